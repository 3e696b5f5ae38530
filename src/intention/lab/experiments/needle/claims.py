"""What the rows of `needle` say: accuracy against the number of tokens between, and the size of the state."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import UNTESTED, at_most, named, together, verdict
from intention.lab.experiments.sequences import WHERE, about

__all__ = ["accuracies", "claims", "finding", "lengths", "name"]

FOUND = 0.9  # of the answers, also what counts as learnt
SLACK = 0.02
NAMES = {
    "intention": "Intention, forgetting",
    "intention_kept": "Intention, keeping",
    "linear_attention": "Linear attention, forgetting",
    "gated_delta": "Delta rule, forgetting",
    "delta": "Delta rule, keeping",
    "window": "Attention, window",
}


def claims(rows: Sequence[Row]) -> list[Claim]:
    as_well = "Intention with forgetting finds it at least as often as"
    return [
        _finds(rows, "intention"),
        _as_well(rows, "intention", "intention_kept", "Forgetting does not cost the pair: with it, Intention finds it"
                 " at least as often as without"),
        _as_well(rows, "intention", "linear_attention", f"{as_well} linear attention"),
        _as_well(rows, "intention", "gated_delta", f"{as_well} the delta rule with forgetting"),
        _window(rows),
        _constant(rows),
    ]  # fmt: skip


def lengths(rows: Sequence[Row]) -> list[float]:
    """Of the streams, not that of training."""
    return sorted({row.x for row in select(rows, metric="bytes") if row.x is not None})


def accuracies(rows: Sequence[Row], model: str, length: float | None = None) -> dict[int, float]:
    """By seed; without a length at those of training."""
    own = select(rows, metric="accuracy", model=model)
    own = [row for row in own if (about(row, "trained") if length is None else row.x == length)]
    own = own if length is None else [row for row in own if not about(row, "trained")]
    return {row.seed: math.nan if row.value is None else row.value for row in own}


def learnt(rows: Sequence[Row], model: str) -> bool:
    found = accuracies(rows, model)
    return bool(found) and estimate(list(found.values())).mean >= FOUND


def percent(found: dict[int, float]) -> str:
    mean = estimate(list(found.values())).mean
    return "not finite" if math.isnan(mean) else f"{mean:.1%}"


def name(model: str) -> str:
    return NAMES.get(model) or named(model)


def _finds(rows: Sequence[Row], model: str) -> Claim:
    text = (
        "Intention with forgetting finds a pair in a stream far longer than those it was trained on (read as: "
        f"{FOUND:.0%} of the answers at every length)"
    )
    if not learnt(rows, model):
        found = accuracies(rows, model)
        return Claim(text, WHERE, f"not learnt: {percent(found)} at the lengths of training" if found else "", UNTESTED)
    parts, verdicts = [f"at the lengths of training {percent(accuracies(rows, model))}"], []
    for length in lengths(rows):
        found = accuracies(rows, model, length)
        verdicts.append(verdict(estimate(list(found.values())), FOUND) if found else UNTESTED)
        parts.append(f"after {length:g} tokens {percent(found)}")
    return Claim(text, WHERE, "; ".join(parts), together(verdicts))


def _as_well(rows: Sequence[Row], model: str, other: str, text: str) -> Claim:
    text = f"{text} (read as: at most {SLACK:.0%} of the answers fewer, at every length)"
    if not learnt(rows, other):  # what has not learnt is not beaten
        return Claim(text, WHERE, "", UNTESTED)
    parts, verdicts = [], []
    for length in lengths(rows):
        one, two = (accuracies(rows, each, length) for each in (model, other))
        if not one or set(one) != set(two):
            verdicts.append(UNTESTED)
            continue
        verdicts.append(verdict(estimate([one[seed] - two[seed] for seed in sorted(one)]), -SLACK))
        parts.append(f"after {length:g} tokens {percent(one)} against {percent(two)}")
    return Claim(text, WHERE, "; ".join(parts), together(verdicts))


def _window(rows: Sequence[Row]) -> Claim:
    text = (
        "Attention with a window loses the pair: it answers at most twice as often as one who guesses a value that was "
        "shown"
    )
    parts, verdicts = [], []
    for length in lengths(rows) if learnt(rows, "window") else []:
        found = accuracies(rows, "window", length)
        if found:
            pairs = max(row.config.get("pairs", 1) for row in select(rows, metric="accuracy", model="window"))
            mean = estimate(list(found.values()))
            verdicts.append(at_most(mean, 2 / pairs))
            parts.append(f"after {length:g} tokens {percent(found)}")
    return Claim(text, WHERE, "; ".join(parts), together(verdicts))


def _constant(rows: Sequence[Row]) -> Claim:
    text = "What Intention remembers has the same number of bytes at every length"
    found = {row.x: row.value for row in select(rows, metric="bytes", model="intention")}
    if len(found) < 2:
        return Claim(text, WHERE, "", UNTESTED)
    said = ", ".join(f"{size:,.0f} after {length:g} tokens" for length, size in sorted(found.items()))
    return Claim(text, WHERE, said, "holds" if len(set(found.values())) == 1 else "does not hold")


def finding(rows: Sequence[Row]) -> str:
    """At the greatest length, with the forgetting of ours that is better there."""
    length = max(lengths(rows), default=math.nan)
    found = {model: accuracies(rows, model, length) for model in NAMES}
    means = {model: estimate(list(each.values())).mean for model, each in found.items() if each}
    means = {model: mean for model, mean in means.items() if not math.isnan(mean)}
    own = [model for model in means if model.startswith("intention")]
    others = [model for model in means if model not in own]
    if not own or not others:
        return ""
    ours, best = (max(some, key=lambda model: means[model]) for some in (own, others))
    text = f"With {length:,.0f} tokens in between, a pair is found again in {means[ours]:.1%} of cases"
    return f"{text} ({name(ours)}); by the best other model, {name(best)}, in {means[best]:.1%}."
