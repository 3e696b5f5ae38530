"""What the rows of `kabsch` say to the paper's claims."""

from __future__ import annotations

import math
from collections.abc import Sequence

from intention.lab.core.results import Row, estimate, select
from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import (
    LEARNT,
    PUT_TO_THE_TEST,
    UNTESTED,
    Found,
    Learnt,
    applicable,
    at_most,
    beside,
    best,
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

__all__ = ["DIMS", "ON_CLOUD", "claims", "finding", "of"]

BASELINES = ("attention", "neural_process", "mlp")
RULE = f"its error is at most {LEARNT:g} of that of predicting the mean"
WIDE = 5.0  # times: a wide margin
NEAR = 0.1  # of the extent of the cloud
ON_CLOUD = "relative error on the cloud"
POINTS = 5  # of the paper, where rows do not say


DIMS = (2, 3)


def of(rows: Sequence[Row], dims: int) -> list[Row]:
    return [row for row in rows if (row.data or {}).get("dims") == dims]


def claims(rows: Sequence[Row]) -> list[Claim]:
    cases = {dims: by_model(of(select(rows, metric="mse"), dims)) for dims in DIMS}
    cases = {dims: found for dims, found in cases.items() if found}
    points = {dims: min(row.config.get("points", POINTS) for row in of(rows, dims)) for dims in cases}
    return [
        _against_baselines(cases, "intention", "Intention beats the baselines by a wide margin", WIDE),
        _near_least_squares(cases, points),
        _any_points(rows),
        _sigma(cases),
        _against_intention(cases),
        _no_training(rows),
    ]


def learnt_by(found: Found) -> Learnt:
    return {model: learnt(own, found.get("zero", {})) for model, own in found.items() if model != "zero"}


def _against_baselines(cases: dict[int, Found], model: str, text: str, least: float) -> Claim:
    """How many times larger is the error of the best baseline, chosen anew for each seed?"""
    parts = [_beside_baselines(dims, found, model, least) for dims, found in cases.items()]
    text += f" (read as: at most 1/{least:g} of the best one's error)"
    return _claim(text, "section 5.4, Figure 10", parts)


def _beside_baselines(dims: int, found: Found, model: str, least: float) -> tuple[str, str]:
    ahead, missed = ratio(best(found, BASELINES), found.get(model, {})), untrained(learnt_by(found), BASELINES)
    beside = errors(found, (model, *BASELINES))
    measured = ahead and _case(dims, f"the best baseline has {times(ahead)} times its MSE ({beside})")
    text = ", ".join(filter(None, (measured, missed)))
    return text if measured else "", tested(verdict(ahead, least), missed)


def _sigma(cases: dict[int, Found]) -> Claim:
    parts = []
    for dims, found in cases.items():
        learns, judged = applicable("sigma_intention", learnt_by(found), BASELINES)
        beside, _ = _beside_baselines(dims, found, "sigma_intention", 1)
        parts.append((f"{_case(dims, learns)}; {beside}" if learns else "", judged))
    return _claim(f"{PUT_TO_THE_TEST} (σIntention; read as: it learns, {RULE})", "abstract, Figure 10", parts)


def _near_least_squares(cases: dict[int, Found], points: dict[int, int]) -> Claim:
    parts = []
    for dims, found in cases.items():
        inverse = ratio(found.get("affine", {}), found.get("intention", {}))  # at most twice: at least one half
        beside = errors(found, ("intention", "affine", "umeyama"))
        if inverse is None:
            parts.append(("", UNTESTED))
        elif points[dims] <= dims + 2:  # E (K'K)^-1 of N centred normal points in d dimensions exists for N > d + 2
            why = f"the error of affine least squares from {points[dims]} points has no mean to compare with"
            parts.append((_case(dims, f"{why} ({beside})"), UNTESTED))
        else:
            more = ratio(found["intention"], found["affine"])
            measured = f"{times(more) if more else '(not finite)'} times the MSE of affine least squares ({beside})"
            parts.append((_case(dims, measured), verdict(inverse, 0.5)))
    text = "The network learns to extract the map (read as: at most twice the error of affine least squares)"
    return _claim(text, "appendix “Learning generalised Kabsch algorithm”", parts)


def _any_points(rows: Sequence[Row]) -> Claim:
    """Median errors over many maps of a cloud, as shares of the extent of its image."""
    parts = []
    on_cloud = select(rows, metric=ON_CLOUD)
    for name in sorted({str((row.data or {}).get("cloud")) for row in on_cloud}):
        here = [row for row in on_cloud if (row.data or {}).get("cloud") == name]
        own = by_model(here).get("intention")
        if own is None:
            parts.append(("", UNTESTED))
            continue
        error = estimate(list(own.values()))
        closed = [model for model in ("affine", "umeyama") if select(here, model=model)]
        beside = ", ".join(_share(select(here, model=model)[:1], model) for model in closed)
        measured = f"{name}: {_share(select(here, model='intention'), 'intention')} over {error.count} seeds"
        parts.append((measured + (f" ({beside} from the same points)" if beside else ""), at_most(error, NEAR)))
    text = "The learned mapping can be applied to any set of points"
    reading = f"(read as: the median of 100 maps has an r.m.s. error of at most {NEAR:.0%} of the extent)"
    return _claim(f"{text} {reading}", "section 5.4, Figure 11", parts)


def _share(rows: Sequence[Row], model: str) -> str:
    """The mean over seeds of the median over maps, and of the 90th percentile where rows have it."""
    median, most = estimate([row.value for row in rows]), estimate([(row.data or {}).get("most") for row in rows])
    if math.isnan(median.mean):
        return f"{named(model)} not finite"
    beyond = "" if math.isnan(most.mean) else f" (90th percentile {most.mean:.1%})"
    return f"{named(model)} {median.mean:.1%}{beyond}"


def _against_intention(cases: dict[int, Found]) -> Claim:
    parts = []
    for dims, found in cases.items():
        ahead = ratio(found.get("linear_attention", {}), found.get("intention", {}))
        measured = ahead and _case(dims, f"linear attention has {times(ahead)} times the MSE of Intention")
        missed = untrained(learnt_by(found), ["linear_attention"])
        parts.append((", ".join(filter(None, (measured, missed))), tested(verdict(ahead, 1), missed)))
    text = "The covariance matters: without it (linear attention, the same layers) the error is larger"
    return _claim(text, "theorem 2.8, our own line", parts)


def _no_training(rows: Sequence[Row]) -> Claim:
    parts = []
    for dims in DIMS:
        found = by_model(of(select(rows, metric="mse without noise", model="affine"), dims)).get("affine")
        if found:
            worst = max(found.values())
            parts.append((_case(dims, f"largest MSE {worst:.1g}"), "holds" if worst < 1e-6 else "does not hold"))
    text = "Without noise, Intention with an intercept finds the map without training (affine least squares)"
    return _claim(text, "our own line", parts)


def _case(dims: int, text: str) -> str:
    return text if dims == 2 else f"in {dims}-D: {text}"


def _claim(text: str, where: str, parts: Sequence[tuple[str, str]]) -> Claim:
    measured = "; ".join(measured for measured, _ in parts if measured)
    return Claim(text, where, measured, together([each for _, each in parts]))


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for dims in DIMS:
        found = by_model(of(select(rows, metric="mse"), dims))
        if said := beside(found, "intention", BASELINES, learnt_by(found)):
            count = min(row.config.get("points", POINTS) for row in of(rows, dims))
            parts.append(_case(dims, f"from {count} pairs of points with {said}"))
    return f"Intention learns to rotate, scale and shift a cloud {'; '.join(parts)}." if parts else ""
