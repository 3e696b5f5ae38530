"""The drawings of `in_context`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate_log, select
from intention.lab.experiments.base import Plot
from intention.lab.experiments.compare import by_model, named, times
from intention.lab.experiments.drawing import history, line
from intention.lab.experiments.in_context.claims import by_position, worst
from intention.lab.experiments.in_context.model import MODELS
from intention.lab.experiments.sequences import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure


CLOSED = ("ridge", "zero")


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    if select(rows, metric="mse"):
        caption = (
            "Mean squared error against the number of pairs seen: seeds thin, their mean thick. Dashed: exact ridge, "
            "the least possible. Dotted: predicting 0. Vertical: as many pairs as dimensions."
        )
        plots.append(Plot("Error along the sequence", caption, partial(draw, rows)))
        about_it = "Positions from d on; 95% intervals over seeds."
        plots.append(Plot("The same as numbers", about_it, table=table(rows)))
    if select(rows, metric="mse during training"):
        caption = "Error on the held-out tasks during training, positions from d on."
        plots.append(Plot("Error during training", caption, partial(draw_history, rows)))
    return plots


def table(rows: Sequence[Row]) -> list[list[str]]:
    found, body = by_model(select(rows, metric="mse")), []
    for model in [model for model in (*MODELS, *CLOSED) if model in found]:
        most = worst(rows, model)
        times_ridge = f"{times(most[0])} ({most[1]} pairs)" if most else ""
        body.append([named(model), str(estimate_log(list(found[model].values()))), times_ridge])
    return [["", "MSE", "times exact ridge, at the worst position"], *body]


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    styles = {"ridge": "--", "zero": ":"}
    for model in (*MODELS, *CLOSED):
        seeds = {seed: list(enumerate(each)) for seed, each in by_position(rows, model).items()}
        seeds = {seed: [(x, y if math.isfinite(y) else math.nan) for x, y in each] for seed, each in seeds.items()}
        if seeds:
            line(axis, model, seeds, linestyle=styles.get(model, "-"))
    for dims in {about(row, "dims") for row in select(rows, metric="mse")}:
        axis.axvline(dims, color="#BBBBBB", linewidth=0.8)
    axis.set(yscale="log", xlabel="pairs seen", ylabel="MSE")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def draw_history(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    found = history(rows, "mse during training")
    for model in [model for model in MODELS if model in found]:
        line(axis, model, found[model])
    axis.set(yscale="log", xlabel="training steps", ylabel="MSE")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
