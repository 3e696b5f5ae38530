"""Anomaly detection: which of 10 images is of another class? Five -formers, and rules without training."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab import data
from intention.lab.core.device import answer
from intention.lab.core.results import Json
from intention.lab.core.train import Plan, train
from intention.lab.experiments.anomaly.claims import SPLITS, claims, finding
from intention.lab.experiments.anomaly.figures import plot
from intention.lab.experiments.anomaly.model import MODELS, STARTS, OddOneOut, build
from intention.lab.experiments.anomaly.task import (
    Sets,
    Split,
    SplitBy,
    lonely,
    lowest_cosine,
    over_images,
    sample,
    split,
    whitening,
)
from intention.lab.experiments.base import Job, Measure, Place, added, chooses, require

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

TITLE = "Anomaly detection"
PLACE = "section 5.5, Table 3, appendix “Anomaly detection”"
EXCLUSIVE = False
SCORE = "error"
RATES = (1e-4, 3e-4, 1e-3, 3e-3)
SECONDS = {"quick": 110, "standard": 1000}  # on one core, all runs; standard: from runs of 700 steps
READING = """
- A set has 10 items, 9 of one class and 1 of another, at a random place. One linear logit per item, softmax over the
  items, cross-entropy, no positions. X is projected to the width of the layers; 4 heads share that width; Adam.
  Attention is scaled by 1/√d; α starts at sigmoid(0).
- "Splits are done over labels", 50,000 to 10,000, would be 83.3 classes: 83 classes are trained on and 17 are unseen,
  drawn anew for each seed. Asked for are unseen classes (all 600 images of each) and, apart from them, test images of
  the seen classes. 50,000 and 10,000 are also CIFAR-100's own images of training and test: with `--splits images` all
  classes are trained on, and other images of them are asked for. Both splits are judged.
- Where parts of the data have classes of their own, those of "test" are unseen and a sixth of the images of each class
  of training is kept back. Intervals are over 4000 sets a seed (2000 in `quick`), or Student's over seeds where that is
  wider.
- Features: those of an ImageNet MobileNetV2 stand in for the paper's ResNet34. They are centred and reduced to 128
  principal components (fitted to the images of training), of length 1. Images without features (the built-in glyphs)
  are treated so as pixels. Rules read the features as they came, but for their length.
- The paper's recipe alone (random start, input dropout of 20%) fits the seen classes and falls behind the rule "lowest
  mean cosine" on unseen ones. What was tried against that, on classes of training that played the unseen ones
  (`--validate`), one seed that is not published, one layer, accuracy on such classes. Runs differ in length and width,
  so lines compare only within themselves; differences below 0.02 are within the noise:
  weight decay 0.1: 0.726 → 0.729; input dropout 50%: 0.711; signs of components flipped per set: 0.525 (half of them)
  and 0.720 (a tenth); sets of mixed classes: 0.745 (half of them) and 0.738 (all), all Transformer, 1500 steps. Random
  means of classes: 0.717 → 0.654; harder outliers: 0.709; half-whitened input: 0.709 (Transformer, 1000 steps).
  A start that keeps angles: Lin-Transformer 0.723 → 0.770, but Transformer 0.708. With, besides, x − mean as the start
  and small queries and keys: Transformer 0.767; with queries and keys of the usual size only 0.589. Informer: 0.63 with
  the usual size, 0.73 with 0.3 of it, 0.72 to 0.73 with 0.1. Dropout 0.2 in the layers: Lin-Transformer 0.723 → 0.749.
- Kept, for all ten models alike: that start (`--start geometry`), half of the training sets from mixed classes, and
  dropout of 0.1 in the layers. It was chosen for what it did for Transformer and Lin-Transformer, and Informers gain
  less from it: their rank says as much about this start as about the layers. Runs with the paper's recipe alone, one
  layer and one seed, stand beside. As each seed draws its own unseen classes out of 100, those of the published seeds
  overlap with the classes that were used to choose: no run was trained on its own unseen classes, but the choice is
  not independent of all of them.
- The learning rate is the same for all: 1e-3, and 5e-5 in `paper`. No grid was searched; 3e-4 was tried once (0.723
  against 0.726). A model may have its own (`--neural_process.learning_rate`), to be found by `sweep anomaly --search
  --validate`. `standard` has width 256 and 350 steps of 64 sets, far from the paper's 1024 and 100 epochs, and ends
  before accuracies stop rising.
- A run that knows less than the rule "lowest mean cosine" about the classes of its training has not learnt: no other
  one is above it.
- Why not 94%: not known. Models are better on seen classes by 8 to 9 points, with the same features, so a split of
  images rather than of labels would explain a part. Other features, width and length were not tested.
- On items of length 1 the largest distance to the mean is the same rule as the lowest mean cosine. "Half-whitening" is
  W^-1/4 with W the covariance within the classes of training: a linear rule that is fitted, not a trivial one.
"""

PLAIN = {"mixed": 0.0, "dropout": 0.0, "weight_decay": 0.0, "start": "random"}  # the paper's recipe
PLAIN_LAYERS = 1


@dataclass(frozen=True)
class Own:
    """What a model has of its own."""

    learning_rate: float = 0.0  # 0: that of all


@dataclass(frozen=True)
class Config:
    """Anomaly detection."""

    models: tuple[str, ...] = chooses(MODELS)
    layers: tuple[int, ...] = chooses((1, 4))
    seeds: int = chooses(3)
    data: str = chooses("auto")  # a named set, a path, or auto: cifar100-features if it is there, else built-in glyphs
    splits: tuple[SplitBy, ...] = chooses(("labels",))  # what is held out: classes, or images of all classes
    plain: bool = chooses(True)  # also train with the paper's recipe alone: one layer, the first seed
    items: int = 10
    dims: int = 512  # principal components of the features; 0: the features as they are
    steps: int = 65_000  # 100 epochs of 41,500 images in batches of 64 sets
    batch: int = 64
    learning_rate: float = 5e-5
    width: int = 1024
    hidden: int = 2048
    heads: int = 4
    input_dropout: float = 0.2
    dropout: float = 0.1  # inside the layers
    mixed: float = 0.5  # share of training sets from virtual classes
    weight_decay: float = 0.0
    start: Literal["random", "geometry"] = "geometry"
    evaluation_sets: int = 4000
    evaluations: int = 5  # during training
    validate: bool = False  # to choose settings: classes of training play the role of the unseen ones
    neural_process: Own = added(Own())
    linear_attention: Own = added(Own())
    intention: Own = added(Own())
    attention: Own = added(Own())
    sigma_intention: Own = added(Own())

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        require(bool(self.layers), "layers must name at least one depth, got none")
        require(min(self.layers, default=1) >= 1, f"layers must be at least 1, got {self.layers}")
        require(self.items >= 3, f"items must be at least 3, or none of them is the odd one, got {self.items}")
        for name, least in (("seeds", 1), ("dims", 0), ("hidden", 1), ("evaluation_sets", 2), ("evaluations", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        fits = self.heads >= 1 and self.width >= 2 and self.width % self.heads == 0
        require(fits, f"width must be a multiple of heads, got {self.width} and {self.heads}")
        for name in ("input_dropout", "dropout"):
            require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), got {getattr(self, name)}")
        require(0 <= self.mixed <= 1, f"mixed must be in [0, 1], got {self.mixed}")
        unknown = set(self.splits) - set(SPLITS)
        require(not unknown, f"splits must be of {', '.join(SPLITS)}, got {', '.join(sorted(unknown))}")
        for model in MODELS:
            rate = getattr(self, model).learning_rate
            require(0 <= rate < math.inf, f"{model}.learning_rate must be >= 0 (0: the shared one), got {rate}")
        require(self.start in STARTS, f"start must be one of {STARTS}, got {self.start!r}")
        self.plan()

    def plan(self, model: str = "") -> Plan:
        """`model`: the rate is its own, where it has one."""
        own = getattr(self, model).learning_rate if model else 0.0
        return Plan(
            self.steps,
            self.batch,
            own or self.learning_rate,
            warmup=100,
            weight_decay=self.weight_decay,
            evaluate_every=max(1, self.steps // self.evaluations),
        )

    def build(self, model: str, dims: int, layers: int) -> OddOneOut:
        return build(
            model,
            dims,
            layers=layers,
            width=self.width,
            hidden=self.hidden,
            heads=self.heads,
            input_dropout=self.input_dropout,
            dropout=self.dropout,
            start=self.start,
        )


PAPER = Config()
STANDARD = replace(PAPER, seeds=2, dims=128, steps=350, learning_rate=1e-3, width=256, hidden=512)
QUICK = replace(STANDARD, dims=64, steps=150, width=64, hidden=128, batch=32, evaluation_sets=2000, evaluations=2)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    """The data are named here, once for all runs; a user's own that do not serve fail before any work."""
    config = replace(config, data=data.choose(config.data, "cifar100-features"))
    if config.data not in data.NAMES:  # to read a known set takes seconds, and a report of its rows needs no features
        for by in config.splits:
            _split(config, 0, by)
    return [job for by in config.splits for job in _jobs(config, by)]


def _jobs(config: Config, by: SplitBy) -> list[Job]:
    at: Json = {"data": config.data} | ({} if by == "labels" else {"split": by})
    found = [Job("anomaly", config, "rules", seed, at) for seed in range(config.seeds)]
    for seed in range(config.seeds):
        for layers in config.layers:
            found += [Job("anomaly", config, model, seed, {**at, "layers": layers}) for model in config.models]
    if config.plain and PLAIN_LAYERS in config.layers and by == "labels":
        plain = {**at, "layers": PLAIN_LAYERS, "recipe": "plain"}
        found += [Job("anomaly", config, model, 0, plain) for model in config.models]
    return found


def _split(config: Config, seed: int, by: SplitBy) -> Split:
    loaded = data.load(config.data)
    if by == "images":
        return over_images(loaded, seed, dims=config.dims, items=config.items, validate=config.validate)
    return split(loaded, seed, dims=config.dims, items=config.items, validate=config.validate)


def _asked(pools: Split, config: Config, seed: int, by: SplitBy) -> dict[str, Sets]:
    """The same sets for all models and rules of a seed."""
    found = {}
    for number, name in enumerate(SPLITS[by]):
        generator = torch.Generator().manual_seed(1_000_000 + 2 * seed + number)
        found[name] = sample(getattr(pools, name), config.evaluation_sets, generator, items=config.items)
    return found


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    by: SplitBy = job.at.get("split", "labels")
    pools = _split(config, job.seed, by)
    asked = _asked(pools, config, job.seed, by)
    if job.model == "rules":
        whole = _asked(_split(replace(config, dims=0), job.seed, by), config, job.seed, by)
        yield from _rules(whitening(pools.train), asked, whole)
        return
    recipe: str = job.at.get("recipe", "ours")
    if recipe == "plain":
        config = replace(config, **PLAIN)
    layers: int = job.at["layers"]
    torch.manual_seed(job.seed)
    model = config.build(job.model, pools.train.x.shape[-1], layers)
    training = partial(sample, pools.train, items=config.items, mixed=config.mixed)

    def evaluate(model: nn.Module) -> dict[str, float]:
        return {name: float(_found(model, sets).mean()) for name, sets in asked.items()}

    about = {"layers": layers, "recipe": recipe}
    plan = config.plan(job.model)
    for entry in train(model, training, _loss, plan, seed=job.seed, place=place, evaluate=evaluate):
        for name in asked:
            yield Measure("accuracy during training", entry[name], entry["step"], data={"asked": name, **about})
    model.eval()
    yield Measure("error", 1 - float(_found(model, asked[SPLITS[by][0]]).mean()), data=about)
    for name, sets in asked.items():
        yield _accuracy(_found(model, sets), {"asked": name, **about})


def _rules(white: Tensor, asked: dict[str, Sets], whole: dict[str, Sets]) -> Iterator[Measure]:
    """`whole`: the same sets with the features as they came, of which the models get the principal components."""
    for name, sets in asked.items():
        scores = {
            "cosine": lowest_cosine(whole[name].items),
            "nearest": lonely(whole[name].items),
            "whitened": lowest_cosine(TF.normalize(sets.items @ white, dim=-1)),
        }
        for rule, score in scores.items():
            yield _accuracy((score.argmax(-1) == sets.outlier).float(), {"asked": name}, rule)
        yield Measure("accuracy", 1 / sets.items.shape[1], data={"asked": name}, model="chance")


def _loss(model: nn.Module, sets: Sets) -> Tensor:
    return TF.cross_entropy(model(sets.items), sets.outlier)


@torch.no_grad()
def _found(model: nn.Module, sets: Sets) -> Tensor:
    """1 for each set whose outlier has the highest logit, else 0."""
    answers = torch.cat([answer(model, items).argmax(-1) for items in sets.items.split(500)])
    return (answers == sets.outlier).float()


def _accuracy(found: Tensor, about: dict[str, object], model: str | None = None) -> Measure:
    """The share of sets, and its 95% interval by Wilson's formula."""
    n, share = len(found), float(found.mean())
    z = 1.96
    middle, wide = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    ends = ((middle - wide) / (1 + z * z / n), (middle + wide) / (1 + z * z / n))
    return Measure("accuracy", share, None, ends, {"sets": n, **about}, model)
