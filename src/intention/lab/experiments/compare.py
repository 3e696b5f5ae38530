"""Models side by side, seed by seed: ratios of errors with their intervals, and verdicts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from intention.lab.experiments.base import label
from intention.lab.models.references import LABELS
from intention.lab.results import Estimate, Row, estimate_log

UNTESTED = "not tested at this size"
Found = dict[str, dict[int, float]]  # model -> seed -> error


def named(model: str) -> str:
    """A model or a closed form, as people read it."""
    return LABELS.get(model) or label(model)


def by_model(rows: Iterable[Row]) -> Found:
    """One error per model and seed; a run whose error is not finite counts as infinitely bad."""
    found: Found = {}
    for row in rows:
        found.setdefault(row.model, {})[row.seed] = math.inf if row.value is None else row.value
    return found


def best(found: Found, models: Sequence[str]) -> dict[int, float]:
    """The smallest error of these models for each seed that all of them ran with."""
    present = [found[model] for model in models if model in found]
    seeds = set.intersection(*(set(errors) for errors in present)) if present else set()
    return {seed: min(errors[seed] for errors in present) for seed in sorted(seeds)}


def ratio(above: dict[int, float], below: dict[int, float]) -> Estimate | None:
    """The geometric mean of above / below over the seeds both ran with; None if there is no such seed."""
    seeds = sorted(set(above) & set(below))
    return estimate_log([_divide(above[seed], below[seed]) for seed in seeds]) if seeds else None


def _divide(above: float, below: float) -> float:
    return above / below if below > 0 else math.inf


def verdict(found: Estimate | None, at_least: float) -> str:
    """holds: the whole interval is at or above the bound. partly: the mean is, the interval is not (or unknown)."""
    if found is None:
        return UNTESTED
    if found.low >= at_least:
        return "holds"
    return "partly" if found.mean >= at_least else "does not hold"


def together(verdicts: Sequence[str]) -> str:
    """Of several cases: what all of them say, or "partly"."""
    tested = [each for each in verdicts if each != UNTESTED]
    if not tested:
        return UNTESTED
    if len(set(tested)) == 1:
        return tested[0]
    return "partly"


def errors(found: Found, models: Sequence[str]) -> str:
    """Text: the mean error of each model."""
    present = [model for model in models if model in found]
    return ", ".join(f"{named(model)} {estimate_log(list(found[model].values()))}" for model in present)
