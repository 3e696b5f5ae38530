"""The drawings of `tables`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate_log
from intention.lab.experiments.base import COLOURS, Plot
from intention.lab.experiments.compare import by_model, named
from intention.lab.experiments.tables.claims import cases
from intention.lab.experiments.tables.model import MODELS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

STYLES = {"ridge_loo": ("--", "s"), "nearest_rows": (":", "^"), "zero": ((0, (1, 4)), "x")}  # of line and mark


def plot(rows: Sequence[Row]) -> list[Plot]:
    if not cases(rows):
        return []
    caption = (
        "Mean squared error on the other rows of a table, in units of its variance, against the number of rows seen: "
        "geometric means over seeds and their 95% intervals. Networks were trained on made-up tasks alone."
    )
    return [
        Plot("Tables never seen", caption, partial(draw, rows)),
        Plot("The same as numbers", "Geometric means over seeds and their 95% intervals.", table=table(rows)),
    ]


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    found = {case: by_model(some) for case, some in cases(rows).items()}
    tables = list(dict.fromkeys(name for name, _ in found))
    figure = Figure(figsize=(7.5, 3.4), layout="constrained")
    axes = figure.subplots(
        1, len(tables), squeeze=False, width_ratios=[1 + 2 * (name == "diabetes") for name in tables]
    )
    for axis, name in zip(axes[0], tables, strict=True):
        counts = [count for table, count in found if table == name]
        for model in (*MODELS, *STYLES):
            ends = [estimate_log(list(found[name, count].get(model, {}).values())) for count in counts]
            style, mark = STYLES.get(model, ("-", "o"))
            line = {"color": COLOURS.get(model, "black"), "linestyle": style, "marker": mark, "label": named(model)}
            off = [[one.mean - one.low for one in ends], [one.high - one.mean for one in ends]]
            axis.errorbar(counts, [one.mean for one in ends], off, markersize=4, capsize=2, **line)
        axis.set(title=name, xlabel="rows seen", xscale="log", xticks=counts, xticklabels=counts)
        axis.minorticks_off()
    axes[0][0].set_ylabel("error")
    figure.legend(
        *axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False, fontsize=8
    )
    return figure


def table(rows: Sequence[Row]) -> list[list[str]]:
    found = {case: by_model(some) for case, some in cases(rows).items()}
    head = ["", *[f"{name}, {count} rows" for name, count in found]]
    models = [model for model in (*MODELS, *STYLES) if any(model in each for each in found.values())]
    body = [
        [named(model), *[str(estimate_log(list(each.get(model, {}).values()))) for each in found.values()]]
        for model in models
    ]
    return [head, *body]
