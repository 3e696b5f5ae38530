"""What the rows of `sine` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import best, by_model, ratio, times, together, verdict

BASELINES = ("attention", "neural_process", "maml")
TRAINED = ("intention", "sigma_intention", "linear_attention", *BASELINES)
SMALL = "Intention, α = 1e-4"  # untrained, under its own label
LINE = "ridge on raw x"
FEW = (5, 10, 20)  # points


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [_any_number(rows), _some_numbers(rows), _untrained(rows), _sigma(rows)]


def points(rows: Sequence[Row]) -> list[float]:
    return sorted({row.x for row in select(rows, metric="mse") if row.x is not None})


def _against(rows: Sequence[Row], model: str, points: Sequence[float]) -> tuple[str, str]:
    """Error of the best baseline over the model's, for each number of points; and the verdict "at every one"."""
    parts, verdicts = [], []
    for x in points:
        found = by_model(select(rows, metric="mse", x=x))
        ahead = ratio(best(found, BASELINES), found.get(model, {}))
        verdicts.append(verdict(ahead, 1.0))
        if ahead is not None:
            parts.append(f"{x:g}: {times(ahead)}×")
    measured = "error of the best baseline over its own, by number of points: " + "; ".join(parts)
    return measured if parts else "", together(verdicts)


def _any_number(rows: Sequence[Row]) -> Claim:
    text = "Once trained, Intention outperforms the remaining baselines on any number of observations."
    return Claim(text, "section 5.1, Figure 7", *_against(rows, "intention", points(rows)))


def _some_numbers(rows: Sequence[Row]) -> Claim:
    text = "Trained Intention beats Neural Process, MAML and Attention at 5, 10 and 20 points."
    return Claim(text, "our own line, Figure 7", *_against(rows, "intention", FEW))


def _sigma(rows: Sequence[Row]) -> Claim:
    text = "Both new modules are put to the test: σIntention outperforms the baselines on any number of observations."
    return Claim(text, "abstract", *_against(rows, "sigma_intention", points(rows)))


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
    measured = f"at {most:g} points, error of the best trained baseline over that of the untrained Intention, "
    return Claim(text, "section 5.1, Figure 7", measured + "; ".join(parts) if parts else "", together(verdicts))
