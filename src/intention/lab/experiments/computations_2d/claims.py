"""What the rows of `computations_2d` say to the paper's claims."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from intention.lab.core.results import Estimate, Row, by_seed, estimate, estimate_log, select
from intention.lab.experiments.base import Claim, label
from intention.lab.experiments.compare import UNTESTED
from intention.lab.experiments.compare import correlation as over_draws
from intention.lab.experiments.computations_2d.task import REPAIRS, SQUARES

MODELS = ("attention", "linear_attention", "sigma_intention", "intention")
REPAIR_NAMES = {"absolute": "|eigenvalues|", "nearest": "nearest PSD"}
CLOSE = 0.99  # a correlation that captures a linear relation closely
OFF = 0.01  # how far from 1 a slope may be


def named(metric: str, where: str, repair: str) -> str:
    """Rows have no field for the square and the repair: they are part of the metric's name."""
    return f"{metric} {where}, {repair}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _ours(rows),
        _interpolation(rows),
        _attention_fails(rows),
        _extrapolation(rows),
        _limit(rows, "intention", "linear attention", "an Intention module converges to a Linear Attention module", 8),
        _limit(rows, "sigma_intention", "attention", "a σIntention module converges to an Attention module", 9),
    ]


def over_seeds(rows: Sequence[Row], model: str, metric: str, where: str, repair: str = "absolute") -> Estimate:
    values = [row.value for row in select(rows, model=model, metric=named(metric, where, repair))]
    average = {"mse": estimate_log, "correlation": over_draws}.get(metric, estimate)
    return average(values)


def known(*found: Estimate) -> bool:
    return all(math.isfinite(one.mean) for one in found)


def _ours(rows: Sequence[Row]) -> Claim:
    """The floor we hold ourselves to: every draw, inside and outside."""
    parts: list[str] = []
    lowest: dict[str, float] = {}
    draws = 0
    for repair in REPAIRS:
        for where in SQUARES:
            found = [r.value for r in select(rows, model="intention", metric=named("correlation", where, repair))]
            if not found:
                continue
            least = min(-math.inf if value is None else value for value in found)  # one that is not finite is the worst
            mean = over_draws(found) if math.isfinite(least) else "not finite"
            parts.append(f"{REPAIR_NAMES[repair]}, {where}: {mean}, lowest of {len(found)} {least:.7g}")
            if repair == "absolute":
                lowest[where], draws = least, len(found)
    verdict = "does not hold" if min(lowest.values(), default=0) <= 0.9999 else "holds" if draws > 1 else "partly"
    verdict = UNTESTED if len(lowest) < len(SQUARES) else verdict
    text = "Intention's correlation is above .9999 inside and outside (repair |eigenvalues|; the other hides half of w)"
    return Claim(text, "Figure 4, our own line", "; ".join(parts), verdict)


def _interpolation(rows: Sequence[Row]) -> Claim:
    parts, sure, correlated, sized, tested = [], [], [], [], True
    for model in ("intention", "sigma_intention"):
        correlation = over_seeds(rows, model, "correlation", "inside")
        slope = over_seeds(rows, model, "slope", "inside")
        tested &= correlation.count > 0 and slope.count > 0  # a draw that is not finite is tested: NaN, which fails
        lowest = min((row.value or 0 for row in _inside(rows, model)), default=math.nan)
        parts.append(f"{label(model)}: correlation {_fine(correlation)}, lowest {lowest:.4f}, slope {slope}")
        sure.append(correlation.low >= CLOSE and slope.low > 1 - OFF and slope.high < 1 + OFF)
        correlated.append(correlation.mean >= CLOSE)
        sized.append(abs(slope.mean - 1) < OFF)
    verdict = "holds" if all(sure) else "partly" if all(correlated) or any(sized) else "does not hold"
    text = "both Intention and σIntention do perfectly well in the interpolation scenario"
    note = " (perfect: correlation ≥ .99 and slope within 1% of 1)"
    return Claim(text, "Figure 4", "; ".join(parts) + note, verdict if tested else UNTESTED)


def _attention_fails(rows: Sequence[Row]) -> Claim:
    found = {model: over_seeds(rows, model, "correlation", "inside") for model in MODELS[:2]}
    measured = "correlation inside: " + "; ".join(f"{label(model)} {value}" for model, value in found.items())
    below = [value.high < CLOSE for value in found.values()]
    likely = all(value.mean < CLOSE for value in found.values())
    verdict = "holds" if all(below) else "partly" if any(below) or likely else "does not hold"
    text = "both forms of Attention fail to capture the linear relation closely"
    return Claim(text, "Figure 4", measured, verdict if known(*found.values()) else UNTESTED)


def _extrapolation(rows: Sequence[Row]) -> Claim:
    """Stronger: the correlation falls from inside to outside, paired by draw, for both forms of attention."""
    parts, falls, found = [], [], []
    for model in (*MODELS[:2], "sigma_intention", "intention"):
        inside = by_seed(select(rows, model=model, metric=named("correlation", "inside", "absolute")))
        outside = by_seed(select(rows, model=model, metric=named("correlation", "outside", "absolute")))
        seeds = inside if set(inside) == set(outside) else {}
        change = estimate([_change(a, outside[seed]) for seed, a in seeds.items()])
        parts.append(f"{label(model)} {over_draws(list(outside.values())).mean:.4f} (change {change})")
        if model in MODELS[:2]:
            found.append(change)
            falls.append(change.high < 0)
    verdict = "holds" if all(falls) else "partly" if any(falls) or all(c.mean < 0 for c in found) else "does not hold"
    text = "The effect is arguably even stronger once we look at the extrapolation results"
    measured = "correlation outside: " + "; ".join(parts) + ". A linear map has the same correlation on every square"
    return Claim(text, "Figure 4", measured, verdict if known(*found) else UNTESTED)


def _inside(rows: Sequence[Row], model: str) -> list[Row]:
    return select(rows, model=model, metric=named("correlation", "inside", "absolute"))


def _fine(correlation: Estimate) -> str:
    """With digits enough to tell .999 from 1."""
    ends = "" if math.isnan(correlation.low) else f" [{correlation.low:.4f}, {correlation.high:.4f}]"
    return f"{correlation.mean:.5f}{ends}"


def _change(inside: float | None, outside: float | None) -> float | None:
    return None if inside is None or outside is None else outside - inside


def order(alphas: Sequence[float], errors: Sequence[float], wide: float = 1e4) -> float | None:
    """The power of alpha with which the error goes, from the alphas at and above `wide`."""
    pairs = [(math.log(a), math.log(e)) for a, e in zip(alphas, errors, strict=True) if a >= wide and e > 0]
    return statistics.linear_regression(*zip(*pairs, strict=True)).slope if len(pairs) > 1 else None


def _limit(rows: Sequence[Row], model: str, limit: str, text: str, theorem: int) -> Claim:
    curves = [row for row in select(rows, model=model, metric=f"distance to {limit}, absolute") if row.data]
    slopes = [order(row.data["alpha"], row.data["error"]) for row in curves if row.data]
    if not curves or None in slopes:
        return Claim(f"As α → ∞ {text} up to a rescaling of queries", f"theorem 2.{theorem}", "", UNTESTED)
    slope, last = estimate(slopes), estimate_log([row.value for row in curves])
    widest = (curves[0].data or {})["alpha"][-1]
    sure = slope.low > -1.05 and slope.high < -0.95 and last.high < 1e-2
    likely = abs(slope.mean + 1) < 0.05 and last.mean < 1e-2
    verdict = "holds" if sure else "partly" if likely else "does not hold"
    measured = f"relative distance {last} at α = {widest:.0e}; it goes as α to the power {slope.mean:.3f} (expected −1)"
    return Claim(f"As α → ∞ {text} up to a rescaling of queries", f"theorem 2.{theorem}", measured, verdict)
