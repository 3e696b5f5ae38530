"""Section 2's closing argument, measured: how many linear-attention layers equal one Intention layer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from intention import functional as F
from intention.lab.core.device import moved, of
from intention.lab.core.place import Place
from intention.lab.core.train import Plan, train
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.layers.claims import MODELS, claims, finding
from intention.lab.experiments.layers.figures import plot
from intention.lab.experiments.layers.model import (
    Steps,
    chebyshev,
    constant,
    left,
    padded,
    stack,
    unit_queries,
    worst_case,
)
from intention.lab.experiments.layers.task import conditioned
from intention.lab.tasks import Problem

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

TITLE = "Layers of linear attention that equal one Intention"
PLACE = "section 2, closing argument"
READING = """
- A layer is one call of linear attention with residual values, v ← v − η K K'v, and the same for the queries, p ← p +
  η Q K'v: gradient descent on least squares. The optimality gap is |w − w*|², with w* standard normal: d at the
  start. Counted are layers until it is 0.1 for d = 1000, a factor of 10⁻⁴. "Reduce by 0.1" at κ = 1.1 is read as
  times 0.1.
- κ is the ratio of the largest eigenvalue L of K'K to the smallest, μ. Worst case: all of w* along the slowest
  direction. Measured: the mean over held-out random problems in `d` dimensions (a smaller d, the same factor),
  eigenvalues log-uniform between μ = 1 and L = κ, both ends included.
- Step sizes: 1/L, which the text calls perfect; 2/(L + μ), the best constant; one learned for each layer, by Adam
  through the stack on random problems of that κ, one stack for each depth; and Chebyshev's, the best for the worst
  case. On average over problems learned ones can do better than those.
- The settings of the learned steps (300 steps in `quick`, rate 0.03) were chosen among about 12 that were tried on seed
  0 with κ = 10, 30 and 100; that seed is among the published ones. The other step sizes have nothing to choose.
- The same step sizes serve all problems of a κ. Float64, no α.
"""
EXCLUSIVE = False
SECONDS = {"quick": 30, "standard": 700}  # on one core, all runs

TENTH = 0.1


@dataclass(frozen=True)
class Config:
    """Condition numbers, the gap to reach, the random problems and the training of the step sizes."""

    kappas: tuple[float, ...] = chooses((1.1, 2.0, 5.0, 10.0, 30.0, 100.0))
    dimension: int = 1000  # of the paper's example: the gap at the start
    goal: float = 0.1  # the gap at the end
    d: int = 32
    points: int = 48
    problems: int = 64  # held out
    steps: int = 300
    batch: int = 8
    learning_rate: float = 0.03
    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)

    def __post_init__(self) -> None:
        require(bool(self.kappas) and min(self.kappas) > 1, f"kappas must be > 1, got {self.kappas}")
        require(0 < self.goal < self.dimension, f"0 < goal < dimension, got {self.goal} and {self.dimension}")
        require(2 <= self.d <= self.points, f"2 <= d <= points, got {self.d} and {self.points}")
        require(min(self.problems, self.steps, self.batch) >= 1, "problems, steps and batch must be >= 1")
        require(set(self.models) <= set(MODELS), f"models are {MODELS}, got {self.models}")
        require(self.seeds >= 1, f"seeds must be >= 1, got {self.seeds}")

    @property
    def ratio(self) -> float:
        """What is left of the gap at the end."""
        return self.goal / self.dimension


quick = Config()
standard = replace(quick, kappas=(*quick.kappas, 300.0), d=64, points=96, steps=800, batch=16)
PRESETS = {"quick": quick, "standard": standard, "paper": standard}


def jobs(config: Config) -> list[Job]:
    return [
        Job("layers", config, model, seed, {"kappa": kappa})
        for model in config.models
        for kappa in config.kappas
        for seed in range(config.seeds)
    ]


def depths(kappa: float, ratio: float) -> list[int]:
    """The depths that are tried: up to where Chebyshev's steps are sure to be there."""
    most = math.ceil(worst_case("chebyshev", kappa, ratio))
    return list(range(max(1, most * 2 // 3), most + 1))


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, kappa = job.config, float(job.at["kappa"])
    generator = torch.Generator().manual_seed(1_000_000 + job.seed)  # held out, the same for all models of a seed
    problem = conditioned(config.problems, config.points, config.d, kappa, generator)
    curve = _learned_curve(job, kappa, problem, place) if job.model == "learned" else _fixed_curve(job, kappa, problem)
    yield Measure("layers", first(curve, config.ratio), x=kappa, data=_thinned(curve))
    yield Measure("layers, worst case", worst_case(job.model, kappa, config.ratio), x=kappa)
    yield Measure("gap left", min(curve.values()), x=kappa)
    if job.model not in ("chebyshev", "learned"):  # those are tried at depths near the goal only
        yield Measure("layers to a tenth", first(curve, TENTH), x=kappa)
        yield Measure("layers to a tenth, worst case", worst_case(job.model, kappa, TENTH), x=kappa)


@torch.no_grad()
def _fixed_curve(job: Job, kappa: float, problem: Problem) -> dict[int, float]:
    """What is left of the gap by number of layers, where no step is learned."""
    if job.model in ("step_l", "step_l_mu"):
        return _constant_curve(job.model, kappa, problem, job.config.ratio)
    if job.model == "intention":
        found = F.intention(unit_queries(problem), problem.key, problem.value, alpha=0)
        assert isinstance(found, Tensor)
        return {1: left(found, problem.w).item()}
    tried = depths(kappa, job.config.ratio)
    *_, last = stack(padded(kappa, tried, chebyshev), unit_queries(problem), problem)
    return dict(zip(tried, left(last, problem.w).tolist(), strict=True))


def _constant_curve(model: str, kappa: float, problem: Problem, ratio: float) -> dict[int, float]:
    """What is left after 1, 2, ... layers, until the goal; the worst case bounds the number."""
    most = math.ceil(worst_case(model, kappa, ratio)) + 1
    steps = torch.full((1, most), constant(model, kappa), dtype=torch.float64)  # one stack
    curve: dict[int, float] = {}
    for index, prediction in enumerate(stack(steps, unit_queries(problem), problem), 1):
        curve[index] = left(prediction, problem.w).item()
        if curve[index] <= ratio:
            break
    return curve


def _learned_curve(job: Job, kappa: float, problem: Problem, place: Place) -> dict[int, float]:
    """Train the stacks of all depths beside each other, then measure them on the held-out problems."""
    config, tried = job.config, depths(kappa, job.config.ratio)
    model = Steps(kappa, tried)
    plan = Plan(steps=config.steps, batch=config.batch, learning_rate=config.learning_rate, clip=0.0)

    def sample(batch: int, generator: torch.Generator) -> Problem:
        return conditioned(batch, config.points, config.d, kappa, generator)

    def loss(model: nn.Module, problem: Problem) -> Tensor:
        return model(problem).log().mean()  # stacks share nothing: each minimises its own gap

    train(model, sample, loss, plan, seed=job.seed, place=place)
    with torch.no_grad():
        return dict(zip(tried, model(moved(problem, of(model))).tolist(), strict=True))


def first(curve: Mapping[int, float], ratio: float) -> float | None:
    """The fewest layers that are there; None if none of those tried is."""
    return next((float(layers) for layers in sorted(curve) if curve[layers] <= ratio), None)


def _thinned(curve: Mapping[int, float], most: int = 60) -> dict[str, list[float]]:
    layers = sorted(curve)
    kept = [layer for i, layer in enumerate(layers) if i % math.ceil(len(layers) / most) == 0 or layer == layers[-1]]
    return {"layers": [float(x) for x in kept], "left": [float(f"{curve[layer]:.4g}") for layer in kept]}
