"""The drawing and table of `fewshot_features`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.fewshot.figures import about, mean
from intention.lab.experiments.fewshot.judge import judged_on, sets
from intention.lab.experiments.fewshot_features.claims import HEADS, of_shot, shots

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    for data, some in sets(rows).items():
        if shots(some):
            what = about(data, some).split(", ")[0]
            caption = f"{what}, 5-way. Right answers on classes never seen, means over seeds with their 95% intervals."
            plots.append(Plot("Accuracy by the number of examples", caption, partial(draw, some)))
            plots.append(Plot("The same as numbers", caption, table=table(some)))
    return plots


def table(rows: Sequence[Row]) -> list[list[str]]:
    head = ["Head", *[f"{shot} of a class" for shot in shots(rows)]]
    found = {model: [list(judged_on(of_shot(rows, shot), model).values()) for shot in shots(rows)] for model in HEADS}
    return [head, *[[_name(model), *map(mean, each)] for model, each in found.items() if any(each)]]


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    counts = shots(rows)
    there = [model for model in HEADS if any(judged_on(of_shot(rows, shot), model) for shot in counts)]
    for place, model in enumerate(there):
        found = [estimate([row.value for row in judged_on(of_shot(rows, n), model).values()]) for n in counts]
        at = [n + 0.08 * (place - (len(there) - 1) / 2) for n in range(len(counts))]
        off = [[100 * (one.mean - one.low) for one in found], [100 * (one.high - one.mean) for one in found]]
        colour, name = COLOURS[model], _name(model)
        axes.errorbar(at, [100 * one.mean for one in found], off, fmt="o", capsize=2, color=colour, label=name)
    axes.set(xlabel="examples of a class", ylabel="right answers, %")
    axes.set_xticks(range(len(counts)), [str(n) for n in counts])
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure


def _name(model: str) -> str:
    return label(model).split(",")[0]
