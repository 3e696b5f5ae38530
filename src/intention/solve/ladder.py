"""The accuracy ladder: try the fast factor, measure it, and climb only with the elements that need it.

    primal / dual    Cholesky in the working precision, accepted while r is small
    refined          the same factor and one refinement step
    float64          Cholesky in float64 and one refinement step
    pinv             SVD in float64; the minimum-norm solution where Sigma is singular
    qr               in place of the last two on a device without float64

What cannot be reached is said: `AccuracyWarning`. Keys that are not finite give NaN, never a plausible number.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.factor import LIMITS, SMALL_CORRECTION
from intention.solve.problem import Fit, Plan, Problem, fit, predict, refine

ROUTES = ("primal", "dual", "refined", "float64", "pinv", "qr")
PRIMAL, DUAL, REFINED, FLOAT64, PINV, QR = range(len(ROUTES))
METHODS = {FLOAT64: "cholesky", PINV: "pinv", QR: "qr"}  # of the routes that factor again
# Of causal fits: the condition up to which float64 leaves errors of 1e-6 at most, and the estimated error that is
# accepted; float32 stays below it where it serves.
SEQUENCE_RATIO, SEQUENCE_ERROR = 1e9, 1e-5
TOLERATED = 1e-3  # an estimated relative error above this is worth a warning


class AccuracyWarning(UserWarning):
    """An answer whose estimated relative error exceeds 1e-3."""


class Report(NamedTuple):
    """Per fit: the route that produced the answer, how well Sigma is conditioned, how exact the answer is.

    `route` indexes `ROUTES`; `condition` estimates cond(Sigma); `error` estimates the relative error of the
    prediction (for sigma_intention: of the scores): rounding times condition where the plain factor served, the size of
    the last refinement step elsewhere. `functional.Info` is this class, in the leading dimensions of keys, values,
    weights and alpha together; where queries have fits of their own (causal, or a mask that differs between queries) in
    those of the output, the worst over queries.
    """

    route: Tensor  # (B,), on its way through the solver a float
    condition: Tensor  # (B,)
    error: Tensor  # (B,)

    def told(self) -> Report:
        """As a user gets it: routes are integers, and nothing of ours can be written into."""
        return Report(self.route.to(torch.int8), self.condition.clone(), self.error.clone())


def base_report(dual: bool, ratio: Tensor, dtype: torch.dtype) -> Report:
    """The report of a plain factor."""
    route = torch.full_like(ratio, DUAL if dual else PRIMAL)
    return Report(route, ratio, ratio * torch.finfo(dtype).eps)


def pack(report: Report) -> Tensor:
    """(B, 3), the form in which a report goes through an operator."""
    return torch.stack(report, -1)


def unpack(packed: Tensor) -> Report:
    return Report(*packed.unbind(-1))


def served_all(packed: Tensor) -> bool:
    """Whether the plain factor served every element. Looks at the host."""
    return packed[:, 0].amax().item() < REFINED


def has_float64(device: torch.device) -> bool:
    return device.type != "mps"


def screen(ratio: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None) -> Tensor:
    """Fold the checks that depend on values into the ratio, as NaN, without reading the host."""
    ok = alpha >= 0
    if gain is not None:
        ok = ok & (gain >= 0)
    if weight is not None:
        ok = ok & (weight >= 0).all(-1)
    return torch.where(ok, ratio, torch.nan)


def warn_inaccurate(
    report: Report,
    what: str = "problems",
    remedy: str = "float64 inputs, or solver='pinv' to drop directions below rounding",
) -> None:
    """Say so when an estimate is above what is tolerated; NaN (from NaN in the data) is visible by itself."""
    if not report.error.numel():
        return
    worst = report.error.nan_to_num(nan=0.0).amax().item()
    if worst > TOLERATED:
        count = int((report.error > TOLERATED).sum())
        warnings.warn(
            f"Intention: estimated relative error {worst:.1e} in {count} of {report.error.numel()} {what} "
            f"(condition up to {report.condition.nan_to_num(nan=0.0).amax().item():.1e}); use a larger alpha, "
            f"{remedy}",
            AccuracyWarning,
            stacklevel=_callers_level(),
        )


def warn_of_error(error: Tensor, *said: str) -> None:
    """The same of answers whose error alone is known."""
    warn_inaccurate(Report(torch.zeros_like(error), torch.zeros_like(error), error), *said)


def _callers_level() -> int:
    """The stack level of the first frame outside this package, so that a warning names the user's line."""
    package, level = __name__.split(".")[0], 2
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").split(".")[0] in (package, "torch"):
        frame, level = frame.f_back, level + 1
    return level


def climb(problem: Problem, plan: Plan, fitted: Fit, out: Tensor) -> tuple[Tensor, Tensor, Report]:
    """Redo the elements whose ratio is too large; `out` and the coefficients are updated in place (they are ours)."""
    checks.require_values(problem.weight, problem.alpha, problem.gain)
    dtype, coef, limits = out.dtype, fitted.coef, LIMITS[out.dtype, plan.dual]
    report = base_report(plan.dual, fitted.factor.ratio.clone(), dtype)
    todo = (~(fitted.factor.ratio < limits.easy)).nonzero()[:, 0]

    middle = todo[fitted.factor.ratio[todo] < limits.hard]
    if middle.numel():
        again = fitted.take(middle)
        again, size = refine(again, plan)
        good = size < limits.step
        where = middle[good]
        out[where], coef[where] = predict(again, plan)[good], again.coef[good]
        report.route[where], report.error[where] = REFINED, size[good]
        todo = todo[~torch.isin(todo, where)]
    return out, coef, climb_on(problem, plan, out, report, todo)


def climb_on(problem: Problem, plan: Plan, out: Tensor, report: Report, todo: Tensor) -> Report:
    """The steps after the refinement, for the elements `todo`; `out` and the report are updated in place."""
    eps = torch.finfo(out.dtype).eps

    def again(sub: Problem, method: str) -> Again:
        fitted, size = refine(fit(sub, plan, method), plan)
        ratio = fitted.factor.ratio
        spread = ratio.rsqrt() if fitted.factor.spread is None else fitted.factor.spread
        # alpha = 0 and keys that are dependent up to their own rounding: the rounding would decide the answer
        noise = torch.where((sub.alpha == 0) & (spread < 4 * eps) & (spread > 0), eps / spread, 0.0)
        return Again(predict(fitted, plan), ratio, size, torch.maximum(size, noise))

    todo = set_non_finite(problem, out, report, todo)
    routes = routes_beyond(out)
    for route in routes[1:] if out.dtype == torch.float64 else routes:
        todo = redo(problem, out, report, todo, route, again)
    warn_inaccurate(report)
    return report


def routes_beyond(out: Tensor) -> tuple[int, ...]:
    """The last steps of the ladder, where this answer is."""
    return (FLOAT64, PINV) if has_float64(out.device) else (QR,)


def redo_problem(problem: Problem, index: Tensor | None, route: int) -> Problem:
    """The elements `index` in the precision of `route`: forward and backward must agree on it."""
    working = problem.query.dtype if route == QR else torch.float64
    return problem.take(index, working)


class Again(NamedTuple):
    """Answers by another route."""

    out: Tensor
    ratio: Tensor  # (B,), as of a factor
    step: Tensor  # (B,): the size of the last refinement
    error: Tensor  # (B,)


def redo(
    problem: Problem,
    out: Tensor,
    report: Report,
    todo: Tensor,
    route: int,
    again: Callable[[Problem, str], Again],
    judged: bool = True,
) -> Tensor:
    """Redo the elements `todo` by another route; returns those that need still more.

    Of Cholesky in float64, where it is `judged`, those whose ratio or step is large. A small step alone does not tell:
    of a singular Sigma, whose last pivot is rounding, it may be small as well.
    """
    if not todo.numel():
        return todo
    whole = todo.numel() == out.shape[0]
    found = again(redo_problem(problem, None if whole else todo, route), METHODS[route])
    good = torch.ones_like(found.ratio, dtype=torch.bool)
    if route == FLOAT64 and judged:
        good = (found.ratio < LIMITS[torch.float64, False].hard) & (found.step < SMALL_CORRECTION[out.dtype])
    where = todo[good]
    out[where] = found.out[good].to(out.dtype)
    report.route[where] = route
    report.condition[where] = found.ratio[good].to(out.dtype)
    report.error[where] = (found.error + torch.finfo(out.dtype).eps)[good].to(out.dtype)
    return todo[~good]


def set_non_finite(problem: Problem, out: Tensor, report: Report, todo: Tensor) -> Tensor:
    """Elements whose keys, weights or alpha are not finite become NaN and leave the ladder."""
    if not todo.numel():
        return todo
    finite = torch.isfinite(problem.key[todo]).flatten(1).all(-1) & torch.isfinite(problem.alpha[todo])
    if problem.weight is not None:
        finite &= torch.isfinite(problem.weight[todo]).all(-1)
    lost = todo[~finite]
    out[lost] = torch.nan
    report.condition[lost] = report.error[lost] = torch.nan
    return todo[finite]
