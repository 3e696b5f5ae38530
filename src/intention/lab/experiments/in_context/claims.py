"""What the rows of `in_context` say: errors against the number of pairs seen, beside exact ridge."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Estimate, Row, estimate_log, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import (
    UNTESTED,
    at_most,
    by_model,
    errors,
    learnt,
    named,
    ratio,
    tested,
    times,
    together,
    untrained,
    verdict,
)
from intention.lab.experiments.sequences import GATED, WHERE, about

__all__ = ["DRIFT", "by_position", "claims", "drifted", "finding", "worst"]

ON = 1.05  # times the error of ridge
CLOSE = 2.0
DRIFT = "mse with drift"
OURS = "intention_gated"
FORGETFUL = {  # without forgetting -> with
    "intention_gated": "intention_gated",
    "linear_attention_gated": "linear_attention_gated",
    "attention_gated": "attention_gated",
    "delta_gated": "gated_delta_gated",
}


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        _near(rows, "intention", ON, "One Intention layer sits on exact ridge"),
        _near(rows, "transformer", CLOSE, "A Transformer with the same budget comes close to exact ridge"),
        _near(rows, "informer", CLOSE, "An Informer, the same network with Intention, comes close to exact ridge"),
        _better(
            rows,
            "informer",
            "linear_attention",
            "The covariance matters: linear attention has a larger error than Intention",
        ),
        _better(
            rows,
            "informer",
            "delta",
            "The delta rule, one step of descent for each token, has a larger error than Intention",
        ),
        _better(rows, "sigma_intention", "transformer", "σIntention is at least as good as attention"),
        _close_in_the_mean(rows),
        _forgetting(rows, [OURS], "Forgetting pays where coefficients drift"),
        _forgetting(rows, list(FORGETFUL), "Where coefficients drift forgetting pays for every mixer that can"),
        _best_with_drift(rows),
    ]


def by_position(rows: Sequence[Row], model: str) -> dict[int, list[float]]:
    """The errors at all positions for each seed; what is not finite is infinitely bad."""
    found = {row.seed: about(row, "by position") or [] for row in select(rows, metric="mse", model=model)}
    return {seed: [math.inf if error is None else error for error in each] for seed, each in found.items()}


def worst(rows: Sequence[Row], model: str) -> tuple[Estimate, int] | None:
    """How many times ridge's error at the worst position from d on (a mean over seeds), and where that is at most."""
    own, floor = by_position(rows, model), by_position(rows, "ridge")
    if not own or not set(own) <= set(floor):
        return None
    dims = max(about(row, "dims") for row in select(rows, metric="mse", model=model))
    found = {}
    for seed, each in own.items():
        found[seed] = max((error / least, place) for place, (error, least) in _from(each, floor[seed], dims))
    return estimate_log([most for most, _ in found.values()]), max(found.values())[1]


def _from(own: list[float], floor: list[float], dims: int) -> list[tuple[int, tuple[float, float]]]:
    return list(enumerate(zip(own, floor, strict=True)))[dims:]


def _near(rows: Sequence[Row], model: str, bound: float, text: str) -> Claim:
    found = worst(rows, model)
    text = f"{text} (read as: at most {bound:g} times its MSE at every position from d on)"
    if found is None:
        return Claim(text, WHERE, "", UNTESTED)
    most, place = found
    beside = errors(by_model(select(rows, metric="mse")), (model, "ridge"))
    measured = f"{times(most)} times at the worst position ({place} pairs seen); MSE from d on: {beside}"
    return Claim(text, WHERE, measured, at_most(most, bound))


def _better(rows: Sequence[Row], model: str, other: str, text: str) -> Claim:
    found = by_model(select(rows, metric="mse"))
    ahead = ratio(found.get(other, {}), found.get(model, {}))
    missed = untrained({other: learnt(found.get(other, {}), found.get("zero", {}))}, [other])
    measured = ahead and f"{named(other)} has {times(ahead)} times the MSE of {named(model)}, the same network"
    said = "; ".join(filter(None, (measured, missed)))
    return Claim(f"{text} (in the same network)", WHERE, said, tested(verdict(ahead, 1), missed))


def _close_in_the_mean(rows: Sequence[Row]) -> Claim:
    text = (
        f"In gated layers Intention comes close to exact ridge (read as: at most {CLOSE:g} times its MSE in the mean "
        "over positions from d on)"
    )
    found = by_model(select(rows, metric="mse"))
    most = worst(rows, OURS)
    if most is None:
        return Claim(text, WHERE, "", UNTESTED)
    far = estimate_log([error / found["ridge"][seed] for seed, error in found[OURS].items()])
    measured = f"{times(far)} times, {times(most[0])} at the worst position ({most[1]} pairs seen)"
    return Claim(text, WHERE, measured, at_most(far, CLOSE))


def drifted(rows: Sequence[Row], model: str, forgets: bool | None) -> dict[int, float]:
    """Errors with drift by seed; `forgets` is None for closed forms."""
    own = [row for row in select(rows, metric=DRIFT, model=model) if about(row, "forgets") == forgets]
    return by_model(own).get(model, {})


def _forgetting(rows: Sequence[Row], models: Sequence[str], text: str) -> Claim:
    parts, verdicts = [], []
    for model in models:
        ahead = ratio(drifted(rows, model, False), drifted(rows, FORGETFUL[model], True))
        verdicts.append(verdict(ahead, 1))
        if ahead is not None:
            parts.append(f"{named(model)} has {times(ahead)} times the MSE without it")
    return Claim(f"{text} (read as: less error with a forgetting gate)", WHERE, "; ".join(parts), together(verdicts))


def _best_with_drift(rows: Sequence[Row]) -> Claim:
    """Against the best of each other mixer, with and without forgetting: that of the smallest mean over seeds."""
    own = drifted(rows, OURS, True)
    others = {
        (name, forgets): drifted(rows, name, forgets) for name in GATED if name != OURS for forgets in (False, True)
    }
    others = {key: each for key, each in others.items() if each}
    text = "Where coefficients drift Intention that forgets has less error than all other mixers, forgetting or not"
    if not own or {name for name, _ in others} != set(GATED) - {OURS}:
        return Claim(text, WHERE, "", UNTESTED)
    (name, forgets), best = min(others.items(), key=lambda item: sum(item[1].values()) / len(item[1]))
    ahead = ratio(best, own)
    measured = (
        ahead and f"the best other, {named(name)}{' that forgets' if forgets else ''}, has {times(ahead)} times its MSE"
    )
    return Claim(text, WHERE, measured or "", verdict(ahead, 1))


def finding(rows: Sequence[Row]) -> str:
    found = by_model(select(rows, metric="mse"))
    above = {model: ratio(own, found.get("ridge", {})) for model, own in found.items()}
    far = {model: one.mean for model, one in above.items() if one is not None and math.isfinite(one.mean)}
    if "intention" not in far:
        return ""
    others = [f"{named(model)} {far[model]:.3g}" for model in ("informer", "transformer", "delta") if model in far]
    text = "On linear regression from pairs shown in the input one layer of Intention has"
    exact = f"{far['intention']:.2f} times the error of exact ridge regression"
    return f"{text} {', '.join([exact, *others])}."
