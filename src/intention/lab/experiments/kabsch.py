"""Generalised Kabsch: learn to apply a rotation, scale and translation that 5 pairs of points show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from intention.lab.experiments.base import Claim, Job, Measure, Net, Place, Plot, chooses, label, require
from intention.lab.experiments.policy import check_net, loss, numbers, over_tasks, predict_in_parts
from intention.lab.models import references
from intention.lab.models.kabsch import MODELS, build
from intention.lab.results import Row, by_seed, estimate_log
from intention.lab.tasks import Episode, clouds, kabsch
from intention.lab.tasks.clouds import Cloud
from intention.lab.train import SCHEDULES, Plan, train

TITLE = "Generalised Kabsch"
PLACE = "section 5.4, Figures 10 and 11, appendix “Learning generalised Kabsch algorithm”"
EXCLUSIVE = False
READING = """
"""

BASELINES = ("attention", "neural_process", "mlp")
WITHOUT_TRAINING: dict[str, Callable[[Episode], Tensor]] = {
    "zero": references.zero,
    "ridge_raw": references.kabsch_ridge,
    "affine": references.affine,
    "umeyama": references.umeyama,
}


@dataclass(frozen=True)
class Config:
    """Generalised Kabsch."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(3)
    cloud: str = chooses("")  # file of points to map, npz, npy, ply or csv; its columns decide dims. Default: a rabbit
    dims: Literal[2, 3] = chooses(2)
    steps: int = 50_000
    batch: int = 64
    points: int = 5
    queries: int = 5
    noise: float = 0.05
    smallest: float = 0.5  # scale
    largest: float = 2.0
    evaluation_tasks: int = 2000
    evaluations: int = 10  # during training
    alpha: float = 0.1  # at the start
    schedule: str = "cosine"
    clip: float = 1.0
    intention: Net = Net((128, 128), (128, 128, 2))
    sigma_intention: Net = Net((128, 128), (128, 128, 2))
    linear_attention: Net = Net((128, 128), (128, 128, 2))
    attention: Net = Net((256, 256), (256, 256, 2), heads=5)
    neural_process: Net = Net((256, 256), (256, 256, 2))
    mlp: Net = Net((), (256, 256, 256, 10))

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        require(self.schedule in SCHEDULES, f"schedule must be one of {SCHEDULES}, got {self.schedule!r}")
        require(self.dims in (2, 3), f"dims must be 2 or 3, got {self.dims}")
        require(self.points > self.dims, f"points must be more than dims, got {self.points} in {self.dims} dimensions")
        for name, least in (("seeds", 1), ("queries", 1), ("evaluation_tasks", 2), ("evaluations", 1)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        require(0 < self.smallest <= self.largest, f"scale wants 0 < {self.smallest} <= {self.largest}")
        require(self.noise >= 0, f"noise must be >= 0, got {self.noise}")
        require(self.alpha > 0, f"alpha must be > 0, got {self.alpha}")
        for model in MODELS:
            check_net(model, getattr(self, model))
            self.plan(model)

    def plan(self, model: str) -> Plan:
        rate = getattr(self, model).learning_rate
        every = max(1, self.steps // self.evaluations)
        return Plan(self.steps, self.batch, rate, self.schedule, clip=self.clip, evaluate_every=every)

    def sample(self, batch: int, generator: torch.Generator, dims: int) -> Episode:
        return kabsch.sample(
            batch,
            generator,
            points=self.points,
            queries=self.queries,
            dims=dims,
            noise=self.noise,
            smallest=self.smallest,
            largest=self.largest,
        )


PAPER = Config()
STANDARD = replace(
    PAPER,
    steps=10_000,
    batch=32,
    intention=Net((64, 64), (64, 64, 2), learning_rate=3e-3),
    sigma_intention=Net((64, 64), (64, 64, 2), learning_rate=3e-3),
    linear_attention=Net((64, 64), (64, 64, 2), learning_rate=3e-3),
    attention=Net((128, 128), (128, 128, 2), learning_rate=1e-3, heads=5),
    neural_process=Net((128, 128), (128, 128, 2), learning_rate=3e-3),
    mlp=Net((), (128, 128, 128, 10), learning_rate=3e-3),
)
PRESETS = {"quick": replace(STANDARD, steps=1500), "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    """A cloud is read here, so that a file that does not serve fails before any work. Its digest names the run."""
    at: dict[str, Any] = {"dims": config.dims}
    shown = at
    if config.cloud:
        cloud = clouds.load_cloud(config.cloud)
        at = {"dims": cloud.dims}
        shown = {**at, "cloud": cloud.digest}
    models = (*config.models, "references")
    return [
        Job("kabsch", config, model, seed, shown if model == "intention" else at)
        for seed in range(config.seeds)
        for model in models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    dims: int = job.at["dims"]
    sample = partial(config.sample, dims=dims)
    held_out = sample(config.evaluation_tasks, torch.Generator().manual_seed(1_000_000 + job.seed))
    if job.model == "references":
        yield from _references(held_out, dims, config, job.seed)
        return
    net: Net = getattr(config, job.model)
    torch.manual_seed(job.seed)
    model = build(
        job.model,
        net.embed,
        net.decode,
        heads=net.heads,
        alpha=config.alpha,
        dims=dims,
        points=config.points,
        queries=config.queries,
    )
    measured = lambda model: {"mse": float(_errors(predict_in_parts(model, held_out), held_out).mean())}  # noqa: E731
    for entry in train(model, sample, loss, config.plan(job.model), seed=job.seed, place=place, evaluate=measured):
        yield Measure("mse during training", entry["mse"], entry["step"], data={"dims": dims})
    yield over_tasks("mse", _errors(predict_in_parts(model, held_out), held_out), {"dims": dims})
    if job.model == "intention":
        yield from _cloud(model, config, dims, job.seed)


def _errors(predicted: Tensor, episode: Episode) -> Tensor:
    return (predicted - episode.target).square().mean((-2, -1))  # one per task


def _references(held_out: Episode, dims: int, config: Config, seed: int) -> Iterator[Measure]:
    for name, predict in WITHOUT_TRAINING.items():
        yield over_tasks("mse", _errors(predict(held_out), held_out), {"dims": dims}, name)


def _cloud(model, config, dims, seed):
    yield from ()
