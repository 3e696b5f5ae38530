"""The drawings of `vit`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.compare import named
from intention.lab.experiments.vit.claims import accuracies, guessing, slowdowns
from intention.lab.experiments.vit.model import MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]


def plot(rows: Sequence[Row]) -> list[Plot]:
    if not select(rows, metric="accuracy"):
        return []
    caption = (
        "Share of right answers on images that were not trained on, during training: mean over seeds. Dotted: guessing."
    )
    about_it = (
        "Test images: means over seeds and their 95% intervals. A step: forward and backward, medians of steps by "
        "turns with attention."
    )
    return [
        Plot("Accuracy of a small ViT by its mixer", caption, partial(draw, rows)),
        Plot("The same as numbers", about_it, table=table(rows)),
    ]


def table(rows: Sequence[Row]) -> list[list[str]]:
    body = []
    for model in [model for model in MODELS if accuracies(rows, model)]:
        times = slowdowns(rows, model)
        cells = [str(estimate(list(accuracies(rows, model).values()))), str(estimate(times)) if times else "1"]
        body.append([named(model), *cells])
    return [["mixer", "accuracy", "a step, times attention's"], *body]


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axis = figure.subplots()
    for model in MODELS:
        own = select(rows, metric="accuracy during training", model=model)
        steps = sorted({row.x for row in own if row.x is not None})
        means = [estimate([row.value for row in own if row.x == step]).mean for step in steps]
        if steps:
            axis.plot(steps, means, color=COLOURS[model], marker=".", label=named(model))
    axis.axhline(guessing(rows), color="black", linestyle=":", linewidth=1)
    axis.set(xlabel="steps", ylabel="right answers")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
