"""What the rows of `stability` say: what stays finite, how gradients grow, how far solves are off."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from intention.lab.core.results import Row, select
from intention.lab.experiments.base import HOLDS, NOT, Claim
from intention.lab.experiments.compare import UNTESTED, together
from intention.lab.experiments.sequences import WHERE, about

__all__ = ["claims", "ended", "errors", "finding"]

FINITE = "steps that were finite"
GROWTH = 10.0  # times the gradient of the largest ridge
WORST, MEDIAN = 1e-5, 1e-6
NOT_MORE = 2.0  # times the error of a solve in float32


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [_finite(rows), _not_finite(rows), _gradients(rows), _errors(rows), _beside(rows)]


def ended(rows: Sequence[Row], model: str) -> dict[float, list[tuple[float, bool]]]:
    """ridge -> for each seed, the steps that were finite and whether these are all; in order."""
    found: dict[float, list[tuple[float, bool]]] = {}
    for row in sorted(select(rows, metric=FINITE, model=model), key=lambda row: (-(row.x or 0.0), row.seed)):
        done = row.value or 0.0
        found.setdefault(row.x or 0.0, []).append((done, done >= row.config.get("steps", math.inf)))
    return found


def errors(rows: Sequence[Row], model: str) -> dict[tuple[float, float], float]:
    """(ridge, decay) -> error; one that is not finite is infinite."""
    found = select(rows, metric="error", model=model)
    return {(row.x or 0.0, about(row, "decay")): math.inf if row.value is None else row.value for row in found}


def gradients(rows: Sequence[Row], model: str) -> dict[float, float]:
    """ridge -> the median norm, its median over seeds."""
    found: dict[float, list[float]] = {}
    for row in select(rows, metric="gradient", model=model):
        found.setdefault(row.x or 0.0, []).append(math.inf if row.value is None else row.value)
    return {alpha: statistics.median(found[alpha]) for alpha in sorted(found, reverse=True)}


def _counts(found: dict[float, list[tuple[float, bool]]]) -> str:
    parts = []
    for alpha, runs in found.items():
        early = [f"{done:.0f}" for done, whole in runs if not whole]
        said = f"{len(early)} of {len(runs)} not finite, after {', '.join(early)} steps" if early else "all finite"
        parts.append(f"λ = {alpha:g}: {said}")
    return "; ".join(parts)


def _finite(rows: Sequence[Row]) -> Claim:
    text = (
        "Gated Intention trains in bfloat16 autocast at every λ from 1 to 1e-4: every loss and every gradient is finite"
    )
    found = ended(rows, "intention")
    whole = [all(done for _, done in runs) for runs in found.values()]
    if not found or min(found) > 1e-4:
        return Claim(text, WHERE, _counts(found), UNTESTED if all(whole) else "does not hold")
    return Claim(text, WHERE, _counts(found), _each(whole))


def _each(held: Sequence[bool]) -> str:
    """Of cases that are counted, not estimated."""
    return together([HOLDS if one else NOT for one in held])


def _not_finite(rows: Sequence[Row]) -> Claim:
    text = "30 steps of conjugate gradients in bfloat16 do not: there is a λ at which their training ends in NaN"
    found = ended(rows, "conjugate_gradients")
    fails = [not done for runs in found.values() for _, done in runs]
    return Claim(text, WHERE, _counts(found), UNTESTED if not fails else "holds" if any(fails) else "does not hold")


def _gradients(rows: Sequence[Row]) -> Claim:
    text = (
        "The gradients of gated Intention do not explode as λ becomes small (read as: their median norm is at most "
        f"{GROWTH:g} times that at the largest λ)"
    )
    found = gradients(rows, "intention")
    if len(found) < 2:
        return Claim(text, WHERE, "", UNTESTED)
    first, *others = found.values()
    parts = [f"λ = {alpha:g}: {norm:.3g}" for alpha, norm in found.items()]
    held = [norm <= GROWTH * first for norm in others]
    beside = [f"λ = {alpha:g}: {norm:.3g}" for alpha, norm in gradients(rows, "conjugate_gradients").items()]
    said = f"median norms {', '.join(parts)}" + (f"; conjugate gradients {', '.join(beside)}" if beside else "")
    return Claim(text, WHERE, said, _each(held))


def _errors(rows: Sequence[Row]) -> Claim:
    text = (
        f"A single causal fit in float32 is off by at most {WORST:g} for unit keys at every λ and decay, in the median "
        f"by at most {MEDIAN:g}"
    )
    found = list(errors(rows, "intention").values())
    if not found:
        return Claim(text, WHERE, "", UNTESTED)
    worst, middle = max(found), statistics.median(found)
    parts = [f"at most {worst:.1e}, median {middle:.1e} over {len(found)} cases"]
    for model, name in (("solve", "a float32 solve per token"), ("conjugate_gradients", "conjugate gradients")):
        if other := errors(rows, model).values():
            parts.append(f"{name} {min(other):.1e} to {max(other):.1e}")
    return Claim(text, WHERE, "; ".join(parts), _each([worst <= WORST, middle <= MEDIAN]))


def _beside(rows: Sequence[Row]) -> Claim:
    text = f"Its error is in no case more than {NOT_MORE:g} times that of a float32 solve for each token"
    own, other = errors(rows, "intention"), errors(rows, "solve")
    if not own or set(own) != set(other):
        return Claim(text, WHERE, "", UNTESTED)
    ratios = {case: own[case] / other[case] for case in own}
    case = max(ratios, key=lambda case: ratios[case])
    said = f"{ratios[case]:.2g} times at most (λ = {case[0]:g}, decay {case[1]:g}), {min(ratios.values()):.1g} at least"
    held = [ratio <= NOT_MORE for ratio in ratios.values()]
    return Claim(text, WHERE, said, _each(held))


def finding(rows: Sequence[Row]) -> str:
    parts = []
    for model, name in (("intention", "Intention"), ("conjugate_gradients", "30 steps of conjugate gradients")):
        runs = [whole for each in ended(rows, model).values() for _, whole in each]
        off = errors(rows, model).values()
        if runs and off:
            stays = f"{sum(runs)} of {len(runs)} trainings in bfloat16 stay finite"
            worst = f"of at most {max(off):.1g}" if math.isfinite(max(off)) else "that is not finite"
            parts.append(f"with {name} {stays}, and a single fit has a relative error {worst}")
    ridges = list(ended(rows, "intention"))
    text = f"At ridges from {max(ridges):g} down to {min(ridges):g}" if ridges else ""
    return f"{text}, {'; '.join(parts)}." if ridges and parts else ""
