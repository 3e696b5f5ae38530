"""The sizes that were needed, and how they grow."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from intention.lab.core.results import Estimate, Row, estimate_log, select

__all__ = ["SEEDS", "Growth", "Need", "Needed", "growth", "in_words", "needed"]

SEEDS = 3  # sizes are powers of two: fewer seeds that agree are no evidence


class Need(NamedTuple):
    """A size, and whether it was enough; if not, it is the next of the grid: a lower bound."""

    size: int
    reached: bool

    @property
    def order(self) -> tuple[int, bool]:
        """A size that was enough is less than the same one as a lower bound."""
        return self.size, not self.reached


Needed = dict[str, dict[int, dict[int, Need]]]  # by model, dimension and seed


def needed(rows: Iterable[Row]) -> Needed:
    found: Needed = {}
    for row in select(rows, metric="smallest"):
        if row.data is None:
            continue
        need = Need(2 * row.data["tried"], False) if row.value is None else Need(int(row.value), True)
        found.setdefault(row.model, {}).setdefault(int(row.data["d"]), {})[row.seed] = need
    return {model: dict(sorted(by_d.items())) for model, by_d in found.items()}


def in_words(needs: Mapping[int, Need]) -> str:
    """The median over seeds and their range.

    >>> in_words({0: Need(4, True), 1: Need(8, True), 2: Need(64, False)})
    '8 (4 to ≥ 64)'
    """
    ordered = sorted(needs.values(), key=lambda need: need.order)
    low, middle, high = ordered[0], ordered[(len(ordered) - 1) // 2], ordered[-1]
    if low == high:
        return _size(low)
    return f"{_size(middle)} ({_size(low)} to {_size(high)})"


def _size(need: Need) -> str:
    return f"{'' if need.reached else '≥ '}{need.size}"


class Growth(NamedTuple):
    """The factor per added dimension. `dims`: how many all seeds solved; `bound`: the size beyond is not known."""

    factor: Estimate
    dims: int
    bound: bool
    straight: bool  # log s is closer to a straight line in d (exponential) than in log d (a power)
    grows: bool  # with every seed

    def __str__(self) -> str:
        return f"× {'≥ ' if self.bound else ''}{over_seeds(self.factor)} per dimension"


def over_seeds(factor: Estimate) -> str:
    """Sizes are powers of two: seeds often agree, and an interval without width would say more than is known.

    >>> over_seeds(estimate_log([2.0, 2.0, 2.0]))
    '2 (all 3 seeds agree)'
    """
    if factor.count > 1 and math.isclose(factor.low, factor.high):
        return f"{factor.mean:.3g} (all {factor.count} seeds agree)"
    return str(factor)


def growth(by_d: Mapping[int, Mapping[int, Need]]) -> Growth | None:
    """Fitted per seed over the dimensions that all seeds solved and the first that they did not.

    The size of that last one is a lower bound, and so is then the slope. None: fewer than two dimensions to fit, or not
    the same seeds in all of them.
    """
    solved: list[int] = []
    bound = False
    for d, needs in sorted(by_d.items()):
        solved.append(d)
        if not all(need.reached for need in needs.values()):
            bound = True
            break
    if len(solved) < 2 or len({frozenset(by_d[d]) for d in solved}) > 1:
        return None
    logs = {seed: [math.log(by_d[d][seed].size) for d in solved] for seed in sorted(by_d[solved[0]])}
    factors = [math.exp(_line(solved, y)[0]) for y in logs.values()]
    grows = all(factor > 1 and not math.isclose(factor, 1) for factor in factors)
    residuals = [sum(_line(x, y)[1] for y in logs.values()) for x in (solved, [math.log(d) for d in solved])]
    return Growth(estimate_log(factors), len(solved) - bound, bound, residuals[0] < residuals[1], grows)


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line, and the squared residuals that remain."""
    slope, intercept = statistics.linear_regression(x, y)
    return slope, sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))
