"""The report: one HTML file that needs nothing else, the same as Markdown, and tables as CSV."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from intention.lab import experiments
from intention.lab.core.files import LabError, write_whole
from intention.lab.core.results import Json, Row, read_folder
from intention.lab.experiments.base import VERDICTS
from intention.lab.paper import appendix
from intention.lab.report import cards
from intention.lab.report.figures import standalone
from intention.lab.report.markdown import CLAIM_HEAD, to_report
from intention.lab.report.search import is_search, read_search, searches
from intention.lab.report.sections import Section, duration, joined, section
from intention.lab.report.text import inline, to_csv, to_html
from intention.lab.run.search import FOLDER as SEARCHED

TITLE = "Intention: the paper's experiments, repeated"


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
    verdicts = Counter(claim.verdict for item in sections for claim in item.claims)
    return {
        "title": TITLE,
        "facts": _facts(sections),
        "sections": sections,
        "verdicts": [(verdict, verdicts[verdict]) for verdict in VERDICTS],
        "tally": "Claims: " + ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS),
        "missing": [name for name in experiments.NAMES if name not in by_name],
        "searches": searches(tried),
        "hyperparameters": appendix.table(),
        "problems": [f"{item.name}: {problem}" for item in sections for problem in item.problems],
    }


def _facts(sections: Sequence[Section]) -> list[tuple[str, str]]:
    return [
        ("Preset", joined(part for item in sections for part in item.preset.split("; "))),
        ("intention", joined(part for item in sections for part in item.intention.split("; "))),
        ("torch", joined(part for item in sections for part in item.torch.split("; "))),
        ("Time of all runs", duration(sum(item.seconds for item in sections))),
    ]


def _html(page: Json) -> str:
    files = resources.files("intention.lab.report")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters.update(markdown=to_html, inline=inline, duration=duration, safe_svg=Markup)
    style = Markup((files / "style.css").read_text(encoding="utf-8"))
    template = environment.from_string((files / "page.html.jinja").read_text(encoding="utf-8"))
    shown = {
        "hero": cards.hero(),
        "diagrams": cards.diagrams(),
        "cards": [cards.card(item) for item in page["sections"]],
        "counts": _counts(page["sections"]),
        "lead": cards.shown_claim,
        "is_ours": cards.is_ours,
    }
    return template.render(**page, **shown, style=style, claim_head=CLAIM_HEAD) + "\n"


def _counts(sections: Sequence[Section]) -> list[tuple[str, list[tuple[str, int]]]]:
    """How many claims of the paper, and how many lines of our own, there are of each verdict."""
    claims = [claim for item in sections for claim in item.claims]
    parts = {
        "Claims of the paper": [claim for claim in claims if not cards.is_ours(claim)],
        "Our own lines": [claim for claim in claims if cards.is_ours(claim)],
    }
    return [(title, cards.count(some)) for title, some in parts.items() if some]


def _claims_csv(sections: Sequence[Section]) -> str:
    head = ("experiment", "claim", "where", "measured", "verdict")
    return to_csv(head, [(item.name, c.text, c.where, c.measured, c.verdict) for item in sections for c in item.claims])


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
