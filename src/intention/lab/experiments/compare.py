"""How verdicts are reached: one model against the best of others, paired by seed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from intention.lab.results import Estimate, Row, by_seed, estimate_log, select


def ratio(above: Iterable[Row], below: Iterable[Row]) -> Estimate:
    """Geometric mean over seeds of above / below, both measured with the same seed."""
    first, second = by_seed(above), by_seed(below)
    seeds = sorted(set(first) & set(second))
    return estimate_log([_divide(first[seed], second[seed]) for seed in seeds])


def _divide(above: float | None, below: float | None) -> float | None:
    return None if above is None or not below else above / below


def best(rows: Sequence[Row], models: Iterable[str]) -> str | None:
    """The model with the smallest geometric mean; None if none of them was measured."""
    means = {model: estimate_log([row.value for row in select(rows, model=model)]).mean for model in models}
    finite = {model: mean for model, mean in means.items() if mean == mean}
    return min(finite, key=finite.__getitem__) if finite else None


def verdict(found: Estimate, least: float) -> str:
    """Whether a ratio is above `least`: its whole interval, only its mean, or not."""
    if found.count == 0 or found.mean != found.mean:
        return "not tested at this size"
    if found.low > least:
        return "holds"
    return "partly" if found.mean > least else "does not hold"


def all_of(verdicts: Sequence[str]) -> str:
    """The verdict on "for every ...": it holds if all do, partly if some do."""
    tested = [one for one in verdicts if one != "not tested at this size"]
    if not tested:
        return "not tested at this size"
    if len(set(tested)) == 1:
        return tested[0]
    return "partly"
