"""What the report says of each experiment, read from its rows. Nothing here writes files."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from intention.lab import experiments
from intention.lab.core.results import Row
from intention.lab.experiments.base import Claim, Experiment, Plot, data_name, label
from intention.lab.report.choose import Chosen, choose
from intention.lab.report.figures import to_svg

__all__ = ["Drawn", "Section", "Setting", "duration", "joined", "section"]

T = TypeVar("T")


class Drawn(NamedTuple):
    """A Plot made: `svg` or `table`, or the `error` that came instead. `name` is unique in the report."""

    name: str
    title: str
    caption: str
    svg: str | None = None
    table: Sequence[Sequence[str]] | None = None
    error: str | None = None


class Setting(NamedTuple):
    """A field of the config beside its value in the paper preset."""

    name: str
    value: str
    paper: str
    differs: bool


@dataclass
class Section:
    """One experiment of the report."""

    name: str
    title: str
    place: str = ""
    reading: str = ""
    preset: str = ""
    finding: str = ""
    claims: list[Claim] = field(default_factory=list)
    figures: list[Drawn] = field(default_factory=list)
    settings: list[Setting] = field(default_factory=list)
    runs: list[tuple[str, str, str, str]] = field(default_factory=list)  # model, number of runs, seeds, seconds
    seeds: str = ""
    seconds: float = 0.0
    intention: str = ""
    torch: str = ""
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """Where links lead; a name that is not ours may hold anything."""
        known = self.name in experiments.NAMES
        return self.name if known else f"unknown-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def section(name: str, rows: Sequence[Row]) -> Section:
    """A section even where its experiment fails: the error stands in the place of what is missing."""
    out = Section(name, name)
    if name not in experiments.NAMES:
        out.problems.append(
            f"there is no experiment {name!r} in this version of the package: its {len(rows)} rows are not shown"
        )
        return out
    experiment = _attempt(out.problems, "cannot be loaded", lambda: experiments.find(name))
    if experiment is not None:
        out.title, out.place, out.reading = experiment.TITLE, experiment.PLACE, experiment.READING
        chosen = _attempt(out.problems, "its configs cannot be read", lambda: choose(experiment, rows))
        if chosen is not None:
            _describe(out, experiment, chosen)
            out.claims = _attempt(out.problems, "claims failed", lambda: list(experiment.claims(chosen.rows))) or []
            out.finding = _attempt(out.problems, "its finding failed", lambda: experiment.finding(chosen.rows)) or ""
            plots = _attempt(out.problems, "figures failed", lambda: list(experiment.plot(chosen.rows))) or []
            out.figures = [_draw(plot, f"fig-{name}-{number}") for number, plot in enumerate(plots, 1)]
            out.problems += [f"figure {item.title!r} failed: {item.error}" for item in out.figures if item.error]
    return out


def _attempt(problems: list[str], what: str, action: Callable[[], T]) -> T | None:
    """An experiment that raises must not cost the others their report."""
    try:
        return action()
    except Exception as error:
        problems.append(f"{what}: {_text(error)}")
        return None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _draw(plot: Plot, name: str) -> Drawn:
    try:
        svg = None if plot.draw is None else to_svg(plot.draw, name, plot.title)
    except Exception as error:
        return Drawn(name, plot.title, plot.caption, None, paper_second(plot.table), _text(error))
    return Drawn(name, plot.title, plot.caption, svg, paper_second(plot.table))


def paper_second(table: Sequence[Sequence[str]] | None) -> Sequence[Sequence[str]] | None:
    """What the paper has stands beside the names, where it is seen without scrolling.

    >>> paper_second([["Model", "MSE", "The paper"], ["MLP", "0.5", "0.4"]])
    [['Model', 'The paper', 'MSE'], ['MLP', '0.4', '0.5']]
    """
    place = next((i for i, name in enumerate(table[0]) if name.lower() == "the paper"), 0) if table else 0
    if not table or place < 2:
        return table
    return [[row[0], row[place], *row[1:place], *row[place + 1 :]] for row in table]


def _describe(out: Section, experiment: Experiment, chosen: Chosen) -> None:
    rows = chosen.rows
    out.settings = _settings(chosen.config, experiment)
    out.runs = _runs(rows)
    out.seeds, out.seconds = spans(row.seed for row in rows), seconds(rows)
    out.preset, out.intention, out.torch = (joined(getattr(row, name) for row in rows) for name in _SOURCES)
    if "data" in chosen.config:
        out.notes.append(f"Data: {data_name(str(chosen.config['data']))}.")
    if chosen.passed_over:
        out.notes.append(
            "The most recent config is not shown because its runs are not all there; this one is the last that is."
        )
    elif chosen.complete is None:
        out.notes.append(
            "Whether all runs of this config are there cannot be told: this version does not accept it, or a file "
            "that it names is gone."
        )
    elif not chosen.complete:
        out.notes.append("Not all runs of this config are there.")
    if chosen.other_config:
        out.notes.append(f"{chosen.other_config} rows of other configs are left out.")
    if chosen.repeated:
        out.notes.append(f"{chosen.repeated} rows of runs that were made again later are left out.")


_SOURCES = ("preset", "intention", "torch")


def joined(values: Iterable[str]) -> str:
    """Each text once, in order."""
    return "; ".join(dict.fromkeys(value for value in values if value))


def seconds(rows: Iterable[Row]) -> float:
    """The time of all runs: each counts once, however many rows it has."""
    return math.fsum({row.run: row.seconds for row in rows}.values())


def duration(value: float) -> str:
    """
    >>> duration(0.25), duration(42), duration(4000)
    ('0.2 s', '42 s', '67 min')
    """
    if value < 10:
        return f"{value:.1f} s"
    return f"{value:.0f} s" if value < 300 else f"{value / 60:.0f} min" if value < 3 * 3600 else f"{value / 3600:.1f} h"


def _runs(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Per model of a run (its id begins with the name): runs, seeds, seconds."""
    by_model: dict[str, list[Row]] = {}
    for row in rows:
        by_model.setdefault(row.run.split("-", 1)[0], []).append(row)
    return [
        (label(model), str(len({row.run for row in own})), spans(row.seed for row in own), duration(seconds(own)))
        for model, own in by_model.items()
    ]


def spans(seeds: Iterable[int]) -> str:
    """
    >>> spans([0, 2, 1, 1, 7])
    '0–2, 7'
    """
    parts: list[list[int]] = []
    for seed in sorted(set(seeds)):
        if parts and seed == parts[-1][-1] + 1:
            parts[-1].append(seed)
        else:
            parts.append([seed])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}–{part[-1]}" for part in parts)


def _settings(config: Mapping[str, object], experiment: Experiment) -> list[Setting]:
    """Every field, beside the paper preset's, so that a reader sees what was reduced."""
    ours, paper = _flat(config), _flat(dataclasses.asdict(experiment.PRESETS["paper"]))
    names = list(dict.fromkeys([*paper, *ours]))
    return [
        Setting(name, ours.get(name, "–"), paper.get(name, "–"), ours.get(name) != paper.get(name)) for name in names
    ]


def _flat(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """{"net": {"heads": 5}} to {"net.heads": "5"}; lists and tuples look the same."""
    out: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            out |= _flat(value, f"{prefix}{name}.")
        else:
            out[f"{prefix}{name}"] = _show(value)
    return out


def _show(value: object) -> str:
    if isinstance(value, list | tuple):
        return (
            ", ".join(f"({_show(item)})" if isinstance(item, list | tuple) else _show(item) for item in value) or "none"
        )
    return f"{value:g}" if isinstance(value, float) else str(value)
