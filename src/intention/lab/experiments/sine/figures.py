"""The drawings of `sine`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.drawing import robust_limits
from intention.lab.experiments.sine.claims import LINE, SMALL, TRAINED, points

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    if select(rows, metric="mse"):
        caption = (
            "Mean squared error against the number of context points; trained (solid) and at step 0 (dashed). "
            "Geometric mean and 95% interval over seeds. Trained with 10 points."
        )
        plots.append(Plot("Error against observations", caption, lambda: _draw_errors(rows)))
        plots.append(Plot("The same as numbers", "After training; 95% interval over seeds.", table=_table(rows)))
    if select(rows, metric="curves"):
        caption = "One task with 2, 5, 10 and 20 observations: truth (black), untrained (dashed), trained (solid)."
        plots.append(Plot("Curves", caption, lambda: _draw_curves(rows)))
    return plots


def _table(rows: Sequence[Row]) -> list[list[str]]:
    numbers = points(rows)
    body = []
    for model in (*TRAINED, LINE):
        cells = [estimate_log([row.value for row in select(rows, metric="mse", model=model, x=x)]) for x in numbers]
        if any(cell.count for cell in cells):
            body.append([label(model), *(str(cell) if cell.count else "" for cell in cells)])
    return [["", *(f"{x:g} points" for x in numbers)], *body]


def _draw_errors(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    drawn: list[float] = []
    for metric, style in (("mse", "-"), ("mse before training", "--")):
        for model in (*TRAINED, SMALL, LINE):
            found = select(rows, metric=metric, model=model)
            if not found:
                continue
            x = sorted({row.x for row in found if row.x is not None})
            y = [estimate_log([row.value for row in select(found, x=at)]) for at in x]
            colour = COLOURS.get(model, COLOURS["intention"] if model == SMALL else "black")
            style = ":" if model in (SMALL, LINE) else style
            drawn += [e.mean for e in y if math.isfinite(e.mean)]
            name = label(model) if metric == "mse" or model == SMALL else None
            axes.plot(x, [e.mean for e in y], style, color=colour, label=name, linewidth=1.4)
            if metric == "mse":
                axes.fill_between(x, [e.low for e in y], [e.high for e in y], color=colour, alpha=0.18, linewidth=0)
    axes.set(xscale="log", yscale="log", xlabel="context points", ylabel="mean squared error")
    robust_limits(axes, drawn)  # by the means: an interval of two seeds may span many decades
    ticks = points(rows)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
    axes.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _draw_curves(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    shown = [row for row in select(rows, metric="curves") if row.data]
    seed = min(row.seed for row in shown)
    found = {row.model: row.data for row in shown if row.seed == seed and row.data}
    models = [model for model in TRAINED if model in found]
    shared = found[models[0]]
    counts = list(shared["before"])
    figure = Figure(figsize=(7.5, 1.35 * len(models) + 0.4), layout="constrained")
    grid = figure.subplots(len(models), len(counts), sharex=True, sharey=True, squeeze=False)
    for axes_row, model in zip(grid, models, strict=True):
        for axes, count in zip(axes_row, counts, strict=True):
            data, n = found[model], int(count)
            axes.plot(data["x"], data["y"], color="black", linewidth=0.8)
            axes.plot(data["x"], data["before"][count], "--", color=COLOURS[model], linewidth=0.9)
            axes.plot(data["x"], data["after"][count], color=COLOURS[model], linewidth=1.4)
            axes.plot(data["key"][:n], data["value"][:n], "o", color="black", markersize=2.5)
            axes.set(ylim=(-6.5, 6.5), xticks=[-6, 0, 6], yticks=[-5, 0, 5])
        axes_row[0].set_ylabel(label(model), fontsize=8)
    for axes, count in zip(grid[0], counts, strict=True):
        axes.set_title(f"{count} points", fontsize=9)
    return figure
