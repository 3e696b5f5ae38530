"""Anomaly detection: which of 10 images is of another class? Five -formers, and rules without training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.lab import data
from intention.lab.experiments.anomaly_claims import ASKED, claims
from intention.lab.experiments.anomaly_figures import plot
from intention.lab.experiments.base import Job, Measure, Place, chooses, require
from intention.lab.models.anomaly import MODELS, STARTS, OddOneOut, build
from intention.lab.tasks.anomaly import Sets, Split, lonely, lowest_cosine, sample, split, whitening
from intention.lab.train import Plan, train

__all__ = ["EXCLUSIVE", "PLACE", "PRESETS", "READING", "SECONDS", "TITLE", "Config", "claims", "jobs", "plot", "run"]

TITLE = "Anomaly detection"
PLACE = "section 5.5, Table 3, appendix “Anomaly detection”"
EXCLUSIVE = False
SECONDS = {}
READING = """
"""

PLAIN = {"mixed": 0.0, "dropout": 0.0, "weight_decay": 0.0, "start": "random"}  # the paper's recipe
PLAIN_LAYERS = 1


@dataclass(frozen=True)
class Config:
    """Anomaly detection."""

    models: tuple[str, ...] = chooses(MODELS)
    layers: tuple[int, ...] = chooses((1, 4))
    seeds: int = chooses(3)
    data: str = chooses("auto")  # a named set, a path, or auto: cifar100-features if it is there, else built-in glyphs
    plain: bool = chooses(True)  # also train with the paper's recipe alone: one layer, the first seed
    items: int = 10
    dims: int = 512  # principal components of the features
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

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        require(bool(self.layers), "layers must name at least one depth, got none")
        require(min(self.layers, default=1) >= 1, f"layers must be at least 1, got {self.layers}")
        require(self.items >= 3, f"items must be at least 3, or none of them is the odd one, got {self.items}")
        for name, least in (("seeds", 1), ("dims", 1), ("hidden", 1), ("evaluation_sets", 2), ("evaluations", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        fits = self.heads >= 1 and self.width >= 2 and self.width % self.heads == 0
        require(fits, f"width must be a multiple of heads, got {self.width} and {self.heads}")
        for name in ("input_dropout", "dropout"):
            require(0 <= getattr(self, name) < 1, f"{name} must be in [0, 1), got {getattr(self, name)}")
        require(0 <= self.mixed <= 1, f"mixed must be in [0, 1], got {self.mixed}")
        require(self.start in STARTS, f"start must be one of {STARTS}, got {self.start!r}")
        self.plan()

    def plan(self) -> Plan:
        return Plan(
            self.steps,
            self.batch,
            self.learning_rate,
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
STANDARD = replace(PAPER, seeds=2, dims=128, steps=700, learning_rate=1e-3, width=256, hidden=512)
QUICK = replace(STANDARD, dims=64, steps=150, width=64, hidden=128, batch=32, evaluation_sets=2000, evaluations=2)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    """The data are named and read here, so that data that do not serve fail before any work."""
    config = replace(config, data=data.choose(config.data, "cifar100-features"))
    _split(config, 0)
    at = {"data": config.data}
    found = [Job("anomaly", config, "rules", seed, at) for seed in range(config.seeds)]
    for seed in range(config.seeds):
        for layers in config.layers:
            found += [Job("anomaly", config, model, seed, {**at, "layers": layers}) for model in config.models]
    if config.plain and PLAIN_LAYERS in config.layers:
        plain = {**at, "layers": PLAIN_LAYERS, "recipe": "plain"}
        found += [Job("anomaly", config, model, 0, plain) for model in config.models]
    return found


def _split(config: Config, seed: int) -> Split:
    loaded = data.load(config.data)
    return split(loaded, seed, dims=config.dims, items=config.items, validate=config.validate)


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    pools = _split(config, job.seed)
    asked = {}
    for number, name in enumerate(ASKED):
        # the same sets for all models of a seed
        generator = torch.Generator().manual_seed(1_000_000 + 2 * job.seed + number)
        asked[name] = sample(getattr(pools, name), config.evaluation_sets, generator, items=config.items)
    if job.model == "rules":
        yield from _rules(pools, asked)
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
    for entry in train(model, training, _loss, config.plan(), seed=job.seed, place=place, evaluate=evaluate):
        for name in ASKED:
            yield Measure("accuracy during training", entry[name], entry["step"], data={"asked": name, **about})
    model.eval()
    for name, sets in asked.items():
        yield _accuracy(_found(model, sets), {"asked": name, **about})


def _rules(pools: Split, asked: dict[str, Sets]) -> Iterator[Measure]:
    white = whitening(pools.train)
    for name, sets in asked.items():
        x = sets.items
        scores = {
            "cosine": lowest_cosine(x),
            "nearest": lonely(x),
            "whitened": lowest_cosine(TF.normalize(x @ white, dim=-1)),
        }
        for rule, score in scores.items():
            yield _accuracy((score.argmax(-1) == sets.outlier).float(), {"asked": name}, rule)
        yield Measure("accuracy", 1 / x.shape[1], data={"asked": name}, model="chance")


def _loss(model: nn.Module, sets: Sets) -> Tensor:
    return TF.cross_entropy(model(sets.items), sets.outlier)


@torch.no_grad()
def _found(model: nn.Module, sets: Sets) -> Tensor:
    """1 for each set whose outlier has the highest logit, else 0."""
    answers = torch.cat([model(items).argmax(-1) for items in sets.items.split(500)])
    return (answers == sets.outlier).float()


def _accuracy(found: Tensor, about: dict[str, object], model: str | None = None) -> Measure:
    """The share of sets, and its 95% interval by Wilson's formula."""
    n, share = len(found), float(found.mean())
    z = 1.96
    middle, wide = share + z * z / (2 * n), z * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    ends = ((middle - wide) / (1 + z * z / n), (middle + wide) / (1 + z * z / n))
    return Measure("accuracy", share, None, ends, {"sets": n, **about}, model)
