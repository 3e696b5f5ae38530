"""The drawings of `text`, and what its models wrote."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import Plot
from intention.lab.experiments.compare import by_model, named
from intention.lab.experiments.drawing import history, line
from intention.lab.experiments.sequences import MIXERS, about, texts
from intention.lab.experiments.text.claims import COUNTED, METRIC, of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    for name in texts(rows, "text"):
        own = of(rows, name)
        if select(own, metric="bits during training"):
            caption = "Bits per character on the held-out part: seeds thin, their mean thick. Dashed: counted pairs."
            plots.append(Plot(f"Bits per character: {name}", caption, partial(draw, own)))
        if select(own, metric=METRIC):
            size = max(about(row, "characters") for row in select(own, metric=METRIC))
            caption = (
                f"After training; 95% intervals over seeds. The text has {size} characters, the last tenth held out."
            )
            plots.append(Plot(f"The same as numbers: {name}", caption, table=table(own)))
        if shown := written(own):
            first = next(iter(shown.values()))
            caption = (
                "Characters drawn one after another, seed by seed the same for all models; ⏎ is the end of a line."
            )
            body = [[named(model), _one_line(about(row, "sample"))] for model, row in shown.items()]
            table_of = [["", "written"], ["the beginning, given", _one_line(about(first, "prompt"))], *body]
            plots.append(Plot(f"What the models write: {name}", caption, table=table_of))
    return plots


def written(rows: Sequence[Row]) -> dict[str, Row]:
    """One sample per model, of its smallest seed."""
    found: dict[str, Row] = {}
    for row in sorted(select(rows, metric="sample"), key=lambda row: row.seed):
        found.setdefault(row.model, row)
    return {model: found[model] for model in MIXERS if model in found}


def _one_line(text: str) -> str:
    return text.replace("\n", " ⏎ ")


def table(rows: Sequence[Row]) -> list[list[str]]:
    found = by_model(select(rows, metric=METRIC))
    shown = [model for model in (*MIXERS, COUNTED) if model in found]
    return [["", METRIC], *([named(model), str(estimate(list(found[model].values())))] for model in shown)]


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axis = figure.subplots()
    found = history(rows, "bits during training")
    for model in [model for model in MIXERS if model in found]:
        line(axis, model, found[model])
    counted = select(rows, metric=METRIC, model=COUNTED)
    if counted:
        axis.axhline(estimate([row.value for row in counted]).mean, color="black", linestyle="--", linewidth=1)
    axis.set(xlabel="training steps", ylabel=METRIC)
    figure.legend(loc="outside lower center", ncols=5, frameon=False, fontsize=8)
    return figure
