"""Drawings and the table of the scaling experiment, from its rows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.scaling.sizes import Need, Needed, growth, in_words, needed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["REFERENCE", "plot"]

REFERENCE = "least_squares"  # no training: Intention on the raw pairs


def plot(rows: Sequence[Row]) -> list[Plot]:
    found = needed(rows)
    plots: list[Plot] = []
    if found:
        caption = (
            "Geometric mean and range over seeds. Hollow with an arrow: not reached by all seeds, the next size of the "
            "grid is drawn. Dotted: least squares itself, without training, works with d numbers."
        )
        plots.append(Plot("Smallest latent size against dimension", caption, draw=lambda: draw_sizes(found)))
        plots.append(Plot("The same in numbers", "Median over seeds (range).", table=table(found, rows)))
    errors = [row for row in select(rows, metric="mse") if row.x is not None and row.value is not None]
    if errors:
        caption = (
            "Held-out error of every training, geometric mean over seeds; a walk ends where it is below the threshold."
        )
        plots.append(Plot("Error against latent size", caption, draw=lambda: draw_errors(errors)))
    return plots


def _ordered(models: Iterable[str]) -> list[str]:
    return sorted(models, key=[*COLOURS].index)


def draw_sizes(found: Needed) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.5), layout="constrained")
    axes = figure.subplots()
    models = _ordered(found)
    dims = sorted({d for by_d in found.values() for d in by_d})
    for place, model in enumerate(models):
        shift = 0.08 * (place - (len(models) - 1) / 2)  # so that equal sizes can be seen beside each other
        _draw_model(axes, found[model], shift, COLOURS[model], label(model))
    axes.plot(dims, dims, ":", color="black", label="least squares, untrained")
    axes.set_yscale("log", base=2)
    axes.set_ylim(top=2 * axes.get_ylim()[1])  # room for the arrows
    axes.set_xticks(dims)
    axes.set_xlabel("dimension d of x")
    axes.set_ylabel("smallest latent size s")
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _draw_model(axes: Axes, by_d: Mapping[int, Mapping[int, Need]], shift: float, colour: str, name: str) -> None:
    x = [d + shift for d in by_d]
    sizes = [[need.size for need in needs.values()] for needs in by_d.values()]
    means = [statistics.geometric_mean(size) for size in sizes]
    axes.plot(x, means, "-", color=colour, linewidth=1.5)
    axes.vlines(x, [min(size) for size in sizes], [max(size) for size in sizes], color=colour, linewidth=1.0)
    axes.plot([], [], "o-", color=colour, label=name)
    for at, mean, needs in zip(x, means, by_d.values(), strict=True):
        reached = all(need.reached for need in needs.values())
        axes.plot([at], [mean], "o", color=colour, markerfacecolor=colour if reached else "white", markersize=6)
        if not reached:
            axes.annotate("", (at, mean * 1.5), (at, mean * 1.08), arrowprops={"arrowstyle": "->", "color": colour})


def draw_errors(rows: Sequence[Row]) -> Figure:
    """One panel per dimension: the held-out error of each size, and the threshold."""
    from matplotlib.figure import Figure

    dims = sorted({_d(row) for row in rows})
    columns = min(3, len(dims))
    lines = math.ceil(len(dims) / columns)
    figure = Figure(figsize=(7.5, 0.6 + 2.5 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, sharex=True, sharey=True, squeeze=False).flatten()
    for axes, d in zip(panels, dims, strict=False):
        here = [row for row in rows if _d(row) == d]
        for model in _ordered({row.model for row in here}):
            own = select(here, model=model)
            sizes = sorted({row.x for row in own if row.x is not None})
            means = [estimate_log([row.value for row in own if row.x == size]).mean for size in sizes]
            axes.plot(
                sizes, means, "o-", markersize=3, color=COLOURS[model], label=label(model) if d == dims[0] else None
            )
        axes.axhline(rows[0].config.get("threshold", math.nan), color="black", linewidth=0.8, linestyle="--")
        axes.set_title(f"d = {d}")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda size, _: f"{size:g}")
    for axes in panels[len(dims) :]:
        axes.set_visible(False)
    figure.supxlabel("latent size s")
    figure.supylabel("held-out MSE")
    figure.legend(loc="outside upper center", ncols=4, frameon=False)
    return figure


def _d(row: Row) -> int:
    return int(row.data["d"]) if row.data else 0


def table(found: Needed, rows: Sequence[Row]) -> list[list[str]]:
    """Smallest sizes per dimension and the growth of each model; last the exact solution and its error."""
    dims = sorted({d for by_d in found.values() for d in by_d})
    lines = [["model", *(f"d = {d}" for d in dims), "growth"]]
    for model in _ordered(found):
        cells = [in_words(found[model][d]) if d in found[model] else "" for d in dims]
        lines.append([label(model), *cells, str(growth(found[model]) or "")])
    exact = select(rows, model=REFERENCE, metric="mse")
    if exact:
        errors = {d: [row.value or 0.0 for row in exact if _d(row) == d] for d in dims}
        cells = [f"{d} (MSE {max(values):.0e})" if values else "" for d, values in errors.items()]
        lines.append(["least squares, untrained", *cells, ""])
    return lines
