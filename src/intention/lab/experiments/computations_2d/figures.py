"""The drawings of `computations_2d`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Json, Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.computations_2d.claims import MODELS, REPAIR_NAMES, known, named, over_seeds
from intention.lab.experiments.computations_2d.task import REPAIRS, SQUARES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

THINNED = 3  # every third point of the grid is drawn in the scatters


CELLS = "Means over draws with 95% intervals: of correlations by Fisher's z, of MSE geometric."


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    for repair in REPAIRS:
        maps = {
            (model, where): row.data
            for model in MODELS
            for where in SQUARES
            for row in select(rows, model=model, metric=named("map", where, repair), seed=0)
            if row.data
        }
        titles = {
            (model, where): row.value
            for model, where in maps
            for row in select(rows, model=model, metric=named("correlation", where, repair), seed=0)
        }
        if maps:
            caption = (
                "Rows 1 and 3: predictions inside and outside (each map has its own colours, from the lowest to the "
                "highest value, printed above it; dots are the context). Rows 2 and 4: true value (x) and prediction "
                "(y), with Pearson's correlation. Draw 0."
            )
            title = f"Predictions of the four computations, repair {REPAIR_NAMES[repair]}"
            plots.append(Plot(title, caption, partial(draw_maps, maps, titles)))
    table = _table(rows)
    if len(table) > 1:
        plots.append(Plot("Correlation, slope and MSE", CELLS, table=table))
    curves = [row for row in rows if row.metric.startswith("distance to") and "absolute" in row.metric and row.data]
    if curves:
        caption = "Relative distance over α; lines are geometric means over draws. Repair |eigenvalues|, float64."
        plots.append(Plot("From least squares to attention", caption, partial(draw_limits, curves)))
    return plots


def _table(rows: Sequence[Row]) -> list[list[str]]:
    table = [["Computation", "Repair", "Square", "Correlation", "Slope", "MSE"]]
    for repair in REPAIRS:
        for where in SQUARES:
            for model in MODELS:
                found = [over_seeds(rows, model, metric, where, repair) for metric in ("correlation", "slope", "mse")]
                if known(found[0]):
                    table.append([label(model), REPAIR_NAMES[repair], where, *map(str, found)])
    return table


def draw_maps(maps: Mapping[tuple[str, str], Json], titles: Mapping[tuple[str, str], float | None]) -> Figure:
    """Four columns, one per computation; maps in rows 1 and 3, true against predicted in rows 2 and 4.

    Every map has its own colours, or σIntention's would be white: the range of its values is printed above it.
    """
    from matplotlib.figure import Figure

    models = [model for model in MODELS if any(name == model for name, _ in maps)]
    figure = Figure(figsize=(7.5, 8.2), layout="constrained")
    axes = figure.subplots(4, len(models), squeeze=False)
    for row, where in enumerate(("inside", "outside")):
        for column, model in enumerate(models):
            above, below, data = axes[2 * row][column], axes[2 * row + 1][column], maps.get((model, where))
            if data is None:
                above.set_axis_off()
                below.set_axis_off()
                continue
            _map(above, data)
            below.plot(data["true"][::THINNED], data["predicted"][::THINNED], ".", markersize=2, color=COLOURS[model])
            below.tick_params(labelsize=6)
            below.locator_params(nbins=3)
            correlation = titles.get((model, where))
            name = f"{label(model)}\n" if row == 0 else ""
            above.set_title(f"{name}{_short(min(data['predicted']))} to {_short(max(data['predicted']))}", fontsize=8)
            below.set_title("" if correlation is None else f"correlation {correlation:.4f}", fontsize=8)
            if column == 0:
                above.set_ylabel(where, fontsize=8)
                below.set_ylabel("predicted", fontsize=8)
    for axis in axes[-1]:
        axis.set_xlabel("true", fontsize=8)
    return figure


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 10 else f"{value:.2g}"


def _map(axis: Axes, data: Json) -> None:
    grid, reach = data["grid"], data["reach"]
    predicted = data["predicted"]
    image = [[predicted[x * grid + y] for x in range(grid)] for y in range(grid)]
    extent = (-reach, reach, -reach, reach)
    axis.imshow(image, interpolation="none", origin="lower", extent=extent, cmap="RdBu_r")
    x, y = zip(*data["points"], strict=True)
    axis.plot(x, y, ".", markersize=2, color="#222222")  # on a pale map, in the dark as well
    axis.set(xlim=(-reach, reach), ylim=(-reach, reach), xticks=(-reach, reach), yticks=(-reach, reach))
    axis.tick_params(labelsize=6)


def draw_limits(curves: Sequence[Row]) -> Figure:
    """Relative distance of each Intention to its limits, over alpha."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    styles = {"least squares": "-", "linear attention": "--", "attention": "-."}
    for limit, style in styles.items():
        found = [row.data for row in curves if row.metric.split(", ")[0] == f"distance to {limit}" and row.data]
        if not found:
            continue
        model = "sigma_intention" if limit == "attention" else "intention"
        alphas = found[0]["alpha"]
        same = [data["error"] for data in found if data["alpha"] == alphas]
        means = [estimate_log([max(error, 1e-17) for error in errors]).mean for errors in zip(*same, strict=True)]
        axis.loglog(alphas, means, style, color=COLOURS[model], label=f"{label(model)} to {limit}")
    axis.set(xlabel="α", ylabel="relative distance")
    axis.legend(frameon=False, fontsize=8)
    return figure
