"""The drawings of `policy`, and the rows they read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from intention.lab.core.results import Json, Row, estimate_log, select
from intention.lab.experiments.base import COLOURS, Plot, label
from intention.lab.experiments.compare import by_model, errors, named
from intention.lab.experiments.drawing import history_lines
from intention.lab.experiments.policy.claims import final, of_reward
from intention.lab.experiments.policy.model import MODELS
from intention.lab.experiments.policy.task import REWARDS

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["plot"]

LINES = {"zero": "--", "ridge_raw": ":"}  # the exact closed forms lie far off the axis
ZOOM = 0.75  # half the side of the lower panels


def history(rows: Sequence[Row], reward: str) -> list[Row]:
    return of_reward(select(rows, metric="mse during training"), reward)


def examples(rows: Sequence[Row], reward: str) -> dict[str, Json]:
    """The stored tasks of each model, of the first seed that all of the models ran with."""
    shown = of_reward(select(rows, metric="examples"), reward)
    if not shown:
        return {}
    seeds = [{row.seed for row in shown if row.model == model} for model in {row.model for row in shown}]
    seed = min(set.intersection(*seeds) or {shown[0].seed})
    return {row.model: row.data for row in shown if row.seed == seed and row.data}


def plot(rows: Sequence[Row]) -> list[Plot]:
    plots: list[Plot] = []
    if any(row.model in MODELS for reward in REWARDS for row in final(rows, reward)):
        exact = "; ".join(_exact(rows, reward) for reward in REWARDS if _exact(rows, reward))
        caption = (
            "Mean squared error over held-out tasks: a dot per seed, their geometric mean and its 95% interval. "
            f"Off the axis, without training: {exact or 'not run'}."
        )
        plots.append(Plot("Error by model", caption, partial(draw_results, rows)))
    for reward in reversed(REWARDS):
        shown = examples(rows, reward)
        if shown:
            caption = (
                "Four held-out tasks. Grey: the Gaussian reward around the target (+). Circles: the observations, "
                "their area by that reward. Stars: predictions. Below: a window around the target; a prediction that "
                "is not in it is further away."
            )
            plots.append(Plot(f"Examples, {reward} reward", caption, partial(draw_examples, shown, reward)))
    groups = {f"{reward} reward": history(rows, reward) for reward in REWARDS}
    groups = {title: found for title, found in groups.items() if found}
    if groups:
        caption = "Error on the held-out tasks during training: seeds thin, their geometric mean thick."
        plots.append(Plot("Error during training", caption, partial(draw_history, groups)))
    return plots


def _exact(rows: Sequence[Row], reward: str) -> str:
    found = by_model(final(rows, reward))
    text = errors(found, ("trilateration", "intention_exact"))
    return f"{reward} reward, {text}" if text else ""


def draw_results(rows: Sequence[Row]) -> Figure:
    """One panel per reward; a dot per seed, a bar for the interval of their geometric mean."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullFormatter

    rewards = [reward for reward in REWARDS if final(rows, reward)]
    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    for axis, reward in zip(figure.subplots(1, len(rewards), sharey=True, squeeze=False)[0], rewards, strict=True):
        found = by_model(final(rows, reward))
        models = [model for model in reversed(MODELS) if model in found]
        for place, model in enumerate(models):
            values = [value for value in found[model].values() if math.isfinite(value)]
            mean = estimate_log(values)
            axis.plot(values, [place] * len(values), "o", color=COLOURS[model], alpha=0.4, markersize=4)
            if math.isfinite(mean.mean):
                low, high = (mean.low, mean.high) if math.isfinite(mean.low + mean.high) else (mean.mean, mean.mean)
                axis.plot([low, high], [place, place], color=COLOURS[model], linewidth=2)
                axis.plot([mean.mean], [place], "D", color=COLOURS[model], markersize=7)
                axis.annotate(
                    f"{mean.mean:.2g}", (mean.mean, place), (0, 7), textcoords="offset points", ha="center", fontsize=8
                )
        for name, style in LINES.items():
            if name in found:
                value = estimate_log(list(found[name].values())).mean
                axis.axvline(value, color="black", linestyle=style, linewidth=1, label=named(name))
        shown = [value for model in models for value in found[model].values() if math.isfinite(value)]
        if shown:
            axis.set_xlim(min(shown) / 2.5, max(1.6, 1.3 * max(shown)))
        axis.set(xscale="log", xlabel="MSE", title=f"{reward} reward", ylim=(-0.5, len(models) - 0.3))
        axis.xaxis.set_minor_formatter(NullFormatter())  # on a short axis the labels of minor ticks overlap
        axis.set_yticks(range(len(models)), [label(model) for model in models])
    handles, labels = figure.axes[0].get_legend_handles_labels()
    if handles:
        figure.legend(handles, labels, loc="outside lower center", ncols=2, frameon=False, fontsize=8)
    return figure


def draw_history(groups: Mapping[str, Sequence[Row]]) -> Figure:
    """Error against training steps, one panel per group of rows; thin lines are seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 3.2), layout="constrained")
    for axis, (title, rows) in zip(figure.subplots(1, len(groups), squeeze=False)[0], groups.items(), strict=True):
        history_lines(axis, rows, MODELS)
        axis.set(yscale="log", xlabel="training steps", ylabel="MSE", title=title)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def draw_examples(shown: dict[str, Json], reward: str) -> Figure:
    """Four tasks, and below each a window around its target."""
    import numpy as np
    from matplotlib.figure import Figure

    data = next(iter(shown.values()))
    tasks = range(len(data["target"]))
    figure = Figure(figsize=(7.5, 4.3), layout="constrained")
    axes = figure.subplots(2, len(tasks), squeeze=False)
    for task in tasks:
        target, observed = np.array(data["target"][task]), np.array(data["observed"][task])
        for axis in axes[:, task]:
            _reward(axis, target, data["width"])
            size = observed[:, 2] if reward == "gaussian" else np.exp(observed[:, 2] / (-2 * data["width"] ** 2))
            axis.scatter(
                observed[:, 0], observed[:, 1], 8 + 90 * size, facecolor="none", edgecolor="black", linewidth=1
            )
            axis.plot(*target, "+", color="black", markersize=9)
            for model in [model for model in MODELS if model in shown]:
                x, y = shown[model]["predicted"][task]
                axis.plot(x, y, "*", color=COLOURS[model], markersize=9, label=label(model), markeredgewidth=0)
            axis.set(aspect="equal", xticks=[], yticks=[])
        everything = np.concatenate([observed[:, :2], [target]])
        middle = (everything.max(0) + everything.min(0)) / 2
        _window(axes[0, task], middle, max(1.6, float(np.abs(everything - middle).max()) + 0.4))
        _window(axes[1, task], target, ZOOM)
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    return figure


def _reward(axis: Axes, target: np.ndarray, width: float) -> None:
    """Circles where the Gaussian has fallen to 9/10, 6/10, 3/10 and 1/10."""
    from matplotlib.patches import Circle

    for level in (0.9, 0.6, 0.3, 0.1):
        radius = width * math.sqrt(-2 * math.log(level))
        axis.add_patch(Circle(tuple(target), radius, fill=False, edgecolor="#999999", linewidth=0.8))


def _window(axis: Axes, middle: np.ndarray, half: float) -> None:
    axis.set(xlim=(middle[0] - half, middle[0] + half), ylim=(middle[1] - half, middle[1] + half))
