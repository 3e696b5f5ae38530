"""Regression tables, answered in context by networks that were trained on made-up tasks alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Generator, Tensor, nn

from intention.lab.core.train import Plan, train
from intention.lab.experiments.base import Job, Measure, Net, Place, chooses, require
from intention.lab.experiments.episodes import check_net, loss, over_tasks, predict_in_parts, task_errors
from intention.lab.experiments.tables.claims import ERROR, claims, finding
from intention.lab.experiments.tables.figures import plot
from intention.lab.experiments.tables.model import MODELS, WITHOUT_TRAINING, build
from intention.lab.experiments.tables.task import NAMES, drawn_from, sample
from intention.lab.tasks import Episode

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

TITLE = "Tables never seen"
PLACE = "our own experiment"
EXCLUSIVE = False
SECONDS = {"quick": 10, "standard": 600}  # on one core, all runs
READING = """
- The paper has no such experiment. The sentences were written before any run: from a context of its rows, a network
  that was trained on made-up tasks alone answers a table at least as well as ridge whose α leave-one-out chooses, and
  better than attention of the same size and than nearest rows.
- A made-up task has 2 to 10 correlated columns, a line, in most tasks bends (16 hyperbolic tangents), and noise of .1
  to 1.5; its context has 10 to 200 rows, 50 others are asked for. Columns and targets have mean 0 and variance 1 over
  the context; columns that are not there are 0.
- Tables are the regression sets that scikit-learn brings with it: diabetes (442 rows, 10 columns), and linnerud (20
  rows, 3 columns, three targets that take turns). Some rows, drawn at random, are the context, and all others are
  asked for; the same draws for all models of a seed. No choice was made by a table.
- An error is the mean square of the difference, in units of the variance of the context's targets: predicting their
  mean has about 1.
- Intention has one solve with an intercept on the columns and what a network makes of them; α is learnable and starts
  at 10, the best for a line in 10 columns with noise 1. Attention reads the same with two heads of full size, a value
  embedding and a network behind. Numbers of parameters are within 3%. Learning rates are searched on one grid, by
  made-up tasks of a seed that is not published.
- Nearest rows: the mean of 1, 3, 5, 9 or 15, by leave-one-out in each task. Ridge is `intention.fit(..., alpha="loo",
  intercept=True)`.
- A run has learnt if its error on made-up tasks is at most 0.8 of that of predicting the mean.
- `paper` is `standard`.
"""


@dataclass(frozen=True)
class Config:
    """Tables never seen."""

    models: tuple[str, ...] = chooses(MODELS)
    seeds: int = chooses(4)
    steps: int = 4000
    batch: int = 16
    alpha: float = 10.0  # at the start
    clip: float = 1.0
    evaluation_tasks: int = 500  # made-up ones
    evaluations: int = 5  # during training
    draws: int = 200  # of each table and number of rows
    rows: tuple[int, ...] = (20, 50, 100, 200)  # of diabetes, as context
    few_rows: int = 15  # of linnerud
    intention: Net = Net((216, 216, 96), learning_rate=1e-3)  # both searched
    attention: Net = Net((128, 128, 64), (64, 1), learning_rate=3e-3, heads=2)

    def __post_init__(self) -> None:
        unknown = set(self.models) - set(MODELS)
        require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(MODELS)}")
        for name, least in (("seeds", 1), ("evaluation_tasks", 2), ("evaluations", 1), ("draws", 2)):
            require(getattr(self, name) >= least, f"{name} must be at least {least}, got {getattr(self, name)}")
        for rows in self.rows:
            require(2 <= rows <= 400, f"rows must be 2 to 400 of the 442 of diabetes, got {rows}")
        require(2 <= self.few_rows <= 19, f"few_rows must be 2 to 19 of the 20 of linnerud, got {self.few_rows}")
        require(0 < self.alpha < math.inf, f"alpha must be > 0 and finite, got {self.alpha}")
        check_net("attention", self.attention)
        for model in MODELS:
            self.plan(model)

    def plan(self, model: str) -> Plan:
        rate = getattr(self, model).learning_rate
        return Plan(self.steps, self.batch, rate, clip=self.clip, evaluate_every=max(1, self.steps // self.evaluations))

    def counts(self, name: str) -> tuple[int, ...]:
        """Numbers of rows that are asked about a table."""
        return self.rows if name == "diabetes" else (self.few_rows,)


STANDARD = Config()
QUICK = replace(
    STANDARD,
    seeds=1,
    steps=150,
    evaluation_tasks=100,
    evaluations=1,
    draws=30,
    rows=(20, 100),
    intention=replace(STANDARD.intention, embed=(48, 48, 32)),
    attention=replace(STANDARD.attention, embed=(32, 32, 16), decode=(16, 1)),
)
PRESETS = {"quick": QUICK, "standard": STANDARD, "paper": STANDARD}


def jobs(config: Config) -> Iterable[Job]:
    return [
        Job("tables", config, model, seed) for seed in range(config.seeds) for model in (*config.models, "references")
    ]


def run(job: Job, place: Place) -> Iterator[Measure]:
    config: Config = job.config
    made_up = sample(config.evaluation_tasks, Generator().manual_seed(1_000_000 + job.seed))
    if job.model == "references":
        for name, predict in WITHOUT_TRAINING.items():
            yield over_tasks("mse", task_errors(predict(made_up), made_up), {}, name)
            yield from _on_tables(config, job.seed, predict, name)
        return
    torch.manual_seed(job.seed)
    model = build(job.model, getattr(config, job.model), config.alpha)

    def measured(model: nn.Module) -> dict[str, float]:
        return {"mse": float(task_errors(predict_in_parts(model, made_up), made_up).mean())}

    for entry in train(model, sample, loss, config.plan(job.model), seed=job.seed, place=place, evaluate=measured):
        yield Measure("mse during training", entry["mse"], entry["step"])
    count = {"parameters": sum(weight.numel() for weight in model.parameters())}
    yield over_tasks("mse", task_errors(predict_in_parts(model, made_up), made_up), count)
    yield from _on_tables(config, job.seed, partial(predict_in_parts, model))


def _on_tables(
    config: Config, seed: int, predict: Callable[[Episode], Tensor], name: str | None = None
) -> Iterator[Measure]:
    for number, of in enumerate(NAMES):
        for rows in config.counts(of):
            generator = Generator().manual_seed(2_000_000 + 1000 * seed + 10 * rows + number)
            asked: Episode = drawn_from(of, rows, config.draws, generator)
            found = over_tasks(ERROR, task_errors(predict(asked), asked), {"table": of}, name)
            yield replace(found, x=rows)
