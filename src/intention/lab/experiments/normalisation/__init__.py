"""Figure 15: the variance of an entry of the Intention map over d, beside its exact value. Nothing is trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from intention.lab.core.place import Place
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.normalisation.claims import claims, finding
from intention.lab.experiments.normalisation.figures import plot
from intention.lab.experiments.normalisation.model import FAR, MODELS, PRINTED, of_inverse, variances

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

TITLE = "Variance of the Intention map"
PLACE = "Figure 15, appendix “Normalisation”"
READING = """
- Keys and queries are standard normal. For d < N the matrix KK' is singular and has no inverse. Both are shown: the
  printed map with an ordinary inverse in float32, which then inverts rounding errors (its median over 201 draws of
  keys), and with the pseudo-inverse, of which all other lines are. The factor 0.5 of the regularised map is sig(0),
  so that it is √d QK'(KK' + I)⁻¹.
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

BATCH = 100
PRINTED_DRAWS = 201  # of the printed inverse, whose median is told


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


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, n = job.config, job.at["n"]
    dimensions = grid(n, config)
    for step, d in enumerate(dimensions):
        generator = torch.Generator().manual_seed(1_000_003 * job.seed + 1009 * n + d)
        drawn = draw(n, d, config, generator)
        printed = of_inverse(torch.randn(PRINTED_DRAWS, n, d, generator=generator, dtype=torch.float64)).median().item()
        yield Measure("variance", printed, x=d, data={"n": n, "draws": PRINTED_DRAWS, "is": "median"}, model=PRINTED)
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
