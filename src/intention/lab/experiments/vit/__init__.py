"""A small vision transformer with the mixer exchanged: attention, σIntention, Intention."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab import data
from intention.lab.core.device import answer, moved
from intention.lab.core.train import train
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.experiments.sequences import OURS, check, check_heads, plan
from intention.lab.experiments.vit.claims import claims, finding
from intention.lab.experiments.vit.figures import plot
from intention.lab.experiments.vit.model import MODELS, ViT, step_times
from intention.lab.experiments.vit.task import Images, Pools, sample, split

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

TITLE = "A small ViT by its mixer"
PLACE = OURS
EXCLUSIVE = False
SCORE = "error"
RATES = (3e-4, 1e-3, 3e-3, 1e-2)  # tried for every mixer
SECONDS: dict[str, float] = {}
PART = 500  # images that are answered at once
READING = """
- The paper has no such experiment. The sentence "Intention as a mixer in a small ViT is more accurate than attention"
  was written before any run, and so was its rule: the 95% interval of the difference, seed by seed, lies above 0. Where
  attention is below three times the accuracy of guessing it has not learnt, and nothing is compared.
- Images of 28×28 in patches of 4×4, learnt positions, 4 layers of width 96 with 4 heads and 384 hidden units (norm
  first, GELU, no dropout), the mean over patches, one linear layer; cross-entropy, Adam, no augmentation. Mixers have
  their defaults: attention's 1/√d, Intention's α from sigmoid(0) and the scale of its output, σIntention's of variance.
- Data: the 64 training classes of miniImageNet at 28×28, or else the training classes of the built-in glyphs. Of each
  class 80% of the images are trained on, 10% choose the learning rate, 10% are asked about; drawn anew for each seed,
  the same for all mixers. All see the same batches.
- Learning rates are searched for each mixer on one grid (`sweep vit --search`), with a seed of its own, by the error on
  the 10% that choose.
- A step (forward and backward of one batch) is timed after training, by turns with attention of the same sizes.
- `paper` is `standard`.
"""


@dataclass(frozen=True)
class Rate:
    """What a mixer has of its own."""

    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        require(0 < self.learning_rate < math.inf, f"learning_rate must be > 0 and finite, got {self.learning_rate}")


@dataclass(frozen=True)
class Config:
    """A small ViT by its mixer."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(4)
    data: str = "auto"  # miniimagenet-64 if it is there, else built-in
    steps: int = 700
    batch: int = 64
    size: int = 28
    patch: int = 4
    width: int = 96
    heads: int = 4
    layers: int = 4
    clip: float = 1.0
    evaluations: int = 5  # during training
    timed: int = 10  # steps of each mixer
    attention: Rate = Rate()
    sigma_intention: Rate = Rate()
    intention: Rate = Rate()

    def __post_init__(self) -> None:
        check(self, MODELS, size=1, patch=1, timed=1)
        check_heads(self.width, self.heads)
        require(self.size % self.patch == 0, f"size must be a multiple of patch, got {self.size} and {self.patch}")
        plan(self, self.attention.learning_rate)


STANDARD = Config()
QUICK = replace(STANDARD, data="built-in", seeds=1, steps=30, batch=16, width=32, layers=2, evaluations=2, timed=3)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    return [Job("vit", config, model, seed) for seed in range(config.seeds) for model in config.models]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    name = data.choose(config.data, "miniimagenet-64")
    labelled = data.load(name, config.size).parts["train"]
    require(labelled.images, f"a ViT reads images, and {name} holds features; give a set of images to --data")
    pools = split(labelled, job.seed)

    def built(mixer: str) -> ViT:
        torch.manual_seed(job.seed)
        sizes = {"size": config.size, "patch": config.patch, "width": config.width, "heads": config.heads}
        channels = labelled.x.shape[-1]
        return ViT(mixer, classes=len(labelled.classes), channels=channels, layers=config.layers, **sizes)

    model = built(job.model)
    yield from _learn(model, pools, job, place, {"data": name, "classes": len(labelled.classes)})
    if job.model != "attention":
        batch = moved(sample(pools.train, config.batch, torch.Generator().manual_seed(job.seed)), place.device)
        pair = [model.train(), built("attention").to(place.device)]
        own, other = step_times(pair, lambda each: loss(each, batch), config.timed)
        yield Measure("seconds of a step", own)
        yield Measure("slowdown", own / other)


def _learn(model: ViT, pools: Pools, job: Job, place: Place, about: dict[str, object]) -> Iterator[Measure]:
    def measured(model: nn.Module) -> dict[str, float]:
        return {"accuracy": float(right(model, pools.chosen_by).mean())}

    planned = plan(job.config, getattr(job.config, job.model).learning_rate)
    draw = partial(sample, pools.train)
    history = train(model, draw, loss, planned, seed=job.seed, place=place, evaluate=measured)
    for entry in history:
        yield Measure("accuracy during training", entry["accuracy"], entry["step"])
    yield Measure("error", 1 - history[-1]["accuracy"])  # by which learning rates are chosen
    found = right(model, pools.test)
    mean = float(found.mean())
    half = 1.96 * (mean * (1 - mean) / len(found)) ** 0.5
    yield Measure("accuracy", mean, None, (max(0.0, mean - half), min(1.0, mean + half)), about)


def loss(model: nn.Module, images: Images) -> Tensor:
    return TF.cross_entropy(model(images.x), images.y)


def right(model: nn.Module, images: Images) -> Tensor:
    """1 for each image whose class is named, else 0."""
    said = torch.cat([answer(model, x).argmax(-1) for x in images.x.split(PART)])
    return (said == images.y).float()
