"""The drawings of `stability`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.compare import named
from intention.lab.experiments.sequences import about
from intention.lab.experiments.stability.claims import ended, errors

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

WAYS = {"intention": "Intention", "solve": "a float32 solve per token", "conjugate_gradients": "conjugate gradients"}
TRAINED = ("intention", "conjugate_gradients")


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    if select(rows, metric="gradient"):
        caption = (
            "The norm of the gradient during training, before clipping; one panel for each λ, one line for each seed. "
            "A cross is the last step before a number that is not finite."
        )
        plots.append(Plot("Gradients", caption, partial(draw, rows)))
        about_it = (
            "Medians of the norm over the steps of a run; bits per token after training; λ between which it ends."
        )
        plots.append(Plot("The same as numbers", about_it, table=table(rows)))
    if select(rows, metric="error"):
        caption = "Errors of single fits against float64, and in brackets the worst token. Keys of length 1, float32."
        plots.append(Plot("Errors of a solve", caption, table=error_table(rows)))
    return plots


def table(rows: Sequence[Row]) -> list[list[str]]:
    heading = ["λ", "", "seed", "finite steps", "gradient, median", "largest", "bits per token", "λ at the end"]
    body = []
    for row in sorted(select(rows, metric="gradient"), key=lambda row: (-(row.x or 0), row.model, row.seed)):
        same = {"x": row.x, "model": row.model, "seed": row.seed}
        steps, bits = (select(rows, metric=m, **same) for m in ("steps that were finite", "bits per token"))
        edges = about(row, "ridges") or []
        body.append(
            [
                f"{row.x:g}",
                WAYS.get(row.model, row.model),
                str(row.seed),
                _number(steps[0].value if steps else None, "g"),
                _number(row.value),
                _number(about(row, "largest")),
                _number(bits[0].value if bits else None),
                " to ".join(_number(edge) for edge in edges),
            ]
        )
    return [heading, *body]


def error_table(rows: Sequence[Row]) -> list[list[str]]:
    cases = sorted({case for model in WAYS for case in errors(rows, model)}, reverse=True)
    worst = {(row.model, row.x, about(row, "decay")): about(row, "worst token") for row in select(rows, metric="error")}
    body = []
    for alpha, decay in cases:
        cells = []
        for model in WAYS:
            error = errors(rows, model).get((alpha, decay))
            own = worst.get((model, alpha, decay))
            cells.append("" if error is None else f"{_number(error, '.1e')} ({_number(own, '.1e')})")
        body.append([f"{alpha:g}", f"{decay:g}", *cells])
    return [["λ", "decay", *WAYS.values()], *body]


def _number(value: float | None, style: str = ".3g") -> str:
    return "not finite" if value is None or not math.isfinite(value) else format(value, style)


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    ridges = sorted({row.x for row in select(rows, metric="gradient") if row.x is not None}, reverse=True)
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    axes = figure.subplots(1, len(ridges), sharey=True, squeeze=False)[0]
    for axis, alpha in zip(axes, ridges, strict=True):
        for model in TRAINED:
            own = sorted(select(rows, metric="gradient", model=model, x=alpha), key=lambda row: row.seed)
            for row, (_, whole) in zip(own, ended(rows, model).get(alpha, []), strict=False):
                points = [(i, norm) for i, norm in about(row, "by step") or [] if norm is not None]
                if not points:
                    continue
                colour = COLOURS.get(model, "black")
                axis.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, label=named(model))
                if not whole:
                    axis.plot(*points[-1], "x", color=colour)
        axis.set(yscale="log", title=f"λ = {alpha:g}", xlabel="steps")
    axes[0].set_ylabel("norm of the gradient")
    handles = {name: handle for axis in axes for handle, name in zip(*axis.get_legend_handles_labels(), strict=True)}
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure
