"""What the rows of the scaling experiment say: the sizes that were needed, how they grow, and the verdicts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from intention.lab.experiments.base import label
from intention.lab.results import Estimate, Row, estimate_log, select


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

    def __str__(self) -> str:
        return f"× {'≥ ' if self.bound else ''}{self.factor} per dimension"


def growth(by_d: Mapping[int, Mapping[int, Need]]) -> Growth | None:
    """Fitted per seed over the dimensions that all seeds solved and the first that they did not.

    The size of that last one is a lower bound, and so is then the slope. None: fewer than two dimensions to fit.
    """
    solved: list[int] = []
    bound = False
    for d, needs in sorted(by_d.items()):
        solved.append(d)
        if not all(need.reached for need in needs.values()):
            bound = True
            break
    seeds = sorted(set.intersection(*(set(by_d[d]) for d in solved))) if solved else []
    if len(solved) < 2 or not seeds:
        return None
    logs = {seed: [math.log(by_d[d][seed].size) for d in solved] for seed in seeds}
    factor = estimate_log([math.exp(_line(solved, y)[0]) for y in logs.values()])
    residuals = [sum(_line(x, y)[1] for y in logs.values()) for x in (solved, [math.log(d) for d in solved])]
    return Growth(factor, len(solved) - bound, bound, residuals[0] < residuals[1])


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """Slope of the least-squares line, and the squared residuals that remain."""
    slope, intercept = statistics.linear_regression(x, y)
    return slope, sum((b - slope * a - intercept) ** 2 for a, b in zip(x, y, strict=True))


NOT_TESTED = "not tested at this size"


def exponential(found: Needed, baselines: Sequence[str]) -> tuple[str, str]:
    """What was measured and the verdict on "exponentially many dimensions"."""
    fits = {model: growth(found[model]) for model in baselines if model in found}
    words = []
    for model, fit in fits.items():
        sizes = ", ".join(f"d = {d}: {in_words(needs)}" for d, needs in found[model].items())
        words.append(f"{label(model)} {sizes} ({fit or 'no growth to fit'})")
    known = {model: fit for model, fit in fits.items() if fit is not None}
    if not known:
        return "; ".join(words) or "no baseline was trained", NOT_TESTED
    if len(known) == len(baselines) and all(_is_exponential(fit) for fit in known.values()):
        return "; ".join(words), "holds"
    growing = [model for model, fit in known.items() if fit.factor.mean > 1]
    if not growing:
        return "; ".join(words), "does not hold"
    names = ", ".join(label(model) for model in growing)
    words.append(
        f"the size grows for {names}; that it is exponential would need four solved dimensions or more of each"
    )
    if all(fit.dims >= 4 for fit in known.values()):
        words[-1] = f"the size grows for {names}, not surely or not as an exponential for all"
    return "; ".join(words), "partly"


def _is_exponential(fit: Growth) -> bool:
    return fit.dims >= 4 and fit.factor.low > 1 and fit.straight


def smaller(found: Needed, model: str, baselines: Sequence[str]) -> tuple[str, str]:
    """What was measured and the verdict on "needs a smaller size than the baselines", per dimension, paired by seed."""
    others = [other for other in baselines if other in found]
    if model not in found or not others:
        return "the models were not trained", NOT_TESTED
    words, sure, likely = [], [], []
    for d, own in found[model].items():
        best = {seed: _least(found[other][d][seed] for other in others) for seed in own if _has(found, others, d, seed)}
        if not best:
            continue
        text = f"d = {d}: {in_words(own)}, the best baseline {in_words(best)}"
        if all(own[seed].reached for seed in best):
            ratio = estimate_log([best[seed].size / own[seed].size for seed in best])
            bound = "" if all(need.reached for need in best.values()) else "≥ "
            text += f", × {bound}{ratio}"
            likely += [d] * (ratio.mean > 1)
            sure += [d] * (ratio.low > 1)
        words.append(text)
    if not words:
        return "no dimension was measured for both", NOT_TESTED
    if len(sure) == len(words):
        return "; ".join(words), "holds"
    return "; ".join(words), "partly" if likely else "does not hold"


def _least(needs: Iterable[Need]) -> Need:
    return min(needs, key=lambda need: need.order)


def _has(found: Needed, models: Sequence[str], d: int, seed: int) -> bool:
    return all(seed in found[model].get(d, {}) for model in models)
