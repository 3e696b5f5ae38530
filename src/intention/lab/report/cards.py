"""What the report opens with: one card for each experiment, with its best figure, its finding and one claim."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from importlib import resources
from typing import NamedTuple

from markupsafe import Markup

from intention.lab.experiments import OURS
from intention.lab.experiments.base import VERDICTS, Claim
from intention.lab.report.sections import Drawn, Section

__all__ = ["DIAGRAMS", "Card", "brief", "card", "count", "diagrams", "hero", "shown_claim"]

SHOWN = {
    "computations_2d": 1,
    "normalisation": 1,
    "policy": 1,
    "recall": 6,
    "text": 6,
}  # which claim stands for an experiment, if not the first
BEST = {"kabsch": "Mapping a cloud", "pixels": "Completed images"}  # else the first figure
TALL = 0.62  # height over width of a small picture, at most
LONG = 150  # characters of what was measured
DIAGRAMS = {
    "kvq_space": "The space of KVQ models (the paper's Figure 1)",
    "heads": "The heads (Figure 2)",
    "former_layer": "A layer of the stacks (Figure 12)",
}


class Card(NamedTuple):
    """An experiment in a few lines. `picture` is a small copy of a figure that stands further down."""

    anchor: str
    title: str
    picture: Markup | None
    finding: str
    claim: Claim | None
    here: str
    counts: list[tuple[str, int]]
    problem: str
    ours: bool  # the paper does not have this experiment


def count(claims: Sequence[Claim]) -> list[tuple[str, int]]:
    """Verdicts that occur, in their order, and how often."""
    kinds = [claim.kind for claim in claims]
    return [(verdict, kinds.count(verdict)) for verdict in VERDICTS if verdict in kinds]


def card(section: Section) -> Card:
    claim = shown_claim(section)
    return Card(
        section.anchor,
        section.title,
        None if (best := _best(section)) is None else small(best),
        section.finding,
        claim,
        "" if claim is None else brief(claim.measured),
        count(section.claims),
        section.problems[0] if section.problems else "",
        section.name in OURS,
    )


def shown_claim(section: Section) -> Claim | None:
    """The claim that stands for the experiment; where that was not run, the first that was."""
    if not section.claims:
        return None
    wanted = section.claims[min(SHOWN.get(section.name, 0), len(section.claims) - 1)]
    return next((claim for claim in (wanted, *section.claims) if claim.measured), wanted)


def brief(text: str) -> str:
    """The beginning, up to the end of a part of the sentence.

    >>> brief("MSE 0.1; MAML 0.2; " + "much more " * 20)
    'MSE 0.1; MAML 0.2; …'
    """
    if len(text) <= LONG:
        return text
    ends = [match.end() for match in re.finditer(r"[;.,)] ", text[:LONG])]
    return text[: ends[-1] if ends and ends[-1] > 10 else LONG].rstrip() + " …"


def _best(section: Section) -> Drawn | None:
    drawn = [figure for figure in section.figures if figure.svg]
    wanted = BEST.get(section.name, "")
    return next((figure for figure in drawn if figure.title.startswith(wanted)), drawn[0] if drawn else None)


def small(figure: Drawn) -> Markup:
    """The figure once more, without a second copy of its lines: `use` points to those further down."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', figure.svg or "")
    inside = re.search(r'<g id="([^"]+)"', figure.svg or "")
    if box is None or inside is None:
        return Markup("")
    text = (
        '<svg viewBox="0 0 {} {:.6g}" fill="currentColor" aria-hidden="true" focusable="false"><use href="#{}"/></svg>'
    )
    return Markup(text).format(box[1], min(float(box[2]), TALL * float(box[1])), inside[1])  # of a tall one the top


def hero() -> Markup:
    """Made by tools/hero.py."""
    return Markup(_file("hero.svg").decode())


def diagrams() -> list[tuple[str, str]]:
    """Title and address of the paper's own diagrams, which docs/diagram.py draws."""
    return [
        (title, f"data:image/svg+xml;base64,{base64.b64encode(_file(f'{name}.svg')).decode()}")
        for name, title in DIAGRAMS.items()
    ]


def _file(name: str) -> bytes:
    return (resources.files("intention.lab.report") / "pictures" / name).read_bytes()
