"""Accuracy against the size of e_H for the linear and the Gaussian kernel: Figure 14."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from intention.lab import data
from intention.lab.core.place import Place
from intention.lab.experiments.base import Job, Measure, chooses, require
from intention.lab.experiments.fewshot import config as fewshot_config
from intention.lab.experiments.fewshot import training as fewshot_runs
from intention.lab.experiments.fewshot_latent.claims import claims, finding
from intention.lab.experiments.fewshot_latent.figures import plot

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

TITLE = "Few-shot classification, latent size"
PLACE = "section 5.2, Figure 14, appendix “Kernel performance experiments”"
EXCLUSIVE = False
# on one core, all runs: quick from the processor time of runs of Intention, standard from the rows of results/real
SECONDS = {"quick": 30, "standard": 320}
READING = (
    """
- The linear and the Gaussian kernel, e_H of 16 to 128, otherwise as in Table 1. With features instead of images (an npz
  of `intention embed`) only e_H and the head are trained.
- The kernel is exp(−γ|x − y|²) with a learnable γ that starts at 1 / (size of e_H).
"""
    + fewshot_config.SHARED_READING
)

MODELS = ("intention", "intention_kernel")


@dataclass(frozen=True)
class Config(fewshot_config.Config):
    """Few-shot classification, latent size."""

    models: tuple[str, ...] = chooses(MODELS)
    latents: tuple[int, ...] = chooses((16, 32, 64, 128))  # sizes of e_H

    def __post_init__(self) -> None:
        super().__post_init__()
        foreign = set(self.models) - set(MODELS)
        require(not foreign, f"models must be of {', '.join(MODELS)}, got {', '.join(sorted(foreign))}")
        require(bool(self.latents) and min(self.latents) >= 1, f"latents must be sizes from 1 on, got {self.latents}")


PAPER = Config(encoder="resnet12")
STANDARD = replace(PAPER, encoder="conv4", precision="bfloat16", steps=1000, batch=2, decay_period=100, validations=10)
QUICK = replace(STANDARD, seeds=1, **fewshot_config.SHORT)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    config = replace(config, data=data.choose(config.data, "miniimagenet"))
    return [
        Job("fewshot_latent", config, model, seed, {"data": config.data, "latent": latent})
        for seed in range(config.seeds)
        for latent in config.latents
        for model in config.models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    latent = job.at["latent"]
    for measure in fewshot_runs.run(job, place, latent):
        yield replace(measure, data={**(measure.data or {}), "latent": latent})
