"""Figure 4: the four computations applied to linear data on a plane. Nothing is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intention import functional as F
from intention.lab.core.place import Place
from intention.lab.core.results import Json
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.computations_2d.claims import MODELS, claims, finding, named
from intention.lab.experiments.computations_2d.figures import plot
from intention.lab.experiments.computations_2d.task import REPAIRS, SQUARES, Repair, plane, square
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

TITLE = "Four computations on linear data in the plane"
PLACE = "Figure 4, theorems 2.8 and 2.9, appendix “Comparing the computations”"
READING = """
- The printed covariance [[.7, .9], [.9, 1.]] of the keys is not positive semidefinite (an eigenvalue is −0.062). Both
  repairs are shown: |eigenvalues|, which is what numpy draws from the printed matrix, and the nearest positive
  semidefinite matrix, which is singular: all points then lie on a line and no method can know `w` across it.
- The number of points is not printed: N = 50. V = Kw. Attention has no 1/√d and both Intentions have α = 0, as
  printed; where K'K is singular the inverse is the pseudo-inverse.
- A seed is a draw of `w` and of the points. Correlation, slope (of the prediction regressed on the truth) and MSE are
  over random queries of each square; a correlation alone does not see that σIntention predicts values about N times
  too small. Means and intervals of correlations over draws are by Fisher's z.
- Distances are relative, |a − b| / |b| over the queries inside, in float64: Intention to least squares
  (`torch.linalg.lstsq`) with scale 1, Intention to linear attention and σIntention to attention with the queries
  multiplied by α, as in the theorems.
- Nothing is trained, so that all presets are the same.
"""
EXCLUSIVE = False
SECONDS = {"quick": 1, "standard": 1}  # on one core, all runs


@dataclass(frozen=True)
class Config:
    """Sizes of the comparison on the plane."""

    points: int = 50
    queries: int = 1000
    alphas: tuple[float, ...] = tuple(10.0**power for power in range(-4, 7))
    grid: int = 17  # the maps of the figure have this many points a side
    repairs: tuple[Repair, ...] = chooses(REPAIRS)
    seeds: int = chooses(20)

    def __post_init__(self) -> None:
        require(self.points >= 2, f"two unknowns need points >= 2, got {self.points}")
        require(self.queries >= 3, f"a correlation needs queries >= 3, got {self.queries}")
        require(self.grid >= 2, f"grid must be >= 2, got {self.grid}")
        require(bool(self.alphas) and min(self.alphas) > 0, f"alphas must be positive, got {self.alphas}")
        require(set(self.repairs) <= set(REPAIRS), f"repairs are {REPAIRS}, got {self.repairs}")
        require(self.seeds >= 1, f"seeds must be >= 1, got {self.seeds}")


PRESETS = {"quick": Config(), "standard": Config(), "paper": Config()}


def jobs(config: Config) -> list[Job]:
    return [
        Job("computations_2d", config, "all", seed, {"repair": repair})
        for repair in config.repairs
        for seed in range(config.seeds)
    ]


def predict(model: str, query: Tensor, problem: Problem) -> Tensor:
    """The computation as printed."""
    key, value = problem.key, problem.value
    computations: dict[str, Callable[[], Any]] = {
        "attention": lambda: F.attention(query, key, value, scale=1.0),
        "linear_attention": lambda: F.linear_attention(query, key, value),
        "sigma_intention": lambda: F.sigma_intention(query, key, value, alpha=0),
        "intention": lambda: F.intention(query, key, value, alpha=0),
    }
    return computations[model]()


def run(job: Job, place: Place) -> Iterator[Measure]:
    config, repair = job.config, job.at["repair"]
    generator = torch.Generator().manual_seed(job.seed)
    problem = plane(1, config.points, repair, generator)
    inside = square(1, config.queries, SQUARES["inside"], generator)
    outside = square(1, config.queries, SQUARES["outside"], generator)
    for where, query in (("inside", inside), ("outside", outside)):
        for model in MODELS:
            found = agreement(predict(model, query, problem), query @ problem.w)
            for metric, value in found.items():
                yield Measure(named(metric, where, repair), value, model=model)
            if job.seed == 0:
                data = figure_data(model, problem, SQUARES[where], config.grid)
                yield Measure(named("map", where, repair), None, model=model, data=data)
    yield from distances(problem, inside, config.alphas, repair)


def agreement(predicted: Tensor, true: Tensor) -> dict[str, float]:
    """Pearson correlation, slope of predicted = slope true + constant, and MSE."""
    a, b = predicted.flatten(), true.flatten()
    centred, truth = a - a.mean(), b - b.mean()
    slope = centred @ truth / truth.square().sum()
    correlation = (centred / centred.norm()) @ (truth / truth.norm())
    return {
        "correlation": min(correlation.item(), 1.0),
        "slope": slope.item(),
        "mse": (a - b).square().mean().item(),
    }


def distances(problem: Problem, query: Tensor, alphas: Sequence[float], repair: str) -> Iterator[Measure]:
    """How far each Intention is from its limits, over alpha; the value is that of the alpha nearest to the limit."""
    key, value = problem.key, problem.value
    # gelsd: the minimum-norm solution also where the keys are on a line
    least_squares = query @ torch.linalg.lstsq(key, value, driver="gelsd").solution
    linear = F.linear_attention(query, key, value)
    softmax = F.attention(query, key, value, scale=1.0)
    fits = {
        ("intention", "least squares"): lambda a: relative(F.intention(query, key, value, alpha=a), least_squares),
        ("intention", "linear attention"): lambda a: relative(F.intention(query, key, value, alpha=a, scale=a), linear),
        ("sigma_intention", "attention"): lambda a: relative(
            F.sigma_intention(query, key, value, alpha=a, scale=a), softmax
        ),
    }
    ordered = sorted(alphas)
    for (model, limit), distance in fits.items():
        errors = [distance(alpha) for alpha in ordered]
        last = errors[0] if limit == "least squares" else errors[-1]
        data = {"alpha": ordered, "error": [float(f"{error:.4g}") for error in errors]}
        yield Measure(f"distance to {limit}, {repair}", last, model=model, data=data)


def relative(found: Tensor | tuple[Tensor, object], wanted: Tensor) -> float:
    assert isinstance(found, Tensor)
    return ((found - wanted).norm() / wanted.norm()).item()


def figure_data(model: str, problem: Problem, reach: float, grid: int) -> Json:
    """What the figure draws: predictions and truth on a grid, row by row, and the context points."""
    side = torch.linspace(-reach, reach, grid, dtype=torch.float64)
    query = torch.cartesian_prod(side, side).unsqueeze(0)  # (1, grid * grid, 2): x is the slow index
    numbers = {"predicted": predict(model, query, problem), "true": query @ problem.w}
    data = {name: [float(f"{value:.4g}") for value in values.flatten().tolist()] for name, values in numbers.items()}
    points = [[round(x, 3) for x in point] for point in problem.key[0].tolist()]
    return {**data, "points": points, "reach": reach, "grid": grid}
