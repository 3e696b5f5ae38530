"""The table and drawing of `fewshot_latent`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.fewshot.config import ACCURACY, BEFORE, MODELS
from intention.lab.experiments.fewshot.figures import PER_SEED, about, mean
from intention.lab.experiments.fewshot.judge import percent, seeds_of, sets
from intention.lab.experiments.fewshot_latent.claims import latents, of_latent

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot", "table_latent"]


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots = []
    for data, some in sets(rows).items():
        if latents(some):
            caption = (
                f"{about(data, some)}. Accuracy against the size of e_H: a dot per seed with its 95% interval over test"
            )
            caption += " episodes; the line is their mean."
            plots.append(Plot("Figure 14: accuracy against latent size", caption, partial(draw_latent, some)))
            caption = f"{about(data, some)}. {PER_SEED}."
            plots.append(Plot("The same as numbers", caption, table=table_latent(some)))
    return plots


def table_latent(rows: Sequence[Row]) -> list[list[str]]:
    head = ["Size of e_H", "Model", "Accuracy", "Seeds", "Each seed", "Before training"]
    body = []
    for latent in latents(rows):
        here = of_latent(rows, latent)
        for model in MODELS:
            own = seeds_of(here, model)
            if own:
                before = list(seeds_of(here, model, BEFORE).values())
                each = "; ".join(percent(row) for row in own.values())
                body.append([str(latent), label(model), mean(list(own.values())), str(len(own)), each, mean(before)])
    return [head, *body]


def draw_latent(rows: Sequence[Row]) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.6), layout="constrained")
    axes = figure.subplots()
    found = select(rows, metric=ACCURACY)
    sizes = latents(rows)
    models = [model for model in MODELS if select(found, model=model)]
    for place, model in enumerate(models):
        own = {latent: _finite(of_latent(select(found, model=model), latent)) for latent in sizes}
        line = [(latent, estimate([value for _, value in some]).mean) for latent, some in own.items() if some]
        axes.plot([x for x, _ in line], [100 * y for _, y in line], color=COLOURS[model], label=label(model))
        for latent, some in own.items():
            for number, (row, value) in enumerate(some):
                # beside each other around the size: the axis is logarithmic
                x = latent * 1.04 ** (place * len(some) + number - (len(models) * len(some) - 1) / 2)
                low, high = row.interval or (value, value)
                axes.plot([x, x], [100 * low, 100 * high], color=COLOURS[model], linewidth=1)
                axes.plot([x], [100 * value], "o", color=COLOURS[model], markersize=4)
    axes.set(xscale="log", xlabel="size of e_H", ylabel="accuracy, %")
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.minorticks_off()
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def _finite(rows: Sequence[Row]) -> list[tuple[Row, float]]:
    return [(row, row.value) for row in rows if row.value is not None]
