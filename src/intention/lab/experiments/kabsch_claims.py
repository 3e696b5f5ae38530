"""What the rows of `kabsch` say to the paper's claims."""

from __future__ import annotations

from collections.abc import Sequence

from intention.lab.experiments.base import Claim
from intention.lab.experiments.compare import Found, best, by_model, errors, named, ratio, together, verdict
from intention.lab.experiments.kabsch_figures import DIMS, of
from intention.lab.results import Row, estimate, select

BASELINES = ("attention", "neural_process", "mlp")
SIGMA = "Both new modules are put to the test: σIntention beats the baselines"
WIDE = 5.0  # times: a wide margin
NEAR = 0.1  # of the extent of the cloud
ON_CLOUD = "relative error on the cloud"


def claims(rows: Sequence[Row]) -> list[Claim]:
    cases = {dims: by_model(of(select(rows, metric="mse"), dims)) for dims in DIMS}
    cases = {dims: found for dims, found in cases.items() if found}
    return [
        _against_baselines(cases, "intention", "Intention beats the baselines by a wide margin", WIDE),
        _near_least_squares(cases),
        _any_points(rows),
        _against_baselines(cases, "sigma_intention", SIGMA, 1),
        _against_intention(cases),
        _no_training(rows),
    ]


def _against_baselines(cases: dict[int, Found], model: str, text: str, least: float) -> Claim:
    """How many times larger is the error of the best baseline, chosen anew for each seed?"""
    parts = []
    for dims, found in cases.items():
        times = ratio(best(found, BASELINES), found.get(model, {}))
        each = verdict(times, least)
        if each == "does not hold" and verdict(times, 1) == "holds":
            each = "partly"  # ahead, but not by a wide margin
        measured = f"the best baseline has {times} times its MSE ({errors(found, (model, *BASELINES))})"
        parts.append(("" if times is None else _case(dims, measured), each))
    if least > 1:
        text += f" (read as: at most 1/{least:g} of the best one's error)"
    return _claim(text, "section 5.4, Figure 10" if model == "intention" else "abstract, Figure 10", parts)


def _near_least_squares(cases: dict[int, Found]) -> Claim:
    parts = []
    for dims, found in cases.items():
        times = ratio(found.get("intention", {}), found.get("affine", {}))
        inverse = ratio(found.get("affine", {}), found.get("intention", {}))  # at most twice: at least one half
        beside = errors(found, ("intention", "affine", "umeyama"))
        measured = _case(dims, f"{times} times the MSE of affine least squares ({beside})")
        parts.append(("" if times is None else measured, verdict(inverse, 0.5)))
    text = "The network learns to extract the map (read as: at most twice the error of affine least squares)"
    return _claim(text, "appendix “Learning generalised Kabsch algorithm”", parts)


def _any_points(rows: Sequence[Row]) -> Claim:
    """Errors of one map of a cloud, as shares of the extent of its image."""
    parts = []
    on_cloud = select(rows, metric=ON_CLOUD)
    for name in sorted({str((row.data or {}).get("cloud")) for row in on_cloud}):
        found = by_model(row for row in on_cloud if (row.data or {}).get("cloud") == name)
        error = estimate(list(found.get("intention", {}).values()))
        closed = {model: next(iter(values.values())) for model, values in found.items() if model != "intention"}
        beside = ", ".join(f"{named(model)} {value:.1%}" for model, value in closed.items())
        measured = f"{name}: {error.mean:.1%} of its extent over {error.count} seeds ({beside} from the same points)"
        each = "holds" if error.high <= NEAR else "partly" if error.mean <= NEAR else "does not hold"
        parts.append((measured, each))
    text = "The learned mapping can be applied to any set of points"
    return _claim(f"{text} (read as: r.m.s. error at most {NEAR:.0%} of its extent)", "section 5.4, Figure 11", parts)


def _against_intention(cases: dict[int, Found]) -> Claim:
    parts = []
    for dims, found in cases.items():
        times = ratio(found.get("linear_attention", {}), found.get("intention", {}))
        measured = _case(dims, f"linear attention has {times} times the MSE of Intention")
        parts.append(("" if times is None else measured, verdict(times, 1)))
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
