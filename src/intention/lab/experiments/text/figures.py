"""The drawings of `text`, and what its models wrote."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.compare import by_model, named
from intention.lab.experiments.drawing import history, line
from intention.lab.experiments.sequences import GATED, MIXERS, about, texts
from intention.lab.experiments.text.claims import COUNTED, METRIC, exactly, of
from intention.lab.experiments.text.parts import ABLATION, AS_IT_IS, PARTS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["parts_table", "plot"]

SHOWN = (*MIXERS, *GATED)


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    for name in texts(rows, "text"):
        own = of(rows, name)
        if select(own, metric="bits during training"):
            caption = (
                "Bits per character on the held-out part: seeds thin, their mean thick. Plain layers are dotted, gated "
                "ones solid. Dashed: counted pairs."
            )
            plots.append(Plot(f"Bits per character: {name}", caption, partial(draw, own)))
        if select(own, metric=METRIC):
            size = max(about(row, "characters") for row in select(own, metric=METRIC))
            caption = (
                f"After training; 95% intervals over seeds. The text has {size} characters, the last tenth held out."
            )
            plots.append(Plot(f"The same as numbers: {name}", caption, table=table(own)))
        if select(own, metric=METRIC, model=set(GATED)):
            caption = (
                "Bits per character of each mixer in plain layers (hollow) and in gated ones (filled), every seed."
            )
            plots.append(Plot(f"Plain and gated layers: {name}", caption, partial(draw_pairs, own)))
        if changed := select(own, metric=ABLATION):
            steps = max(about(row, "steps") for row in changed)
            caption = f"Intention in gated layers with one part changed, {steps} steps; 95% intervals over seeds."
            plots.append(Plot(f"What the parts are worth: {name}", caption, table=parts_table(changed)))
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
    return {model: found[model] for model in SHOWN if model in found}


def _one_line(text: str) -> str:
    return text.replace("\n", " ⏎ ")


def table(rows: Sequence[Row]) -> list[list[str]]:
    found = by_model(select(rows, metric=METRIC))
    body = []
    for model in [model for model in (*SHOWN, COUNTED) if model in found]:
        sizes = texts(select(rows, metric=METRIC, model=model), "parameters")
        values = list(found[model].values())
        body.append([named(model), exactly(estimate(values)), str(len(values)), "".join(map(str, sizes))])
    return [["", METRIC, "seeds", "parameters"], *body]


def parts_table(rows: Sequence[Row]) -> list[list[str]]:
    """The parts, and how much more bits than the layer as it is."""
    found: dict[str, dict[int, float]] = {}
    for row in rows:
        found.setdefault(about(row, "part"), {})[row.seed] = math.nan if row.value is None else row.value
    whole, body = found.get(AS_IT_IS, {}), []
    for part in [part for part in PARTS if part in found]:
        own = found[part]
        more = [own[seed] - whole[seed] for seed in own if seed in whole]
        body.append([part, exactly(estimate(list(own.values()))), f"{estimate(more).mean:+.3f}" if more else ""])
    return [["", METRIC, "more than as it is"], *body]


def draw_pairs(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 2.8), layout="constrained")
    axis = figure.subplots()
    found = by_model(select(rows, metric=METRIC))
    mixers = [mixer for mixer in GATED.values() if mixer in found or f"{mixer}_gated" in found]
    for place, mixer in enumerate(mixers):
        for model, filled in ((mixer, False), (f"{mixer}_gated", True)):
            values = [value for value in found.get(model, {}).values() if math.isfinite(value)]
            face = COLOURS[mixer] if filled else "none"
            axis.plot(values, [place] * len(values), "o", color=COLOURS[mixer], markerfacecolor=face)
    axis.set_yticks(range(len(mixers)), [label(mixer) for mixer in mixers])
    axis.invert_yaxis()
    axis.set(xlabel=METRIC)
    return figure


def draw(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.0), layout="constrained")
    axis = figure.subplots()
    found = history(rows, "bits during training")
    for model in [model for model in SHOWN if model in found]:
        line(axis, model, found[model], linestyle="-" if model in GATED else ":")
    counted = select(rows, metric=METRIC, model=COUNTED)
    if counted:
        axis.axhline(estimate([row.value for row in counted]).mean, color="black", linestyle="--", linewidth=1)
    axis.set(xlabel="training steps", ylabel=METRIC)
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
