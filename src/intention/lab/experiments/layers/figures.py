"""The drawings of `layers`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.layers.claims import MODELS, NAMES, layers_at, over_seeds

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

LINE_COLOURS = {
    "step_l": COLOURS["attention"],
    "step_l_mu": COLOURS["linear_attention"],
    "chebyshev": COLOURS["mlp"],
    "learned": COLOURS["neural_process"],
    "intention": COLOURS["intention"],
}

LOWEST = 1e-7  # of the gap that is drawn
RING: dict[str, Any] = {
    "markersize": 10,
    "markerfacecolor": "none",
}  # learned steps often need as many as Chebyshev's

Points = Sequence[tuple[float, float]]


def plot(rows: Sequence[Row]) -> list[Plot]:
    kappas = sorted({row.x for row in select(rows, metric="layers") if row.x is not None})
    if not kappas:
        return []
    table = [["κ", *(NAMES[model] for model in MODELS)]]
    for kappa in kappas:
        table.append([f"{kappa:g}", *(_cell(rows, model, kappa) for model in MODELS)])
    caption = (
        "Points: mean over random problems (seeds); lines: worst case. Until the gap is 10⁻⁴ of what it was. A cross: "
        "the deepest stack that was tried, where not all seeds got there."
    )
    points = {model: _points(rows, model, "layers", kappas) for model in MODELS}
    worst = {model: _points(rows, model, "layers, worst case", kappas) for model in MODELS if model != "learned"}
    missed = {model: _missed(rows, model, kappas) for model in MODELS}
    plots = [Plot("Layers that equal one Intention", caption, partial(draw_layers, points, worst, missed))]
    cells = "On random problems; in brackets the worst case. Chebyshev's worst case bounds the learned steps too."
    plots.append(Plot("Layers needed", cells, table=table))
    shown = 10.0 if 10.0 in kappas else kappas[-1]
    curves = [row for row in select(rows, metric="layers", x=shown, seed=0) if row.data]
    if curves:
        caption = (
            "What is left of |w − w*|² on random problems. Learned and Chebyshev steps: a stack for each depth. "
            "Intention lies far below the axis."
        )
        drawn = {row.model: row.data for row in curves if row.data}
        plots.append(Plot(f"The gap, layer by layer, at κ = {shown:g}", caption, partial(draw_gaps, drawn)))
    return plots


def _points(rows: Sequence[Row], model: str, metric: str, kappas: Sequence[float]) -> list[tuple[float, float]]:
    found = [(kappa, over_seeds(rows, model, metric, kappa).mean) for kappa in kappas]
    return [(kappa, mean) for kappa, mean in found if math.isfinite(mean)]


def _missed(rows: Sequence[Row], model: str, kappas: Sequence[float]) -> list[tuple[float, float]]:
    """Where not all seeds reached the goal: the deepest stack."""
    found = [(kappa, select(rows, model=model, metric="layers", x=kappa)) for kappa in kappas]
    deepest = [(kappa, [max(r.data["layers"]) for r in here if r.value is None and r.data]) for kappa, here in found]
    return [(kappa, max(depths)) for kappa, depths in deepest if depths]


def _cell(rows: Sequence[Row], model: str, kappa: float) -> str:
    measured, worst = layers_at(rows, model, kappa)
    if worst is None:
        return "–"
    found = f"{measured.mean:.3g}" if math.isfinite(measured.mean) else "not reached"
    return found if model in ("learned", "intention") else f"{found} ({worst})"


def draw_layers(points: Mapping[str, Points], worst: Mapping[str, Points], missed: Mapping[str, Points]) -> Figure:
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


def draw_gaps(curves: Mapping[str, Mapping[str, Sequence[float]]]) -> Figure:
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
