"""The drawings of `anomaly`, and the rows they read."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Row, select
from intention.lab.experiments.anomaly.claims import ASKED, DEPTHS, PRINTED, RULES, Cell, cell, mean, percent, spread
from intention.lab.experiments.anomaly.model import LABELS, MODELS
from intention.lab.experiments.base import COLOURS, Plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["plot"]

TITLES = {
    "unseen": "classes that training never saw",
    "seen": "other images of the classes of training",
    "images": "split over images: other images of all classes",
}
LINES = {"cosine": "--", "nearest": ":", "whitened": "-."}
MARKS = {1: "o", 4: "s"}


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots: list[Plot] = []
    if any(cell(rows, model, depth, asked) for model in MODELS for depth in DEPTHS for asked in ASKED):
        ends = "95% intervals: over sets, or over seeds where these differ by more"
        about = f"{about_data(rows)}. The paper's column: ResNet34 features of CIFAR-100. {ends}."
        plots.append(Plot("Accuracy", about, table=table(rows)))
        caption = (
            f"{about_data(rows)}. Circles: 1 layer, squares: 4 layers; hollow: the paper's recipe alone, one seed. "
            f"Horizontal: rules without training. {ends}; cut at 0 and 1."
        )
        plots.append(Plot("Accuracy by model", caption, partial(draw_results, rows)))
    if select(rows, metric="accuracy during training"):
        caption = (
            "Accuracy during training, mean over seeds. Solid: unseen classes, dashed: seen classes, dotted: the split "
            "over images."
        )
        plots.append(Plot("Accuracy during training", caption, partial(draw_history, rows)))
    return plots


def about_data(rows: Sequence[Row]) -> str:
    names = {str(row.config.get("data", "unknown")) for row in rows}
    return "Data: " + ", ".join("built-in data (glyphs)" if name == "built-in" else name for name in sorted(names))


def table(rows: Sequence[Row]) -> list[list[str]]:
    """Models and rules by kind of question; "–" where nothing was run."""
    kinds = shown(rows)
    head = ["", *(f"{depth} layer{'s'[: depth > 1]}, {asked}" for asked in kinds for depth in DEPTHS)]
    lines = [[*head, "paper, 1 layer", "paper, 4 layers", "paper's recipe, unseen", "paper's recipe, seen"]]
    for model in MODELS:
        own = [_text(cell(rows, model, depth, asked)) for asked in kinds for depth in DEPTHS]
        plain = [_text(cell(rows, model, DEPTHS[0], asked, "plain")) for asked in ASKED[:2]]
        lines.append([LABELS[model], *own, *(f"{100 * share:.1f}%" for share in PRINTED[model]), *plain])
    for rule, name in RULES.items():
        own = [text for asked in kinds for text in (_text(cell(rows, rule, asked=asked)), "")]
        lines.append([f"no training: {name}", *own, "", "", "", ""])
    return lines


def shown(rows: Sequence[Row]) -> list[str]:
    """What was asked for in these rows."""
    return [asked for asked in ASKED if any(cell(rows, model, depth, asked) for model in MODELS for depth in DEPTHS)]


def _text(of: Cell) -> str:
    return percent(of) if of else "–"


def _within(found: Cell) -> list[list[float]]:
    """The interval below and above the mean, cut where a share ends: two seeds that differ would flatten all others."""
    half = spread(found)
    return [[min(half, mean(found))], [min(half, 1 - mean(found))]]


def draw_results(rows: Sequence[Row]) -> Figure:
    """A column for each model, a panel for each kind of question."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.9), layout="constrained")
    kinds = shown(rows)
    axes = figure.subplots(1, len(kinds), sharey=True, squeeze=False)[0]
    for axis, asked in zip(axes, kinds, strict=True):
        for place, model in enumerate(MODELS):
            for depth in DEPTHS:
                for recipe, fill, aside in (("ours", "full", 0.0), ("plain", "none", -0.3)):
                    found = cell(rows, model, depth, asked, recipe)
                    if found:
                        side = place + aside + (0.12 if depth > DEPTHS[0] else -0.12)
                        marks = {"marker": MARKS[depth], "fillstyle": fill, "color": COLOURS[model]}
                        axis.errorbar(side, mean(found), _within(found), linestyle="none", capsize=2, **marks)
        for rule, style in LINES.items():
            found = cell(rows, rule, asked=asked)
            if found:
                name = RULES[rule] if asked == kinds[0] else None
                axis.axhline(mean(found), color="black", linestyle=style, linewidth=1, label=name)
        axis.set_xticks(range(len(MODELS)), [LABELS[model].replace("-", "-\n") for model in MODELS], fontsize=7.5)
        axis.set_title(TITLES[asked], fontsize=9)
    axes[0].set_ylabel("share of sets")
    if axes[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def draw_history(rows: Sequence[Row]) -> Figure:
    """A panel for each depth."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3.6), layout="constrained")
    axes = figure.subplots(1, len(DEPTHS), sharey=True)
    for axis, depth in zip(axes, DEPTHS, strict=True):
        for model in MODELS:
            for asked, style in zip(ASKED, ("-", "--", ":"), strict=True):
                line = history(rows, model, depth, asked)
                name = LABELS[model] if asked == shown(rows)[0] and depth == DEPTHS[0] else None
                if line:
                    axis.plot(*zip(*line, strict=True), style, color=COLOURS[model], linewidth=1.4, label=name)
        axis.set_title("1 layer" if depth == 1 else f"{depth} layers", fontsize=9)
        axis.set_xlabel("training steps")
    axes[0].set_ylabel("share of sets")
    if axes[0].get_legend_handles_labels()[0]:
        figure.legend(loc="outside lower center", ncols=len(MODELS), frameon=False, fontsize=8)
    return figure


def history(rows: Sequence[Row], model: str, depth: int, asked: str) -> list[tuple[float, float]]:
    """The mean over seeds at each step."""
    wanted = {"layers": depth, "asked": asked, "recipe": "ours"}
    found: dict[float, list[float]] = {}
    for row in select(rows, metric="accuracy during training", model=model):
        if row.data == wanted and row.x is not None and row.value is not None:
            found.setdefault(row.x, []).append(row.value)
    return [(step, sum(shares) / len(shares)) for step, shares in sorted(found.items())]
