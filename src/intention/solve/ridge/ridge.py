"""Q (c K'WK + alpha I)^-1 K'WV for a batch.

`RIDGE`, at the end, declares it; `by_route` has the implementation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.factor import Spectrum, by_gain, mm, spectrum
from intention.solve.ladder import PINV, Report, has_float64, warn_inaccurate
from intention.solve.operator import Operator, Saved, flat
from intention.solve.problem import Grads, Invert, Needs, Plan, Problem
from intention.solve.ridge.by_route import Known, Solution, backward_batch, cast_grads, shaped_like, solve_batch
from intention.solve.ridge.gradients import Mode, pullback
from intention.solve.torch_state import gradient_free
from intention.solve.transform.transform import inverter, transform

# Beyond this many features d unit vectors are too much to pay for one derivative, that at w = 0.
LARGE = 1024


def ridge(problem: Problem, plan: Plan, solver: str) -> tuple[Tensor, Tensor]:
    """Solve a batch: (out, packed report)."""
    out, packed = RIDGE(*problem, *plan, solver)
    return out, packed


def solve_points(
    key: Tensor, value: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, size: Tensor
) -> tuple[Tensor, Report]:
    """Sigma^-1 K'WV (..., d, k) by the SVD of the keys, whose condition is nowhere squared. float64.

    `size`: |keys| before they were centred, which left rounding of that size. Derivatives are those of the ladder,
    whose value stands back.
    """
    shapes = {"key": key.shape[:-2], "value": value.shape[:-2], "alpha": alpha.shape}
    lead = checks.leading(**shapes, weight=() if weight is None else weight.shape[:-1])
    key, value, size = (flat(x, lead, *x.shape[-2:]) for x in (key, value, size))
    weight, alpha, gain = flat(weight, lead, key.shape[-2]), flat(alpha, lead), flat(gain, lead)
    w, report, null = _by_svd(key, value, weight, alpha, gain, size)
    warn_inaccurate(report)
    if not gradient_free(key, value, weight, alpha, gain):
        key = key - key @ null @ null.mT
        moving = _by_ladder(key, value, weight, alpha, gain)
        w = moving + (w - moving).detach()
    return w.reshape(*lead, *w.shape[-2:]), Report(*(x.reshape(lead) for x in report))


@torch.no_grad()
def _by_svd(
    key: Tensor, value: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, size: Tensor
) -> tuple[Tensor, Report, Tensor]:
    """W = V s / (c s^2 + alpha) U'V~ with K~ = U s V', and the directions (columns) that only rounding has."""
    root = 1.0 if weight is None else weight.sqrt().unsqueeze(-1)
    found, noisy = _directions(key, weight, alpha, gain, size)
    u, s, vt, sigma, kept, lost = found
    power = torch.where(kept, s / sigma, 0.0)
    w = torch.bmm(vt.mT, power.unsqueeze(-1) * torch.bmm(u.mT, root * value))
    ratio, eps = found.condition(), torch.finfo(key.dtype).eps
    report = Report(torch.full_like(ratio, PINV), ratio + lost, eps * ratio.sqrt() + lost)
    w = torch.where((root * key != 0).any(1).unsqueeze(-1), w, 0.0)  # a column of zeros, exactly
    return w + lost.view(-1, 1, 1), report, vt.mT * noisy.unsqueeze(1)


@torch.no_grad()
def hat_of_points(key: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, size: Tensor) -> Tensor:
    """w k Sigma^-1 k' (..., N) of the points themselves: U^2 s^2 / (c s^2 + alpha). Arguments as in `solve_points`."""
    shapes = {"key": key.shape[:-2], "alpha": alpha.shape}
    lead, n = checks.leading(**shapes, weight=() if weight is None else weight.shape[:-1]), key.shape[-2]
    key, size = (flat(x, lead, *x.shape[-2:]) for x in (key, size))
    found, _ = _directions(key, flat(weight, lead, n), flat(alpha, lead), flat(gain, lead), size)
    share = torch.where(found.kept, found.s.square() / found.sigma, 0.0)
    return ((found.u.square() * share.unsqueeze(1)).sum(-1) + found.lost.unsqueeze(-1)).reshape(*lead, n)


def _directions(
    key: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, size: Tensor
) -> tuple[Spectrum, Tensor]:
    """The spectrum of K~, without the directions that are the rounding of centring, and which those are."""
    root = 1.0 if weight is None else weight.sqrt().unsqueeze(-1)
    found = spectrum(root * key, alpha, gain)
    # |K~ v| of a direction v that is rounding: that of the columns it is made of
    reach = torch.linalg.vector_norm(root * size, dim=1).unsqueeze(-1)
    noise = 2 * torch.finfo(key.dtype).eps * torch.bmm(found.vt.abs(), reach).squeeze(-1)
    noisy = found.kept & ~(found.s > noise) & (alpha == 0).unsqueeze(-1)
    return found._replace(kept=found.kept & ~noisy), noisy


def _by_ladder(key: Tensor, value: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None) -> Tensor:
    """The same W by the ladder, in the smaller form; with weights as a prediction, which has a slope at w = 0."""
    n, d = key.shape[-2:]
    if n < d and (weight is None or d > LARGE):
        root = 1.0 if weight is None else (torch.where(weight > 0, weight, 1.0).sqrt() * (weight > 0)).unsqueeze(-1)
        key, value = root * key, root * value
        out, _ = transform(Problem.of_points(value.mT, key.mT, None, alpha, gain), "auto")
        return key.mT @ out.mT
    unit = torch.eye(d, dtype=key.dtype, device=key.device).expand(key.shape[0], d, d)
    return ridge(Problem(unit, key, value, weight, alpha, gain), Plan(n < d, False, 1.0), "auto")[0]


def _solve(*args: Any) -> tuple[Solution, bool]:
    return solve_batch(Problem(*args[:6]), Plan(*args[6:9]), *args[9:])


def _shapes(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None, *options: Any
) -> Solution:
    batch, (n, d), k, (dual, _, _, solver) = alpha.shape[0], key.shape[-2:], value.shape[-1], options
    size, dtype = n if dual else d, torch.float64 if solver == "float64" else query.dtype
    coef, matrix = (query.new_empty(batch, size, width, dtype=dtype) for width in (k, size))
    return query.new_empty(*query.shape[:-1], k), coef, matrix, query.new_empty(batch, 3)


def _pull(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The first derivatives."""
    (grad,), problem, (coef, matrix, packed) = grads, Problem._make(saved.tensors), saved.outputs
    plan, solver = Plan(*saved.options[:3]), saved.options[3]
    known = Known(problem, plan, coef, matrix, packed, saved.seen)
    return backward_batch(grad, known, solver, Needs(*needs))[:6]


def _differentiable(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Those of any order: of the pullback, written with `transform`."""
    (grad,), problem = grads, Problem._make(saved.tensors)
    plan, solver = Plan(*saved.options[:3]), saved.options[3]
    return differentiable(grad, problem, bool(saved.seen), plan, solver, Needs(*needs))[:6]


def differentiable(grad: Tensor, problem: Problem, plain: bool, plan: Plan, solver: str, needs: Needs) -> Grads:
    """The pullback as a differentiable function of everything it is made of."""
    moving_weight = problem.weight is not None and (needs.weight or problem.weight.requires_grad)
    # a moving weight changes the form below, whose condition the forward has not seen
    hard = solver == "float64" or (solver == "auto" and (moving_weight or not plain))
    wide = problem.take(None, torch.float64) if hard and has_float64(problem.query.device) else problem
    wide, inner = wide.expanded(), {"auto": "auto", "qr": "qr", "pinv": "pinv"}.get(solver, "cholesky")
    if moving_weight:
        plan = plan._replace(dual=False)  # sqrt(w) has no derivative at 0; K'WK has
    refined = solver not in ("primal", "dual") and wide.query.dtype == torch.float64
    centred = wide.centred()[0] if plan.intercept else wide
    invert = inverter(centred, plan, inner)
    coef = _coefficients(centred, plan, invert, refined)
    mode = Mode(refined, deficient=inner == "pinv" or (inner == "auto" and hard))
    grad = grad.reshape(wide.query.shape[0], *grad.shape[-2:])
    grads = pullback(wide, plan, grad.to(wide.query.dtype), invert, coef, needs, mode)
    grads = shaped_like(problem, grads)
    return cast_grads(grads, grad.dtype)


def _coefficients(problem: Problem, plan: Plan, invert: Invert, refined: bool) -> Tensor:
    """W or P as a differentiable function, with one refinement step where that is asked for."""
    gain, alpha = problem.gain, problem.alpha.view(-1, 1, 1)
    if plan.dual:
        key, value = problem.weighted()
        coef = invert(value)
        if refined:
            coef = coef + invert(value - by_gain(gain, mm(key, mm(key.mT, coef))) - alpha * coef)
        return coef
    weight = 1 if problem.weight is None else problem.weight.unsqueeze(-1)
    coef = invert(mm(problem.key.mT, weight * problem.value))
    if refined:
        rest = problem.value - by_gain(gain, mm(problem.key, coef))
        coef = coef + invert(mm(problem.key.mT, weight * rest) - alpha * coef)
    return coef


RIDGE = Operator(
    "ridge",
    tensors="query key value weight? alpha gain?",
    options="bool dual, bool intercept, float scale, str solver",
    answers=1,
    outputs=4,  # out, coefficients, factor, packed report
    solve=_solve,
    shapes=_shapes,
    pull=_pull,
    differentiable=_differentiable,
    saves_answers=False,
)
