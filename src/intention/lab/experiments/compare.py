"""Models side by side, seed by seed: ratios of errors with their intervals, and verdicts.

Runs that are missing or not finite never help a claim: a comparison needs the same seeds of all models in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from intention.lab.core.results import Estimate, Row, estimate, estimate_log
from intention.lab.experiments.base import HOLDS, NOT, OPEN, UNTESTED, VERDICTS, Cases, cases, label

__all__ = [
    "CLOSED_FORMS",
    "LEARNT",
    "PUT_TO_THE_TEST",
    "UNTESTED",
    "Found",
    "Learnt",
    "applicable",
    "at_most",
    "beside",
    "best",
    "by_model",
    "correlation",
    "errors",
    "every",
    "learnt",
    "named",
    "ratio",
    "share",
    "tested",
    "times",
    "together",
    "untrained",
    "verdict",
]

LEARNT = 0.8  # times the error of what has learnt nothing, or of the same model without its context
PUT_TO_THE_TEST = "Both new modules are put to the test, and the tasks confirm that they are applicable"
CLOSED_FORMS = {
    "zero": "predicting the mean",
    "ridge_raw": "ridge on raw features",
    "trilateration": "trilateration",
    "intention_exact": "Intention with intercept, untrained",
    "affine": "affine least squares",
    "umeyama": "Umeyama",
    "ridge": "exact ridge",
    "ridge_loo": "ridge, α by leave-one-out",
    "nearest_rows": "nearest rows",
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
    """holds: the whole interval is at or above the bound. does not hold: the whole interval is below.

    Otherwise, and with one run, whose interval is not known, it is not decided.
    """
    if found is None:
        return UNTESTED
    if math.isnan(found.mean):
        return NOT  # a run that is judged is not finite
    if found.low >= at_least:
        return HOLDS
    return NOT if found.high < at_least else OPEN


def at_most(found: Estimate | None, bound: float) -> str:
    """The verdict on "not more than": the same with the interval on the other side."""
    return verdict(found and Estimate(-found.mean, -found.high, -found.low, found.count), -bound)


def together(verdicts: Sequence[str]) -> str:
    """Of several cases: what all of them say, or in how many of them it holds."""
    said = set(verdicts)
    if len(said) <= 1 and said <= set(VERDICTS):
        return said.pop() if said else UNTESTED
    each = [cases(one) for one in verdicts]
    total = Cases(*map(sum, zip(*each, strict=True)))
    return OPEN if total.open == total.all else str(total)


def every(verdicts: Sequence[str]) -> str:
    """Of several conditions of one case: one that fails is enough, and one that is not known leaves it open."""
    return next((one for one in (NOT, UNTESTED, OPEN) if one in verdicts), HOLDS)


Learnt = Mapping[str, Mapping[int, bool]]  # model -> seed -> whether that run learnt its task


def learnt(own: Mapping[int, float], without: Mapping[int, float]) -> dict[int, bool]:
    """Of each run whose error is known: whether it is at most `LEARNT` times that of the same seed without learning."""
    return {seed: own[seed] <= LEARNT * without[seed] for seed in sorted(own) if seed in without}


def untrained(found: Learnt, models: Iterable[str]) -> str:
    """Text: which of these models did not learn, with how many of their runs; nothing if all did.

    A baseline that has not learnt its task is not beaten: the claim is then not tested.
    """
    parts = []
    for model in models:
        runs = found.get(model, {})
        missed = sum(not run for run in runs.values())
        if missed:
            parts.append(f"{named(model)} did not learn ({missed} of {len(runs)} runs)")
    return ", ".join(parts)


def tested(judged: str, missed: str) -> str:
    """The verdict, unless a baseline of the claim did not learn."""
    return UNTESTED if missed else judged


def applicable(model: str, found: Learnt, baselines: Iterable[str] = ()) -> tuple[str, str]:
    """The paper says of both new modules that tasks they "are put to the test" on confirm that they are applicable:
    what was measured and the verdict, run by run. Where baselines have not learnt either, training was too short.
    """
    runs = list(found.get(model, {}).values())
    text = f"{named(model)} learnt it in {sum(runs)} of {len(runs)} runs" if runs else ""
    short = untrained(found, baselines) if not all(runs) else ""
    return text, tested(together([HOLDS if run else NOT for run in runs]), short)


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


def many(factor: float) -> str:
    """
    >>> many(1567.8), many(2.94)
    ('1,568', '2.9')
    """
    return f"{factor:,.0f}" if factor >= 10 else f"{factor:.2g}"


def beside(found: Found, model: str, others: Sequence[str], learnt: Learnt | None = None) -> str:
    """For a finding: the error of a model beside that of the best other one (of the smallest mean over seeds).

    Nothing where they have not the same seeds. It says so where the best other one has not learnt its task, and where
    the interval over seeds allows both directions.
    """
    means = {name: estimate_log(list(found.get(name, {}).values())).mean for name in others}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if not means:
        return ""
    other = min(means, key=lambda name: means[name])
    ahead = ratio(found[other], found.get(model, {}))
    if ahead is None:
        return ""
    if math.isnan(ahead.mean):
        return "an error that is not finite"
    size = "about the size of" if max(ahead.mean, 1 / ahead.mean) < 1.05 else f"{many(ahead.mean)} times smaller than"
    if 1 / ahead.mean >= 1.05:
        size = f"{many(1 / ahead.mean)} times larger than"
    words = [f"an error {size} that of {named(other)}", "the best other model" if len(means) > 1 else ""]
    words.append("which has not learnt the task" if untrained(learnt or {}, [other]) else "")
    words.append("though seeds differ by more" if ahead.low < 1 < ahead.high and "times" in size else "")
    return ", ".join(filter(None, words))


def share(values: Iterable[float | None]) -> str:
    """For a finding: the mean of accuracies; nothing where there are none.

    >>> share([0.6, 0.7]), share([0.6, None]), share([])
    ('65.0%', 'not finite', '')
    """
    found = estimate(list(values))
    return "" if not found.count else "not finite" if math.isnan(found.mean) else f"{found.mean:.1%}"
