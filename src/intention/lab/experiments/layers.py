"""Section 2's closing argument, measured: how many linear-attention layers equal one Intention layer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from intention import functional as F
from intention.lab.experiments.base import COLOURS, Claim, Job, Measure, Plot, chooses, require
from intention.lab.place import Place
from intention.lab.results import Estimate, Row, estimate, estimate_log, select
from intention.lab.tasks.linear import Problem, conditioned
from intention.lab.train import Plan, train

TITLE = "Layers of linear attention that equal one Intention"
PLACE = "section 2, closing argument"
READING = """
- A layer is one call of linear attention with residual values, v ← v − η K K'v, and the same for the queries, p ← p + η Q K'v: gradient descent on
  least squares. The optimality gap is |w − w*|², with w* standard normal: d at the start. Counted are layers until it is 0.1 for d = 1000, a factor of
  10⁻⁴. "Reduce by 0.1" at κ = 1.1 is read as times 0.1.
- κ is the ratio of the largest eigenvalue L of K'K to the smallest, μ. Worst case: all of w* along the slowest direction. Measured:
  the mean over held-out random problems in `d` dimensions (a smaller d, the same factor), eigenvalues log-uniform between μ = 1 and L = κ,
  both ends included.
- Step sizes: 1/L, which the text calls perfect; 2/(L + μ), the best constant; one learned for each layer, by Adam through the stack on random problems of that κ,
  one stack for each depth; and Chebyshev's, the best for the worst case. On average over problems learned ones can do better than those.
- The same step sizes serve all problems of a κ. Float64, no α.
"""
EXCLUSIVE = False

MODELS = ("step_l", "step_l_mu", "chebyshev", "learned", "intention")
NAMES = {
    "step_l": "step 1/L",
    "step_l_mu": "step 2/(L + μ)",
    "chebyshev": "Chebyshev steps",
    "learned": "learned steps",
    "intention": "Intention",
}
LINE_COLOURS = {
    "step_l": COLOURS["attention"],
    "step_l_mu": COLOURS["linear_attention"],
    "chebyshev": COLOURS["mlp"],
    "learned": COLOURS["neural_process"],
    "intention": COLOURS["intention"],
}
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
    steps: int = 150
    batch: int = 8
    learning_rate: float = 0.05
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
standard = replace(quick, kappas=(*quick.kappas, 300.0), d=64, points=96, steps=500, batch=16)
PRESETS = {"quick": quick, "standard": standard, "paper": standard}


def jobs(config: Config) -> list[Job]:
    return [
        Job("layers", config, model, seed, {"kappa": kappa})
        for model in config.models
        for kappa in config.kappas
        for seed in range(config.seeds)
    ]


# --- the stack --------------------------------------------------------------------------------------------------------


def layer(prediction: Tensor, residual: Tensor, both: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of linear attention over values that are what is still to be explained.

    prediction (..., M, k), residual (..., N, k), both: queries and keys (..., M + N, d), key (..., N, d), step: a
    number, or k of them.
    """
    m = prediction.shape[-2]
    update = step * F.linear_attention(both, key, residual)  # eta [Q; K] K'v
    return prediction + update[..., :m, :], residual - update[..., m:, :]


def stack(steps: Tensor, query: Tensor, problem: Problem) -> Iterator[Tensor]:
    """Predictions (..., M, S) after each layer, of S stacks with steps (S, layers): each is a column of the values."""
    key, residual = problem.key, problem.value.expand(*problem.value.shape[:-1], len(steps))
    query = query.expand(*key.shape[:-2], *query.shape[-2:])
    both, prediction = torch.cat([query, key], -2), residual.new_zeros(*query.shape[:-1], len(steps))
    for step in steps.unbind(-1):
        prediction, residual = layer(prediction, residual, both, key, step)
        yield prediction


def left(prediction: Tensor, w: Tensor) -> Tensor:
    """What is left of the gap, over the problems, for each column: predictions at the unit vectors are w itself."""
    return (prediction - w).square().sum((0, 1)) / w.square().sum()


def unit_queries(problem: Problem) -> Tensor:
    return torch.eye(problem.key.shape[-1], dtype=problem.key.dtype)


# --- step sizes -------------------------------------------------------------------------------------------------------


def constant(model: str, kappa: float) -> float:
    """With mu = 1 and L = kappa: 1/L or 2/(L + mu)."""
    return 1 / kappa if model == "step_l" else 2 / (kappa + 1)


def worst_case(model: str, kappa: float, ratio: float) -> float:
    """Layers until the gap is `ratio` of what it was, if all of it lies along the slowest direction; a real number.

    A constant step multiplies the gap by rho^2 each time, rho = 1 - 1/kappa or (kappa - 1)/(kappa + 1). L layers of
    Chebyshev's steps multiply it by T_L((kappa + 1)/(kappa - 1))^-2, and T_L(x) = cosh(L arcosh x).
    """
    if model == "intention":
        return 1.0
    if model in ("chebyshev", "learned"):
        return math.acosh(ratio**-0.5) / math.acosh((kappa + 1) / (kappa - 1))
    rho = 1 - 1 / kappa if model == "step_l" else (kappa - 1) / (kappa + 1)
    return math.log(ratio) / (2 * math.log(rho))


def alternate(values: Tensor) -> Tensor:
    """First, last, second, last but one ...: large and small steps take turns, so that nothing grows between."""
    size = len(values)
    order = [index // 2 if index % 2 == 0 else size - 1 - index // 2 for index in range(size)]
    return values[order]


def chebyshev(depth: int, kappa: float) -> Tensor:
    """One over the roots of the Chebyshev polynomial on [1, kappa]."""
    angles = math.pi * (torch.arange(depth, dtype=torch.float64) + 0.5) / depth
    return alternate(1 / ((kappa + 1) / 2 + (kappa - 1) / 2 * angles.cos()))


def spread(depth: int, kappa: float) -> Tensor:
    """Where learning starts: evenly spread in log between 1/kappa and 1. Equal steps would stay equal."""
    return alternate((-math.log(kappa) * (torch.arange(depth, dtype=torch.float64) + 0.5) / depth).exp())


def depths(kappa: float, ratio: float) -> list[int]:
    """The depths that are tried: up to where Chebyshev's steps are sure to be there."""
    most = math.ceil(worst_case("chebyshev", kappa, ratio))
    return list(range(max(1, most * 2 // 3), most + 1))


def padded(kappa: float, tried: Sequence[int], steps: Callable[[int, float], Tensor]) -> Tensor:
    """Step sizes of stacks of several depths, (depths, deepest): a layer of step 0 changes nothing."""
    rows = [torch.cat([steps(depth, kappa), torch.zeros(max(tried) - depth, dtype=torch.float64)]) for depth in tried]
    return torch.stack(rows)


class Steps(nn.Module):
    """Step sizes of stacks of several depths, learned as logarithms; what is left of the gap after each stack."""

    def __init__(self, kappa: float, tried: Sequence[int]) -> None:
        super().__init__()
        start = padded(kappa, tried, spread)
        self.log_steps = nn.Parameter(start.clamp_min(1e-300).log() * (start > 0))
        self.register_buffer("used", (start > 0).double())

    def forward(self, problem: Problem) -> Tensor:
        steps = self.log_steps.exp() * self.used
        *_, last = stack(steps, unit_queries(problem), problem)
        return left(last, problem.w)  # (depths,)


# --- runs -------------------------------------------------------------------------------------------------------------


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, kappa = job.config, float(job.at["kappa"])
    generator = torch.Generator().manual_seed(1_000_000 + job.seed)  # held out, the same for all models of a seed
    problem = conditioned(config.problems, config.points, config.d, kappa, generator)
    yield Measure("layers, worst case", worst_case(job.model, kappa, config.ratio), x=kappa)
    with torch.no_grad():
        if job.model == "intention":
            curve = {1: left(_intention(problem), problem.w).item()}
        elif job.model in ("step_l", "step_l_mu"):
            curve = _constant_curve(job.model, kappa, problem, config.ratio)
        elif job.model == "chebyshev":
            tried = depths(kappa, config.ratio)
            *_, last = stack(padded(kappa, tried, chebyshev), unit_queries(problem), problem)
            curve = dict(zip(tried, left(last, problem.w).tolist(), strict=True))
    if job.model == "learned":
        curve = _learned_curve(job, kappa, problem, place)
    yield Measure("layers", first(curve, config.ratio), x=kappa, data=_thinned(curve))
    yield Measure("gap left", min(curve.values()), x=kappa)
    if job.model in ("step_l", "step_l_mu", "intention"):
        yield Measure("layers to a tenth", first(curve, TENTH), x=kappa)
        yield Measure("layers to a tenth, worst case", worst_case(job.model, kappa, TENTH), x=kappa)


def _intention(problem: Problem) -> Tensor:
    found = F.intention(unit_queries(problem), problem.key, problem.value, alpha=0)
    assert isinstance(found, Tensor)
    return found


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
        return dict(zip(tried, model(problem).tolist(), strict=True))


def first(curve: Mapping[int, float], ratio: float) -> float | None:
    """The fewest layers that are there; None if none of those tried is."""
    return next((float(layers) for layers in sorted(curve) if curve[layers] <= ratio), None)


def _thinned(curve: Mapping[int, float], most: int = 60) -> dict[str, list[float]]:
    layers = sorted(curve)
    kept = [layer for i, layer in enumerate(layers) if i % math.ceil(len(layers) / most) == 0 or layer == layers[-1]]
    return {"layers": [float(x) for x in kept], "left": [float(f"{curve[layer]:.4g}") for layer in kept]}
