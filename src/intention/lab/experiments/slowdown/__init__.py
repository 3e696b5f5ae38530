"""Figure 5: how many times slower Intention is than attention, over shapes. Nothing is trained."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from intention import functional as F
from intention.lab.core.place import Place
from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim, Job, Measure, Plot, require
from intention.lab.experiments.slowdown.figures import HIGH, LOW, NAMES, draw_histograms, draw_shapes

TITLE = "Slowdown of Intention over attention"
PLACE = "Figure 5, section 3.1"
READING = """
- PyTorch in place of Jax; float32, one CPU thread, forward pass. The paper's ranges are not printed: N and d are
  log-uniform whole numbers in 16 … 724, M = N queries and k = d values (self-attention), in 1809 repetitions as in
  the paper, whatever the preset.
- Each repetition draws a shape and data and times all codes back to back, in alternating order; a short call is
  repeated and the least time taken.
- *Written out*: softmax(QK'/√d)V against an explicit inverse, Q(K'K)⁻¹K'V or QK'(KK')⁻¹V, whichever matrix is
  smaller; and a Cholesky factor of the same matrix plus I. *Ours*: `intention.functional.intention` with α = 1, its
  accuracy check included, against both the written-out attention and
  `torch.nn.functional.scaled_dot_product_attention`.
- The interval of a median is that of its order statistics over repetitions. All of it depends on the machine.
"""
EXCLUSIVE = True
SECONDS = {"quick": 25, "standard": 25}  # on one core, all runs

Code = Callable[[Tensor, Tensor, Tensor], Any]
BINS = 48  # of the histogram, from 1/16 to 64 in equal ratios
FIRST, LAST = -4.0, 6.0  # powers of two
SCATTER = 300  # repetitions kept with their shapes


@dataclass(frozen=True)
class Config:
    """How many shapes are timed, and how large they are."""

    repetitions: int = 1809
    smallest: int = 16
    largest: int = 724
    enough: float = 3e-4  # seconds after which a call is not repeated
    calls: int = 5  # repeats of one call at most

    def __post_init__(self) -> None:
        require(self.repetitions >= 2, f"a distribution needs repetitions >= 2, got {self.repetitions}")
        require(1 <= self.smallest <= self.largest, f"1 <= smallest <= largest, got {self.smallest} and {self.largest}")
        require(self.calls >= 1, f"calls must be >= 1, got {self.calls}")
        require(self.enough >= 0, f"enough is a time >= 0, got {self.enough}")


PRESETS = {"quick": Config(), "standard": Config(), "paper": Config()}


def jobs(config: Config) -> list[Job]:
    return [Job("slowdown", config, "all", 0)]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K' / sqrt(d)) V, written out."""
    return torch.softmax((query * key.shape[-1] ** -0.5) @ key.mT, -1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def inverse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Q (K'K)^-1 K'V, or Q K' (KK')^-1 V where N <= d. As Jax, it does not stop at a singular matrix."""
    if key.shape[-1] < key.shape[-2]:
        return query @ (torch.linalg.inv_ex(key.mT @ key).inverse @ (key.mT @ value))
    return (query @ key.mT) @ (torch.linalg.inv_ex(key @ key.mT).inverse @ value)


def cholesky(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Q (K'K + I)^-1 K'V, or Q K' (KK' + I)^-1 V where N <= d."""
    primal = key.shape[-1] < key.shape[-2]
    gram = key.mT @ key if primal else key @ key.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor = torch.linalg.cholesky(gram)
    if primal:
        return query @ torch.cholesky_solve(key.mT @ value, factor)
    return (query @ key.mT) @ torch.cholesky_solve(value, factor)


def ours(query: Tensor, key: Tensor, value: Tensor) -> Any:
    return F.intention(query, key, value, alpha=1)


CODES: dict[str, Code] = {
    "attention": attention,
    "fused": fused,
    "inverse": inverse,
    "cholesky": cholesky,
    "intention": ours,
}
# what is divided by what
PAIRS = (("inverse", "attention"), ("cholesky", "attention"), ("intention", "attention"), ("intention", "fused"))


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, threads = job.config, torch.get_num_threads()
    generator = torch.Generator().manual_seed(job.seed)
    shapes: list[tuple[int, int]] = []
    times: dict[str, list[float]] = {name: [] for name in CODES}
    torch.set_num_threads(1)
    try:
        for index in range(config.repetitions):
            n, d = (size(config, generator) for _ in range(2))
            seconds = repetition(n, d, config, generator, backwards=index % 2 == 1)
            shapes.append((n, d))
            for name, value in seconds.items():
                times[name].append(value)
            if place.tell is not None and index % 20 == 0:
                place.tell(index, config.repetitions, {})
    finally:
        torch.set_num_threads(threads)
    for code, base in PAIRS:
        ratios = [a / b for a, b in zip(times[code], times[base], strict=True)]
        yield from summary(code, base, ratios, shapes)


def size(config: Config, generator: torch.Generator) -> int:
    """Log-uniform whole number from smallest to largest, both included."""
    low, high = math.log(config.smallest), math.log(config.largest + 1)
    drawn = math.exp(low + (high - low) * torch.rand((), generator=generator, dtype=torch.float64).item())
    return min(int(drawn), config.largest)


@torch.no_grad()
def repetition(n: int, d: int, config: Config, generator: torch.Generator, backwards: bool) -> dict[str, float]:
    """Seconds of every code at one shape; (1, 1, N, d), the shape that the fused attention is made for."""
    query, key, value = (torch.randn(1, 1, n, d, generator=generator) for _ in range(3))
    names = list(reversed(CODES)) if backwards else list(CODES)
    return {name: clock(partial(CODES[name], query, key, value), config) for name in names}


def clock(call: Callable[[], Any], config: Config) -> float:
    """The least of several calls; calls that are long enough to be timed are made once."""
    least, spent = math.inf, 0.0
    for _ in range(config.calls):
        start = time.perf_counter()
        call()
        taken = time.perf_counter() - start
        least, spent = min(least, taken), spent + taken
        if spent >= config.enough:
            break
    return least


def summary(code: str, base: str, ratios: Sequence[float], shapes: Sequence[tuple[int, int]]) -> Iterator[Measure]:
    """Median, percentiles, the share in [1, 4] and at most 4, and what the figures draw."""
    ordered, count = sorted(ratios), len(ratios)
    half = 0.98 * math.sqrt(count)  # order statistics: count/2 -/+ 1.96 sqrt(count)/2
    low, high = ordered[max(0, int(count / 2 - half))], ordered[min(count - 1, math.ceil(count / 2 + half))]
    step = max(1, math.ceil(count / SCATTER))
    kept = [[*shape, round(ratio, 3)] for shape, ratio in list(zip(shapes, ratios, strict=True))[::step]]
    data = {"counts": histogram(ratios), "first": FIRST, "last": LAST, "shapes": kept, "repetitions": count}
    name = f"slowdown over {base}"
    yield Measure(f"{name}, median", statistics.median(ratios), interval=(low, high), data=data, model=code)
    yield Measure(f"{name}, 10th percentile", ordered[int(0.1 * (count - 1))], model=code)
    yield Measure(f"{name}, 90th percentile", ordered[math.ceil(0.9 * (count - 1))], model=code)
    for what, hits in (
        ("share in [1, 4]", sum(LOW <= ratio <= HIGH for ratio in ratios)),
        ("share at most 4", sum(ratio <= HIGH for ratio in ratios)),
    ):
        yield Measure(f"{name}, {what}", hits / count, interval=wilson(hits, count), model=code)


def histogram(ratios: Sequence[float]) -> list[int]:
    """Counts in bins of equal ratio; what lies beyond is in the outer bins."""
    counts = [0] * BINS
    for ratio in ratios:
        place = (math.log2(ratio) - FIRST) / (LAST - FIRST) * BINS
        counts[min(max(int(place), 0), BINS - 1)] += 1
    return counts


def wilson(hits: int, count: int) -> tuple[float, float]:
    """95% interval of a share."""
    z = 1.96
    share, spread = hits / count, z / count
    centre = (share + z * spread / 2) / (1 + z * spread)
    half = spread * math.sqrt(hits * (1 - share) + z * z / 4) / (1 + z * spread)
    return centre - half, centre + half


# --- what the rows say ------------------------------------------------------------------------------------------------


def claims(rows: Sequence[Row]) -> list[Claim]:
    text = "Intention is approximately only between 1. and 4. times slower than Attention"
    found = [
        Claim(f"{text} ({NAMES[pair]})", "Figure 5, section 3.1", *_range(rows, pair))
        for pair in (("inverse", "attention"), ("cholesky", "attention"))
    ]
    ours_text = "Our line: the op of this library is at most 4 times slower than attention"
    for pair in (("intention", "attention"), ("intention", "fused")):
        found.append(Claim(f"{ours_text} ({NAMES[pair]})", "section 3.1", *_at_most(rows, pair)))
    return found


def _get(rows: Sequence[Row], pair: tuple[str, str], what: str) -> Row | None:
    found = select(rows, model=pair[0], metric=f"slowdown over {pair[1]}, {what}")
    return next((row for row in found if row.value is not None), None)


def _describe(rows: Sequence[Row], pair: tuple[str, str]) -> str:
    median = _get(rows, pair, "median")
    parts = []
    if median is not None:
        low, high = median.interval or (math.nan, math.nan)
        count = (median.data or {}).get("repetitions", "?")
        parts.append(f"median {median.value:.2f} [{low:.2f}, {high:.2f}] over {count} repetitions")
    ends = [_get(rows, pair, f"{what}th percentile") for what in (10, 90)]
    if ends[0] is not None and ends[1] is not None:
        parts.append(f"10th to 90th percentile {ends[0].value:.2f} to {ends[1].value:.2f}")
    for what in ("share in [1, 4]", "share at most 4"):
        share = _get(rows, pair, what)
        if share is not None and share.interval is not None:
            parts.append(f"{what} {share.value:.1%} [{share.interval[0]:.1%}, {share.interval[1]:.1%}]")
    shapes = (median.data or {}).get("shapes", []) if median is not None else []
    for name, chosen in (("N < 64", lambda n: n < 64), ("N ≥ 256", lambda n: n >= 256)):
        ratios = [ratio for n, _, ratio in shapes if chosen(n)]
        if ratios:
            parts.append(f"median where {name}: {statistics.median(ratios):.2f}")
    return "; ".join(parts)


def _range(rows: Sequence[Row], pair: tuple[str, str]) -> tuple[str, str]:
    """Holds where nine in ten are within the range, partly where the median is."""
    median, share = _get(rows, pair, "median"), _get(rows, pair, "share in [1, 4]")
    if median is None or share is None or median.value is None or share.value is None:
        return "", "not tested at this size"
    sure = share.interval is not None and share.interval[0] >= 0.9
    verdict = "holds" if share.value >= 0.9 and sure else "partly" if LOW <= median.value <= HIGH else "does not hold"
    return _describe(rows, pair) + " (holds: nine in ten are in the range)", verdict


def _at_most(rows: Sequence[Row], pair: tuple[str, str]) -> tuple[str, str]:
    median, share = _get(rows, pair, "median"), _get(rows, pair, "share at most 4")
    if median is None or share is None or median.value is None or share.value is None:
        return "", "not tested at this size"
    sure = share.interval is not None and share.interval[0] >= 0.9
    verdict = "holds" if share.value >= 0.9 and sure else "partly" if median.value <= HIGH else "does not hold"
    return _describe(rows, pair) + " (holds: nine in ten are at most 4)", verdict


def plot(rows: Sequence[Row]) -> list[Plot]:
    found = {pair: row.data for pair in PAIRS if (row := _get(rows, pair, "median")) is not None and row.data}
    if not found:
        return []
    across = (
        "Distribution of the slowdown over repetitions; the band is the paper's range, 1 to 4, the line the median."
    )
    medians = {pair: row.value for pair in found if (row := _get(rows, pair, "median")) is not None}
    plots = [Plot("Slowdown over attention", across, partial(draw_histograms, found, medians))]
    if any(data["shapes"] for data in found.values()):
        caption = (
            "A point is a repetition: N against d, coloured by the slowdown (white is 1, red is slower, blue faster)."
        )
        plots.append(Plot("Where it is slow", caption, partial(draw_shapes, found)))
    return plots
