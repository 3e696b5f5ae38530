"""How the few-shot experiments are judged: what their rows say of two models.

All models of a seed answer the same test episodes, so differences are taken episode by episode where rows have these.
With three seeds or more the interval is Student's over seeds; with fewer, every seed must say the same by its interval
over episodes.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence

from intention.lab.core.results import Estimate, Json, Row, estimate, select
from intention.lab.experiments.base import HOLDS, NOT, OPEN, Claim, data_name, label
from intention.lab.experiments.compare import UNTESTED, together
from intention.lab.experiments.fewshot.config import ACCURACY, UNSEEN

__all__ = [
    "ABOVE",
    "LEARNT",
    "SAME",
    "SEEDS",
    "Part",
    "above",
    "against",
    "claim",
    "difference",
    "each_seed",
    "ends",
    "gaps",
    "judged_on",
    "learnt",
    "percent",
    "same",
    "same_seeds",
    "seeds_of",
    "set_name",
    "sets",
    "steps_of",
    "trained",
]

NEAR = 0.01  # a percentage point
SEEDS = 3  # from which on the interval is over seeds
LEARNT = 2.0  # times the accuracy of chance
ABOVE = "(read as: the difference over the same test episodes is above 0, on all unseen classes)"
SAME = "(read as: the difference over the same test episodes is within 1 percentage point, on all unseen classes)"
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


def judged_on(rows: Iterable[Row], model: str) -> dict[int, Row]:
    """All unseen classes: which half of them is "test" moves accuracies by more than models differ."""
    rows = list(rows)
    return seeds_of(rows, model, UNSEEN) or seeds_of(rows, model)


def learnt(rows: Seeds) -> bool:
    """Whether all runs answer at least twice as often as chance."""
    return all((row.value or 0) >= LEARNT / int(row.config.get("way", 5)) for row in rows.values())


def percent(row: Row) -> str:
    """
    >>> percent(Row("fewshot", "a", "quick", {}, "maml", 0, "accuracy", 0.5771, interval=(0.57, 0.5842)))
    '57.7% [57.0, 58.4]'
    """
    if row.value is None:
        return "not finite"
    ends = "" if row.interval is None else f" [{100 * row.interval[0]:.1f}, {100 * row.interval[1]:.1f}]"
    return f"{100 * row.value:.1f}%{ends}"


def trained(rows: Sequence[Row], model: str = "intention") -> str:
    """How far, and what: "4000 steps × 2 episodes, Conv4 of width 64"."""
    own = seeds_of(rows, model)
    config = (next(iter(own.values())) if own else rows[0]).config
    net = config.get(model) or {}
    on_features = str(config.get("data", "")).endswith((".npz", "-features"))
    if "start" in net:
        frozen = "frozen features" if on_features else f"the frozen encoder {net['start']}"
        what = f"e_H and head on {frozen}" if net.get("frozen") else f"all of it, from the encoder {net['start']}"
        return f"{net.get('steps')} steps × {net.get('tasks')} tasks, {what}"
    done = f"{config.get('steps')} steps × {config.get('batch')} episodes"
    if on_features:
        return f"{done}, on frozen features"
    encoder = ENCODERS.get(config.get("encoder", ""), "unnamed encoder")
    return f"{done}, {encoder} of width {config.get('width')}"


def steps_of(config: Json, model: str) -> int:
    """Of this model; one of them is trained longer than the others."""
    own = config.get(model)
    if not isinstance(own, Mapping):
        return int(config.get("steps", 0))
    return int(own["steps"]) if "steps" in own else int(config.get("steps", 0)) * int(own.get("times", 1))


def same_seeds(own: Seeds, other: Seeds, model: str) -> tuple[Seeds, Seeds]:
    """Nothing unless both ran with the same seeds. Second-order MAML has fewer: it is compared on those it has."""
    if model.startswith("maml"):
        common = set(own) & set(other)
        own, other = ({seed: rows[seed] for seed in common} for rows in (own, other))
    return (own, other) if own and set(own) == set(other) else ({}, {})


def above(own: Seeds, other: Seeds) -> str:
    return _known(own, other) or _agreed([_side(gap, 0.0) for gap in gaps(own, other)])


def same(own: Seeds, other: Seeds) -> str:
    """Within a percentage point, either way."""
    return _known(own, other) or _agreed([_within(gap) for gap in gaps(own, other)])


def gaps(own: Seeds, other: Seeds) -> list[Estimate]:
    """The difference of accuracies: one over seeds, or one for each seed where these are few."""
    each = [difference(own[seed], other[seed]) for seed in own]
    return [estimate([gap.mean for gap in each])] if len(each) >= SEEDS else each


def difference(own: Row, other: Row) -> Estimate:
    """Of one seed, over its test episodes: paired where rows tell how many answers of each were right."""
    one, two = ((row.data or {}).get("right", "") for row in (own, other))
    mean = (own.value or 0.0) - (other.value or 0.0)
    if one and len(one) == len(two):
        counts = [list(bytes.fromhex(text)) for text in (one, two)]
        apart = [a - b for a, b in zip(*counts, strict=True)]
        queries = (own.data or {})["queries"]
        half = 1.96 * statistics.stdev(apart) / queries / math.sqrt(len(apart))
    else:
        half = math.hypot(*(ends(row)[1] - (row.value or 0.0) for row in (own, other)))
    return Estimate(mean, mean - half, mean + half, 1)


def _side(gap: Estimate, bound: float) -> str:
    return HOLDS if gap.low > bound else NOT if gap.high < bound else OPEN


def _within(gap: Estimate) -> str:
    if gap.low >= -NEAR and gap.high <= NEAR:
        return HOLDS
    return NOT if gap.low > NEAR or gap.high < -NEAR else OPEN


def _agreed(verdicts: Sequence[str]) -> str:
    return verdicts[0] if len(set(verdicts)) == 1 else OPEN


def _known(own: Seeds, other: Seeds) -> str | None:
    """The verdict where there is nothing to compare, or nothing that has learnt."""
    if not own or any(row.value is None for row in other.values()) or not learnt(other):
        return UNTESTED
    return NOT if any(row.value is None for row in own.values()) else None


def ends(row: Row) -> tuple[float, float]:
    """Without an interval nothing is surely above or below, nor does anything overlap."""
    return (-math.inf, math.inf) if row.interval is None else row.interval


def against(model: str, others: Sequence[str], judge: Judge = above) -> Callable[[list[Row]], Part]:
    """The model against each of the others."""

    def each(some: list[Row]) -> Part:
        own, texts, verdicts = judged_on(some, model), [], []
        for other in others:
            found = judged_on(some, other)
            verdicts.append(judge(*same_seeds(own, found, other)))
            texts.append(f"{each_seed(other, found)} ({_said(own, found, other, verdicts[-1])})")
        return f"{each_seed(model, own)}; against {'; '.join(texts)}" if own else "", together(verdicts)

    return each


def _said(own: Seeds, found: Seeds, other: str, verdict: str) -> str:
    """The difference and what it says, or why there is none."""
    if not found or not learnt(found):
        return "not learnt" if found else "not run"
    known = gaps(*same_seeds(own, found, other)) if verdict != UNTESTED else []
    return "; ".join([" and ".join(points(gap) for gap in known), verdict]) if known else verdict


def points(gap: Estimate) -> str:
    """
    >>> points(Estimate(0.031, 0.02, 0.042, 1))
    '+3.1 [+2.0, +4.2]'
    """
    if not all(map(math.isfinite, (gap.low, gap.high))):
        return f"{100 * gap.mean:+.1f}"
    return f"{100 * gap.mean:+.1f} [{100 * gap.low:+.1f}, {100 * gap.high:+.1f}]"


def each_seed(model: str, rows: Seeds) -> str:
    """The accuracy of each seed."""
    return f"{label(model)} {' and '.join(percent(row) for row in rows.values())}".strip()


def claim(
    rows: Sequence[Row], text: str, where: str, each: Callable[[list[Row]], Part], model: str = "intention"
) -> Claim:
    """One claim for all data sets there are; how they were trained is told of one model."""
    parts = [(data, some, *each(some)) for data, some in sets(rows).items()]
    measured = ". ".join(f"{set_name(data)}, {trained(some, model)}: {said}" for data, some, said, _ in parts if said)
    return Claim(text, where, measured, together([verdict for *_, verdict in parts]))
