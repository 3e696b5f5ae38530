"""What the rows of `fewshot_features` say: heads side by side, for each number of examples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import HOLDS, NOT, OPEN, OUR_LINE, Claim, label
from intention.lab.experiments.compare import UNTESTED, share, together
from intention.lab.experiments.fewshot.config import UNSEEN
from intention.lab.experiments.fewshot.judge import (
    NEAR,
    Part,
    against,
    claim,
    each_seed,
    gaps,
    judged_on,
    points,
    same_seeds,
)

__all__ = ["HEADS", "claims", "finding", "of_shot", "shots"]

OWN = "intention_tuned"
HEADS = (
    OWN,
    "sigma_intention_tuned",
    "attention_tuned",
    "neural_process_tuned",
    "protonet_tuned",
    "intention_kernel_tuned",
    "intention_lda_tuned",
    "intention_qda_tuned",
)
BASELINES = ("attention_tuned", "neural_process_tuned")
SHOWN = 5  # examples, of the finding


def shots(rows: Iterable[Row]) -> list[int]:
    return sorted({int(row.data["shot"]) for row in select(rows, metric=UNSEEN) if row.data and "shot" in row.data})


def of_shot(rows: Iterable[Row], shot: int) -> list[Row]:
    return [row for row in rows if (row.data or {}).get("shot") == shot]


def claims(rows: Sequence[Row]) -> list[Claim]:
    above = "On features of photographs Intention is above Attention and the Neural Process"
    level = f"No head is above Intention by more than {100 * NEAR:g} percentage point"
    return [
        claim(rows, f"{above}, for every number of examples", OUR_LINE, _each_shot(against(OWN, BASELINES)), OWN),
        claim(rows, f"{level}, for every number of examples", OUR_LINE, _each_shot(_none_above), OWN),
    ]


def _each_shot(judge: Callable[[list[Row]], Part]) -> Callable[[list[Row]], Part]:
    def each(some: list[Row]) -> Part:
        parts = [(shot, *judge(of_shot(some, shot))) for shot in shots(some)]
        said = "; ".join(f"{shot} of a class: {measured}" for shot, measured, _ in parts if measured)
        return said, together([verdict for *_, verdict in parts])

    return each


def _none_above(some: list[Row]) -> Part:
    """The head with the highest mean, of those that are not Intention, against it."""
    own = judged_on(some, OWN)
    others = {model: judged_on(some, model) for model in HEADS if model != OWN and judged_on(some, model)}
    if not own or not others:
        return "", UNTESTED
    best = max(others, key=lambda model: sum(row.value or 0.0 for row in others[model].values()) / len(others[model]))
    known = gaps(*same_seeds(others[best], own, OWN))
    lows, highs = [gap.low for gap in known], [gap.high for gap in known]
    judged = UNTESTED if not known else HOLDS if max(highs) <= NEAR else NOT if min(lows) > NEAR else OPEN
    apart = " and ".join(points(gap) for gap in known)
    return f"{each_seed(OWN, own)}; the best other head, {each_seed(best, others[best])} ({apart})", judged


def finding(rows: Sequence[Row]) -> str:
    here = of_shot(rows, SHOWN)
    means = {model: share(row.value for row in judged_on(here, model).values()) for model in HEADS}
    parts = [f"{label(model).split(',')[0]} {value}" for model, value in means.items() if value]
    text = f"From {SHOWN} photographs of each of 5 new classes, by features and head, others are named right"
    return f"{text}: {', '.join(parts)}." if parts else ""
