"""What the rows of `text` say: bits per character of each mixer, and what it writes."""

from __future__ import annotations

from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import by_model, errors, named, ratio, times, together, verdict
from intention.lab.experiments.sequences import WHERE, about, texts

METRIC = "bits per character"
COUNTED = "counted_pairs"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _as_well(rows, "intention", "linear_attention", "Intention models text at least as well as linear attention"),
        _as_well(rows, "intention", "delta", "Intention models text at least as well as the delta rule"),
        _as_well(rows, "intention", "attention", "Intention models text at least as well as attention"),
        _as_well(rows, "sigma_intention", "attention", "σIntention models text at least as well as attention"),
        _as_well(rows, "intention", COUNTED, "Intention uses more than the last character: it beats counted pairs"),
    ]


def of(rows: Sequence[Row], name: str) -> list[Row]:
    """The rows of one text."""
    return [row for row in rows if about(row, "text") == name]


def _as_well(rows: Sequence[Row], model: str, other: str, text: str) -> Claim:
    parts, verdicts = [], []
    for name in texts(rows, "text"):
        found = by_model(select(of(rows, name), metric=METRIC))
        ahead = ratio(found.get(other, {}), found.get(model, {}))
        verdicts.append(verdict(ahead, 1))
        if ahead is not None:
            beside = errors(found, (model, other))
            parts.append(f"{name}: {times(ahead)} times the bits of {named(model)} ({beside})")
    return Claim(f"{text} (in bits per character)", WHERE, "; ".join(parts), together(verdicts))
