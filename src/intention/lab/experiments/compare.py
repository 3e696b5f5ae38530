"""Models side by side, seed by seed: ratios of errors with their intervals, and verdicts.

Runs that are missing or not finite never help a claim: a comparison needs the same seeds of all models in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from intention.lab.core.results import Estimate, Row, estimate, estimate_log
from intention.lab.experiments.base import label

UNTESTED = "not tested at this size"
CLOSED_FORMS = {
    "zero": "predicting the mean",
    "ridge_raw": "ridge on raw features",
    "trilateration": "trilateration",
    "intention_exact": "Intention with intercept, untrained",
    "affine": "affine least squares",
    "umeyama": "Umeyama",
    "ridge": "exact ridge",
    "kalman": "Kalman's filter",
    "counted_pairs": "counted pairs of characters",
}

Found = dict[str, dict[int, float]]  # model -> seed -> error


def named(model: str) -> str:
    """A model or a closed form, as people read it."""
    return CLOSED_FORMS.get(model) or label(model)


def by_model(rows: Iterable[Row]) -> Found:
    """One error per model and seed; a run whose error is not finite counts as infinitely bad."""
    found: Found = {}
    for row in rows:
        found.setdefault(row.model, {})[row.seed] = math.inf if row.value is None else row.value
    return found


def best(found: Found, models: Sequence[str]) -> dict[int, float]:
    """The smallest error of these models for each seed; nothing unless all of them ran, with the same seeds."""
    seeds = {frozenset(found.get(model, {})) for model in models}
    if len(seeds) != 1:
        return {}
    return {seed: min(found[model][seed] for model in models) for seed in sorted(*seeds)}


def ratio(other: dict[int, float], own: dict[int, float]) -> Estimate | None:
    """The geometric mean of other / own, by seed. None: not the same seeds, or nothing finite to compare with.

    If a run of the model that is judged is not finite, all of it is NaN, which no verdict takes for "holds".
    """
    if not own or set(other) != set(own):
        return None
    if not all(map(math.isfinite, own.values())):
        return Estimate(math.nan, math.nan, math.nan, len(own))
    if not all(map(math.isfinite, other.values())):
        return None
    return estimate_log([_divide(other[seed], own[seed]) for seed in sorted(own)])


def _divide(above: float, below: float) -> float:
    return above / below if below > 0 else math.inf


def verdict(found: Estimate | None, at_least: float) -> str:
    """holds: the whole interval is at or above the bound. partly: the mean is, the interval is not (or unknown)."""
    if found is None:
        return UNTESTED
    if found.low >= at_least:
        return "holds"
    return "partly" if found.mean >= at_least else "does not hold"


def by_margin(found: Estimate | None, at_least: float) -> str:
    """The verdict on "ahead by this factor": surely ahead, but not by that much, is "partly"."""
    each = verdict(found, at_least)
    return "partly" if each == "does not hold" and verdict(found, 1) == "holds" else each


def together(verdicts: Sequence[str]) -> str:
    """Of several cases: what all of them say, or "partly". With a case that is not tested, "partly" at most."""
    said = set(verdicts) - {UNTESTED}
    if not said:
        return UNTESTED
    if len(said) > 1 or (said == {"holds"} and UNTESTED in verdicts):
        return "partly"
    return said.pop()


def times(found: Estimate) -> str:
    """Text: how many times, also where a run was not finite."""
    return "(not finite)" if math.isnan(found.mean) else str(found)


def errors(found: Found, models: Sequence[str]) -> str:
    """Text: the mean error of each model, or how many of its runs are not finite."""
    parts = []
    for model in [model for model in models if model in found]:
        values = list(found[model].values())
        bad = sum(not math.isfinite(value) for value in values)
        mean = f"not finite in {bad} of {len(values)} runs" if bad else str(estimate_log(values))
        parts.append(f"{named(model)} {mean}")
    return ", ".join(parts)


def correlation(values: Sequence[float | None]) -> Estimate:
    """Mean and interval of correlations by Fisher's z, so that they lie within -1 and 1.

    >>> print(correlation([0.9, 0.99, 0.97, 0.98]))
    0.972 [0.87, 0.99]
    """
    # z = artanh(r) has about the same spread wherever r is, but 1 itself has none: what is 1 to rounding is cut
    nearly = 1 - 1e-12
    inside = estimate([None if r is None else math.atanh(max(-nearly, min(nearly, r))) for r in values])
    return Estimate(math.tanh(inside.mean), math.tanh(inside.low), math.tanh(inside.high), inside.count)
