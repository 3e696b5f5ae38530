"""The page of `intention fewshot`: one HTML file about a user's data, pictures inside."""

from __future__ import annotations

import base64
import functools
import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from intention.lab.core.files import write_whole
from intention.lab.experiments.base import COLOURS
from intention.lab.report.figures import to_svg
from intention.lab.report.html import render
from intention.lab.run.study import Study

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Answered", "Cell", "Row", "write_page"]

EDGE = 96  # largest side of a picture on the page
QUERIES, PAIRS, EXAMPLES, CLASSES = (
    5,
    6,
    4,
    100,
)  # shown of a class, pairs, pictures of a class in a pair, in the matrix
LOOK = {
    "LsSvm()": "intention",
    "LsSvm('loo')": "intention_longer",
    "Kernel()": "intention_kernel",
    "LDA()": "intention_lda",
    "QDA()": "intention_qda",
    "SigmaIntention()": "sigma_intention",
    "Matching()": "attention",
    "Prototypes()": "protonet",
    "Logistic()": "pretrained",
}
Thumb = Callable[[int], "str | None"]


class Answered(NamedTuple):
    """A query of a shown episode."""

    picture: str | None
    member: str
    said: str
    right: bool


class Row(NamedTuple):
    """A class of a shown episode."""

    label: str
    support: list[tuple[str | None, str]]  # picture, file
    queries: list[Answered]


class Cell(NamedTuple):
    """Of the confusion matrix: where, how much, and in words."""

    row: int
    column: int
    share: float
    text: str


def write_page(path: Path, found: Study) -> None:
    """One file that needs nothing else."""
    thumb: Thumb = functools.cache(functools.partial(_thumb, found))
    many = found.many
    heads = [("Head", "Accuracy", "95% interval", "Behind the best", "Seconds")]
    for line in found.lines:
        less, half = line.behind
        behind = "best" if line is found.lines[0] else f"{100 * less:.1f} ± {100 * half:.1f}"
        accuracy = (f"{100 * line.found.accuracy:.1f}%", f"± {100 * line.found.interval:.1f}")
        heads.append((line.name, *accuracy, behind, f"{line.seconds:.1f}"))
    shots = list(found.lines[0].shots)
    by_shots = [("Head", *(f"{shot} shot{'s' if shot > 1 else ''}" for shot in shots))]
    by_shots += [(line.name, *map(str, line.shots.values())) for line in found.lines]
    svg = (
        to_svg(lambda: _draw_shots(found), "shots", "Accuracy against the number of shots") if len(shots) > 1 else None
    )
    page = render(
        "study.html.jinja",
        {},
        title=f"{Path(found.own.name).name}: few-shot learning on your images",
        facts=_facts(found),
        notes=found.notes,
        heads=heads,
        shots=by_shots,
        svg=svg,
        tasks=[_task(found, number, thumb) for number in range(len(found.said))],
        pairs=[_pair(found, *pair, thumb) for pair in many.hardest(PAIRS)],
        matrix=_matrix(found),
        classes=_classes(found),
        suspects=[_suspect(found, one, thumb) for one in found.suspects],
        left_out=f"{100 * found.left_out:.1f}%",
        sizes=str(found.sizes),
        many=len(many.each),
    )
    write_whole(path, page.encode())


def _facts(found: Study) -> list[tuple[str, str]]:
    return [
        ("Images", str(len(found.own.y))),
        ("Classes", str(len(found.own.classes))),
        ("Features", found.own.backbone),
        ("Best head", found.lines[0].name),
        ("Its accuracy", str(found.lines[0].found)),
    ]


def _thumb(found: Study, number: int) -> str | None:
    """A picture as a data address; None where there are none."""
    if found.own.picture is None:
        return None
    image = found.own.picture(number)
    image.thumbnail((EDGE, EDGE))
    out = io.BytesIO()
    image.save(out, "webp", quality=80)
    return "data:image/webp;base64," + base64.b64encode(out.getvalue()).decode()


def _task(found: Study, number: int, thumb: Thumb) -> dict[str, Any]:
    """An episode: its classes with their examples, and the first queries of each with the answers."""
    tasks, sizes, names = found.tasks, found.sizes, found.own.classes
    own = [names[label] for label in tasks.classes[number].tolist()]
    n = sizes.way * sizes.shot
    support = tasks.chosen[number, :n].view(sizes.way, sizes.shot).tolist()
    asked = tasks.chosen[number, n:].view(sizes.way, sizes.query).tolist()
    said = found.said[number].view(sizes.way, sizes.query)
    right = said == torch.arange(sizes.way).unsqueeze(-1)
    rows = []
    for c, label in enumerate(own):
        queries = [
            Answered(thumb(i), found.own.members[i], own[int(said[c, q])], bool(right[c, q]))
            for q, i in enumerate(asked[c][:QUERIES])
        ]
        rows.append(Row(label, [(thumb(i), found.own.members[i]) for i in support[c][:QUERIES]], queries))
    return {"rows": rows, "right": int(right.sum()), "count": right.numel()}


def _pair(found: Study, one: int, other: int, share: float, thumb: Thumb) -> dict[str, Any]:
    def some(label: int) -> list[str | None]:
        return [thumb(i) for i in (found.own.y == label).nonzero().flatten()[:EXAMPLES].tolist()]

    names = found.own.classes
    return {"names": (names[one], names[other]), "pictures": (some(one), some(other)), "share": f"{100 * share:.0f}%"}


def _matrix(found: Study) -> dict[str, Any]:
    """The share of queries of a class (row) that were taken for another (column) where both were there."""
    many = found.many
    share = many.confusion / many.met.clamp(min=1)
    hardest = many.per_class.argsort(stable=True)[:CLASSES].sort().values  # all of them, unless they are too many
    share = share[hardest][:, hardest]
    names = [found.own.classes[int(many.classes[i])] for i in hardest.tolist()]
    cells = []
    for row, column in (share >= 0.02).nonzero().tolist():
        what = "right" if row == column else f"taken for {names[column]}"
        value = float(share[row, column])
        cells.append(Cell(row, column, value, f"{names[row]} {what}: {100 * value:.0f}%"))
    size = max(9, min(26, 640 // len(names)))
    left = min(18, max(map(len, names))) * 0.62 * min(12, size) + 8
    return {
        "names": [name if len(name) <= 18 else name[:17] + "…" for name in names],
        "cells": cells,
        "size": size,
        "left": round(left),
        "font": min(12, size),
        "all": len(names) == len(found.own.classes),
    }


def _classes(found: Study) -> list[tuple[str, str, str]]:
    many = found.many
    rows = [("Class", "Images", "Accuracy")]
    for i in many.per_class.argsort().tolist():
        label = int(many.classes[i])
        if many.confusion[i].sum() > 0:
            share = f"{100 * float(many.per_class[i]):.1f}%"
            rows.append((found.own.classes[label], str(int(found.own.sizes[label])), share))
    return rows


def _suspect(found: Study, one: Any, thumb: Thumb) -> dict[str, Any]:
    names, member = found.own.classes, found.own.members[one.example]
    return {
        "picture": thumb(one.example),
        "file": "/".join(Path(member).parts[-2:]),
        "label": names[one.label],
        "predicted": names[one.predicted],
    }


def _draw_shots(found: Study) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.add_subplot()
    shots = list(found.lines[0].shots)
    for line in found.lines:
        values = [100 * one.accuracy for one in line.shots.values()]
        axis.plot(
            shots, values, color=COLOURS[LOOK[line.name]], linewidth=1.8, marker="o", markersize=3.5, label=line.name
        )
    axis.set_xscale("log")
    axis.set_xticks(shots, [str(shot) for shot in shots], minor=False)
    axis.minorticks_off()
    axis.set_xlabel("images of each class to learn from")
    axis.set_ylabel("accuracy, %")
    axis.grid(True)
    figure.legend(loc="outside right center")
    return figure
