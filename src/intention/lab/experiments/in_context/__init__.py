"""In-context regression: predict y along a sequence of pairs of one linear map, from the pairs before."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from intention.lab.core.device import answer
from intention.lab.core.results import Json
from intention.lab.core.train import Plan, train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.in_context.claims import DRIFT, claims, finding
from intention.lab.experiments.in_context.figures import plot
from intention.lab.experiments.in_context.model import CAN_FORGET, MODELS, build, kalman, ridge
from intention.lab.experiments.in_context.task import Pairs, pairs
from intention.lab.experiments.sequences import GATED, OURS, RATES, Gated, check, check_heads, plan

__all__ = [
    "EXCLUSIVE",
    "PLACE",
    "PRESETS",
    "RATES",
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

TITLE = "In-context linear regression"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 35, "standard": 4500}  # on one core, all runs
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
- Gated networks have the gated layers of the language model (`nn.GatedIntention`) in the place of these, with those of
  their parts that are linear, as what is regressed is: input and forgetting gates where the mixer can use them; no
  convolution (a token holds its pair), no SiLU, no output gate, no norm before a mixer or at the end, no positions.
  Queries and keys have length 1 in the delta rules, which need it, and not in the others. These parts were chosen for
  Intention, with a seed that is not published, and are the same for all: it had 14 times the error of exact ridge with
  unit keys, 2.2 times without, 2.0 also without the output gate, 2.1 without the norms, and 1.7 without both. Numbers
  of parameters are within 3% of each other.
- With drift, w loses a share of its variance at each position (`drift`) and gets as much that is new, in fewer
  dimensions (`drift_dims`). Kalman's filter, which knows drift and noise, is then the mean of y given all that was
  seen. The mixers that can forget run with their forgetting gate and without; the delta rule that forgets is the gated
  one.
- All models get the same tasks and the same number of steps. The plain networks share one learning rate
  (`learning_rate`): of 0.001, 0.003 and 0.01, tried for the Transformer with seed 0 at the quick size, the best one.
  The one layer has another (`layer_rate`), of 0.003, 0.03 and 0.1 the best with seed 0: its α has to go from 1 to 0.01,
  and Adam moves log α by no more than the rate in a step. The rates of gated networks were searched with half of
  the steps and a seed that is not published, on 0.001, 0.003 and 0.01: the best is 0.01 for Intention, at the edge (at
  0.03 no network with norms and an output gate learnt anything), and 0.003 for the others; for the gated delta rule
  0.01 was not tried with these parts.
- Rates with drift are those without.
- Trained on y with its noise, judged by the error against w'x without it, which would otherwise hide in the noise. The
  error is that of positions with at least d pairs before them.
- `paper` is `standard`.
"""


@dataclass(frozen=True)
class Config:
    """In-context linear regression."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(5)
    gated_seeds: int = chooses(3)
    drift: float = chooses(0.02)  # of the variance of coefficients, at each position; 0 leaves these runs out
    drift_dims: int = chooses(8)
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
    intention_gated: Gated = Gated(1e-2)
    sigma_intention_gated: Gated = Gated(3e-3)
    attention_gated: Gated = Gated(3e-3)
    linear_attention_gated: Gated = Gated(3e-3)
    delta_gated: Gated = Gated(3e-3)
    gated_delta_gated: Gated = Gated(3e-3)

    def __post_init__(self) -> None:
        check(self, MODELS, dims=1, evaluation_tasks=2, gated_seeds=1, drift_dims=1)
        plan(self, self.layer_rate)
        check_heads(self.width, self.heads)
        require(self.length > self.dims, f"length must be more than dims, got {self.length} pairs, {self.dims} dims")
        require(self.length > self.drift_dims, f"length must be more than drift_dims, got {self.length} pairs")
        require(0 <= self.drift < 1, f"drift must be in [0, 1), got {self.drift}")
        require(0 < self.noise < math.inf, f"noise must be > 0 and finite, got {self.noise}")
        require(0 < self.alpha < math.inf, f"alpha must be > 0 and finite, got {self.alpha}")


STANDARD = Config()
QUICK = replace(
    STANDARD,
    models=("intention", "informer", "transformer", "intention_gated", "delta_gated", "gated_delta_gated"),
    seeds=1,
    gated_seeds=1,
    steps=200,
    dims=8,
    length=32,
    width=32,
    heads=2,
    evaluation_tasks=200,
)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    plain = [name for name in config.models if name not in GATED]
    gated = [name for name in config.models if name in GATED]
    found = [Job("in_context", config, name, seed) for seed in range(config.seeds) for name in (*plain, "references")]
    asked: list[tuple[str, Json]] = [(name, {}) for name in gated]
    if config.drift and gated:
        at = {"drift": config.drift, "dims": config.drift_dims}
        asked += [(name, {**at, "forgets": forgets}) for name in gated for forgets in _forgetting(name)]
        asked += [("references", at)]
    return found + [
        Job("in_context", config, name, seed, at) for seed in range(config.gated_seeds) for name, at in asked
    ]


def _forgetting(name: str) -> tuple[bool, ...]:
    """With and without; the gated delta rule without is the delta rule."""
    if name == "gated_delta_gated":
        return (True,)
    return (True, False) if name in CAN_FORGET else (False,)


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    drift, dims = job.at.get("drift", 0.0), job.at.get("dims", config.dims)
    sample = partial(pairs, dims=dims, length=config.length, noise=config.noise, drift=drift)
    held_out = sample(config.evaluation_tasks, torch.Generator().manual_seed(1_000_000 + job.seed))
    told = partial(_measure, metric=DRIFT if drift else "mse", data={**job.at, "dims": dims})
    if job.model == "references":
        least = {"kalman": kalman(held_out, config.noise, drift)} if drift else {}
        for name, predicted in {
            **least,
            "ridge": ridge(held_out, config.noise),
            "zero": torch.zeros_like(held_out.y),
        }.items():
            yield told(_errors(predicted, held_out), model=name)
        return
    model = _built(job, dims)

    def measured(model: nn.Module) -> dict[str, float]:
        return {"mse": float(_errors(_predict(model, held_out), held_out)[:, dims:].mean())}

    asked = None if drift else measured  # along the way no figure shows drift
    for entry in train(model, sample, loss, _plan(job), seed=job.seed, place=place, evaluate=asked):
        yield Measure("mse during training", entry["mse"], entry["step"])
    yield told(_errors(_predict(model, held_out), held_out))


def _built(job: Job, dims: int) -> nn.Module:
    config: Config = job.config
    torch.manual_seed(job.seed)
    sizes = {"width": config.width, "heads": config.heads, "layers": config.layers, "alpha": config.alpha}
    return build(job.model, dims, **sizes, forgets=job.at.get("forgets"))


def _plan(job: Job) -> Plan:
    config: Config = job.config
    if job.model in GATED:
        own: Gated = getattr(config, job.model)
        return plan(config, own.learning_rate, own.weight_decay)
    return plan(config, config.layer_rate if job.model == "intention" else config.learning_rate)


def loss(model: nn.Module, drawn: Pairs) -> Tensor:
    return (model(drawn.x, drawn.y) - drawn.y).square().mean()


def _predict(model: nn.Module, drawn: Pairs, size: int = 100) -> Tensor:
    return torch.cat([answer(model, x, y) for x, y in zip(drawn.x.split(size), drawn.y.split(size), strict=True)])


def _errors(predicted: Tensor, drawn: Pairs) -> Tensor:
    return (predicted - drawn.clear).square().squeeze(-1)  # (tasks, positions)


def _measure(errors: Tensor, *, metric: str, data: Json, model: str | None = None) -> Measure:
    """The mean from position `dims` on with its interval over tasks, and the mean at each position."""
    each = errors[:, data["dims"] :].mean(-1)
    mean, half = float(each.mean()), 1.96 * float(each.std()) / len(each) ** 0.5
    by_position = [float(f"{error:.6g}") for error in errors.mean(0)]
    return Measure(metric, mean, None, (mean - half, mean + half), {**data, "by position": by_position}, model)
