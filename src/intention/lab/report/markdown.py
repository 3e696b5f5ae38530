"""The report as Markdown: the same tables, figures as links."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from intention.lab.core.results import Json
from intention.lab.report.sections import Section, duration
from intention.lab.report.text import markdown_table, to_markdown

__all__ = ["CLAIM_HEAD", "to_report"]

CLAIM_HEAD = ("Claim", "Where", "Measured here, 95% interval", "Verdict")


def to_report(page: Json) -> str:
    """`page` is what the HTML template gets."""
    parts = [f"# {page['title']}\n", _facts(page["facts"])]
    if page["problems"]:
        parts.append("**Problems**\n\n" + _bullets(page["problems"]))
    parts.append("## Summary\n\n" + to_markdown(page["tally"]) + "\n")
    for title, ours in (("Claims of the paper", False), ("Lines of our own", True)):
        parts.append(f"### {title}\n")
        parts += [text for section in page["sections"] if (text := _summary(section, ours))]
    if page["missing"]:
        parts.append(f"Not run: {', '.join(map(to_markdown, page['missing']))}.\n")
    parts += [_section(section) for section in page["sections"]]
    for search in page["searches"]:
        table = markdown_table(("Model", "Options", "Score", ""), search.rows)
        parts.append(f"## Search budget: {to_markdown(search.title)}\n\n{to_markdown(search.budget)}\n\n{table}")
    head, *body = page["hyperparameters"]
    parts.append("## Hyperparameters of the paper\n\n" + markdown_table(head, body))
    return "\n".join(parts)


def _facts(facts: Iterable[tuple[str, str]]) -> str:
    return _bullets(f"{name}: {value}" for name, value in facts)


def _bullets(lines: Iterable[str]) -> str:
    return "".join(f"- {to_markdown(line)}\n" for line in lines)


def _summary(section: Section, ours: bool) -> str:
    """The claims of the paper, or the lines of our own; a section without any is told once."""
    rows = [(claim.text, claim.where, claim.measured, claim.verdict) for claim in section.claims if claim.ours == ours]
    heading = f"**[{to_markdown(section.title)}](#{section.anchor})**\n\n"
    if rows:
        return heading + markdown_table(CLAIM_HEAD, rows)
    return "" if section.claims or ours else heading + "No claims.\n"


def _caption(text: str) -> str:
    """A caption may hold code and bold; what could be HTML or a link is shown as it stands."""
    return text.replace("<", "&lt;").replace(">", "&gt;").replace("](", "]\\(")


def _section(section: Section) -> str:
    parts = [f'<a id="{section.anchor}"></a>\n\n## {to_markdown(section.title)}\n']
    if section.place:
        parts.append(f"Paper: {to_markdown(section.place)}\n")
    if section.finding:
        parts.append(f"{to_markdown(section.finding)}\n")
    if section.problems or section.notes:
        parts.append(_bullets([*section.problems, *section.notes]))
    if section.reading:
        parts.append(f"### How the paper is read\n\n{inspect.cleandoc(section.reading)}\n")
    for figure in section.figures:
        parts.append(f"### {to_markdown(figure.title)}\n")
        if figure.svg:
            parts.append(f"![{to_markdown(figure.title)}](figures/{figure.name}.svg)\n")
        if figure.error:
            parts.append(f"This figure failed: {to_markdown(figure.error)}\n")
        if figure.table:
            parts.append(markdown_table([to_markdown(cell) for cell in figure.table[0]], figure.table[1:]))
        parts.append(_caption(figure.caption) + "\n")
    if section.settings:
        settings = [(item.name, item.value, item.paper) for item in section.settings]
        parts += ["### Config\n", markdown_table(("Field", "This run", "Paper preset"), settings)]
        parts += ["### Runs\n", markdown_table(("Model", "Runs", "Seeds", "Time"), section.runs)]
        versions = (
            f"Preset {section.preset}; seeds {section.seeds}; intention {section.intention}; torch {section.torch}; "
        )
        parts.append(to_markdown(versions + duration(section.seconds)) + "\n")
    return "\n".join(parts)
