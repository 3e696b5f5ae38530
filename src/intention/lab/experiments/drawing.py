"""Lines that several experiments draw: seeds thin, their mean thick."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from intention.lab.core.results import Row, estimate, estimate_log, select
from intention.lab.experiments.base import COLOURS, label
from intention.lab.experiments.compare import named

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["history", "history_lines", "line", "robust_limits"]


def history_lines(axis: Axes, rows: Sequence[Row], models: Sequence[str]) -> dict[str, tuple[float, float]]:
    """Draw the seeds thin and their geometric mean thick; where the mean of each model ends (step, error)."""
    ends: dict[str, tuple[float, float]] = {}
    drawn: list[float] = []
    for model in [model for model in models if any(row.model == model for row in rows)]:
        own = [row for row in rows if row.model == model and row.x is not None and row.value is not None]
        for seed in sorted({row.seed for row in own}):
            line = sorted((row.x, row.value) for row in own if row.seed == seed)
            axis.plot(*zip(*line, strict=True), color=COLOURS[model], linewidth=0.6, alpha=0.5)
        steps = sorted({row.x for row in own if row.x is not None})
        means = [estimate_log([row.value for row in own if row.x == step]).mean for step in steps]
        axis.plot(steps, means, color=COLOURS[model], linewidth=2, label=label(model))
        drawn += means
        if steps:
            ends[model] = (steps[-1], means[-1])
    robust_limits(axis, drawn)
    return ends


def line(axis: Axes, model: str, lines: Mapping[int, Sequence[tuple[float, float]]], **style: Any) -> None:
    """One line per seed, thin, and the mean over seeds, thick; a value that is not finite leaves a gap."""
    look = {"color": COLOURS.get(model, "black"), **style}
    for points in lines.values():
        axis.plot(*zip(*points, strict=True), linewidth=0.5, alpha=0.5, **look)
    over = sorted({x for points in lines.values() for x, _ in points})
    by_place = [[y for points in lines.values() for at, y in points if at == x] for x in over]
    axis.plot(over, [estimate(values).mean for values in by_place], linewidth=1.8, label=named(model), **look)


def robust_limits(axis: Axes, values: Sequence[float], factor: float = 100.0) -> None:
    """Limits of a logarithmic y-axis by where most values are: a model that diverged must not flatten the others.

    What is above `factor` times the third quartile leaves the picture at the top, and a word there says how far.
    """
    drawn = sorted(value for value in values if math.isfinite(value) and value > 0)
    if not drawn:
        return
    top = factor * drawn[(3 * len(drawn)) // 4]
    axis.set_ylim(drawn[0] / 3, min(2 * drawn[-1], top))
    if 2 * drawn[-1] > top:
        axis.text(0.99, 0.98, f"cut: up to {drawn[-1]:.0e}", transform=axis.transAxes, ha="right", va="top", fontsize=8)


def history(rows: Sequence[Row], metric: str) -> dict[str, dict[int, list[tuple[float, float]]]]:
    """model -> seed -> (step, value) in order."""
    found: dict[str, dict[int, list[tuple[float, float]]]] = {}
    for row in sorted(select(rows, metric=metric), key=lambda row: row.x or 0.0):
        value = math.nan if row.value is None else row.value
        found.setdefault(row.model, {}).setdefault(row.seed, []).append((row.x or 0.0, value))
    return found
