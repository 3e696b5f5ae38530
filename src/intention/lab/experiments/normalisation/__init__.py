"""Figure 15: the variance of an entry of the Intention map over d, beside its exact value. Nothing is trained."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from intention.lab.core.place import Place
from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim, Job, Measure, Plot, chooses, require
from intention.lab.experiments.normalisation.figures import draw_variances
from intention.nn.scaling import variance_scale

TITLE = "Variance of the Intention map"
PLACE = "Figure 15, appendix “Normalisation”"
READING = """
- Keys and queries are standard normal. Z is the printed map, with the pseudo-inverse where d < N (KK' is singular
  there, and an inverse does not exist). The factor 0.5 of the regularised map is sig(0), so that it is √d QK'(KK' +
  I)⁻¹.
- Given the keys, the variance of the entries over queries is known: the mean squared length of the columns of Z/Q.
  What is averaged is that, over draws of keys, which is the same number with less noise. From the singular values s
  of K: the mean over N of Σ 1/s² (unscaled), and of Σ s²/(s² + 1)² (regularised).
- Keys are drawn until the standard error is below `error` of the mean, or `draws` are used up (a sixth of them for
  |d−N| < 8, where there is nothing to converge to). Exact: 1/(d−N−1) for d > N+1 and d/(N(N−d−1)) for N > d+1;
  infinite between. The estimator itself has a finite variance for |d−N| > 3; the comparison is made from |d−N| ≥ 8
  on. Intervals are over draws of keys.
- `scale="variance"` of `intention.nn`, with α = 1, is added as a fourth line.
- Nothing is trained; `standard` and `paper` only draw more.
"""
EXCLUSIVE = False
SECONDS = {"quick": 6, "standard": 35}  # on one core, all runs

MODELS = ("unscaled", "scaled", "regularised", "variance")
FAR = 8  # |d - N| from which the mean over draws is compared with the exact value
BATCH = 100


@dataclass(frozen=True)
class Config:
    """The grid of N and d, and how exact the means are."""

    sizes: tuple[int, ...] = chooses((16, 32, 64))
    dimensions: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
    near: tuple[int, ...] = (1, 2, 4, 8, 16)  # d = N and N -/+ these are added
    error: float = 0.004
    draws: int = 6000  # at most; a sixth where |d - N| < 8

    def __post_init__(self) -> None:
        require(bool(self.sizes) and min(self.sizes) >= 1, f"sizes must be positive, got {self.sizes}")
        require(bool(self.dimensions) and min(self.dimensions) >= 1, f"dimensions must be >= 1, got {self.dimensions}")
        require(all(gap >= 1 for gap in self.near), f"near holds distances from N >= 1, got {self.near}")
        require(0 < self.error < 1, f"error is a relative standard error between 0 and 1, got {self.error}")
        require(self.draws >= 2, f"draws must be >= 2, got {self.draws}")


PRESETS = {"quick": Config(), "standard": Config(error=0.002, draws=40_000), "paper": Config(error=0.002, draws=40_000)}


def jobs(config: Config) -> list[Job]:
    return [Job("normalisation", config, "map", 0, {"n": n}) for n in config.sizes]


def grid(n: int, config: Config) -> list[int]:
    """The dimensions of the curve of N points."""
    around = {n, *(n - gap for gap in config.near), *(n + gap for gap in config.near)}
    return sorted(d for d in {*config.dimensions, *around} if d >= 1)


def exact(n: int, d: int) -> float:
    """The variance of an entry of Q K^+ for standard normal queries and keys."""
    if d > n + 1:
        return 1 / (d - n - 1)
    return d / (n * (n - d - 1)) if n > d + 1 else math.inf


def variances(key: Tensor) -> dict[str, Tensor]:
    """The variance of an entry of each map over queries, given the keys (B, N, d): one number per draw.

    With K = U S W' the columns of Z/Q are those of W S^-1 U' (of W S/(S^2 + 1) U'), and the mean of their squared
    lengths over the N columns is sum(1/s^2) / N (sum(s^2/(s^2 + 1)^2) / N).
    """
    n, d = key.shape[-2:]
    gram = key @ key.mT if n <= d else key.mT @ key
    squares = torch.linalg.eigvalsh(gram)  # s^2, (B, min(N, d))
    plain = squares.reciprocal().sum(-1) / n
    ridge = (squares / (squares + 1).square()).sum(-1) / n
    return {
        "unscaled": plain,
        "scaled": d * plain,
        "regularised": d * ridge,
        "variance": variance_scale(n, d) ** 2 * ridge,
    }


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, n = job.config, job.at["n"]
    dimensions = grid(n, config)
    for step, d in enumerate(dimensions):
        generator = torch.Generator().manual_seed(1_000_003 * job.seed + 1009 * n + d)
        drawn = draw(n, d, config, generator)
        for model, values in drawn.items():
            mean, count = values.mean().item(), len(values)
            half = 1.96 * values.std().item() / math.sqrt(count)
            sure = abs(d - n) >= FAR or model not in ("unscaled", "scaled")
            data = {"n": n, "draws": count, "median": float(f"{values.median().item():.5g}")}
            interval = (mean - half, mean + half) if sure else None
            yield Measure("variance", mean, x=d, interval=interval, data=data, model=model)
        if place.tell is not None:
            place.tell(step + 1, len(dimensions), {})


def draw(n: int, d: int, config: Config, generator: torch.Generator) -> dict[str, Tensor]:
    """Draw keys until the unscaled variance is known to `config.error`, at most `config.draws`."""
    parts: dict[str, list[Tensor]] = {model: [] for model in MODELS}
    count, most = 0, config.draws if abs(d - n) >= FAR else max(2, config.draws // 6)
    while count < most:
        batch = min(BATCH, most - count)
        found = variances(torch.randn(batch, n, d, generator=generator, dtype=torch.float64))
        for model in MODELS:
            parts[model].append(found[model])
        count += batch
        values = torch.cat(parts["unscaled"])
        if count >= 2 * BATCH and (values.std() / values.mean()).item() < config.error * math.sqrt(count):
            break
    return {model: torch.cat(values) for model, values in parts.items()}


# --- what the rows say ------------------------------------------------------------------------------------------------

Curves = dict[int, dict[int, Row]]  # by N, then by d
UNTESTED = "not tested at this size"


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
        _small(plain),
        _vanishing(plain),
        _converges(scaled),
        _regularised(curves(rows, "regularised"), scaled),
        _ours(curves(rows, "variance")),
    ]


def _theory(found: Curves) -> Claim:
    text = "Our line: the unscaled variance is 1/(d−N−1) for d > N+1 and d/(N(N−d−1)) for N > d+1, measured within 3%"
    where = "appendix “Normalisation”, exact value"
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
    verdict = "holds" if bound < 0.03 else "partly" if most < 0.03 else "does not hold"
    at = f"largest deviation {most:.2%} ± {half:.2%} (N = {n}, d = {d}) of {len(off)} pairs with |d−N| ≥ {FAR}"
    return Claim(text, where, f"{at}; no 95% interval reaches beyond {bound:.2%}", verdict)


def _value(row: Row) -> float:
    assert row.value is not None
    return row.value


def _peak(curve: Mapping[int, Row]) -> int:
    return max(curve, key=lambda d: _value(curve[d]))


def _small(found: Curves) -> Claim:
    """Explodes at small d: the variance at the smallest d is above 1, and d is small beside N."""
    parts, explodes, tested = [], [], []
    for n, curve in found.items():
        small, peak = min(curve), _peak(curve)
        if small * 4 <= n:
            tested.append(n)
            explodes.append(_value(curve[small]) > 1)
            parts.append(
                f"N = {n}: {_value(curve[small]):.2g} at d = {small}, largest at d = {peak} ({_value(curve[peak]):.2g})"
            )
    verdict = "holds" if all(explodes) else "partly" if any(explodes) else "does not hold"
    measured = "; ".join(parts) + ". The blow-up is at d ≈ N; there the mean has no limit and depends on the draws"
    text = "unscaled intention has an exploding variance for very small d"
    return Claim(text, "Figure 15", measured if tested else "", verdict if tested else UNTESTED)


def _vanishing(found: Curves) -> Claim:
    parts, vanishes = [], []
    for n, curve in found.items():
        d = max(curve)
        if d >= 4 * n:
            vanishes.append(_value(curve[d]) < 2 / d)
            parts.append(f"N = {n}: {_value(curve[d]):.3g} at d = {d}")
    verdict = "holds" if all(vanishes) else "partly" if any(vanishes) else "does not hold"
    text = "and a vanishing representation problem as d goes to infinity"
    return Claim(text, "Figure 15", "; ".join(parts), verdict if parts else UNTESTED)


def _converges(found: Curves) -> Claim:
    """To 1: nearer with every doubling from 2N on, and within 10% at the end."""
    parts, converges = [], []
    for n, curve in found.items():
        tail = [d for d in curve if d >= 2 * n]
        if len(tail) < 2 or tail[-1] < 8 * n:
            continue
        off = [abs(_value(curve[d]) - 1) for d in tail]
        noise = 0.01
        converges.append(off[-1] < 0.1 and all(b < a + noise for a, b in itertools.pairwise(off)))
        parts.append(
            f"N = {n}: {_value(curve[tail[0]]):.3g} at d = {tail[0]}, {_value(curve[tail[-1]]):.4g} at d = {tail[-1]}"
        )
    verdict = "holds" if all(converges) else "partly" if any(converges) else "does not hold"
    measured = "; ".join(parts) + ". Exactly d/(d−N−1) for d > N+1; for N ≫ d it goes to 0 instead"
    text = "Scaled Intention smoothly converges in variance to 1"
    return Claim(text, "Figure 15", measured if parts else "", verdict if parts else UNTESTED)


def _regularised(found: Curves, scaled: Curves) -> Claim:
    """Stable: between .5 and 2 at all d. Only bounded: the peak is below a tenth of the unregularised one."""
    parts, stable, bounded = [], [], []
    for n, curve in found.items():
        if n not in curve:
            continue
        peak, small = _peak(curve), min(curve)
        stable.append(all(0.5 <= _value(row) <= 2 for row in curve.values()))
        bounded.append(n in scaled and _value(curve[peak]) < 0.1 * _value(scaled[n][_peak(scaled[n])]))
        interval = curve[peak].interval or (math.nan, math.nan)
        size = f"{_value(curve[peak]):.3g} [{interval[0]:.3g}, {interval[1]:.3g}]"
        parts.append(f"N = {n}: peak {size} at d = {peak}, {_value(curve[small]):.2g} at d = {small}")
    verdict = "holds" if all(stable) else "partly" if all(bounded) else "does not hold"
    text = "having a regulariser stabilises behaviour for small d too"
    measured = "; ".join(parts) + ". No pole any more, but a peak near d = N, and for d ≪ N it goes to 0"
    return Claim(text, "Figure 15", measured if parts else "", verdict if parts else UNTESTED)


def _ours(found: Curves) -> Claim:
    values = {(n, d): _value(row) for n, curve in found.items() for d, row in curve.items() if d >= 16}
    text = 'Our line: with scale="variance" an entry has a variance between .5 and 1 at every N, for d ≥ 16'
    where = "appendix “Normalisation”, docs/nn.md"
    if not values:
        return Claim(text, where, "", UNTESTED)
    low, high = min(values, key=values.__getitem__), max(values, key=values.__getitem__)
    small = [_value(row) for curve in found.values() for d, row in curve.items() if d < 16]
    measured = f"lowest {values[low]:.3f} (N = {low[0]}, d = {low[1]})"
    measured += f", highest {values[high]:.3f} (N = {high[0]}, d = {high[1]})"
    measured += f"; for d < 16: {min(small):.2g} to {max(small):.2g}" if small else ""
    inside = values[low] >= 0.5 and values[high] <= 1.03  # 3%: what a mean over draws may be off
    return Claim(text, where, measured, "holds" if inside else "does not hold")


def plot(rows: Sequence[Row]) -> list[Plot]:
    found = {
        model: {n: [(d, _value(row)) for d, row in curve.items()] for n, curve in curves(rows, model).items()}
        for model in MODELS
    }
    if not any(found.values()):
        return []
    caption = (
        "Variance of an entry over d. Black: the exact value of the unscaled and scaled map, infinite at d ≈ N. "
        "The dotted line is 1."
    )
    return [Plot("Variance of the Intention map over d", caption, partial(draw_variances, found, exact))]
