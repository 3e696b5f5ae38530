"""The search for hyperparameters: what was tried for each model and chosen, and whether all had the same budget."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from intention.lab.core.results import Json, Row, estimate, read
from intention.lab.experiments.base import label

__all__ = ["Search", "is_search", "read_search", "searches"]

METRICS = ("search", "search_score")


class Search(NamedTuple):
    """The search of one experiment and preset: rows of model, options, score, "chosen" or ""; and what it cost."""

    experiment: str
    title: str
    rows: list[tuple[str, str, str, str]]
    budget: str


def is_search(row: Row) -> bool:
    return row.metric in METRICS


def read_search(path: Path | None) -> list[Row]:
    """The search rows of a file or a folder."""
    if path is None:
        return []
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    return [row for file in files for row in read(file) if is_search(row)]


def searches(rows: Sequence[Row]) -> list[Search]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.experiment, row.preset), []).append(row)
    return [_search(name, preset, own) for (name, preset), own in groups.items()]


def _search(name: str, preset: str, rows: Sequence[Row]) -> Search:
    tried: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        tried.setdefault((row.model, _options(row.data)), []).append(row)
    lines = [
        (label(model), options, _score(own), "chosen" if _is_chosen(own[-1]) else "")
        for (model, options), own in tried.items()
    ]
    return Search(name, f"{name}, {preset}", lines, _budget(list(tried)))


def _budget(tried: Sequence[tuple[str, str]]) -> str:
    grids: dict[str, set[str]] = {}
    for model, options in tried:
        grids.setdefault(model, set()).add(options)
    sizes = {model: len(grid) for model, grid in grids.items()}
    first = next(iter(grids.values()))
    if all(grid == first for grid in grids.values()):
        return f"All models got the same grid of {len(first)} options."
    if len(set(sizes.values())) == 1:
        return f"All models got {len(first)} options each, but not the same ones."
    return "The models did not get the same grid: " + ", ".join(f"{label(m)} {size}" for m, size in sizes.items()) + "."


def _score(rows: Sequence[Row]) -> str:
    """The score, the mean of several; a run that diverged has none."""
    return "not finite" if any(row.value is None for row in rows) else str(estimate([row.value for row in rows]))


def _is_chosen(row: Row) -> bool:
    return bool((row.data or {}).get("chosen"))


def _options(data: Json | None) -> str:
    options = (data or {}).get("options")
    if not isinstance(options, dict):
        return json.dumps(options)
    return ", ".join(
        f"{name} = {json.dumps(value) if not isinstance(value, str) else value}" for name, value in options.items()
    )
