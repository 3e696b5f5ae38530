"""What the rows of `text` say: bits per character of each mixer, and what it writes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Estimate, Row, estimate, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import (
    UNTESTED,
    Found,
    at_most,
    best,
    by_model,
    errors,
    named,
    ratio,
    tested,
    times,
    together,
    untrained,
    verdict,
)
from intention.lab.experiments.sequences import GATED, WHERE, about, texts

__all__ = ["COUNTED", "METRIC", "claims", "exactly", "finding", "of"]

METRIC = "bits per character"
COUNTED = "counted_pairs"
OURS, PLAIN = "intention_gated", "intention"
BITS = 2.68  # of the documentation of Python, with 4 layers after 900 steps
NEAR = 1.02  # times the bits of the best mixer


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _as_well(rows, "intention", "linear_attention", "Intention models text at least as well as linear attention"),
        _as_well(rows, "intention", "delta", "Intention models text at least as well as the delta rule"),
        _as_well(rows, "intention", "attention", "Intention models text at least as well as attention"),
        _as_well(rows, "sigma_intention", "attention", "σIntention models text at least as well as attention"),
        _as_well(rows, "intention", COUNTED, "Intention uses more than the last character: it beats counted pairs"),
        _few_bits(rows),
        _near_the_best(rows),
        _as_well(rows, OURS, PLAIN, "Gated layers are what Intention lacked: with them it models text better"),
    ]


def of(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of one text."""
    return [row for row in rows if about(row, "text") == name]


def _as_well(rows: Sequence[Row], model: str, other: str, text: str) -> Claim:
    """Of the seeds that both have."""
    parts, verdicts = [], []
    for name in texts(rows, "text"):
        found = by_model(select(of(rows, name), metric=METRIC))
        one, two = found.get(model, {}), found.get(other, {})
        ahead = ratio(
            {seed: two[seed] for seed in two if seed in one}, {seed: one[seed] for seed in one if seed in two}
        )
        counted = found.get(COUNTED, {})
        fewer = {seed: bits < counted[seed] for seed, bits in two.items() if seed in counted and other != COUNTED}
        missed = untrained({other: fewer}, [other])  # it knows no more than counted pairs
        verdicts.append(tested(verdict(ahead, 1), missed))
        if ahead is not None:
            beside = ", ".join(filter(None, (errors(found, (model, other)), missed)))
            parts.append(f"{name}: {times(ahead)} times the bits of {named(model)} ({beside})")
    return Claim(f"{text} (in bits per character)", WHERE, "; ".join(parts), together(verdicts))


def _few_bits(rows: Sequence[Row]) -> Claim:
    """Judged at the size that the number is for."""
    own = [
        row
        for row in select(rows, metric=METRIC, model=OURS)
        if row.config.get("text") == "" and row.config["steps"] >= 900 and row.config["layers"] >= 4
    ]
    text = (
        f"In gated layers Intention needs at most {BITS} bits per character (the documentation of Python, 4 layers of "
        "width 64, 900 steps)"
    )
    if not own:
        return Claim(text, WHERE, "", UNTESTED)
    found = estimate([row.value for row in own])
    return Claim(text, WHERE, f"{exactly(found)} bits, {found.count} seed(s)", at_most(found, BITS))


def exactly(found: Estimate) -> str:
    """Bits to the third decimal: mixers differ in the second.

    >>> exactly(estimate([2.6767, 2.6891]))
    '2.683 [2.604, 2.762]'
    """
    known = found.count > 1 and math.isfinite(found.mean)
    return f"{found.mean:.3f} [{found.low:.3f}, {found.high:.3f}]" if known else f"{found.mean:.3f}"


def _near_the_best(rows: Sequence[Row]) -> Claim:
    """The best of all mixers with the same parts, itself among them, is that of the smallest mean over seeds."""
    parts, verdicts = [], []
    for name in texts(rows, "text"):
        found = by_model(select(of(rows, name), metric=METRIC, model=set(GATED)))
        ahead = ratio(_best(found), found.get(OURS, {}))
        verdicts.append(verdict(ahead, 1 / NEAR))
        if ahead is not None:
            parts.append(f"{name}: the best has {times(ahead)} times its bits ({errors(found, tuple(GATED))})")
    text = "In gated layers Intention is within 2% of the best mixer with the same parts"
    return Claim(text, WHERE, "; ".join(parts), together(verdicts))


def _best(found: Found) -> dict[int, float]:
    """By seed; nothing unless all mixers ran, with the same seeds."""
    if not best(found, tuple(GATED)):
        return {}
    return min((found[model] for model in GATED), key=lambda bits: sum(bits.values()))


def finding(rows: Sequence[Row]) -> str:
    """Of the gated layers, or of the plain ones where these were not run."""
    found = by_model(select(rows, metric=METRIC))
    plain = ("intention", "attention", "linear_attention", "delta")
    for own, models in ((OURS, tuple(GATED)), (PLAIN, plain)):
        bits = {model: estimate(list(found.get(model, {}).values())).mean for model in models}
        bits = {model: mean for model, mean in bits.items() if not math.isnan(mean)}
        if own in bits and len(bits) > 1:
            best = min((model for model in bits if model != own), key=lambda model: bits[model])
            text = f"Text costs {named(own)} {bits[own]:.3f} bits per character"
            return f"{text}; the best other mixer, {named(best)}, {bits[best]:.3f}."
    return ""
