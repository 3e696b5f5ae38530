"""What the heads make of a user's data: `intention fewshot`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from intention.fewshot import (
    LDA,
    QDA,
    Episodes,
    Evaluation,
    FewShotClassifier,
    Kernel,
    Logistic,
    LsSvm,
    Matching,
    Prototypes,
    SigmaIntention,
    Suspect,
    episodes,
    evaluate,
    unit,
)
from intention.fewshot.heads import Head
from intention.lab.core.files import LabError
from intention.lab.run.own import Own

__all__ = ["HEADS", "Line", "Sizes", "Study", "study", "turned"]

# Those that need no training, with their own defaults, as they are written in Python
HEADS: dict[str, Callable[[], Head]] = {
    "LsSvm()": LsSvm,
    "LsSvm('loo')": lambda: LsSvm("loo"),
    "Kernel()": Kernel,
    "LDA()": LDA,
    "QDA()": QDA,
    "SigmaIntention()": SigmaIntention,
    "Matching()": Matching,
    "Prototypes()": Prototypes,
    "Logistic()": Logistic,
}
SHOTS = (1, 2, 5, 10, 20)
SHOWN, SUSPECTS = 3, 24  # episodes and suspects on the page
MEETINGS, MOST = 4, 2000  # each pair of classes meets so often in the confusion matrix, with so many episodes at most


@dataclass(frozen=True)
class Sizes:
    way: int
    shot: int
    query: int
    episodes: int
    seed: int

    def __str__(self) -> str:
        return f"{self.way}-way {self.shot}-shot, {self.query} queries of each class, {self.episodes} episodes"


@dataclass(frozen=True)
class Line:
    """What a head reached."""

    name: str
    found: Evaluation
    seconds: float
    behind: tuple[float, float]  # the best head's accuracy less this one's, over the same episodes; half its interval
    shots: dict[int, Evaluation]


@dataclass(frozen=True)
class Study:
    own: Own
    sizes: Sizes
    lines: list[Line]  # the best first
    many: Evaluation  # of the best head, with episodes enough for pairs of classes
    tasks: Episodes  # some of its episodes,
    said: Tensor  # (B, way * query): and its answers
    left_out: float  # share of all images that the others label as they are labelled
    suspects: list[Suspect]
    notes: list[str]


def study(own: Own, way: int | None, shot: int | None, query: int | None, count: int, seed: int) -> Study:
    """Every head on the same episodes. Sizes that are None are those that the data has enough images for."""
    sizes = choose_sizes(own, way, shot, query, count, seed)
    large = own.sizes >= sizes.shot + sizes.query
    notes = [*own.notes]
    if not bool(large.all()):
        few = [label for label, enough in zip(own.classes, large.tolist(), strict=True) if not enough]
        notes.append(
            f"{len(few)} of {len(own.classes)} classes have fewer than {sizes.shot} + {sizes.query} images and are in "
            f"no episode: {', '.join(few[:5])}{', ...' if len(few) > 5 else ''}."
        )
    x = unit(own.x)
    lines = [_line(name, x, own, sizes) for name in HEADS]
    lines.sort(key=lambda line: -line.found.accuracy)
    best = lines[0]
    lines = [Line(line.name, line.found, line.seconds, _behind(best, line), line.shots) for line in lines]
    head = turned(HEADS[best.name]())
    tasks = episodes(x, own.y, way=sizes.way, shot=sizes.shot, query=sizes.query, count=SHOWN, seed=seed)
    model = FewShotClassifier().fit(own.x, own.y)
    with torch.no_grad():
        said = head(*tasks[:3]).argmax(-1)
        many = _evaluate(head, x, own.y, sizes, episodes=_enough(int(large.sum()), sizes))
    return Study(own, sizes, lines, many, tasks, said, model.leave_one_out(), model.suspects(SUSPECTS), notes)


def choose_sizes(own: Own, way: int | None, shot: int | None, query: int | None, count: int, seed: int) -> Sizes:
    """5-way 5-shot with 15 queries, or what the smallest class allows; what was asked for stays."""
    for name, number, least in (
        ("--way", way, 2),
        ("--shot", shot, 1),
        ("--query", query, 1),
        ("--episodes", count, 2),
    ):
        if number is not None and number < least:
            raise LabError(f"{name} must be at least {least}, got {number}")
    least = int(own.sizes.min())
    shot = min(5, max(1, least // 2)) if shot is None else shot
    query = max(1, min(15, least - shot)) if query is None else query
    enough = int((own.sizes >= shot + query).sum())
    way = min(5, max(2, enough)) if way is None else way
    if enough < way:
        raise LabError(
            f"{own.name} has {enough} classes with at least {shot} + {query} images (--shot + --query), and --way "
            f"{way} needs {way}; its classes have {least} to {int(own.sizes.max())}. Add images, or ask for fewer"
        )
    return Sizes(way, shot, query, count, seed)


def _line(name: str, x: Tensor, own: Own, sizes: Sizes) -> Line:
    head = turned(HEADS[name]())
    start = time.perf_counter()
    found = _evaluate(head, x, own.y, sizes)
    seconds = time.perf_counter() - start
    least = int(own.sizes[own.sizes >= sizes.shot + sizes.query].min())
    shots = [shot for shot in sorted({*SHOTS, sizes.shot}) if shot <= max(least // 2, sizes.shot)]
    query, fewer = min(sizes.query, least - shots[-1]), min(sizes.episodes, 200)
    return Line(
        name,
        found,
        seconds,
        (0.0, 0.0),
        {shot: _evaluate(head, x, own.y, sizes, shot=shot, query=query, episodes=fewer) for shot in shots},
    )


def _evaluate(head: Callable[..., Tensor], x: Tensor, y: Tensor, sizes: Sizes, **changed: int) -> Evaluation:
    options = {"way": sizes.way, "shot": sizes.shot, "query": sizes.query, "episodes": sizes.episodes} | changed
    return evaluate(head, x, y, seed=sizes.seed, normalise=False, **options)


def _behind(best: Line, line: Line) -> tuple[float, float]:
    less = best.found.each - line.found.each
    return float(less.mean()), 1.96 * float(less.std()) / len(less) ** 0.5


def _enough(classes: int, sizes: Sizes) -> int:
    pairs = classes * (classes - 1) / (sizes.way * (sizes.way - 1))  # episodes until a pair meets, on average
    return max(sizes.episodes, min(MOST, round(MEETINGS * pairs)))


def turned(head: Head) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The same answers from N + 1 coordinates where there are more features than that.

    Heads without training see points by their inner products and distances alone. An orthonormal basis Q of the support
    has all of these: a query is q Q and the length of what is left of it, where no support is.
    """

    def answer(support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        n, d = support.shape[-2:]
        if d <= n + 1:
            return head(support, labels, query)
        basis, _ = torch.linalg.qr(support.mT)  # (..., d, n)
        inside = query @ basis
        rest = (query - inside @ basis.mT).norm(dim=-1, keepdim=True)
        points = support @ basis
        return head(torch.cat([points, torch.zeros_like(points[..., :1])], -1), labels, torch.cat([inside, rest], -1))

    return answer
