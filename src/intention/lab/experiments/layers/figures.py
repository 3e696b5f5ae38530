"""The drawings of `layers`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from intention.lab.experiments.base import COLOURS

NAMES = {
    "step_l": "step 1/L",
    "step_l_mu": "step 2/(L + μ)",
    "chebyshev": "Chebyshev steps",
    "learned": "learned steps",
    "intention": "Intention",
}
LINE_COLOURS = {
    "step_l": COLOURS["attention"],
    "step_l_mu": COLOURS["linear_attention"],
    "chebyshev": COLOURS["mlp"],
    "learned": COLOURS["neural_process"],
    "intention": COLOURS["intention"],
}

LOWEST = 1e-7  # of the gap that is drawn
RING: dict[str, Any] = {"markersize": 10, "markerfacecolor": "none"}  # learned steps often need as many as Chebyshev's

Points = Sequence[tuple[float, float]]


def draw_layers(points: Mapping[str, Points], worst: Mapping[str, Points], missed: Mapping[str, Points]) -> Any:
    """Layers over kappa: points are measured, lines the worst case, crosses the deepest stack where none was enough."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    for model, name in NAMES.items():
        colour, ring = LINE_COLOURS[model], RING if model == "learned" else {}
        if points.get(model):
            axis.plot(*zip(*points[model], strict=True), "o", color=colour, label=name, **ring)
        if worst.get(model):
            axis.plot(*zip(*worst[model], strict=True), "-", color=colour, linewidth=1)
        if missed.get(model):
            crossed = f"{name}, not reached"
            axis.plot(*zip(*missed[model], strict=True), "x", color=colour, markersize=10, label=crossed)
    axis.set(xscale="log", yscale="log", xlabel="condition number κ", ylabel="layers")
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_gaps(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """What is left of the gap over layers; what lies far below the axis is written at its lower end."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    for model, name in NAMES.items():
        if model not in curves:
            continue
        layers, left, colour = curves[model]["layers"], curves[model]["left"], LINE_COLOURS[model]
        if max(left) < LOWEST:
            axis.plot(layers[:1], [3 * LOWEST], "v", color=colour, label=name, markersize=8)
            count = "one layer" if layers[0] == 1 else f"{layers[0]:g} layers"
            text, at = f"{name}: {left[0]:.0e} with {count}", (layers[0], 3 * LOWEST)
            axis.annotate(text, at, (9, 0), textcoords="offset points", va="center", fontsize=8)
            continue
        ring: dict[str, Any] = RING if model == "learned" else {"markersize": 4}
        axis.plot(layers, left, "o-", color=colour, label=name, linewidth=1.2, **ring)
    axis.set(yscale="log", xlabel="layers", ylabel="gap left", ylim=(LOWEST, 2))
    axis.legend(frameon=False, fontsize=8)
    return figure
