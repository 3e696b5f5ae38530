"""The drawings of `recall`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.compare import named
from intention.lab.experiments.drawing import history, line
from intention.lab.experiments.recall.claims import MIXED, accuracies, cells, mixed
from intention.lab.experiments.sequences import FIXED, GATED, MIXERS, about, texts

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure

__all__ = ["plot"]

SHOWN = (*MIXERS, *GATED)


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    if cells(rows):
        caption = (
            "Share of right answers against the number of pairs, for each width: seeds thin, their mean thick. Plain "
            "layers are dashed, gated ones solid. Dotted: guessing one of the values that were shown."
        )
        plots.append(Plot("Accuracy against pairs", caption, partial(draw, rows)))
        plots.append(Plot("The same as numbers", "Means over seeds and their 95% intervals.", table=table(rows)))
    if select(rows, metric="accuracy during training"):
        caption = "Accuracy on held-out sequences during training, the mean over all numbers of pairs."
        plots.append(Plot("Accuracy during training", caption, partial(draw_history, rows)))
    if select(rows, metric=MIXED):
        caption = (
            "Gated layers, lengths mixed: share of right answers against what is remembered of a sequence, in numbers, "
            "for each number of pairs. Dashed: mixers that remember every token, with their best size of heads."
        )
        plots.append(Plot("Accuracy against the size of the state", caption, partial(draw_states, rows)))
        about_it = "Gated layers, lengths mixed. Means over seeds and their 95% intervals."
        plots.append(Plot("Mixed lengths as numbers", about_it, table=mixed_table(rows)))
    return plots


def mixed_table(rows: Sequence[Row]) -> list[list[str]]:
    own = select(rows, metric=MIXED)
    numbers = sorted({row.x for row in own if row.x is not None})
    body = []
    for head in texts(own, "head"):
        for model in GATED:
            states = texts([row for row in select(own, model=model) if about(row, "head") == head], "state")
            found = [mixed(rows, model, "head", head, pairs) for pairs in numbers]
            if any(found):
                values = [str(estimate(list(one.values()))) if one else "" for one in found]
                body.append([str(head), named(model), "".join(map(str, states)) or "every token", *values])
    return [["head", "model", "state", *(f"{pairs:g} pairs" for pairs in numbers)], *body]


def draw_states(rows: Sequence[Row]) -> Figure:
    """One panel per number of pairs."""
    from matplotlib.figure import Figure

    own = select(rows, metric=MIXED)
    numbers = sorted({row.x for row in own if row.x is not None})
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for axis, pairs in zip(axes, numbers, strict=True):
        for model in GATED:
            seeds: dict[int, list[tuple[float, float]]] = {}
            for row in sorted(select(own, model=model, x=pairs), key=lambda row: about(row, "state") or 0):
                value = math.nan if row.value is None else row.value
                seeds.setdefault(row.seed, []).append((about(row, "state"), value))
            if model in FIXED and seeds:
                line(axis, model, seeds, marker=".")
            elif seeds:
                top = estimate([max(value for _, value in points) for points in seeds.values()]).mean
                axis.axhline(top, color=COLOURS[model], linestyle="--", linewidth=1, label=named(model))
        axis.set(xscale="log", xlabel="state", ylim=(-0.02, 1.02), title=f"{pairs:g} pairs")
        axis.minorticks_off()
    return _legend(figure, axes, "right answers")


def table(rows: Sequence[Row]) -> list[list[str]]:
    heading = ["width", "model", *(f"{pairs:g} pairs" for pairs in sorted({pairs for _, pairs in cells(rows)}))]
    body = []
    for width in texts(select(rows, metric="accuracy"), "width"):
        for model in SHOWN:
            own = [accuracies(rows, model, width, pairs) for pairs in sorted({pairs for _, pairs in cells(rows)})]
            if any(own):
                body.append(
                    [str(width), named(model), *(str(estimate(list(one.values()))) if one else "" for one in own)]
                )
    return [heading, *body]


def draw(rows: Sequence[Row]) -> Figure:
    """One panel per width."""
    figure, axes, widths = _panels(select(rows, metric="accuracy"))
    numbers = sorted({pairs for _, pairs in cells(rows)})
    for axis, width in zip(axes, widths, strict=True):
        for model in SHOWN:
            seeds: dict[int, list[tuple[float, float]]] = {}
            for pairs in numbers:
                for seed, value in accuracies(rows, model, width, pairs).items():
                    seeds.setdefault(seed, []).append((pairs, value))
            if seeds:
                line(axis, model, seeds, marker=".", linestyle="-" if model in GATED else "--")
        axis.plot(numbers, [1 / pairs for pairs in numbers], ":", color="black", linewidth=1)
        axis.set(xscale="log", xlabel="pairs", ylim=(-0.02, 1.02), title=f"width {width}")
        axis.set_xticks(numbers, [f"{pairs:g}" for pairs in numbers])
        axis.minorticks_off()
    return _legend(figure, axes, "right answers")


def draw_history(rows: Sequence[Row]) -> Figure:
    figure, axes, widths = _panels(select(rows, metric="accuracy during training"))
    for axis, width in zip(axes, widths, strict=True):
        found = history([row for row in rows if about(row, "width") == width], "accuracy during training")
        for model in [model for model in SHOWN if model in found]:
            line(axis, model, found[model], linestyle="-" if model in GATED else "--")
        axis.set(xlabel="training steps", ylim=(-0.02, 1.02), title=f"width {width}")
    return _legend(figure, axes, "right answers")


def _panels(rows: Sequence[Row]) -> tuple[Figure, np.ndarray, list[int]]:
    from matplotlib.figure import Figure

    widths = texts(rows, "width")
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    return figure, figure.subplots(1, len(widths), sharey=True, squeeze=False)[0], widths


def _legend(figure: Figure, axes: np.ndarray, quantity: str) -> Figure:
    axes[0].set_ylabel(quantity)
    handles = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
