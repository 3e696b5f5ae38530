"""The pictures of `--export`, by matplotlib, in the colours of the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from intention.lab.core.results import Json
from intention.lab.experiments.base import COLOURS
from intention.play.fields import Row
from intention.play.scenes.base import Panel

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["curve_panels", "maps", "panel_axes", "regions"]

CLASS_COLOURS = ("#E08A00", "#2F7FD1", "#1C9E77")
MARKERS = ("o", "D", "^")


def panel_axes(titles: Sequence[str], columns: int, height: float = 2.4) -> tuple[Figure, list[Axes]]:
    """One axis for each title, in rows."""
    from matplotlib.figure import Figure

    rows = -(-len(titles) // columns)
    figure = Figure(figsize=(3.2 * columns, height * rows), layout="constrained")
    grid = [axis for row in figure.subplots(rows, columns, squeeze=False) for axis in row]
    for axis in grid[len(titles) :]:
        axis.set_axis_off()
    for axis, title in zip(grid, titles, strict=False):
        axis.set_title(title, fontsize=10)
    return figure, grid[: len(titles)]


def curve_panels(
    panels: Mapping[str, Panel], answered: Json, points: Sequence[Row], x: tuple[float, float], y: tuple[float, float]
) -> Figure:
    """A curve in each panel, with its band, and the points in all of them."""
    figure, axes = panel_axes([panel.title for panel in panels.values()] or ["no points"], 3)
    for axis, (name, panel) in zip(axes, panels.items(), strict=False):
        colour = COLOURS[panel.colour]
        curve, band = answered["found"].get(name), answered.get("band", {}).get(name)
        if curve is not None and band is not None:
            low, high = ([c + side * b for c, b in zip(curve, band, strict=True)] for side in (-1, 1))
            axis.fill_between(answered["x"], low, high, color=colour, alpha=0.15, linewidth=0)
        if curve is not None:
            axis.plot(answered["x"], [float("nan") if v is None else v for v in curve], color=colour, linewidth=1.8)
        axis.plot([p[0] for p in points], [p[1] for p in points], "o", color="black", markersize=3.5)
        axis.set(xlim=x, ylim=y)
        axis.tick_params(labelsize=7)
    return figure


def maps(
    panels: Mapping[str, Panel], found: Mapping[str, Sequence[float]], grid: int, reach: float, points: Sequence[Row]
) -> Figure:
    """A heat map for each, with its own colours and its range above it."""
    figure, axes = panel_axes([panel.title for panel in panels.values()], 4, 3.2)
    for axis, name in zip(axes, panels, strict=True):
        if name in found:
            values = [[found[name][x * grid + y] for x in range(grid)] for y in range(grid)]
            far = max(abs(v) for v in found[name]) or 1.0
            extent = (-reach, reach, -reach, reach)
            axis.imshow(values, origin="lower", extent=extent, cmap="PuOr_r", vmin=-far, vmax=far)
            axis.set_title(f"{panels[name].title}, ±{far:.3g}", fontsize=10)
        axis.plot([p[0] for p in points], [p[1] for p in points], ".", color="black", markersize=4)
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach))
    return figure


def regions(panels: Mapping[str, Panel], answered: Json, points: Sequence[Row]) -> Figure:
    """The class of each place, the points, and rings around suspects."""
    from matplotlib.colors import ListedColormap

    reach, grid = answered["reach"], answered["grid"]
    figure, axes = panel_axes([panel.title for panel in panels.values()], 4, 3.2)
    for axis, name in zip(axes, panels, strict=True):
        if name in answered["found"]:
            found = answered["found"][name]
            values = [[int(found[x * grid + y]) for x in range(grid)] for y in range(grid)]
            look = {"cmap": ListedColormap(CLASS_COLOURS), "vmin": 0, "vmax": 2, "alpha": 0.25}
            axis.imshow(values, origin="lower", extent=(-reach, reach, -reach, reach), **look)
            rings = [points[index] for index in answered["suspects"][name]]
            ring = {"markersize": 11, "fillstyle": "none", "color": "black"}
            axis.plot([p[0] for p in rings], [p[1] for p in rings], "o", **ring)
        for label, (colour, marker) in enumerate(zip(CLASS_COLOURS, MARKERS, strict=True)):
            own = [p for p in points if round(p[2]) == label]
            axis.plot([p[0] for p in own], [p[1] for p in own], marker, color=colour, markersize=4.5)
        axis.set(xlim=(-reach, reach), ylim=(-reach, reach))
    return figure
