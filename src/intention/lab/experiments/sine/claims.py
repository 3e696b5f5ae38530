"""What the rows of `sine` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import (
    LEARNT,
    PUT_TO_THE_TEST,
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

__all__ = ["LINE", "SMALL", "TRAINED", "claims", "finding", "points"]

BASELINES = ("attention", "neural_process", "maml")
TRAINED = ("intention", "sigma_intention", "linear_attention", *BASELINES)
SMALL = "Intention, α = 1e-4"  # untrained, under its own label
LINE = "ridge on raw x"
FEW = (5, 10, 20)  # points
FIRST, TRAINED_AT = 1, 10  # points: a model that has learnt its task uses those that it was trained with
RULE = f"the error at {TRAINED_AT} points is at most {LEARNT:g} of that at {FIRST}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [_any_number(rows), _some_numbers(rows), _untrained(rows), _sigma(rows)]


def points(rows: Sequence[Row]) -> list[float]:
    return sorted({row.x for row in select(rows, metric="mse") if row.x is not None})


def learnt_by(rows: Sequence[Row]) -> Learnt:
    """Which runs have learnt to use their context."""
    few, more = (by_model(select(rows, metric="mse", x=x)) for x in (FIRST, TRAINED_AT))
    return {model: learnt(more.get(model, {}), few[model]) for model in few}


def _against(rows: Sequence[Row], model: str, points: Sequence[float]) -> tuple[str, str]:
    """Error of the best baseline over the model's, for each number of points; and in how many cases it is larger."""
    parts, verdicts, missed = [], [], untrained(learnt_by(rows), BASELINES)
    for x in points:
        found = by_model(select(rows, metric="mse", x=x))
        ahead = ratio(best(found, BASELINES), found.get(model, {}))
        verdicts.append(verdict(ahead, 1.0))
        if ahead is not None:
            parts.append(f"{x:g}: {times(ahead)}×")
    measured = "error of the best baseline over its own, by number of points: " + "; ".join(parts)
    measured += f"; {missed}" if missed else ""
    return measured if parts else "", tested(together(verdicts), missed)


def _any_number(rows: Sequence[Row]) -> Claim:
    text = "Once trained, Intention outperforms the remaining baselines on any number of observations."
    return Claim(text, "section 5.1, Figure 7", *_against(rows, "intention", points(rows)))


def _some_numbers(rows: Sequence[Row]) -> Claim:
    text = "Trained Intention beats Neural Process, MAML and Attention at 5, 10 and 20 points."
    return Claim(text, "Figure 7, our own line", *_against(rows, "intention", FEW))


def _sigma(rows: Sequence[Row]) -> Claim:
    learns, judged = applicable("sigma_intention", learnt_by(rows), BASELINES)
    beside, _ = _against(rows, "sigma_intention", points(rows))
    text = f"{PUT_TO_THE_TEST} (σIntention; read as: it learns, {RULE})"
    return Claim(text, "abstract, Figure 7", f"{learns}; {beside}" if learns else "", judged)


def _untrained(rows: Sequence[Row]) -> Claim:
    text = "With enough context points the untrained Intention matches the trained baselines."
    most = max(points(rows), default=math.nan)
    trained = best(by_model(select(rows, metric="mse", x=most)), BASELINES)
    raw = by_model(select(rows, metric="mse before training", x=most))
    parts, verdicts = [], []
    for model, name in (("intention", "as training starts it (α = 1)"), (SMALL, "with α = 1e-4")):
        ahead = ratio(trained, raw.get(model, {}))
        verdicts.append(verdict(ahead, 1.0))
        parts += [] if ahead is None else [f"{name}: {times(ahead)}×"]
    missed = untrained(learnt_by(rows), BASELINES)
    measured = f"at {most:g} points, error of the best trained baseline over that of the untrained Intention, "
    measured += "; ".join([*parts, *filter(None, [missed])])
    return Claim(text, "section 5.1, Figure 7", measured if parts else "", tested(together(verdicts), missed))


def finding(rows: Sequence[Row]) -> str:
    x = TRAINED_AT if TRAINED_AT in points(rows) else max(points(rows), default=math.nan)
    said = beside(by_model(select(rows, metric="mse", x=x)), "intention", BASELINES, learnt_by(rows))
    return said and f"From {x:g} points of a sine curve Intention draws the rest with {said}."
