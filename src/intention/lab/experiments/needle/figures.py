"""The drawings of `needle`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.needle.claims import accuracies, lengths, name
from intention.lab.experiments.needle.model import MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

LIKE = {"intention_kept": "intention", "gated_delta": "delta", "window": "attention"}  # drawn in its colour
DASHED = ("intention_kept", "delta")  # without forgetting


def plot(rows: Sequence[Row]) -> list[Plot]:
    if not lengths(rows):
        return []
    caption = (
        "Share of right answers against the number of tokens between a pair and the question: mean over seeds. The "
        "first point is that of training. Dashed: without forgetting. Dotted: guessing one of the values shown."
    )
    about_it = "Means over seeds, and their 95% intervals; bytes of the state of one sequence."
    return [
        Plot("Accuracy against tokens between", caption, partial(draw, rows)),
        Plot("The same as numbers", about_it, table=table(rows)),
    ]


def table(rows: Sequence[Row]) -> list[list[str]]:
    heading = ["", "in training", *(f"{length:,.0f}" for length in lengths(rows)), "bytes"]
    body = []
    for model in [model for model in MODELS if accuracies(rows, model)]:
        own = [accuracies(rows, model), *(accuracies(rows, model, length) for length in lengths(rows))]
        held = sorted({row.value for row in select(rows, metric="bytes", model=model) if row.value is not None})
        cells = [str(estimate(list(each.values()))) if each else "" for each in own]
        body.append([name(model), *cells, " to ".join(f"{size:,.0f}" for size in held)])
    return [heading, *body]


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    configs = [row.config for row in select(rows, metric="accuracy")]
    first = max(1, max(config.get("filler", 1) for config in configs))
    for model in MODELS:
        cells = [(first, accuracies(rows, model)), *((x, accuracies(rows, model, x)) for x in lengths(rows))]
        points = [(x, estimate(list(each.values())).mean) for x, each in cells if each]
        if points:
            style = "--" if model in DASHED else "-"
            colour = COLOURS.get(LIKE.get(model, model), "black")
            axis.plot(*zip(*points, strict=True), style, color=colour, marker=".", label=name(model))
    for pairs in {config.get("pairs", 1) for config in configs}:
        axis.axhline(1 / pairs, color="black", linestyle=":", linewidth=1)
    axis.set(xscale="log", xlabel="tokens between", ylabel="right answers", ylim=(-0.02, 1.02))
    ticks = [first, *lengths(rows)]
    axis.set_xticks(ticks, [f"{tick:,.0f}" for tick in ticks])
    axis.minorticks_off()
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
