"""What the rows of `normalisation` say to the paper's claims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import HOLDS, NOT, OPEN, OUR_LINE, Claim
from intention.lab.experiments.compare import UNTESTED, together
from intention.lab.experiments.normalisation.model import FAR, PRINTED, exact

__all__ = ["claims", "curves", "finding", "value_of"]

Curves = dict[int, dict[int, Row]]  # by N, then by d


def curves(rows: Sequence[Row], model: str) -> Curves:
    """The curve of each N."""
    found: Curves = {}
    for row in select(rows, model=model, metric="variance"):
        if row.value is not None and row.x is not None and row.data:
            found.setdefault(row.data["n"], {}).setdefault(int(row.x), row)
    return {n: dict(sorted(found[n].items())) for n in sorted(found)}


def claims(rows: Sequence[Row]) -> list[Claim]:
    plain, scaled = curves(rows, "unscaled"), curves(rows, "scaled")
    return [
        _theory(plain),
        _small(curves(rows, PRINTED), "as printed: an ordinary inverse, float32"),
        _small(plain, "with the pseudo-inverse"),
        _vanishing(plain),
        _converges(scaled),
        _regularised(curves(rows, "regularised"), scaled),
        _ours(curves(rows, "variance")),
    ]


def _theory(found: Curves) -> Claim:
    text = "The unscaled variance is 1/(d−N−1) for d > N+1 and d/(N(N−d−1)) for N > d+1, measured within 3%"
    where = f"appendix “Normalisation”, {OUR_LINE}"
    off = []  # (deviation, half of its interval, n, d)
    for n, curve in found.items():
        for d, row in curve.items():
            if abs(d - n) >= FAR and row.interval is not None and row.value is not None:
                true = exact(n, d)
                off.append((abs(row.value / true - 1), (row.interval[1] - row.value) / true, n, d))
    if not off:
        return Claim(text, where, "", UNTESTED)
    most, half, n, d = max(off)
    bound = max(deviation + interval for deviation, interval, _, _ in off)
    judged = HOLDS if bound < 0.03 else NOT if any(by - wide > 0.03 for by, wide, _, _ in off) else OPEN
    at = f"largest deviation {most:.2%} ± {half:.2%} (N = {n}, d = {d}) of {len(off)} pairs with |d−N| ≥ {FAR}"
    return Claim(text, where, f"{at}; no 95% interval reaches beyond {bound:.2%}", judged)


def value_of(row: Row) -> float:
    assert row.value is not None
    return row.value


def _peak(curve: Mapping[int, Row]) -> int:
    return max(curve, key=lambda d: value_of(curve[d]))


def _small(found: Curves, how: str) -> Claim:
    """Explodes at small d: the variance at the smallest d is above 1, and d is small beside N."""
    parts, explodes = [], []
    for n, curve in found.items():
        small, peak = min(curve), _peak(curve)
        if small * 4 <= n:
            explodes.append(value_of(curve[small]) > 1)
            first, largest = value_of(curve[small]), value_of(curve[peak])
            parts.append(f"N = {n}: {first:.2g} at d = {small}, largest at d = {peak} ({largest:.2g})")
    text = f"unscaled intention has an exploding variance for very small d ({how})"
    return Claim(text, "Figure 15", "; ".join(parts), _each(explodes))


def _each(held: Sequence[bool]) -> str:
    """Of the curves of all N."""
    return together([HOLDS if one else NOT for one in held])


def _vanishing(found: Curves) -> Claim:
    parts, vanishes = [], []
    for n, curve in found.items():
        d = max(curve)
        if d >= 4 * n:
            vanishes.append(value_of(curve[d]) < 2 / d)
            parts.append(f"N = {n}: {value_of(curve[d]):.3g} at d = {d}")
    text = "and a vanishing representation problem as d goes to infinity"
    return Claim(text, "Figure 15", "; ".join(parts), _each(vanishes))


def _converges(found: Curves) -> Claim:
    """To 1: nearer with every doubling from 2N on, and within 10% at the end."""
    parts, converges = [], []
    for n, curve in found.items():
        tail = [d for d in curve if d >= 2 * n]
        if len(tail) < 2 or tail[-1] < 8 * n:
            continue
        off = [abs(value_of(curve[d]) - 1) for d in tail]
        noise = 0.01
        converges.append(off[-1] < 0.1 and all(b < a + noise for a, b in itertools.pairwise(off)))
        first, last = value_of(curve[tail[0]]), value_of(curve[tail[-1]])
        parts.append(f"N = {n}: {first:.3g} at d = {tail[0]}, {last:.4g} at d = {tail[-1]}")
    measured = "; ".join(parts) + ". Exactly d/(d−N−1) for d > N+1; for N ≫ d it goes to 0 instead"
    text = "Scaled Intention smoothly converges in variance to 1"
    return Claim(text, "Figure 15", measured if parts else "", _each(converges))


def _regularised(found: Curves, scaled: Curves) -> Claim:
    """Stable: between .5 and 2 at all d. Only bounded: the peak is below a tenth of the unregularised one."""
    parts, stable, bounded = [], [], []
    for n, curve in found.items():
        if n not in curve:
            continue
        peak, small = _peak(curve), min(curve)
        stable.append(all(0.5 <= value_of(row) <= 2 for row in curve.values()))
        bounded.append(n in scaled and value_of(curve[peak]) < 0.1 * value_of(scaled[n][_peak(scaled[n])]))
        interval = curve[peak].interval or (math.nan, math.nan)
        size = f"{value_of(curve[peak]):.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"
        parts.append(f"N = {n}: peak {size} at d = {peak}, {value_of(curve[small]):.2g} at d = {small}")
    text = (
        "having a regulariser stabilises behaviour for small d too (read as, for each N: the peak is below a tenth of "
        "that without, and the variance is between .5 and 2 at every d)"
    )
    measured = "; ".join(parts) + ". No pole any more, but a peak near d = N, and for d ≪ N it goes to 0"
    return Claim(text, "Figure 15", measured if parts else "", _each([*bounded, *stable]))


def _ours(found: Curves) -> Claim:
    values = {(n, d): value_of(row) for n, curve in found.items() for d, row in curve.items() if d >= 16}
    text = 'With scale="variance" an entry has a variance between .5 and 1 at every N, for d ≥ 16'
    where = f"docs/nn.md, {OUR_LINE}"
    if not values:
        return Claim(text, where, "", UNTESTED)
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    small = [value_of(row) for curve in found.values() for d, row in curve.items() if d < 16]
    measured = f"lowest {values[low]:.3f} (N = {low[0]}, d = {low[1]})"
    measured += f", highest {values[high]:.3f} (N = {high[0]}, d = {high[1]})"
    measured += f"; for d < 16: {min(small):.2g} to {max(small):.2g}" if small else ""
    inside = values[low] >= 0.5 and values[high] <= 1.03  # 3%: what a mean over draws may be off
    return Claim(text, where, measured, HOLDS if inside else NOT)


def finding(rows: Sequence[Row]) -> str:
    plain = {(n, d): value_of(row) for n, curve in curves(rows, "unscaled").items() for d, row in curve.items()}
    ours = [value_of(row) for curve in curves(rows, "variance").values() for d, row in curve.items() if d >= 16]
    if not plain or not ours:
        return ""
    n, d = max(plain, key=lambda case: plain[case])
    worst = f"{float(f'{plain[n, d]:.2g}'):,g}"
    text = f"With {n} points and {d} features the variance of an entry of Intention's output reaches {worst}"
    return f'{text}; with scale="variance" it stays between {min(ours):.2f} and {max(ours):.2f} from 16 features on.'
