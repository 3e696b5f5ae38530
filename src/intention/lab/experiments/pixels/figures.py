"""The drawings of `pixels`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Json, Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.pixels.claims import LINEAR, MEAN, NEAREST, SMALL, TRAINED, points, sets

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.typing import LineStyleType

__all__ = ["observed", "plot", "table", "unpack"]

REFERENCES = {MEAN: (0, (1, 3)), NEAREST: ":", LINEAR: (0, (4, 1, 1, 1))}
METRICS = {"mse": "-", "mse before training": "--"}


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    for name, some in sets(rows).items():
        if select(some, metric="mse"):
            caption = (
                f"{name}: mean squared error of held-out images against the number of observed pixels; trained (solid) "
                "and at step 0 (dashed). Black: no model. Geometric mean and 95% interval over seeds."
            )
            plots.append(Plot("Error against observed pixels", caption, partial(draw_errors, some)))
            plots.append(Plot("The same as numbers", f"{name}; 95% interval over seeds.", table=table(some)))
        if [row for row in select(some, metric="pictures") if row.data]:
            caption = f"{name}: one held-out image, from the observed pixels on top (blue: not observed)."
            plots.append(Plot("Completed images", caption, partial(draw_pictures, some)))
    return plots


def table(rows: Sequence[Row]) -> list[list[str]]:
    body = []
    for metric, suffix in (("mse", ""), ("mse before training", ", untrained")):
        for model in (*TRAINED, SMALL, *REFERENCES):
            found = select(rows, metric=metric, model=model)
            cells = [estimate_log([row.value for row in select(found, x=x)]) for x in points(rows)]
            if found:
                body.append([label(model) + suffix, *(str(cell) if cell.count else "" for cell in cells)])
    return [["", *(f"{x:g} pixels" for x in points(rows))], *body]


def draw_errors(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    drawn: list[float] = []
    for metric, style in METRICS.items():
        for model in (*TRAINED, SMALL, *REFERENCES):
            found = select(rows, metric=metric, model=model)
            if found:
                drawn += _line(
                    axes, found, model, metric == "mse", REFERENCES.get(model, ":" if model == SMALL else style)
                )
    axes.set(xscale="log", yscale="log", xlabel="observed pixels", ylabel="mean squared error")
    drawn = [mean for mean in drawn if math.isfinite(mean)]
    if drawn:  # by the means: an interval of two seeds may span many decades
        axes.set_ylim(min(drawn) / 1.5, min(1.5 * max(drawn), 100 * min(drawn)))
    ticks = points(rows)
    axes.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
    axes.minorticks_off()
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return figure


def _line(axes: Axes, rows: Sequence[Row], model: str, trained: bool, style: LineStyleType) -> list[float]:
    x = sorted({row.x for row in rows if row.x is not None})
    y = [estimate_log([row.value for row in select(rows, x=at)]) for at in x]
    colour = COLOURS.get(model, COLOURS["intention"] if model == SMALL else "black")
    name = f"{SMALL}, untrained" if model == SMALL else label(model) if trained else None
    axes.plot(x, [e.mean for e in y], linestyle=style, color=colour, label=name, linewidth=1.4)
    if trained and model in TRAINED:
        axes.fill_between(x, [e.low for e in y], [e.high for e in y], color=colour, alpha=0.18, linewidth=0)
    return [e.mean for e in y]


def draw_pictures(rows: Sequence[Row]) -> Figure:
    """Rows: models; columns: numbers of observed pixels, before training and after it. On top: what is observed."""
    from matplotlib.figure import Figure

    shown = [row for row in select(rows, metric="pictures") if row.data]
    seed = min(row.seed for row in shown)
    found = {row.model: row.data for row in shown if row.seed == seed and row.data}
    models = [model for model in TRAINED if model in found]
    first = found[models[0]]
    numbers = list(first["before"])
    count = len(numbers)
    figure = Figure(figsize=(7.5, 0.76 * (len(models) + 1) + 0.3), layout="constrained")
    grid = figure.subplots(len(models) + 1, 2 * count + 1, squeeze=False)
    for axes in grid.flat:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for half, when in enumerate(("before", "after")):
        for index, number in enumerate(numbers):
            column = half * (count + 1) + index
            grid[0, column].imshow(observed(first, int(number)))
            grid[0, column].set_title(f"{number} px\n{when}", fontsize=7)
            for axes, model in zip(grid[1:, column], models, strict=True):
                axes.imshow(unpack(found[model][when][number]), cmap="gray", vmin=0, vmax=1)
    grid[0, count].imshow(unpack(first["truth"]), cmap="gray", vmin=0, vmax=1)
    grid[0, count].set_title("truth", fontsize=7)
    for axes, model in zip(grid[1:, 0], models, strict=True):
        axes.set_ylabel(label(model), fontsize=7, rotation=0, ha="right", va="center")
    return figure


def unpack(digits: str) -> np.ndarray:
    """The square image whose pixels are pairs of hexadecimal digits, in [0, 1]."""
    import numpy as np

    flat = np.frombuffer(bytes.fromhex(digits), dtype=np.uint8) / 255
    return flat.reshape(math.isqrt(len(flat)), -1)


def observed(data: Json, number: int) -> np.ndarray:
    """The truth where it is observed, blue elsewhere."""
    import numpy as np

    truth = unpack(data["truth"])
    picture = np.full((truth.size, 3), (0.2, 0.35, 0.6))
    seen = data["observed"][:number]
    picture[seen] = truth.reshape(-1, 1)[seen]
    return picture.reshape(*truth.shape, 3)
