"""What a command ends with: the numbers of a run, best first, and who is best in each experiment."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from intention.lab import experiments
from intention.lab.core.results import Estimate, Row, estimate
from intention.lab.experiments.base import label, score
from intention.lab.experiments.compare import CLOSED_FORMS, named

LARGER = ("accuracy",)  # metrics whose names begin so: the larger the better; all others: the smaller


def larger_is_better(metric: str) -> bool:
    return metric.startswith(LARGER)


def numbers(rows: Iterable[Row]) -> list[str]:
    """Lines: for each metric without an axis, the models with their means over seeds, best first."""
    groups: dict[str, dict[str, list[float | None]]] = {}
    for row in rows:
        if row.x is None and row.value is not None:
            groups.setdefault(row.metric, {}).setdefault(row.model, []).append(row.value)
    lines = []
    for metric, found in groups.items():
        means = {model: estimate(values) for model, values in found.items()}
        lines.append(f"{metric}, best first:" if len(means) > 1 else f"{metric}:")
        width = max(len(named(model)) for model in means)
        for model in sorted(means, key=lambda model: _place(means[model], metric)):
            lines.append(f"  {named(model):{width}}  {means[model]} ({means[model].count} values)")
    return lines


def _place(found: Estimate, metric: str) -> float:
    value = -found.mean if larger_is_better(metric) else found.mean
    return math.inf if math.isnan(value) else value


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
            varied = {k: v for k, v in (row.data or {}).items() if isinstance(v, str | int | bool)}
            found.setdefault(f"{row.x} {sorted(varied.items())}", {}).setdefault(row.model, []).append(row.value)
    return found
