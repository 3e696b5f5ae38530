"""Few-shot classification of images with ResNet-12: LS-SVM, kernel, pooled and true QDA, Table 2."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from intention.lab import data
from intention.lab.core.place import Place
from intention.lab.experiments.base import Job, Measure
from intention.lab.experiments.fewshot import training as fewshot_runs
from intention.lab.experiments.fewshot.config import SHARED_READING, SHORT, Config
from intention.lab.experiments.fewshot_resnet.claims import claims, finding
from intention.lab.experiments.fewshot_resnet.figures import plot

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

TITLE = "Few-shot classification, ResNet-12"
PLACE = "section 5.2, Table 2"
EXCLUSIVE = False
# on one core, all runs: quick from the processor time of runs of Intention, standard from the rows of results/real
SECONDS = {"quick": 45, "standard": 1600}
READING = (
    """
- Four blocks of three convolutions with 1, 2, 4 and 8 times `width` channels; `standard` has a quarter of the usual
  width. Each cell says for how many steps it was trained: as far as the time went, not to convergence.
- "QDA" as printed has the pooled covariance within classes, which is LDA by another route; real QDA, with a covariance
  for each class, is a line of its own. α is added to these covariances.
- The printed interval of QDA, ± 5.81, cannot be that of 1000 episodes: no target.
- The kernel is exp(−γ|x − y|²) with a learnable γ that starts at 1 / (size of e_H).
"""
    + SHARED_READING
)

MODELS = ("intention", "intention_kernel", "intention_lda", "intention_qda")
PAPER = Config(models=MODELS, encoder="resnet12")
STANDARD = replace(PAPER, precision="bfloat16", width=16, steps=1500, decay_period=150, validations=5)
QUICK = replace(STANDARD, seeds=1, **(SHORT | {"width": 8}))
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": PAPER}


def jobs(config: Config) -> Iterable[Job]:
    config = replace(config, data=data.choose(config.data, "miniimagenet"))
    return [
        Job("fewshot_resnet", config, model, seed, {"data": config.data})
        for seed in range(config.seeds)
        for model in config.models
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    return fewshot_runs.run(job, place)
