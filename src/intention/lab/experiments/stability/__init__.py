"""Stability: small ridges in bfloat16, trained with and without an exact solve; and the errors of single solves."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention import causal_intention
from intention.lab.core.device import moved, of
from intention.lab.core.train import Diverged, train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.sequences import OURS, check, check_heads, plan
from intention.lab.experiments.stability import task
from intention.lab.experiments.stability.claims import claims, finding
from intention.lab.experiments.stability.figures import plot
from intention.lab.experiments.stability.model import CHUNK, Watched, build
from intention.lab.experiments.stability.task import Repeated, repeated

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

TITLE = "Small ridges in bfloat16"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 5, "standard": 900}  # on one core, all runs
READING = """
- The paper has no such experiment. Layers that solve for a ridge at every token are published with conjugate gradients
  and a floor under λ, the ridge (α elsewhere here): users report trainings that end in NaN. This asks what λ does to a
  training in bfloat16 autocast, with our solve and with theirs.
- *Intention* is `InformerLM(layer="gated")` as it comes, λ at the start as the row says, and learnable. *Conjugate
  gradients* is the same model with the same weights at the start; 30 steps take the place of the solve, forward and
  backward. Their arithmetic is that of published kernels: chunks of 64 tokens, sums before a chunk stored in
  bfloat16, factors of products in bfloat16 and their sums in float32, vectors of the iteration in float32, 1e-5 added
  to what is divided by.
- Sequences repeat a piece of random tokens with mistakes; asked is the next token. Keys come again, so that their
  matrix is near a singular one, and λ is what keeps it away.
- A run ends where its loss is not finite, which it is one step after a gradient that is not. The norm of the
  gradient is that before clipping. The learning rate is one for all; it was not searched.
- The table of errors trains nothing: keys and queries of length 1, normal values, one decay for all tokens, float32.
  An error is the norm of the difference to solves token by token in float64, over the norm of these, all tokens of all
  sequences together; the worst token, by its own norm over the mean norm, is beside it.
- `paper` is `standard`.
"""

MODELS = ("intention", "conjugate_gradients")


@dataclass(frozen=True)
class Config:
    """Small ridges in bfloat16."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)
    alphas: tuple[float, ...] = chooses((1.0, 1e-1, 1e-2, 1e-3, 1e-4))
    decays: tuple[float, ...] = chooses((0.99, 0.9, 0.5, 0.05))  # of the table of errors
    steps: int = 1000
    batch: int = 2
    length: int = 128  # tokens
    period: int = 24
    vocabulary: int = 32
    mistakes: float = 0.05
    width: int = 64
    heads: int = 2
    layers: int = 2
    iterations: int = 30  # of conjugate gradients
    learning_rate: float = 3e-3
    clip: float = 1.0
    evaluation_sequences: int = 50
    evaluations: int = 5  # during training
    fits: int = 4  # sequences of the table of errors
    fit_length: int = 256
    fit_dims: int = 64

    def __post_init__(self) -> None:
        sizes = {"period": 2, "vocabulary": 2, "iterations": 1, "evaluation_sequences": 2}
        check(self, MODELS, **sizes, fits=1, fit_length=1, fit_dims=1)
        check_heads(self.width, self.heads)
        fits = self.length >= 1 and (self.length < CHUNK or self.length % CHUNK == 0)
        require(fits, f"length must be less than {CHUNK} or a multiple of it, got {self.length}")
        require(0 <= self.mistakes <= 1, f"mistakes must be a share, 0 to 1, got {self.mistakes}")
        require(bool(self.alphas), "alphas must name at least one, got none")
        for alpha in self.alphas:
            require(0 < alpha < math.inf, f"alphas must be > 0 and finite, got {alpha}")
        for decay in self.decays:
            require(0 < decay <= 1, f"decays must be > 0 and at most 1, got {decay}")

    def sample(self, batch: int, generator: torch.Generator) -> Repeated:
        sizes = {"length": self.length, "period": self.period, "vocabulary": self.vocabulary}
        return repeated(batch, generator, **sizes, mistakes=self.mistakes)


STANDARD = Config()
QUICK = replace(
    STANDARD,
    seeds=1,
    alphas=(1.0, 1e-4),
    decays=(0.9, 0.05),
    steps=40,
    length=64,
    layers=1,
    evaluation_sequences=10,
    evaluations=1,
    fits=2,
    fit_length=128,
    fit_dims=32,
)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    errors = [
        Job("stability", config, "errors", 0, {"alpha": alpha, "decay": decay})
        for alpha in config.alphas
        for decay in config.decays
    ]
    return errors + [
        Job("stability", config, model, seed, {"alpha": alpha})
        for seed in range(config.seeds)
        for alpha in config.alphas
        for model in config.models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    if job.model == "errors":
        yield from solved(job.config, **job.at)
    else:
        yield from trained(job, place)


def trained(job: Job, place: Place) -> Iterator[Measure]:
    """One training: whether it stayed finite, the norms of its gradients, and what it learnt."""
    config: Config = job.config
    alpha: float = job.at["alpha"]
    held_out = config.sample(config.evaluation_sequences, torch.Generator().manual_seed(1_000_000 + job.seed))
    torch.manual_seed(job.seed)
    inner = build(
        job.model,
        vocabulary=config.vocabulary,
        width=config.width,
        heads=config.heads,
        layers=config.layers,
        alpha=alpha,
        steps=config.iterations,
    )
    model = Watched(inner, config.steps)

    def measured(model: nn.Module) -> dict[str, float]:
        return {"bits": float(loss(model, moved(held_out, of(model)))) / math.log(2)}

    try:
        history = train(model, config.sample, loss, plan(config), seed=job.seed, place=place, evaluate=measured)
        done, bits = config.steps, history[-1]["bits"]
    except Diverged:
        done, bits = int(model.step) - 1, math.nan
    yield Measure("steps that were finite", done, alpha)
    yield Measure("bits per token", bits, alpha)
    norms = model.norms()[:done]
    finite = norms[norms.isfinite()]
    every = max(1, config.steps // 100)
    curve = [[i, float(f"{norm:.4g}")] for i, norm in list(enumerate(norms.tolist()))[::every]]
    about = {"largest": float(finite.max()) if len(finite) else None, "by step": curve, "ridges": ridges(inner)}
    yield Measure("gradient", float(finite.median()) if len(finite) else math.nan, alpha, data=about)


def ridges(model: nn.Module) -> list[float]:
    """The smallest and the largest ridge after training."""
    found = [weight.detach().exp() for name, weight in model.named_parameters() if name.endswith("log_alpha")]
    return [float(f"{edge:.3g}") for edge in (min(x.min() for x in found), max(x.max() for x in found))]


def loss(model: nn.Module, drawn: Repeated) -> Tensor:
    return TF.cross_entropy(model(drawn.tokens[:, :-1]).flatten(0, 1), drawn.tokens[:, 1:].flatten())


@torch.no_grad()
def solved(config: Config, alpha: float, decay: float) -> Iterator[Measure]:
    """The errors of three ways to solve the same fits."""
    drawn = task.fits(config.fits, torch.Generator().manual_seed(0), length=config.fit_length, dims=config.fit_dims)
    want = task.token_by_token(drawn, alpha, decay, torch.float64)
    found = {
        "intention": causal_intention(*drawn, alpha=alpha, decay=torch.full(drawn.key.shape[:-1], decay)),
        "solve": task.token_by_token(drawn, alpha, decay, torch.float32),
        "conjugate_gradients": task.conjugate_gradients(drawn, alpha, decay, config.iterations),
    }
    for name, answers in found.items():
        off = (answers.double() - want).norm(dim=-1)
        worst = float(off.max() / want.norm(dim=-1).mean())
        about = {"decay": decay, "worst token": worst}
        yield Measure("error", float(off.norm() / want.norm()), alpha, data=about, model=name)
