"""What the rows of `recall` say: accuracy against the number of pairs, for each width."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Estimate, Row, estimate, select
from intention.lab.experiments.base import Claim, label
from intention.lab.experiments.compare import UNTESTED, together, verdict
from intention.lab.experiments.sequences import FIXED, GATED, WHERE, about

__all__ = ["MIXED", "OURS", "accuracies", "cells", "claims", "finding", "mixed"]

SLACK = 0.01  # of the answers
MIXED = "accuracy with mixed lengths"
OURS = "intention_gated"
LEAST = 0.99  # of 16 pairs in the task of the plain models
CROWDED = (16, 32, 0.97)  # head, pairs, accuracy: more pairs than features
NEAR = 0.02  # of the answers, below the best
READ = "(read as: at most 1 percentage point below, at every number of pairs and every width)"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _as_well(rows, "intention", "linear_attention", "Intention recalls at least as well as linear attention"),
        _as_well(rows, "intention", "delta", "Intention recalls at least as well as the delta rule"),
        _as_well(rows, "intention", "attention", "Intention recalls at least as well as attention"),
        _as_well(rows, "sigma_intention", "attention", "σIntention recalls at least as well as attention"),
        _old_task(rows),
        _crowded(rows),
        _near_the_best(rows, "state", "states of the same size"),
        _near_the_best(rows, "head", "heads of the same size"),
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
        if learnt(pairs, two):
            verdicts.append(verdict(found, -SLACK))
            parts.append(f"{case}: {_percent(one)} against {_percent(two)}")
        else:  # what has not learnt is not beaten
            verdicts.append(UNTESTED)
            who = "the other has not" if learnt(pairs, one) else "neither has"
            parts.append(f"{case}: {who} learnt it ({_percent(one)}, {_percent(two)})")
    return Claim(f"{text} {READ}", WHERE, "; ".join(parts), together(verdicts))


def _percent(accuracies: dict[int, float]) -> str:
    mean = estimate(list(accuracies.values())).mean
    return "not finite" if math.isnan(mean) else f"{mean:.1%}"


def _old_task(rows: Sequence[Row]) -> Claim:
    return _at_least(
        accuracies(rows, OURS, 64, 16),
        LEAST,
        "In gated layers of width 64 Intention recalls 16 pairs (16 keys, heads of 16)",
    )


def _crowded(rows: Sequence[Row]) -> Claim:
    head, pairs, least = CROWDED
    text = f"In gated layers Intention recalls {pairs} pairs with heads of {head}, lengths mixed from 4 to 64 pairs"
    own = mixed(rows, OURS, "head", head, pairs, most=64)
    return _at_least(own, least, text)


def _at_least(own: dict[int, float], least: float, text: str) -> Claim:
    text = f"{text}: at least {least:.0%} of the answers are right"
    if not own:
        return Claim(text, WHERE, "", UNTESTED)
    found = estimate(list(own.values()))
    return Claim(text, WHERE, f"{found}, {found.count} seed(s)", verdict(found, least))


def mixed(
    rows: Sequence[Row], model: str, size: str, value: float, pairs: float, most: int | None = None
) -> dict[int, float]:
    """Accuracies with mixed lengths by seed, of models whose head or state (`size`) is so large."""
    own = [row for row in select(rows, metric=MIXED, model=model, x=pairs) if about(row, size) == value]
    own = own if most is None else [row for row in own if about(row, "most") == most]
    return {row.seed: math.nan if row.value is None else row.value for row in own}


def mixed_cells(rows: Sequence[Row], size: str) -> list[tuple[int, float]]:
    """(size, number of pairs) of Intention, for every other mixer with a state of constant size."""
    found = {(about(row, size), row.x) for row in select(rows, metric=MIXED, model=OURS) if row.x is not None}
    return sorted(found)


def _near_the_best(rows: Sequence[Row], size: str, same: str) -> Claim:
    """The best is the other mixer of the largest mean, of those with the same seeds."""
    parts, verdicts = [], []
    for value, pairs in mixed_cells(rows, size):
        own = mixed(rows, OURS, size, value, pairs)
        others = {name: mixed(rows, name, size, value, pairs) for name in FIXED if name != OURS}
        others = {name: each for name, each in others.items() if set(each) == set(own)}
        if not others:
            continue  # none has a state of this size
        best = max(others.values(), key=lambda each: estimate(list(each.values())).mean)
        found = difference(own, best)
        case = f"{size} {value}, {pairs:g} pairs: {_percent(own)}, the best other {_percent(best)}"
        tested = found is not None and learnt(pairs, own, best)
        verdicts.append(verdict(found, -NEAR) if tested else UNTESTED)
        parts.append(case if tested else f"{case} (not learnt)")
    text = (
        f"In gated layers with {same} Intention recalls within 2 percentage points of the best mixer whose state has a "
        "constant size, wherever any has learnt it"
    )
    return Claim(text, WHERE, "; ".join(parts), _of_learnt(verdicts))


def _of_learnt(verdicts: Sequence[str]) -> str:
    """Cells that nobody has learnt say nothing, and take nothing away."""
    return together([one for one in verdicts if one != UNTESTED])


def finding(rows: Sequence[Row]) -> str:
    """The most pairs that any has learnt: with mixed lengths where these were run."""
    for size in ("state", "head"):
        for value, pairs in sorted(mixed_cells(rows, size), key=lambda case: (-case[1], -case[0])):
            found = {name: mixed(rows, name, size, value, pairs) for name in FIXED}
            if said := _first(found, OURS, pairs, f"mixer with a {size} of the same size"):
                return said
    for width, pairs in sorted(cells(rows), key=lambda case: (-case[1], -case[0])):
        names = ("intention", "attention", "linear_attention", "delta")
        found = {name: accuracies(rows, name, width, pairs) for name in names}
        if said := _first(found, "intention", pairs, f"mixer at width {width}"):
            return said
    return ""


def _first(found: dict[str, dict[int, float]], model: str, pairs: float, among: str) -> str:
    """Own accuracy and that of the best other one; nothing unless one of them has learnt."""
    found = {name: each for name, each in found.items() if each}
    others = [name for name in found if name != model]
    if model not in found or not others or not learnt(pairs, *found.values()):
        return ""
    best = max(others, key=lambda name: estimate(list(found[name].values())).mean)
    own, other = _percent(found[model]), f"{label(GATED.get(best, best))}, in {_percent(found[best])}"
    text = f"Shown {pairs:g} pairs, Intention names what belongs to a key in {own} of cases"
    return f"{text}; the best other {among}, {other}."
