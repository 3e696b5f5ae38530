"""The report: one HTML file that needs nothing else, the same as Markdown, and tables as CSV."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from intention.lab import experiments
from intention.lab.core.files import LabError, write_whole
from intention.lab.core.results import Json, Row, read_folder
from intention.lab.experiments.base import Claim, tally
from intention.lab.paper import hyperparameters
from intention.lab.report import cards
from intention.lab.report.figures import standalone
from intention.lab.report.html import render
from intention.lab.report.markdown import CLAIM_HEAD, to_report
from intention.lab.report.search import is_search, read_search, searches
from intention.lab.report.sections import Section, duration, joined, section
from intention.lab.report.text import inline, to_csv, to_html
from intention.lab.run.search import FOLDER as SEARCHED

__all__ = ["Report", "write_report"]

TITLE = "Intention: the paper's experiments, repeated"
GROUPS = ("Claims of the paper", "Lines of our own")


class Report(NamedTuple):
    """Where the report is, and what could not be shown in it."""

    path: Path
    problems: list[str]


def write_report(folder: Path, rows: Sequence[Row] | None = None, search: Path | None = SEARCHED) -> Report:
    """Write report.html, report.md, figures/*.svg, claims.csv and rows.csv into the folder.

    The same rows give the same bytes.

    Args:
        rows: those of the folder, unless given.
        search: a file or folder with the rows of a search for hyperparameters; by default what our presets come from.
    """
    rows = read_folder(folder) if rows is None else rows
    if not rows:
        raise LabError(f"there are no rows to report in {folder}; `intention reproduce --out {folder}` makes some")
    page = _page(rows, _searched(rows, search))
    for item in page["sections"]:
        for figure in item.figures:
            if figure.svg:
                write_whole(folder / "figures" / f"{figure.name}.svg", standalone(figure.svg))
    write_whole(folder / "claims.csv", _claims_csv(page["sections"]).encode())
    write_whole(folder / "rows.csv", _rows_csv(rows).encode())
    write_whole(folder / "report.md", to_report(page).encode())
    path = folder / "report.html"
    write_whole(path, _html(page).encode())
    return Report(path, page["problems"])


def _searched(rows: Sequence[Row], search: Path | None) -> list[Row]:
    """The search rows among these, and those of the other folder that belong to the experiments of these."""
    shown = {row.experiment for row in rows}
    return [*filter(is_search, rows), *(row for row in read_search(search) if row.experiment in shown)]


def _page(rows: Sequence[Row], tried: Sequence[Row]) -> Json:
    """All that the templates show."""
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        if not is_search(row):
            by_name.setdefault(row.experiment, []).append(row)
    known = [name for name in experiments.NAMES if name in by_name]
    unknown = [name for name in by_name if name not in experiments.NAMES]
    sections = [section(name, by_name[name]) for name in [*known, *unknown]]
    every = [claim for item in sections for claim in item.claims]
    counts = [(title, tally(some)) for title, some in groups(every)]
    return {
        "title": TITLE,
        "facts": _facts(sections),
        "sections": sections,
        "counts": [(title, cards.count(some)) for title, some in groups(every) if some],
        "tally": ". ".join(counted(title, found) for title, found in counts),
        "missing": [name for name in experiments.NAMES if name not in by_name],
        "searches": searches(tried),
        "hyperparameters": hyperparameters.table(),
        "problems": [f"{item.name}: {problem}" for item in sections for problem in item.problems],
    }


def groups(claims: Sequence[Claim]) -> list[tuple[str, list[Claim]]]:
    """Claims of the paper and lines of our own, apart."""
    return [(title, [claim for claim in claims if claim.ours == ours]) for ours, title in enumerate(GROUPS)]


def counted(title: str, found: Mapping[str, int]) -> str:
    """
    >>> counted("Claims", {"holds": 3, "does not hold": 1})
    'Claims: 3 holds, 1 does not hold'
    """
    return f"{title}: " + ", ".join(f"{count} {verdict}" for verdict, count in found.items())


def _facts(sections: Sequence[Section]) -> list[tuple[str, str]]:
    return [
        ("Preset", joined(part for item in sections for part in item.preset.split("; "))),
        ("intention", joined(part for item in sections for part in item.intention.split("; "))),
        ("torch", joined(part for item in sections for part in item.torch.split("; "))),
        ("Time of all runs", duration(sum(item.seconds for item in sections))),
    ]


def _html(page: Json) -> str:
    filters = {"markdown": to_html, "inline": inline, "duration": duration}
    shown = {
        "hero": cards.hero(),
        "diagrams": cards.diagrams(),
        "cards": [cards.card(item) for item in page["sections"]],
        "lead": cards.shown_claim,
    }
    return render("page.html.jinja", filters, **page, **shown, claim_head=CLAIM_HEAD)


def _claims_csv(sections: Sequence[Section]) -> str:
    head = ("experiment", "claim", "where", "measured", "verdict", "ours")
    every = [(item.name, claim) for item in sections for claim in item.claims]
    lines = [(name, c.text, c.where, c.measured, c.verdict, "ours" if c.ours else "paper") for name, c in every]
    return to_csv(head, lines)


def _rows_csv(rows: Sequence[Row]) -> str:
    head = ("experiment", "run", "preset", "model", "seed", "metric", "x", "value", "low", "high", "seconds")
    last = ("intention", "torch", "config")
    return to_csv((*head, *last), [[*_cells(row)] for row in rows])


def _cells(row: Row) -> tuple[object, ...]:
    low, high = row.interval or (None, None)
    return (
        *(row.experiment, row.run, row.preset, row.model, row.seed, row.metric, row.x, row.value, low, high),
        *(row.seconds, row.intention, row.torch, json.dumps(row.config, sort_keys=True)),
    )
