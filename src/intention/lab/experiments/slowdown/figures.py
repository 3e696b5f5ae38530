"""The drawings of `slowdown`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Json, Row
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.slowdown.claims import HIGH, LOW, NAMES, find
from intention.lab.experiments.slowdown.model import JAX, PAIRS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

SIZES = (16, 32, 64, 128, 256, 512)  # ticks
Pair = tuple[str, str]  # what is divided by what
LINE_COLOURS = {
    "jax_inverse": COLOURS["maml"],
    "inverse": COLOURS["mlp"],
    "cholesky": COLOURS["neural_process"],
    "intention": COLOURS["intention"],
}


def plot(rows: Sequence[Row]) -> list[Plot]:
    found = {pair: row.data for pair in (JAX, *PAIRS) if (row := find(rows, pair, "median")) is not None and row.data}
    if not found:
        return []
    across = (
        "Distribution of the slowdown over repetitions; the band is the paper's range, 1 to 4, the line the median."
    )
    medians = {pair: row.value for pair in found if (row := find(rows, pair, "median")) is not None}
    plots = [Plot("Slowdown over attention", across, partial(draw_histograms, found, medians))]
    if any(data["shapes"] for data in found.values()):
        caption = (
            "A point is a repetition: N against d, coloured by the slowdown (white is 1, red is slower, blue faster)."
        )
        plots.append(Plot("Where it is slow", caption, partial(draw_shapes, found)))
    return plots


def draw_histograms(found: Mapping[Pair, Json], medians: Mapping[Pair, float | None]) -> Figure:
    """A histogram for each pair of codes, over equal ratios."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.5 * len(found) + 0.6), layout="constrained")
    axes = figure.subplots(len(found), 1, sharex=True, squeeze=False)[:, 0]
    for axis, (pair, data) in zip(axes, found.items(), strict=True):
        counts, width = data["counts"], (data["last"] - data["first"]) / len(data["counts"])
        edges = [2 ** (data["first"] + width * index) for index in range(len(counts) + 1)]
        axis.axvspan(LOW, HIGH, color="#7F8C8D", alpha=0.25, linewidth=0)
        axis.stairs(counts, edges, fill=True, color=LINE_COLOURS[pair[0]])
        if medians.get(pair) is not None:
            axis.axvline(medians[pair], color="black", linewidth=1)
        axis.set_title(NAMES[pair], fontsize=9)
        axis.set(xscale="log", ylabel="runs")
    axes[-1].set_xlabel("times slower")
    ticks = [0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32]
    axes[-1].set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes[-1].minorticks_off()
    return figure


def draw_shapes(found: Mapping[Pair, Json]) -> Figure:
    """N against d, coloured by the slowdown."""
    from matplotlib.figure import Figure

    lines = math.ceil(len(found) / 2)
    figure = Figure(figsize=(7.5, 3.2 * lines), layout="constrained")
    axes = figure.subplots(lines, 2, sharex=True, sharey=True, squeeze=False)
    drawn = None
    for axis, (pair, data) in zip(axes.flat, found.items(), strict=False):
        n, d, ratio = zip(*data["shapes"], strict=True)
        colours = [math.log2(value) for value in ratio]
        drawn = axis.scatter(n, d, c=colours, s=9, cmap="RdBu_r", vmin=-3, vmax=3)
        axis.set_title(NAMES[pair], fontsize=9)
        axis.set(xscale="log", yscale="log", xlabel="N", ylabel="d")
        axis.minorticks_off()
        axis.set_xticks(SIZES, SIZES)
        axis.set_yticks(SIZES, SIZES)
    if drawn is not None:
        bar = figure.colorbar(drawn, ax=axes, shrink=0.7, label="times slower")
        bar.set_ticks([-3, -2, -1, 0, 1, 2, 3], labels=["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    return figure
