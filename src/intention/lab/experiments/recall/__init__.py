"""Associative recall: pairs of a key and a value, then the keys again; the model answers with their values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.recall.claims import claims
from intention.lab.experiments.recall.figures import plot
from intention.lab.experiments.recall.task import Recall, recall
from intention.lab.experiments.sequences import MIXERS, OURS, check, plan
from intention.nn import InformerLM

__all__ = ["EXCLUSIVE", "PLACE", "PRESETS", "READING", "SECONDS", "TITLE", "Config", "claims", "jobs", "plot", "run"]

TITLE = "Associative recall"
PLACE = OURS
EXCLUSIVE = False
SECONDS = {"quick": 70, "standard": 1200}  # on one core, all runs
READING = """
- The paper has no such experiment. A sequence holds P pairs of a key and a value, then the P keys alone in another
  order. The model is asked for the value of each of these (cross-entropy at those positions only). The keys
  of a sequence are distinct, and so are its values; keys and values are different tokens.
- The model is `InformerLM` with rotary positions and 2 layers, which differ in nothing but the mixer. No token sees
  the one before it without a mixer: the first layer has to bring key and value together (an induction head).
- One model is trained for all numbers of pairs: each batch has one of them, drawn at random. It is asked on sequences
  that training never saw, accuracies with their 95% intervals over sequences.
- The size of a head is the same at every width. Linear attention, the delta rule and Intention remember a matrix of
  that size for each head; attention and σIntention remember every token.
- All models get the same sequences and the same number of steps. Each has the better of two learning rates, 0.001 and
  0.003, by its mean accuracy with seed 0 at the size of `standard` (`rates`): Intention and σIntention the larger, the
  others the smaller. (0.01 was tried for attention alone, which learnt nothing.) Those of `quick` were not searched.
- There are 16 keys and 16 values because attention learns to recall these within the steps of `standard`; with 32 of
  each it did not begin to, in 1500 steps of seed 0.
- Who has not learnt the task cannot be compared: a case counts where the better of the two answers more than 2/P of
  the questions (90% for one pair or two). Guessing one of the values that were shown gives 1/P.
- `paper` is `standard`.
"""


@dataclass(frozen=True)
class Rates:
    """The learning rate of each mixer."""

    intention: float = 3e-3
    sigma_intention: float = 3e-3
    attention: float = 3e-3
    linear_attention: float = 3e-3
    delta: float = 3e-3


@dataclass(frozen=True)
class Config:
    """Associative recall."""

    models: tuple[str, ...] = chooses(MIXERS)
    seeds: int = chooses(3)
    widths: tuple[int, ...] = chooses((16, 32, 64))
    steps: int = 1000
    batch: int = 16
    pairs: tuple[int, ...] = (4, 8, 16)
    keys: int = 16
    values: int = 16
    head: int = 16  # size
    layers: int = 2
    rates: Rates = Rates(attention=1e-3, linear_attention=1e-3, delta=1e-3)  # searched
    clip: float = 1.0
    evaluation_sequences: int = 200  # for each number of pairs
    evaluations: int = 5  # during training

    def __post_init__(self) -> None:
        check(self, MIXERS, head=1, evaluation_sequences=2)
        for rate in vars(self.rates).values():
            plan(self, rate)
        require(bool(self.pairs), "pairs must name at least one number, got none")
        most = min(self.keys, self.values)
        for number in self.pairs:
            require(1 <= number <= most, f"pairs must be 1 to {most} (the keys and values there are), got {number}")
        require(bool(self.widths), "widths must name at least one, got none")
        for width in self.widths:
            fits = width >= self.head and width % self.head == 0
            require(fits, f"widths must be multiples of the size of a head, {self.head}; got {width}")

    def sample(self, batch: int, generator: torch.Generator, pairs: int | None = None) -> Recall:
        if pairs is None:
            pairs = self.pairs[int(torch.randint(len(self.pairs), (), generator=generator))]
        return recall(batch, generator, pairs=pairs, keys=self.keys, values=self.values)


STANDARD = Config()
QUICK = replace(STANDARD, seeds=2, widths=(32,), steps=600, pairs=(4, 8), rates=Rates(), evaluation_sequences=100)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    return [
        Job("recall", config, model, seed, {"width": width})
        for seed in range(config.seeds)
        for width in config.widths
        for model in config.models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    width: int = job.at["width"]
    generator = torch.Generator().manual_seed(1_000_000 + job.seed)
    held_out = {number: config.sample(config.evaluation_sequences, generator, number) for number in config.pairs}
    torch.manual_seed(job.seed)
    vocabulary = config.keys + config.values
    model = InformerLM(vocabulary, width, width // config.head, config.layers, mixer=job.model)

    def measured(model: nn.Module) -> dict[str, float]:
        return {"accuracy": sum(float(_right(model, drawn).mean()) for drawn in held_out.values()) / len(held_out)}

    for entry in train(
        model,
        config.sample,
        loss,
        plan(config, getattr(config.rates, job.model)),
        seed=job.seed,
        place=place,
        evaluate=measured,
    ):
        yield Measure("accuracy during training", entry["accuracy"], entry["step"], data={"width": width})
    for number, drawn in held_out.items():
        right = _right(model, drawn)
        mean, half = float(right.mean()), 1.96 * float(right.std()) / len(right) ** 0.5
        yield Measure("accuracy", mean, number, (max(0.0, mean - half), min(1.0, mean + half)), {"width": width})


def answers(model: nn.Module, drawn: Recall) -> Tensor:
    """Logits (B, P, tokens) at the keys that are asked for."""
    return model(drawn.tokens)[0][:, -drawn.answers.shape[1] :]


def loss(model: nn.Module, drawn: Recall) -> Tensor:
    return TF.cross_entropy(answers(model, drawn).flatten(0, 1), drawn.answers.flatten())


@torch.no_grad()
def _right(model: nn.Module, drawn: Recall, size: int = 100) -> Tensor:
    """The share of right answers of each sequence."""
    parts = zip(*(x.split(size) for x in drawn), strict=True)
    found = [answers(model, Recall(*part)).argmax(-1) for part in parts]
    return (torch.cat(found) == drawn.answers).float().mean(-1)
