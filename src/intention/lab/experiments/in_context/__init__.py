"""In-context regression: predict y along a sequence of pairs of one linear map, from the pairs before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.in_context.claims import claims
from intention.lab.experiments.in_context.figures import plot
from intention.lab.experiments.in_context.model import MODELS, build, ridge
from intention.lab.experiments.in_context.task import Pairs, pairs
from intention.lab.experiments.sequences import OURS, check, check_heads, plan

__all__ = ["EXCLUSIVE", "PLACE", "PRESETS", "READING", "SECONDS", "TITLE", "Config", "claims", "jobs", "plot", "run"]

TITLE = "In-context linear regression"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 50, "standard": 1800}  # on one core, all runs
READING = """
- The paper has no such experiment. w ~ N(0, I), x ~ N(0, I), y = w'x + noise of standard deviation 0.1; at each
  position y is predicted from x there and the pairs before it, never from its own y.
- Exact ridge, α = the variance of the noise, is the mean of y given all that was seen: no model can have a smaller
  error in the mean. It is computed with `intention(is_causal=True)` in float64. "Predicting the mean" is 0.
- *Intention* is one causal Intention layer on x and y themselves. Learnt are a linear embedding of keys and queries,
  which is the identity at the start, and α, which starts at 1. It has the form of the answer built in; the others do
  not.
- *Informer*, *σIntention*, *Transformer*, *Linear attention* and *Delta rule* are the same network with another mixer:
  pre-norm layers of the language model (`InformerLM`) without positions. A token holds the pair before and x, so that
  no layer is needed to bring them together.
- All models get the same tasks and the same number of steps. The networks share one learning rate (`learning_rate`):
  of 0.001, 0.003 and 0.01, tried for the Transformer with seed 0 at the quick size, the best one. The one
  layer has another (`layer_rate`), of 0.003, 0.03 and 0.1 the best with seed 0: its α has to go from 1 to 0.01, and
  Adam moves log α by no more than the rate in a step.
- Trained on y with its noise, judged by the error against w'x without it, which would otherwise hide in the noise. The
  error is that of positions with at least d pairs before them.
- `paper` is `standard`.
"""


@dataclass(frozen=True)
class Config:
    """In-context linear regression."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(5)
    steps: int = 1100
    batch: int = 16
    dims: int = 16
    length: int = 64  # pairs of a sequence
    noise: float = 0.1
    width: int = 64
    heads: int = 4
    layers: int = 2
    alpha: float = 1.0  # of the one layer, at the start
    learning_rate: float = 3e-3
    layer_rate: float = 0.1  # learning rate of the one layer
    clip: float = 1.0
    evaluation_tasks: int = 500
    evaluations: int = 5  # during training

    def __post_init__(self) -> None:
        check(self, MODELS, dims=1, evaluation_tasks=2)
        plan(self, self.layer_rate)
        check_heads(self.width, self.heads)
        require(self.length > self.dims, f"length must be more than dims, got {self.length} pairs, {self.dims} dims")
        require(0 < self.noise < math.inf, f"noise must be > 0 and finite, got {self.noise}")
        require(0 < self.alpha < math.inf, f"alpha must be > 0 and finite, got {self.alpha}")


STANDARD = Config()
QUICK = replace(STANDARD, seeds=2, steps=300, dims=8, length=32, width=32, heads=2, evaluation_tasks=200)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    models = (*config.models, "references")
    return [Job("in_context", config, model, seed) for seed in range(config.seeds) for model in models]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    sample = partial(pairs, dims=config.dims, length=config.length, noise=config.noise)
    held_out = sample(config.evaluation_tasks, torch.Generator().manual_seed(1_000_000 + job.seed))
    if job.model == "references":
        for name, predicted in (("ridge", ridge(held_out, config.noise)), ("zero", torch.zeros_like(held_out.y))):
            yield _measure(_errors(predicted, held_out), config.dims, name)
        return
    torch.manual_seed(job.seed)
    model = build(
        job.model,
        config.dims,
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        alpha=config.alpha,
    )

    def measured(model: nn.Module) -> dict[str, float]:
        return {"mse": float(_errors(_predict(model, held_out), held_out)[:, config.dims :].mean())}

    rate = config.layer_rate if job.model == "intention" else config.learning_rate
    for entry in train(model, sample, loss, plan(config, rate), seed=job.seed, place=place, evaluate=measured):
        yield Measure("mse during training", entry["mse"], entry["step"])
    yield _measure(_errors(_predict(model, held_out), held_out), config.dims)


def loss(model: nn.Module, drawn: Pairs) -> Tensor:
    return (model(drawn.x, drawn.y) - drawn.y).square().mean()


@torch.no_grad()
def _predict(model: nn.Module, drawn: Pairs, size: int = 100) -> Tensor:
    return torch.cat([model(x, y) for x, y in zip(drawn.x.split(size), drawn.y.split(size), strict=True)])


def _errors(predicted: Tensor, drawn: Pairs) -> Tensor:
    return (predicted - drawn.clear).square().squeeze(-1)  # (tasks, positions)


def _measure(errors: Tensor, dims: int, model: str | None = None) -> Measure:
    """The mean from position `dims` on with its interval over tasks, and the mean at each position."""
    each = errors[:, dims:].mean(-1)
    mean, half = float(each.mean()), 1.96 * float(each.std()) / len(each) ** 0.5
    by_position = [float(f"{error:.6g}") for error in errors.mean(0)]
    data = {"dims": dims, "by position": by_position}
    return Measure("mse", mean, None, (mean - half, mean + half), data, model)
