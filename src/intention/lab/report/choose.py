"""Which rows of an experiment belong together: rows of different configs are never averaged."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from intention.lab.core.results import Json, Row
from intention.lab.experiments.base import Experiment, without_added
from intention.lab.run.runner import finished

__all__ = ["Chosen", "choose", "own", "rebuild"]


class Chosen(NamedTuple):
    """The rows that a section shows, and what it must say about them."""

    rows: list[Row]
    config: Json
    complete: bool | None  # whether every run of the config is there; None: cannot be told
    other_config: int  # rows left out because their config differs
    repeated: int  # rows left out because the same run was made again later
    passed_over: bool  # the most recent config is not this one: its runs are not all there


def choose(experiment: Experiment, rows: Sequence[Row]) -> Chosen:
    """The rows of the most recent config whose runs are all there (or may be); of the most recent one if there is none.

    Two rows belong to the same config if they agree in all that their run depends on (`base.relevant`): what only
    chooses runs (models, seeds; not the data) and the sizes of other models may differ.
    """
    fresh = last_of_each_run(rows)
    choosing = {item.name for item in dataclasses.fields(experiment.Config) if item.metadata.get("chooses")}
    choosing.discard("data")  # it chooses runs, but those on different data never belong together
    configs: dict[str, Json] = {}  # the most recent first
    for row in reversed(fresh):
        configs.setdefault(json.dumps(_without(_plain(experiment, row.config), choosing), sort_keys=True), row.config)
    candidates = [(config, _rows_of(experiment, config, fresh, choosing)) for config in configs.values()]
    whole = [is_complete(experiment, config, kept) for config, kept in candidates]
    index = next((number for number, answer in enumerate(whole) if answer is not False), 0)
    config, kept = candidates[index]
    return Chosen(kept, config, whole[index], len(fresh) - len(kept), len(rows) - len(fresh), passed_over=index > 0)


def last_of_each_run(rows: Iterable[Row]) -> list[Row]:
    """A run that was made again counts once: its last rows. The rows of one run stand together in a file."""
    blocks: dict[str, list[Row]] = {}
    previous = None
    for row in rows:
        block = blocks.get(row.run)
        if block is None or previous != row.run or _begins_again(row, block[0]):
            blocks.pop(row.run, None)  # so that blocks are in the order of their last rows
            block = blocks[row.run] = []
        block.append(row)
        previous = row.run
    return [row for block in blocks.values() for row in block]


def is_complete(experiment: Experiment, config: Json, rows: Iterable[Row]) -> bool | None:
    """Whether every run that this config asks for is there with all its rows.

    None if its runs are not known: a config of another version of the package, a file that it names is gone.
    """
    try:
        jobs = list(experiment.jobs(rebuild(experiment.PRESETS["quick"], config)))
    except Exception:
        return None
    return finished(rows, jobs) == {job.id for job in jobs}


def rebuild(like: Any, values: Mapping[str, Any]) -> Any:
    """The Config that a row's config was: JSON has lists for tuples and dictionaries for dataclasses. Fields that were
    added later are at their default.

    >>> from intention.lab.experiments.base import Net
    >>> rebuild(Net((1,)), {"embed": [64, 64], "heads": 5})
    Net(embed=(64, 64), decode=(), learning_rate=0.0003, heads=5, scale='none')
    """
    before = {item.name: item.default for item in dataclasses.fields(like) if item.metadata.get("added")}
    given = {name: _restore(getattr(like, name), value) for name, value in values.items()}
    return dataclasses.replace(like, **(before | given))


def _plain(experiment: Experiment, config: Json) -> Json:
    return without_added(config, experiment.PRESETS["quick"])


def _restore(like: object, value: object) -> Any:
    if dataclasses.is_dataclass(like) and isinstance(value, Mapping):
        return rebuild(like, value)
    return tuple(_restore(None, item) for item in value) if isinstance(value, list) else value


def _rows_of(experiment: Experiment, config: Json, rows: Iterable[Row], choosing: set[str]) -> list[Row]:
    wanted = _plain(experiment, config)
    return [
        row
        for row in rows
        if own(_plain(experiment, row.config), _owner(row), choosing) == own(wanted, _owner(row), choosing)
    ]


def own(config: Json, model: str, choosing: set[str]) -> str:
    """What a run of this model depends on, as `base.relevant` says it of a Config."""
    kept = _without(config, choosing)
    kept = {name: value for name, value in kept.items() if name == model or not isinstance(value, Mapping)}
    return json.dumps(kept, sort_keys=True)


def _owner(row: Row) -> str:
    """The model of the run, with whose name its id begins; the row may be of a reference measured beside it."""
    return row.run.split("-", 1)[0]


def _without(config: Json, names: set[str]) -> Json:
    return {name: value for name, value in config.items() if name not in names}


def _begins_again(row: Row, first: Row) -> bool:
    """A run made twice in a row: its first measurement comes again, with another duration."""
    same = (row.model, row.metric, row.x) == (first.model, first.metric, first.x)
    return same and row.seconds != first.seconds
