"""What a command ends with: the numbers of a run, best first, and who is best in each experiment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from intention.lab import experiments
from intention.lab.core.results import Estimate, Row, estimate
from intention.lab.experiments.base import label, score
from intention.lab.experiments.compare import CLOSED_FORMS, named

__all__ = ["SHOWN", "numbers", "winners"]

LARGER = ("accuracy", "correlation")  # metrics whose names begin so: the larger the better; most others: the smaller
NEITHER = ("slope", "share")  # words of metrics that are neither
SHOWN = 3  # metrics
PLACES = 5  # along an axis
OF_A_MODEL = ("parameters", "state", "chosen step", "sample")  # written beside a number, and not varied


def larger_is_better(metric: str) -> bool:
    return metric.startswith(LARGER)


def numbers(rows: Sequence[Row]) -> list[str]:
    """Lines: the first metrics without an axis, the models with their means over seeds, best first.

    Where every metric has an axis, the one by which models are compared at some places along it.
    """
    known = [row for row in rows if row.value is not None and " training" not in row.metric]
    groups = _grouped([row for row in known if row.x is None])
    lines = [line for metric in list(groups)[:SHOWN] for line in _without_axis(metric, groups[metric])]
    if len(groups) > SHOWN:
        lines.append(f"and {len(groups) - SHOWN} other metrics, in the report")
    return lines or _along([row for row in known if row.x is not None])


def _grouped(rows: Iterable[Row]) -> dict[str, dict[str, list[float | None]]]:
    """metric -> model -> values"""
    groups: dict[str, dict[str, list[float | None]]] = {}
    for row in rows:
        groups.setdefault(row.metric, {}).setdefault(row.model, []).append(row.value)
    return groups


def _heading(metric: str, models: int) -> str:
    ordered = models > 1 and not any(word in metric for word in NEITHER)
    return f"{metric}, best first:" if ordered else f"{metric}:"


def _without_axis(metric: str, found: dict[str, list[float | None]]) -> list[str]:
    means = {model: estimate(values) for model, values in found.items()}
    width = max(len(named(model)) for model in means)
    lines = [_heading(metric, len(means))]
    for model in sorted(means, key=lambda model: _place(means[model], metric)):
        lines.append(f"  {named(model):{width}}  {means[model]} ({means[model].count} values)")
    return lines


def _along(rows: Sequence[Row]) -> list[str]:
    """One metric, a column for each of some places; nothing where more is varied than model, seed and place."""
    metric = (_metric(rows[0].experiment, rows) or rows[0].metric) if rows else ""
    own = [row for row in rows if row.metric == metric]
    if not own or len({(row.model, row.seed, row.x) for row in own}) < len(own):
        return []
    axis = sorted({row.x for row in own if row.x is not None})
    places = axis if len(axis) <= PLACES else [axis[i * (len(axis) - 1) // (PLACES - 1)] for i in range(PLACES)]
    at = {x: _grouped([row for row in own if row.x == x])[metric] for x in places}
    means = {
        model: [estimate(at[x].get(model, [])) for x in places] for model in dict.fromkeys(row.model for row in own)
    }
    width = max(len(named(model)) for model in means)
    lines = [_heading(metric, len(means)), f"  {'':{width}}" + "".join(f"{x:>11g}" for x in places)]
    for model in sorted(means, key=lambda model: _place(means[model][-1], metric)):
        cells = ["" if not one.count else f"{one.mean:.3g}" for one in means[model]]
        lines.append(f"  {named(model):{width}}" + "".join(f"{cell:>11}" for cell in cells))
    return lines


def _place(found: Estimate, metric: str) -> float:
    value = -found.mean if larger_is_better(metric) else found.mean
    return math.inf if math.isnan(value) or any(word in metric for word in NEITHER) else value


def winners(rows: Sequence[Row]) -> list[str]:
    """Lines: the trained model that is best in most cases of an experiment, and in how many.

    A case is a place on the axis, or whatever else is varied and written beside a number.
    """
    lines = []
    for name in experiments.NAMES:
        own = [row for row in rows if row.experiment == name]
        metric = _metric(name, own)
        wins: dict[str, int] = {}
        for case in _cases([row for row in own if row.metric == metric]).values():
            if len(case) > 1:
                means = {model: estimate(values) for model, values in case.items()}
                best = min(means, key=lambda model: _place(means[model], metric))
                wins[best] = wins.get(best, 0) + 1
        if wins:
            model = max(wins, key=lambda model: wins[model])
            among = f"best in {wins[model]} of {sum(wins.values())}" if sum(wins.values()) > 1 else "best"
            lines.append(f"{experiments.find(name).TITLE}: {label(model)} ({among}, {metric})")
    return lines


def _metric(name: str, rows: Sequence[Row]) -> str:
    """The number by which models are compared: that of a search, an accuracy, or an error."""
    there = {row.metric for row in rows if row.value is not None}
    wanted = (score(experiments.find(name)) if rows else "", "accuracy", "mse")
    return next((metric for metric in wanted if metric in there), "")


def _cases(rows: Iterable[Row]) -> dict[str, dict[str, list[float | None]]]:
    found: dict[str, dict[str, list[float | None]]] = {}
    for row in rows:
        models = row.config.get("models")
        trained = row.model in models if isinstance(models, list | tuple) else row.model not in CLOSED_FORMS
        if trained:
            beside = {k: v for k, v in (row.data or {}).items() if k not in OF_A_MODEL}
            varied = {k: v for k, v in beside.items() if isinstance(v, str | int | bool)}
            found.setdefault(f"{row.x} {sorted(varied.items())}", {}).setdefault(row.model, []).append(row.value)
    return found
