"""Rows of runs and rows that are made up, for tests of what is said about them."""

from __future__ import annotations

import dataclasses

from intention.lab.core.place import Place
from intention.lab.core.results import Row


def rows_of(module, config) -> list[Row]:
    rows = []
    for job in module.jobs(config):
        for m in module.run(job, Place()):
            head = (job.experiment, job.id, "quick", dataclasses.asdict(job.config), m.model or job.model, job.seed)
            rows.append(Row(*head, m.metric, m.value, m.x, m.interval, m.data))
    return rows


def row(model: str, metric: str, value, x=None, seed: int = 0, **fields) -> Row:
    return Row("e", "r", "quick", {}, model, seed, metric, value, x, **fields)


def verdicts(module, rows) -> list[str]:
    return [claim.verdict for claim in module.claims(rows)]
