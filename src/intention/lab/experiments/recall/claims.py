"""What the rows of `recall` say: accuracy against the number of pairs, for each width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from intention.lab.core.results import Estimate, Row, estimate, select
from intention.lab.experiments.base import Claim, Plot
from intention.lab.experiments.compare import UNTESTED, named, together, verdict
from intention.lab.experiments.in_context.model import MIXERS
from intention.lab.experiments.sequences import WHERE, about, history, line, texts

SLACK = 0.01  # of the answers
READ = "(read as: at most 1 percentage point below, at every number of pairs and every width)"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _as_well(rows, "intention", "linear_attention", "Intention recalls at least as well as linear attention"),
        _as_well(rows, "intention", "delta", "Intention recalls at least as well as the delta rule"),
        _as_well(rows, "intention", "attention", "Intention recalls at least as well as attention"),
        _as_well(rows, "sigma_intention", "attention", "σIntention recalls at least as well as attention"),
    ]


def cells(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(width, number of pairs)"""
    found = {(about(row, "width"), row.x) for row in select(rows, metric="accuracy") if row.x is not None}
    return sorted(found)


def accuracies(rows: Sequence[Row], model: str, width: int, pairs: float) -> dict[int, float]:
    """By seed."""
    own = [row for row in select(rows, metric="accuracy", model=model, x=pairs) if about(row, "width") == width]
    return {row.seed: math.nan if row.value is None else row.value for row in own}


def learnt(pairs: float, *accuracies: dict[int, float]) -> bool:
    """Whether any of them answers more than twice as often as one who guesses a value that was shown."""
    return any(estimate(list(each.values())).mean > min(2 / pairs, 0.9) for each in accuracies)


def difference(one: dict[int, float], other: dict[int, float]) -> Estimate | None:
    """Of accuracies, paired by seed."""
    if not one or set(one) != set(other):
        return None
    return estimate([one[seed] - other[seed] for seed in sorted(one)])


def _as_well(rows: Sequence[Row], model: str, other: str, text: str) -> Claim:
    parts, verdicts = [], []
    for width, pairs in cells(rows):
        one, two = (accuracies(rows, name, width, pairs) for name in (model, other))
        found = difference(one, two)
        if found is None:
            verdicts.append(UNTESTED)
            continue
        case = f"width {width}, {pairs:g} pairs"
        if learnt(pairs, one, two):
            verdicts.append(verdict(found, -SLACK))
            parts.append(f"{case}: {_percent(one)} against {_percent(two)}")
        else:
            verdicts.append(UNTESTED)
            parts.append(f"{case}: neither has learnt it ({_percent(one)}, {_percent(two)})")
    return Claim(f"{text} {READ}", WHERE, "; ".join(parts), together(verdicts))


def _percent(accuracies: dict[int, float]) -> str:
    mean = estimate(list(accuracies.values())).mean
    return "not finite" if math.isnan(mean) else f"{mean:.1%}"


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    if cells(rows):
        caption = (
            "Share of right answers against the number of pairs, for each width: seeds thin, their mean thick. Dotted: "
            "guessing one of the values that were shown."
        )
        plots.append(Plot("Accuracy against pairs", caption, partial(draw, rows)))
        plots.append(Plot("The same as numbers", "Means over seeds and their 95% intervals.", table=table(rows)))
    if select(rows, metric="accuracy during training"):
        caption = "Accuracy on held-out sequences during training, the mean over all numbers of pairs."
        plots.append(Plot("Accuracy during training", caption, partial(draw_history, rows)))
    return plots


def table(rows: Sequence[Row]) -> list[list[str]]:
    heading = ["width", "model", *(f"{pairs:g} pairs" for pairs in sorted({pairs for _, pairs in cells(rows)}))]
    body = []
    for width in texts(select(rows, metric="accuracy"), "width"):
        for model in MIXERS:
            own = [accuracies(rows, model, width, pairs) for pairs in sorted({pairs for _, pairs in cells(rows)})]
            if any(own):
                body.append(
                    [str(width), named(model), *(str(estimate(list(one.values()))) if one else "" for one in own)]
                )
    return [heading, *body]


def draw(rows: Sequence[Row]) -> Any:
    """One panel per width."""
    figure, axes, widths = _panels(select(rows, metric="accuracy"))
    numbers = sorted({pairs for _, pairs in cells(rows)})
    for axis, width in zip(axes, widths, strict=True):
        for model in MIXERS:
            seeds: dict[int, list[tuple[float, float]]] = {}
            for pairs in numbers:
                for seed, value in accuracies(rows, model, width, pairs).items():
                    seeds.setdefault(seed, []).append((pairs, value))
            if seeds:
                line(axis, model, seeds, marker=".")
        axis.plot(numbers, [1 / pairs for pairs in numbers], ":", color="black", linewidth=1)
        axis.set(xscale="log", xlabel="pairs", ylim=(-0.02, 1.02), title=f"width {width}")
        axis.set_xticks(numbers, [f"{pairs:g}" for pairs in numbers])
        axis.minorticks_off()
    return _legend(figure, axes, "right answers")


def draw_history(rows: Sequence[Row]) -> Any:
    figure, axes, widths = _panels(select(rows, metric="accuracy during training"))
    for axis, width in zip(axes, widths, strict=True):
        found = history([row for row in rows if about(row, "width") == width], "accuracy during training")
        for model in [model for model in MIXERS if model in found]:
            line(axis, model, found[model])
        axis.set(xlabel="training steps", ylim=(-0.02, 1.02), title=f"width {width}")
    return _legend(figure, axes, "right answers")


def _panels(rows: Sequence[Row]) -> tuple[Any, Any, list[int]]:
    from matplotlib.figure import Figure

    widths = texts(rows, "width")
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    return figure, figure.subplots(1, len(widths), sharey=True, squeeze=False)[0], widths


def _legend(figure: Any, axes: Any, quantity: str) -> Any:
    axes[0].set_ylabel(quantity)
    handles = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure
