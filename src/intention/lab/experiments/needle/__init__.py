"""A needle in a stream: a pair of a key and a value is asked for after thousands of tokens that say nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab.core.device import moved, of
from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.needle.claims import claims, finding
from intention.lab.experiments.needle.figures import plot
from intention.lab.experiments.needle.model import MODELS, build, read, size
from intention.lab.experiments.needle.task import Needle, needle
from intention.lab.experiments.sequences import OURS, check, check_heads, plan
from intention.nn import InformerLM

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

TITLE = "A pair after thousands of tokens"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 6, "standard": 1100}  # on one core, all runs
READING = """
- The paper has no such experiment. A sequence begins with P pairs of a key and a value. Filler follows, tokens of
  another kind, drawn at random. Then the P keys come again, in another order; asked is the value of each of them.
- Models are trained on short filler, 0 to `filler` tokens, each batch with a length drawn at random, and asked after
  much more than they ever saw (`lengths`). They read it as a stream, in pieces of `chunk` tokens, with a state between
  two pieces; rows say how many bytes that state has.
- All are `InformerLM(layer="gated")` with the same parts: short convolution, unit keys, input and output gates. They
  differ in the mixer: Intention with a forgetting gate and without one, linear attention and the delta rule
  with one, the delta rule without, and softmax attention to the last `window` tokens, with rotary positions. With L
  layers of it, nothing is known of tokens more than L · `window` before.
- The forgetting gate starts between .99 and .9999, and sees the token: to keep a pair for 32,000 tokens it has to learn
  to stay open on filler.
- All models get the same sequences and the same number of steps. Each run trains once for each of two learning rates
  (`rates`) and goes on with the one that has the larger accuracy at the lengths of training.
- Who has not learnt the task cannot be compared: a model counts where it answers 90% at the lengths of training.
  Guessing one of the values that were shown gives 1/P.
- `paper` is `standard`.
"""


@dataclass(frozen=True)
class Config:
    """A pair after thousands of tokens."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)
    steps: int = 400
    batch: int = 16
    pairs: int = 4
    filler: int = 48  # the most in training
    keys: int = 16
    values: int = 16
    lengths: tuple[int, ...] = (1024, 4096, 16384, 32768)
    chunk: int = 1024
    window: int = 64
    width: int = 32
    heads: int = 2
    layers: int = 2
    rates: tuple[float, ...] = (3e-3, 1e-2)  # of which the better one counts
    clip: float = 1.0
    evaluation_sequences: int = 50
    evaluations: int = 5  # during training

    def __post_init__(self) -> None:
        check(self, MODELS, pairs=1, filler=0, chunk=1, window=1, evaluation_sequences=2)
        check_heads(self.width, self.heads)
        most = min(self.keys, self.values)
        require(self.pairs <= most, f"pairs must be 1 to {most} (the keys and values there are), got {self.pairs}")
        require(bool(self.rates), "rates must name at least one, got none")
        for rate in self.rates:
            plan(self, rate)
        require(bool(self.lengths), "lengths must name at least one, got none")
        require(min(self.lengths) >= 0, f"lengths must be at least 0, got {min(self.lengths)}")

    def sample(self, batch: int, generator: torch.Generator, filler: int | None = None) -> Needle:
        if filler is None:
            filler = int(torch.randint(self.filler + 1, (), generator=generator))
        return needle(batch, generator, pairs=self.pairs, filler=filler, keys=self.keys, values=self.values)


STANDARD = Config()
QUICK = replace(
    STANDARD, seeds=1, steps=60, rates=(1e-2,), filler=8, lengths=(256, 1024), window=8, evaluation_sequences=10
)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    return [Job("needle", config, model, seed) for seed in range(config.seeds) for model in config.models]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    generator = torch.Generator().manual_seed(1_000_000 + job.seed)
    short = [config.sample(config.evaluation_sequences, generator) for _ in range(4)]
    model, history, rate = max((learnt(job, rate, place, short) for rate in config.rates), key=_ends)
    for entry in history:
        yield Measure("accuracy during training", entry["accuracy"], entry["step"])
    yield Measure("accuracy", history[-1]["accuracy"], config.filler, data={"trained": True, "rate": rate})
    for length in config.lengths:
        drawn = config.sample(config.evaluation_sequences, generator, length)
        yield from _streamed(model, drawn, length, config)


class Learnt(NamedTuple):
    """A trained model, its accuracies on the way, and the rate at which it learnt."""

    model: InformerLM
    history: list[dict[str, float]]
    rate: float


def learnt(job: Job, rate: float, place: Place, short: list[Needle]) -> Learnt:
    config: Config = job.config
    torch.manual_seed(job.seed)
    sizes = {"width": config.width, "heads": config.heads, "layers": config.layers, "window": config.window}
    model = build(job.model, vocabulary=2 * config.keys + config.values, **sizes)
    if place.folder is not None:
        folder = place.folder / f"rate{rate:g}"
        folder.mkdir(parents=True, exist_ok=True)
        place = replace(place, folder=folder)

    def measured(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float(torch.cat([_right(model, drawn) for drawn in short]).mean())}

    history = train(model, config.sample, loss, plan(config, rate), seed=job.seed, place=place, evaluate=measured)
    return Learnt(model, history, rate)


def _ends(trained: Learnt) -> float:
    return trained.history[-1]["accuracy"]


def _streamed(model: InformerLM, drawn: Needle, length: int, config: Config) -> Iterator[Measure]:
    """The share of right answers with its interval, and the bytes that one sequence needs between two tokens."""
    model.eval()
    right, held = [], 0
    for tokens, answers in zip(drawn.tokens.split(10), drawn.answers.split(10), strict=True):
        logits, streams = read(model, tokens.to(of(model)), config.pairs, config.chunk)
        right.append((logits.argmax(-1).cpu() == answers).float().mean(-1))
        held = size(streams) // len(tokens)
    found = torch.cat(right)
    mean, half = float(found.mean()), 1.96 * float(found.std()) / len(found) ** 0.5
    yield Measure("accuracy", mean, length, (max(0.0, mean - half), min(1.0, mean + half)))
    yield Measure("bytes", held, length)


def asked(model: nn.Module, drawn: Needle) -> Tensor:
    """Logits (B, P, tokens) at the keys that are asked for."""
    return model(drawn.tokens, need_streams=False)[0][:, -drawn.answers.shape[1] :]


def loss(model: nn.Module, drawn: Needle) -> Tensor:
    return TF.cross_entropy(asked(model, drawn).flatten(0, 1), drawn.answers.flatten())


@torch.no_grad()
def _right(model: nn.Module, drawn: Needle) -> Tensor:
    """The share of right answers of each sequence."""
    return (asked(model, moved(drawn, of(model))).argmax(-1).cpu() == drawn.answers).float().mean(-1)
