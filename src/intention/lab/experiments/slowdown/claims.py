"""What the rows of `slowdown` say to the paper's claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import HOLDS, NOT, OPEN, OUR_LINE, UNTESTED, Claim

__all__ = ["HIGH", "LOW", "NAMES", "claims", "find", "finding"]

LOW, HIGH = 1.0, 4.0  # the paper's range
MOST = 0.9  # of the repetitions
NAMES = {
    ("jax_inverse", "jax_attention"): "both jitted in JAX, an explicit inverse",
    ("inverse", "attention"): "explicit inverse / attention, both written out",
    ("cholesky", "attention"): "Cholesky / attention, both written out",
    ("intention", "attention"): "our op / attention written out",
    ("intention", "fused"): "our op / fused attention",
}
PAPERS = (("jax_inverse", "jax_attention"), ("inverse", "attention"), ("cholesky", "attention"))
OURS = (("intention", "attention"), ("intention", "fused"))


def claims(rows: Sequence[Row]) -> list[Claim]:
    text = (
        "Intention is approximately only between 1. and 4. times slower than Attention (read as: at most 4 times, for"
    )
    text += f" {MOST:.0%} of the shapes"
    found = [Claim(f"{text}; {NAMES[pair]})", "Figure 5, section 3.1", *_at_most(rows, pair)) for pair in PAPERS]
    ours_text = f"The op of this library is at most 4 times slower than attention for {MOST:.0%} of the shapes"
    return found + [
        Claim(f"{ours_text} ({NAMES[pair]})", f"section 3.1, {OUR_LINE}", *_at_most(rows, pair)) for pair in OURS
    ]


def find(rows: Sequence[Row], pair: tuple[str, str], what: str) -> Row | None:
    found = select(rows, model=pair[0], metric=f"slowdown over {pair[1]}, {what}")
    return next((row for row in found if row.value is not None), None)


def _describe(rows: Sequence[Row], pair: tuple[str, str]) -> str:
    median = find(rows, pair, "median")
    parts = []
    if median is not None:
        low, high = median.interval or (math.nan, math.nan)
        count = (median.data or {}).get("repetitions", "?")
        parts.append(f"median {median.value:.2f} [{low:.2f}, {high:.2f}] over {count} repetitions")
    ends = [find(rows, pair, f"{what}th percentile") for what in (10, 90)]
    if ends[0] is not None and ends[1] is not None:
        parts.append(f"10th to 90th percentile {ends[0].value:.2f} to {ends[1].value:.2f}")
    for what in ("share in [1, 4]", "share at most 4"):
        share = find(rows, pair, what)
        if share is not None and share.interval is not None:
            parts.append(f"{what} {share.value:.1%} [{share.interval[0]:.1%}, {share.interval[1]:.1%}]")
    shapes = (median.data or {}).get("shapes", []) if median is not None else []
    for name, chosen in (("N < 64", lambda n: n < 64), ("N ≥ 256", lambda n: n >= 256)):
        ratios = [ratio for n, _, ratio in shapes if chosen(n)]
        if ratios:
            parts.append(f"median where {name}: {statistics.median(ratios):.2f}")
    return "; ".join(parts)


def _at_most(rows: Sequence[Row], pair: tuple[str, str]) -> tuple[str, str]:
    """By the interval of the share over repetitions."""
    share = find(rows, pair, "share at most 4")
    if share is None or share.interval is None:
        return "", UNTESTED
    low, high = share.interval
    return _describe(rows, pair), HOLDS if low >= MOST else NOT if high < MOST else OPEN


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for other, name in (("attention", "attention written out"), ("fused", "torch's fused attention")):
        median = find(rows, ("intention", other), "median")
        parts += [f"{median.value:.2f} times as long as {name}"] if median else []
    return f"Over shapes drawn at random our op takes {' and '.join(parts)}, in the median." if parts else ""
