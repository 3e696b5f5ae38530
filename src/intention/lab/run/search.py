"""The search for learning rates: every trained model of an experiment gets the same grid and the same budget.

What was found is kept beside the code (`searched/*.jsonl`), shown in the report, and a test holds the presets to it.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from intention.lab.core import results
from intention.lab.core.results import Row
from intention.lab.experiments.base import Experiment, Job

__all__ = ["FOLDER", "LEARNING_RATES", "SEED", "distil", "found", "jobs", "rates"]

LEARNING_RATES = (3e-4, 1e-3, 3e-3, 1e-2)
SEED = 1000  # no seed of a published run
FOLDER = Path(__file__).parents[1] / "searched"


def rates(experiment: Experiment) -> tuple[float, ...]:
    """The grid of an experiment."""
    return getattr(experiment, "RATES", LEARNING_RATES)


def jobs(experiment: Experiment, config: Any) -> list[Job]:
    """One run of the preset's length for each model and rate, of what all models are asked for."""
    trained = [name for name in getattr(config, "models", ()) if hasattr(getattr(config, name, None), "learning_rate")]
    if not trained:
        raise ValueError("the models of this experiment have no learning rate of their own to search")
    found: list[Job] = []
    for rate in rates(experiment):
        nets = {name: replace(getattr(config, name), learning_rate=rate) for name in trained}
        changed = dataclasses.replace(config, **nets, seeds=1)
        found += [replace(job, seed=SEED) for job in experiment.jobs(changed) if job.model in nets]
    asked = {name: [job.at for job in found if job.model == name] for name in trained}
    return [job for job in found if all(job.at in each for each in asked.values())]


def distil(rows: Sequence[Row], metric: str = "mse") -> list[Row]:
    """One row per model and rate: the geometric mean of its held-out errors (`metric`); the smallest is chosen."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in results.select(rows, metric=metric, seed=SEED):
        if row.model in row.config:  # closed-form references have nothing to search
            groups.setdefault((row.model, row.config[row.model]["learning_rate"]), []).append(row)
    scores = {key: _score(group) for key, group in groups.items()}
    best = {model: min(score for (name, _), score in scores.items() if name == model) for model, _ in scores}
    return [
        replace(
            group[0],
            run="search",
            preset=group[0].preset.removesuffix(", changed"),
            metric="search",
            x=None,
            interval=None,
            value=scores[model, rate],
            data={"options": {"learning_rate": rate}, "chosen": scores[model, rate] == best[model] < math.inf},
            seconds=sum({row.run: row.seconds for row in group}.values()),
        )
        for (model, rate), group in sorted(groups.items())
    ]


def found(experiment: str) -> list[Row]:
    """What was found for an experiment; nothing if it was never searched."""
    return results.read(FOLDER / f"{experiment}.jsonl")


def _score(rows: Sequence[Row]) -> float:
    if any(row.value is None for row in rows):
        return math.inf
    return math.exp(statistics.fmean(math.log(max(row.value or 0.0, 1e-12)) for row in rows))
