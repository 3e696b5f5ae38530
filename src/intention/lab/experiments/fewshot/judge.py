"""How the few-shot experiments are judged: what their rows say of two models.

Few seeds are trained, so a claim is judged seed by seed, by the 95% intervals over the test episodes, which are the
same for all models of a seed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from intention.lab.core.results import Json, Row, select
from intention.lab.experiments.base import Claim, data_name, label
from intention.lab.experiments.compare import UNTESTED, together
from intention.lab.experiments.fewshot.config import ACCURACY

NEAR = 0.01  # a percentage point
ABOVE = "(read as: for every seed the intervals over test episodes lie apart; partly: the mean over seeds is above)"
SAME = (
    "(read as: for every seed the intervals over test episodes overlap or the difference is at most 1 percentage "
    "point; partly: that of the means over seeds is)"
)
ENCODERS = {"conv4": "Conv4", "resnet12": "ResNet-12"}

Seeds = Mapping[int, Row]  # the accuracy of one model
Judge = Callable[[Seeds, Seeds], str]
Part = tuple[str, str]  # what was measured, and the verdict on it


def sets(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each data set, by its name in the rows."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(str(row.config.get("data", "")), []).append(row)
    return found


def set_name(data: str) -> str:
    return data_name(data) or "unnamed data"


def seeds_of(rows: Iterable[Row], model: str, metric: str = ACCURACY) -> dict[int, Row]:
    return {row.seed: row for row in sorted(select(rows, model=model, metric=metric), key=lambda row: row.seed)}


def percent(row: Row) -> str:
    """
    >>> percent(Row("fewshot", "a", "quick", {}, "maml", 0, "accuracy", 0.5771, interval=(0.57, 0.5842)))
    '57.7% [57.0, 58.4]'
    """
    if row.value is None:
        return "not finite"
    ends = "" if row.interval is None else f" [{100 * row.interval[0]:.1f}, {100 * row.interval[1]:.1f}]"
    return f"{100 * row.value:.1f}%{ends}"


def trained(rows: Sequence[Row]) -> str:
    """How far, and what: "4000 steps × 2 episodes, Conv4 of width 64"; features have no encoder that is trained."""
    config = rows[0].config
    done = f"{config.get('steps')} steps × {config.get('batch')} episodes"
    if str(config.get("data", "")).endswith((".npz", "-features")):
        return f"{done}, on frozen features"
    encoder = ENCODERS.get(config.get("encoder", ""), "unnamed encoder")
    return f"{done}, {encoder} of width {config.get('width')}"


def steps_of(config: Json, model: str) -> int:
    """Of this model; one of them is trained longer than the others."""
    own = config.get(model)
    return int(config.get("steps", 0)) * int(own.get("times", 1) if isinstance(own, Mapping) else 1)


def same_seeds(own: Seeds, other: Seeds, model: str) -> tuple[Seeds, Seeds]:
    """Nothing unless both ran with the same seeds. Second-order MAML has fewer: it is compared on those it has."""
    if model == "maml":
        common = set(own) & set(other)
        own, other = ({seed: rows[seed] for seed in common} for rows in (own, other))
    return (own, other) if own and set(own) == set(other) else ({}, {})


def above(own: Seeds, other: Seeds) -> str:
    known = _known(own, other)
    if known is not None:
        return known
    if all(ends(own[seed])[0] > ends(other[seed])[1] for seed in own):
        return "holds"
    return "partly" if _mean(own) > _mean(other) else "does not hold"


def same(own: Seeds, other: Seeds) -> str:
    known = _known(own, other)
    if known is not None:
        return known
    if all(_near(own[seed], other[seed]) for seed in own):
        return "holds"
    return "partly" if abs(_mean(own) - _mean(other)) <= NEAR else "does not hold"


def _known(own: Seeds, other: Seeds) -> str | None:
    """The verdict where there is nothing to compare."""
    if not own or any(row.value is None for row in other.values()):
        return UNTESTED
    return "does not hold" if any(row.value is None for row in own.values()) else None


def _near(one: Row, two: Row) -> bool:
    apart = max(ends(one)[0], ends(two)[0]) > min(ends(one)[1], ends(two)[1])
    return not apart or abs((one.value or 0) - (two.value or 0)) <= NEAR


def ends(row: Row) -> tuple[float, float]:
    """Without an interval nothing is surely above or below, nor does anything overlap."""
    return (-math.inf, math.inf) if row.interval is None else row.interval


def _mean(rows: Seeds) -> float:
    return statistics.fmean(row.value for row in rows.values() if row.value is not None)


def all_of(verdicts: Sequence[str]) -> str:
    """Of one claim about several models: untested if any of them is missing."""
    return UNTESTED if UNTESTED in verdicts else together(verdicts)


def against(model: str, others: Sequence[str], judge: Judge = above) -> Callable[[list[Row]], Part]:
    """The model against each of the others."""

    def each(some: list[Row]) -> Part:
        own, texts, verdicts = seeds_of(some, model), [], []
        for other in others:
            found = seeds_of(some, other)
            verdicts.append(judge(*same_seeds(own, found, other)))
            texts.append(f"{each_seed(other, found)} ({verdicts[-1] if found else 'not run'})")
        return f"{each_seed(model, own)}; against {'; '.join(texts)}" if own else "", all_of(verdicts)

    return each


def each_seed(model: str, rows: Seeds) -> str:
    """The accuracy of each seed."""
    return f"{label(model)} {' and '.join(percent(row) for row in rows.values())}".strip()


def claim(rows: Sequence[Row], text: str, where: str, each: Callable[[list[Row]], Part]) -> Claim:
    """One claim for all data sets there are."""
    parts = [(data, some, *each(some)) for data, some in sets(rows).items()]
    measured = ". ".join(f"{set_name(data)}, {trained(some)}: {said}" for data, some, said, _ in parts if said)
    return Claim(text, where, measured, together([verdict for *_, verdict in parts]))
