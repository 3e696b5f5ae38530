"""The drawing of `normalisation`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row
from intention.lab.experiments.base import Plot
from intention.lab.experiments.normalisation.claims import curves, value_of
from intention.lab.experiments.normalisation.model import MODELS, PRINTED, exact

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

NAMES = {
    "inverse": "as printed: an ordinary inverse in float32 (median)",
    "unscaled": "unscaled, pseudo-inverse",
    "scaled": "scaled by √d",
    "regularised": "√d and regulariser",
    "variance": 'scale="variance", α = 1',
}


def plot(rows: Sequence[Row]) -> list[Plot]:
    found = {
        model: {n: [(d, value_of(row)) for d, row in curve.items()] for n, curve in curves(rows, model).items()}
        for model in (PRINTED, *MODELS)
    }
    if not any(found.values()):
        return []
    caption = (
        "Variance of an entry over d. Black: the exact value of the unscaled and scaled map, infinite at d ≈ N. "
        "The dotted line is 1."
    )
    return [Plot("Variance of the Intention map over d", caption, partial(draw_variances, found, exact))]


def draw_variances(
    found: Mapping[str, Mapping[int, Sequence[tuple[int, float]]]], exact: Callable[[int, int], float]
) -> Figure:
    """One panel per map: variance over d, a line for each N; `found` by map, then N, holds (d, variance)."""
    from matplotlib.figure import Figure

    models = [model for model in NAMES if found.get(model)]
    figure = Figure(figsize=(7.5, 2.1 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), 1, squeeze=False, sharex=True)[:, 0]
    colours = ("#2F7FD1", "#E08A00", "#9B59B6", "#1C9E77", "#D6336C", "#7F8C8D")
    for axis, model in zip(axes, models, strict=True):
        for (n, curve), colour in zip(found[model].items(), colours * len(found[model]), strict=False):
            axis.plot(*zip(*curve, strict=True), ".-", color=colour, label=f"N = {n}")
            if model in ("unscaled", "scaled"):
                _draw_exact(axis, n, curve[-1][0], exact, model == "scaled")
        axis.axhline(1, color="black", linestyle=":", linewidth=0.8)
        axis.set(xscale="log", title=NAMES[model], ylabel="variance")
        if model == "variance":
            axis.set_ylim(bottom=0)
        else:
            axis.set_yscale("log")
    axes[0].legend(frameon=False, fontsize=8)
    axes[-1].set_xlabel("d")
    return figure


def _draw_exact(axis: Axes, n: int, last: int, exact: Callable[[int, int], float], scaled: bool) -> None:
    """Two branches; between them the value is infinite."""
    for branch in (range(1, n - 1), range(n + 2, last + 1)):
        axis.plot(branch, [exact(n, d) * (d if scaled else 1) for d in branch], color="black", linewidth=0.7)
