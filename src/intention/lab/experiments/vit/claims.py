"""What the rows of `vit` say: accuracies of mixers seed by seed, and what a step takes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import OUR_LINE, Claim
from intention.lab.experiments.compare import UNTESTED, at_most, named, share, verdict

__all__ = ["accuracies", "claims", "finding", "guessing", "slowdowns"]

LEARNT = 3.0  # times the accuracy of guessing, for a baseline to count
SLOWER = 4.0  # what the paper allows


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _ahead(rows, "intention", "Intention as a mixer in a small ViT is more accurate than attention"),
        _ahead(rows, "sigma_intention", "σIntention as a mixer in a small ViT is more accurate than attention"),
        _slowdown(rows),
    ]


def accuracies(rows: Sequence[Row], model: str) -> dict[int, float]:
    """On test images, by seed."""
    own = select(rows, metric="accuracy", model=model)
    return {row.seed: math.nan if row.value is None else row.value for row in own}


def guessing(rows: Sequence[Row]) -> float:
    """The accuracy of who guesses one of the classes."""
    counts = [(row.data or {}).get("classes", 1) for row in select(rows, metric="accuracy")]
    return 1 / min(counts, default=1)


def slowdowns(rows: Sequence[Row], model: str) -> list[float | None]:
    return [row.value for row in select(rows, metric="slowdown", model=model)]


def _ahead(rows: Sequence[Row], model: str, text: str) -> Claim:
    own, other = accuracies(rows, model), accuracies(rows, "attention")
    if not own or set(own) != set(other):
        return Claim(text, OUR_LINE, "", UNTESTED)
    said = f"{named(model)} {estimate(list(own.values()))}, attention {estimate(list(other.values()))}"
    if not min(other.values()) >= LEARNT * guessing(rows):
        missed = f"; attention did not learn: guessing is {guessing(rows):.2g}"
        return Claim(text, OUR_LINE, said + missed, UNTESTED)
    ahead = estimate([own[seed] - other[seed] for seed in sorted(own)])
    return Claim(text, OUR_LINE, f"{said}; ahead by {ahead}, seed by seed", verdict(ahead, 0.0))


def _slowdown(rows: Sequence[Row]) -> Claim:
    text = f"A step of training with Intention takes at most {SLOWER:g} times as long as one with attention"
    found = slowdowns(rows, "intention")
    if not found:
        return Claim(text, OUR_LINE, "", UNTESTED)
    return Claim(text, OUR_LINE, f"{estimate(found)} times as long", at_most(estimate(found), SLOWER))


def finding(rows: Sequence[Row]) -> str:
    found = {model: share(accuracies(rows, model).values()) for model in ("intention", "sigma_intention", "attention")}
    parts = [f"{named(model)} {value}" for model, value in found.items() if value]
    return f"Test images that a small ViT names right, by its mixer: {', '.join(parts)}." if parts else ""
