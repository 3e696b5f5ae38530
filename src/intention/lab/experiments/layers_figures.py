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

Points = Sequence[tuple[float, float]]


def draw_layers(points: Mapping[str, Points], worst: Mapping[str, Points]) -> Any:
    """Layers over kappa: points are measured, lines the worst case."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axis = figure.subplots()
    for model, name in NAMES.items():
        if points.get(model):
            axis.plot(*zip(*points[model], strict=True), "o", color=LINE_COLOURS[model], label=name)
        if worst.get(model):
            axis.plot(*zip(*worst[model], strict=True), "-", color=LINE_COLOURS[model], linewidth=1)
    axis.set(xscale="log", yscale="log", xlabel="condition number κ", ylabel="layers")
    axis.legend(frameon=False, fontsize=8)
    return figure


def draw_gaps(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Any:
    """What is left of the gap over layers."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axis = figure.subplots()
    for model, name in NAMES.items():
        if model in curves:
            style = "o" if model == "intention" else ".-"
            axis.plot(curves[model]["layers"], curves[model]["left"], style, color=LINE_COLOURS[model], label=name)
    axis.set(yscale="log", xlabel="layers", ylabel="gap left")
    axis.legend(frameon=False, fontsize=8)
    return figure
