"""What the rows of `pixels` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from intention.lab.core.results import Estimate, Row, select
from intention.lab.experiments.base import HOLDS, NOT, OPEN, OUR_LINE, Claim, data_name, label
from intention.lab.experiments.compare import (
    LEARNT,
    PUT_TO_THE_TEST,
    UNTESTED,
    Learnt,
    applicable,
    beside,
    best,
    by_model,
    learnt,
    ratio,
    tested,
    times,
    together,
    untrained,
    verdict,
)

__all__ = ["BASELINES", "LINEAR", "MEAN", "NEAREST", "SMALL", "TRAINED", "claims", "finding", "points", "sets"]

BASELINES = ("attention", "neural_process", "maml")
TRAINED = ("intention", "sigma_intention", "linear_attention", *BASELINES)
SMALL = "Intention, α = 1e-3"  # untrained, under its own label
MEAN, NEAREST, LINEAR = "mean of the context", "nearest pixel", "linear interpolation"
FEW, MANY = 10, 264  # pixels
RULE = f"its error at {MANY} pixels is at most {LEARNT:g} of that at {FEW}"
NEAR = 1.5  # times
BOUND = f"(read as: within {NEAR:g} times the MSE of the best baseline"
PLACE = "section 5.1, Figure 7 (right)"

Judge = Callable[[Estimate | None], str]


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _untrained(rows),
        _similar(rows, "intention", "Once trained, Intention and the baselines perform similarly", PLACE),
        _at_least_equal(rows),
        _sigma(rows),
        _against(rows, "linear_attention", "The covariance matters: linear attention, the same layers, is worse"),
        _against(rows, LINEAR, "Training pays: trained Intention beats linear interpolation, which has learnt nothing"),
    ]


def sets(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each data set, by the name that people read."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(data_name(row.config.get("data", "")), []).append(row)
    return found


def points(rows: Sequence[Row], least: float = 0) -> list[float]:
    return sorted({row.x for row in select(rows, metric="mse") if row.x is not None and row.x >= least})


def within(found: Estimate | None) -> str:
    """At most NEAR times as large or as small: the whole interval within, without, or neither."""
    if found is None:
        return UNTESTED
    if math.isnan(found.mean):
        return NOT
    if found.low >= 1 / NEAR and found.high <= NEAR:
        return HOLDS
    return NOT if found.high < 1 / NEAR or found.low > NEAR else OPEN


def learnt_by(rows: Sequence[Row]) -> Learnt:
    """Which runs have learnt to use their context; of one data set."""
    few, many = (by_model(select(rows, metric="mse", x=x)) for x in (FEW, MANY))
    return {model: learnt(many.get(model, {}), few[model]) for model in few}


def _judged(
    rows: Sequence[Row],
    about: str,
    numbers: Sequence[float],
    compare: Callable[[float], Estimate | None],
    judge: Judge,
    against: Sequence[str] = BASELINES,
) -> tuple[str, str]:
    """A ratio for each number of pixels: text and verdict; none where one that it is compared with did not learn."""
    found = {x: compare(x) for x in numbers}
    parts = [f"{x:g}: {times(one)}×" for x, one in found.items() if one is not None]
    missed = untrained(learnt_by(rows), against)
    verdicts = [tested(judge(one), missed) for one in found.values()]
    parts += [missed] if missed else []
    return f"{about}, by number of pixels: {'; '.join(parts)}" if parts else "", together(verdicts)


def _claim(rows: Sequence[Row], text: str, where: str, each: Callable[[list[Row]], list[tuple[str, str]]]) -> Claim:
    """One claim for all data sets there are."""
    found = [(name, *case) for name, some in sets(rows).items() for case in each(some)]
    measured = ". ".join(f"{name}: {said}" for name, said, _ in found if said)
    return Claim(text, where, measured, together([verdict for *_, verdict in found]))


def _untrained(rows: Sequence[Row]) -> Claim:
    text = (
        f"Untrained Intention matches trained models on high numbers of context points {BOUND} from {MANY} pixels on)"
    )

    def each(some: list[Row]) -> list[tuple[str, str]]:
        cases = []
        for model, name in (("intention", "as training starts it"), (SMALL, "with α = 1e-3")):

            def compare(x: float, model: str = model) -> Estimate | None:
                raw = by_model(select(some, metric="mse before training", x=x))
                return ratio(best(by_model(select(some, metric="mse", x=x)), BASELINES), raw.get(model, {}))

            about = f"MSE of the best trained baseline over that of untrained Intention, {name}"
            cases.append(_judged(some, about, points(some, MANY), compare, lambda one: verdict(one, 1 / NEAR)))
        return cases

    return _claim(rows, text, PLACE, each)


def _ahead(some: list[Row], model: str) -> Callable[[float], Estimate | None]:
    """The error of the best baseline over the model's."""

    def compare(x: float) -> Estimate | None:
        found = by_model(select(some, metric="mse", x=x))
        return ratio(best(found, BASELINES), found.get(model, {}))

    return compare


def _similar(rows: Sequence[Row], model: str, text: str, where: str) -> Claim:
    about = f"MSE of the best baseline over that of {label(model)} (more than 1: {label(model)} is better)"
    text = f"{text} {BOUND} either way, at every number of pixels)"
    return _claim(rows, text, where, lambda some: [_judged(some, about, points(some), _ahead(some, model), within)])


def _at_least_equal(rows: Sequence[Row]) -> Claim:
    about = "MSE of the best baseline over that of trained Intention"
    text = f"Trained Intention is at least as good as the best baseline from {MANY} pixels on"
    judge: Judge = lambda one: verdict(one, 1.0)  # noqa: E731
    return _claim(
        rows,
        text,
        OUR_LINE,
        lambda some: [_judged(some, about, points(some, MANY), _ahead(some, "intention"), judge)],
    )


def _against(rows: Sequence[Row], other: str, text: str) -> Claim:
    def each(some: list[Row]) -> list[tuple[str, str]]:
        def compare(x: float) -> Estimate | None:
            found = by_model(select(some, metric="mse", x=x))
            return ratio(found.get(other, {}), found.get("intention", {}))

        about = f"MSE of {label(other)} over that of trained Intention"
        judge: Judge = lambda one: verdict(one, 1.0)  # noqa: E731
        return [_judged(some, about, points(some), compare, judge, [other] if other in TRAINED else [])]

    return _claim(rows, text, OUR_LINE, each)


def _sigma(rows: Sequence[Row]) -> Claim:
    about = "MSE of the best baseline over that of σIntention (more than 1: σIntention is better)"

    def each(some: list[Row]) -> list[tuple[str, str]]:
        learns, judged = applicable("sigma_intention", learnt_by(some), BASELINES)
        beside, _ = _judged(some, about, points(some), _ahead(some, "sigma_intention"), within)
        return [(f"{learns}; {beside}" if learns else "", judged)]

    return _claim(rows, f"{PUT_TO_THE_TEST} (σIntention; read as: it learns, {RULE})", "abstract, Figure 7", each)


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for name, some in sets(rows).items():
        x = MANY if MANY in points(some) else max(points(some), default=math.nan)
        said = beside(by_model(select(some, metric="mse", x=x)), "intention", BASELINES, learnt_by(some))
        parts += [f"from {x:g} pixels ({name}) with {said}"] if said else []
    return f"Intention completes an image {'; '.join(parts)}." if parts else ""
