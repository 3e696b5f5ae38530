"""The drawings of `kabsch`, and the rows they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Json, Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.compare import by_model, named
from intention.lab.experiments.drawing import history_lines
from intention.lab.experiments.kabsch.claims import DIMS, of
from intention.lab.experiments.kabsch.model import MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

LINES = {"zero": (0, (1, 3)), "affine": "--", "umeyama": ":"}
TURN = ((0.94, 0.0, 0.34), (0.12, 0.94, -0.33))  # how clouds of 3-D points are looked at: right and up


def clouds(rows: Sequence[Row]) -> list[Row]:
    """One per cloud, of the smallest seed."""
    found: dict[str, Row] = {}
    for row in sorted(select(rows, metric="cloud"), key=lambda row: row.seed):
        found.setdefault(str((row.data or {}).get("name")), row)
    return list(found.values())


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots: list[Plot] = []
    for dims in DIMS:
        if of(select(rows, metric="mse during training"), dims):
            caption = (
                "Error on held-out tasks during training: seeds thin, their geometric mean thick, its last value in "
                "the legend. Horizontal: closed forms on the same tasks."
            )
            title = "Error during training" if dims == 2 else f"Error during training, {dims}-D"
            plots.append(Plot(title, caption, partial(draw_history, rows, dims)))
    for row in clouds(rows):
        caption = (
            "A cloud, its target, the 5 observed points with their images (which have noise), and the prediction of "
            "Intention (orange) on the target (grey)."
        )
        data = row.data or {}
        plots.append(Plot(f"Mapping a cloud: {data['name']}", caption, partial(draw_cloud, data)))
    return plots


def draw_history(rows: Sequence[Row], dims: int) -> Figure:
    """Error against training steps; the legend has the last mean of each line, closed forms are horizontal."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    ends = history_lines(axis, of(select(rows, metric="mse during training"), dims), MODELS)
    found = by_model(of(select(rows, metric="mse"), dims))
    for line in axis.get_lines():
        for model, (_, error) in ends.items():
            if line.get_label() == label(model):
                line.set_label(f"{label(model)}: {error:.2g}")
    for name, style in LINES.items():
        if name in found:
            value = estimate_log(list(found[name].values())).mean
            axis.axhline(value, color="black", linestyle=style, linewidth=1, label=f"{named(name)}: {value:.2g}")
    axis.set(yscale="log", xlabel="training steps", ylabel="MSE")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_cloud(data: Json) -> Figure:
    """The cloud, its target, what was observed, what was predicted; all panels have the same scale."""
    import numpy as np
    from matplotlib.figure import Figure

    look = np.array(TURN).T if data["dims"] == 3 else np.eye(2)
    cloud, target, key, value, predicted = (
        np.array(data[name]) @ look for name in ("cloud", "target", "key", "value", "predicted")
    )
    figure = Figure(figsize=(7.5, 2.4), layout="constrained")
    axes = figure.subplots(1, 4)
    dots = {"linestyle": "none", "marker": ".", "markersize": 2.5}
    axes[0].plot(*cloud.T, color="black", **dots)
    axes[1].plot(*target.T, color="black", **dots)
    for start, end in zip(key, value, strict=True):
        axes[2].annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#999999", "linewidth": 0.8})
    axes[2].plot(*key.T, "o", color="black", fillstyle="none", markersize=5)
    axes[2].plot(*value.T, "o", color="black", markersize=5)
    axes[3].plot(*target.T, color="#BBBBBB", **dots)
    axes[3].plot(*predicted.T, color=COLOURS["intention"], **dots)
    both = np.concatenate([target, predicted])
    half = 0.55 * max(np.ptp(cloud, 0).max(), np.ptp(np.concatenate([both, key, value]), 0).max())
    titles = ("cloud", "target", f"{len(key)} observations", "prediction")
    inside = (cloud, both, np.concatenate([both, key, value]), both)
    for axis, title, shown in zip(axes, titles, inside, strict=True):
        axis.set_title(title, fontsize=9)
        axis.set(aspect="equal", xticks=[], yticks=[])
        x, y = (shown.max(0) + shown.min(0)) / 2
        axis.set(xlim=(x - half, x + half), ylim=(y - half, y + half))
    return figure
