"""What the rows of `recall` say: accuracy against the number of pairs, for each width."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Estimate, Row, estimate, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import UNTESTED, together, verdict
from intention.lab.experiments.sequences import WHERE, about

SLACK = 0.01  # of the answers
READ = "(read as: at most 1 percentage point below, at every number of pairs and every width)"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _as_well(rows, "intention", "linear_attention", "Intention recalls at least as well as linear attention"),
        _as_well(rows, "intention", "delta", "Intention recalls at least as well as the delta rule"),
        _as_well(rows, "intention", "attention", "Intention recalls at least as well as attention"),
        _as_well(rows, "sigma_intention", "attention", "σIntention recalls at least as well as attention"),
    ]


def cells(rows: Sequence[Row]) -> list[tuple[int, float]]:
    """(width, number of pairs)"""
    found = {(about(row, "width"), row.x) for row in select(rows, metric="accuracy") if row.x is not None}
    return sorted(found)


def accuracies(rows: Sequence[Row], model: str, width: int, pairs: float) -> dict[int, float]:
    """By seed."""
    own = [row for row in select(rows, metric="accuracy", model=model, x=pairs) if about(row, "width") == width]
    return {row.seed: math.nan if row.value is None else row.value for row in own}


def learnt(pairs: float, *accuracies: dict[int, float]) -> bool:
    """Whether any of them answers more than twice as often as one who guesses a value that was shown."""
    return any(estimate(list(each.values())).mean > min(2 / pairs, 0.9) for each in accuracies)


def difference(one: dict[int, float], other: dict[int, float]) -> Estimate | None:
    """Of accuracies, paired by seed."""
    if not one or set(one) != set(other):
        return None
    return estimate([one[seed] - other[seed] for seed in sorted(one)])


def _as_well(rows: Sequence[Row], model: str, other: str, text: str) -> Claim:
    parts, verdicts = [], []
    for width, pairs in cells(rows):
        one, two = (accuracies(rows, name, width, pairs) for name in (model, other))
        found = difference(one, two)
        if found is None:
            verdicts.append(UNTESTED)
            continue
        case = f"width {width}, {pairs:g} pairs"
        if learnt(pairs, one, two):
            verdicts.append(verdict(found, -SLACK))
            parts.append(f"{case}: {_percent(one)} against {_percent(two)}")
        else:
            verdicts.append(UNTESTED)
            parts.append(f"{case}: neither has learnt it ({_percent(one)}, {_percent(two)})")
    return Claim(f"{text} {READ}", WHERE, "; ".join(parts), together(verdicts))


def _percent(accuracies: dict[int, float]) -> str:
    mean = estimate(list(accuracies.values())).mean
    return "not finite" if math.isnan(mean) else f"{mean:.1%}"
