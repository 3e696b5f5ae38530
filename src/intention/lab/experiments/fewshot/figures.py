"""The tables and drawings of `fewshot`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.fewshot.config import ACCURACY, BEFORE, HALVES, MODELS, SEEN, UNSEEN, VALIDATION
from intention.lab.experiments.fewshot.judge import percent, seeds_of, set_name, sets, steps_of, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["PER_SEED", "about", "mean", "plot", "table", "tables"]

Numbers = Mapping[str, str]  # model -> what the paper has
TABLE_1 = {
    "intention": "67.30 ± 0.51",
    "attention": "54.26 ± 0.51",
    "neural_process": "60.10 ± 0.51",
    "maml_first": "63.15 ± 0.91 (no target)",
    "maml": "63.15 ± 0.91 (no target)",
}
NOTE_1 = (
    "The paper's number of MAML is the first-order one of the MAML paper, of images of 84×84 and another split of the "
    "classes."
)
PER_SEED = (
    "Each seed has its 95% interval over test episodes; the mean's is Student's over seeds, wide where these are few"
)
UNSEEN_TOO = (
    "All unseen classes: those of test and of validation together, where the latter chose which weights are kept (not "
    "of models that begin with one encoder: their last weights are). Random halves: mean and standard deviation over "
    "20 of them. Training: steps × episodes."
)
LOSSES = {
    "intention": "least squares",
    "intention_longer": "least squares",
    "intention_kernel": "least squares",
    "intention_tuned": "least squares",
    "intention_kernel_tuned": "least squares",
    "pretrained": "cross-entropy of all training classes",
}


def plot(rows: Sequence[Row]) -> list[Plot]:
    return tables(rows, "Table 1", TABLE_1, NOTE_1)


def tables(rows: Sequence[Row], title: str, numbers: Numbers, note: str) -> list[Plot]:
    plots = []
    for data, some in sets(rows).items():
        if select(some, metric=ACCURACY):
            known = numbers if data.startswith("miniimagenet") else {}
            caption = f"{about(data, some)}. {PER_SEED}. {UNSEEN_TOO}{' ' + note if known else ''}"
            plots.append(Plot(f"{title}: accuracy", caption, table=table(some, known)))
        if select(some, metric=VALIDATION):
            caption = f"{about(data, some)}. Accuracy on the validation classes: seeds thin, their mean thick."
            plots.append(Plot("Accuracy during training", caption, partial(draw_history, some)))
    return plots


def about(data: str, rows: Sequence[Row]) -> str:
    config = rows[0].config
    return f"{set_name(data)}, {config.get('way')}-way {config.get('shot')}-shot; {trained(rows)}"


def table(rows: Sequence[Row], numbers: Numbers) -> list[list[str]]:
    """A line for each model there is; the paper's column only where there are numbers of it."""
    head = ["Model", "Loss", "Accuracy", "Seeds", "Each seed", "All unseen classes", "Random halves of these"]
    head += ["Training classes", "Before training", "Training"]
    body = []
    for model in MODELS:
        own = seeds_of(rows, model)
        if own:
            config = next(iter(own.values())).config
            halves = " and ".join(
                f"{100 * (row.value or 0):.1f} ± {100 * (row.data or {}).get('spread', 0):.1f}%"
                for row in seeds_of(rows, model, HALVES).values()
            )
            line = [
                *(label(model), LOSSES.get(model, "cross-entropy"), mean(list(own.values())), str(len(own))),
                "; ".join(percent(row) for row in own.values()),
                *(mean(list(seeds_of(rows, model, UNSEEN).values())), halves),
                *(mean(list(seeds_of(rows, model, metric).values())) for metric in (SEEN, BEFORE)),
                f"{steps_of(config, model)} × {config.get('batch')}, width {config.get('width')}",
            ]
            body.append(line + ([numbers.get(model, "")] if numbers else []))
    return [head + (["The paper"] if numbers else []), *body]


def mean(rows: Sequence[Row]) -> str:
    """Over seeds, with Student's interval where there are several."""
    if not rows:
        return ""
    found = estimate([row.value for row in rows])
    if math.isnan(found.mean):
        return "not finite"
    low, high = (100 * min(1, max(0, end)) for end in (found.low, found.high))
    return f"{100 * found.mean:.1f}%" + ("" if math.isnan(found.low) else f" [{low:.1f}, {high:.1f}]")


def draw_history(rows: Sequence[Row]) -> Figure:
    """Accuracy on the validation classes against training steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.2), layout="constrained")
    axes = figure.subplots()
    for model in MODELS:
        found = select(rows, metric=VALIDATION, model=model)
        known = [(row.seed, row.x, row.value) for row in found if row.x is not None and row.value is not None]
        for seed in sorted({seed for seed, _, _ in known}):
            line = sorted((x, 100 * value) for own, x, value in known if own == seed)
            axes.plot(*zip(*line, strict=True), color=COLOURS[model], linewidth=0.6, alpha=0.5)
        steps = sorted({x for _, x, _ in known})
        if steps:
            means = [100 * estimate([value for _, x, value in known if x == step]).mean for step in steps]
            axes.plot(steps, means, color=COLOURS[model], linewidth=2, label=label(model))
    axes.set(xlabel="training steps", ylabel="validation accuracy, %")
    figure.legend(loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure
