"""The drawings of `in_context`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.compare import by_model, named, times
from intention.lab.experiments.drawing import history, line
from intention.lab.experiments.in_context.claims import DRIFT, by_position, drifted, worst
from intention.lab.experiments.in_context.model import MODELS, PLAIN
from intention.lab.experiments.sequences import GATED, about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

CLOSED = ("ridge", "zero")


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    if select(rows, metric="mse"):
        caption = (
            "Mean squared error against the number of pairs seen: seeds thin, their mean thick. Dashed: exact ridge, "
            "the least possible. Dotted: predicting 0. Vertical: as many pairs as dimensions."
        )
        plots.append(Plot("Error along the sequence", caption, partial(draw, rows, PLAIN)))
        if select(rows, metric="mse", model=set(GATED)):
            plots.append(Plot("Error along the sequence, gated layers", caption, partial(draw, rows, tuple(GATED))))
        about_it = "Positions from d on; 95% intervals over seeds."
        plots.append(Plot("The same as numbers", about_it, table=table(rows)))
    if select(rows, metric="mse during training"):
        caption = "Error on the held-out tasks during training, positions from d on."
        plots.append(Plot("Error during training", caption, partial(draw_history, rows)))
    if select(rows, metric=DRIFT):
        caption = (
            "Gated layers where coefficients drift: mean squared error with a forgetting gate (solid) and without "
            "(dotted), means over seeds. Black: Kalman's filter (dashed), the least possible; exact ridge, which "
            "does not forget (dash-dotted); predicting 0 (dotted)."
        )
        plots.append(Plot("Error with drift", caption, partial(draw_drift, rows)))
        plots.append(Plot("Drift as numbers", "Positions from d on; 95% intervals.", table=drift_table(rows)))
    return plots


def drift_table(rows: Sequence[Row]) -> list[list[str]]:
    """Without and with forgetting; the gated delta rule stands beside the delta rule."""

    def shown(found: dict[int, float]) -> str:
        return str(estimate_log(list(found.values()))) if found else ""

    body = []
    for model in (*GATED, "kalman", *CLOSED):
        cells = [drifted(rows, model, forgets) for forgets in (False, True)]
        alone = drifted(rows, model, None)
        if alone or any(cells):
            body.append([named(model), *([shown(alone), ""] if alone else map(shown, cells))])
    return [["", "MSE without forgetting", "with"], *body]


def draw_drift(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    looks = {None: "--", False: ":", True: "-"}
    for model in (*GATED, "kalman", *CLOSED):
        for forgets, look in looks.items():
            own = [row for row in select(rows, metric=DRIFT, model=model) if about(row, "forgets") == forgets]
            curves = [[math.nan if y is None else y for y in about(row, "by position")] for row in own]
            if curves:
                mean = [sum(each) / len(each) for each in zip(*curves, strict=True)]
                name = named(model) + (", forgets" if forgets and model != "gated_delta_gated" else "")
                look = {"ridge": "-.", "zero": ":"}.get(model, look)
                axis.plot(mean, look, color=COLOURS.get(model, "black"), linewidth=1.4, label=name)
    axis.set(yscale="log", xlabel="pairs seen", ylabel="MSE")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def table(rows: Sequence[Row]) -> list[list[str]]:
    found, body = by_model(select(rows, metric="mse")), []
    for model in [model for model in (*MODELS, *CLOSED) if model in found]:
        most = worst(rows, model)
        times_ridge = f"{times(most[0])} ({most[1]} pairs)" if most else ""
        body.append([named(model), str(estimate_log(list(found[model].values()))), times_ridge])
    return [["", "MSE", "times exact ridge, at the worst position"], *body]


def draw(rows: Sequence[Row], models: Sequence[str]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    styles = {"ridge": "--", "zero": ":"}
    for model in (*models, *CLOSED):
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
        line(axis, model, found[model], linestyle="-" if model in GATED else "--")
    axis.set(yscale="log", xlabel="training steps", ylabel="MSE")
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
