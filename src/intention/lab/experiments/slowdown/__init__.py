"""Figure 5: how many times slower Intention is than attention, over shapes. Nothing is trained."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from intention.lab.core.place import Place
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.slowdown.claims import HIGH, LOW, claims, finding
from intention.lab.experiments.slowdown.figures import plot
from intention.lab.experiments.slowdown.model import CODES, JAX, PAIRS

__all__ = [
    "EXCLUSIVE",
    "PLACE",
    "PRESETS",
    "READING",
    "SECONDS",
    "TITLE",
    "Config",
    "claims",
    "finding",
    "jobs",
    "plot",
    "run",
]

TITLE = "Slowdown of Intention over attention"
PLACE = "Figure 5, section 3.1"
READING = """
- PyTorch; with `--jax 200` the paper's framework beside it: the same two functions jitted in JAX (extra `jax`), an
  explicit inverse, for fewer shapes, since each is compiled anew.
- "Between 1 and 4 times slower" is judged as "at most 4 times", for 90% of the shapes: to be faster is no failure.
- float32, one CPU thread, forward pass. The paper's ranges are not printed: N and d are log-uniform whole numbers in
  16 … 724, M = N queries and k = d values (self-attention), in 1809 repetitions as in the paper, whatever the preset.
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
    jax: int = chooses(0)  # repetitions of the two functions jitted in JAX (extra jax); each shape is compiled anew

    def __post_init__(self) -> None:
        require(self.repetitions >= 2, f"a distribution needs repetitions >= 2, got {self.repetitions}")
        require(1 <= self.smallest <= self.largest, f"1 <= smallest <= largest, got {self.smallest} and {self.largest}")
        require(self.calls >= 1, f"calls must be >= 1, got {self.calls}")
        require(self.enough >= 0, f"enough is a time >= 0, got {self.enough}")
        require(self.jax == 0 or self.jax >= 2, f"jax must be 0 (none) or at least 2 repetitions, got {self.jax}")


PRESETS = {"quick": Config(), "standard": Config(), "paper": Config()}


def jobs(config: Config) -> list[Job]:
    found = [Job("slowdown", config, "all", 0)]
    return [*found, Job("slowdown", config, "jax", 0, {"repetitions": config.jax})] if config.jax else found


def run(job: Job, place: Place) -> Iterator[Measure]:
    if job.model == "jax":
        yield from in_jax(job, place)
        return
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


def in_jax(job: Job, place: Place) -> Iterator[Measure]:
    """The paper's own framework: both functions jitted, the first call of a shape, which compiles, not timed."""
    from intention.lab.experiments.slowdown import jitted

    config, count = job.config, job.at["repetitions"]
    generator = torch.Generator().manual_seed(job.seed)
    shapes, ratios = [], []
    for index in range(count):
        n, d = (size(config, generator) for _ in range(2))
        arrays = [torch.randn(n, d, generator=generator).numpy() for _ in range(3)]
        seconds = jitted.seconds(arrays, partial(clock, config=config), backwards=index % 2 == 1)
        shapes.append((n, d))
        ratios.append(seconds[JAX[0]] / seconds[JAX[1]])
        if place.tell is not None:
            place.tell(index, count, {})
    yield from summary(*JAX, ratios, shapes)


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


def clock(call: Callable[[], object], config: Config) -> float:
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
