"""Text made safe: for HTML, for Markdown and for CSV; and the little Markdown that a READING is written in."""

from __future__ import annotations

import csv
import inspect
import io
import re
from collections.abc import Iterable, Sequence

from markupsafe import Markup, escape

__all__ = ["inline", "markdown_table", "to_csv", "to_html", "to_markdown"]

_ITEM = re.compile(r"\s*(?:[-*+]|(?P<number>\d+)[.)])\s+(?P<text>.*)")
_HEADING = re.compile(r"#{1,6}\s+(?P<text>.*)")
_CODE = re.compile(r"`([^`]+)`")
_BOLD = re.compile(r"\*\*(?=\S)(.+?)(?<=\S)\*\*")
_EMPHASIS = re.compile(r"(?<![\w*])\*(?=[^\s*])([^*]+?)(?<=\S)\*(?![\w*])")
_LINK = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_MARKDOWN = re.compile(r"([\\`*_\[\]|$~#])")


def to_html(text: str) -> Markup:
    """Markdown to HTML: paragraphs, lists, tables, headings, bold, emphasis and code. All else is shown as it stands.

    >>> print(to_html("Read as `Q w`, **not** <b>:\\n- one\\n- two"))
    <p>Read as <code>Q w</code>, <strong>not</strong> &lt;b&gt;:</p>
    <ul><li>one</li><li>two</li></ul>
    """
    blocks: list[tuple[str, list[str]]] = []  # kind, items
    new = True  # whether a line of plain text begins a paragraph
    for line in inspect.cleandoc(text).splitlines():
        item, heading = _ITEM.match(line), _HEADING.match(line)
        if not line.strip():
            new = True
            continue
        if heading:
            blocks.append(("h4", [heading["text"]]))
        elif item or line.startswith("|"):
            kind = "table" if item is None else "ol" if item["number"] else "ul"
            if not blocks or blocks[-1][0] != kind:
                blocks.append((kind, []))
            blocks[-1][1].append(item["text"] if item else line)
        elif blocks and blocks[-1][0] in ("p", "ul", "ol") and (not new or line.startswith(" ")):
            blocks[-1][1][-1] += " " + line.strip()
        else:
            blocks.append(("p", [line]))
        new = heading is not None
    return Markup("\n").join(_block(kind, items) for kind, items in blocks)


def _block(kind: str, items: Sequence[str]) -> Markup:
    if kind == "table":
        return _table(items)
    if kind in ("ul", "ol"):
        inside = Markup("").join(Markup("<li>{}</li>").format(inline(item)) for item in items)
        return Markup(f"<{kind}>{{}}</{kind}>").format(inside)
    return Markup(f"<{kind}>{{}}</{kind}>").format(inline(" ".join(items)))


def _table(lines: Sequence[str]) -> Markup:
    rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    rows = [row for row in rows if not all(re.fullmatch(r":?-+:?", cell) for cell in row)]
    out = Markup("")
    for number, row in enumerate(rows):
        cell = Markup("<td>{}</td>" if number else '<th scope="col">{}</th>')
        out += Markup("<tr>{}</tr>").format(Markup("").join(cell.format(inline(text)) for text in row))
    return Markup('<div class="scroll"><table>{}</table></div>').format(out)


def inline(text: str) -> Markup:
    """Code, bold and emphasis inside a line; a link is written out, for nothing on the page leads to the network."""
    parts = _CODE.split(text)  # even: text, odd: code
    return Markup("").join(
        Markup("<code>{}</code>").format(part) if number % 2 else _words(part) for number, part in enumerate(parts)
    )


def _words(text: str) -> Markup:
    safe = str(escape(_LINK.sub(r"\1 (\2)", text)))
    return Markup(_EMPHASIS.sub(r"<em>\1</em>", _BOLD.sub(r"<strong>\1</strong>", safe)))


def to_markdown(text: object) -> str:
    """Text that Markdown shows as it stands, on one line.

    >>> to_markdown("a|b <i>*x*")
    'a\\\\|b &lt;i&gt;\\\\*x\\\\*'
    """
    flat = _MARKDOWN.sub(r"\\\1", " ".join(str(text).split()))
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """`rows` are text that is escaped here."""
    lines = [head, ["---"] * len(head), *([to_markdown(cell) for cell in row] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def to_csv(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table that a spreadsheet opens without running anything: text that looks like a formula begins with '."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(head)
    writer.writerows([_inert(cell) for cell in row] for row in rows)
    return out.getvalue()


def _inert(cell: object) -> object:
    risky = isinstance(cell, str) and cell.lstrip().startswith(("=", "+", "-", "@"))
    return f"'{cell}" if risky else cell
