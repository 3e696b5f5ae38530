"""Q (c K'WK + alpha I)^-1 K'WV for a batch: one implementation behind two doors.

Eager calls go through an autograd.Function, compiled ones through a custom operator; both run `_solve` and `_backward`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention.solve.doors import (
    accept_any_arguments,
    gather_batch,
    gradient_free,
    no_autocast,
    scatter_batch,
    sum_neighbours,
)
from intention.solve.factor import EASY, Factor, mm, solve, wants_inverse
from intention.solve.ladder import (
    FLOAT64,
    PINV,
    QR,
    REFINED,
    base_report,
    climb,
    has_float64,
    pack,
    redo_problem,
    redo_rtol,
    screen,
    uneventful,
    unpack,
)
from intention.solve.problem import Fit, Plan, Problem, fit, pick, predict, refine
from intention.solve.pullback import Grads, Invert, Mode, Needs, pullback, pushforward
from intention.solve.transform import inverter

METHODS = {"primal": "cholesky", "dual": "cholesky", "float64": "cholesky", "qr": "qr", "pinv": "pinv"}
# alpha's gradient is made again in float64 where it is smaller than this times the root sum of squares of its terms
CANCELLED = 0.1
_NAMED_ROUTE = {"float64": FLOAT64, "qr": QR, "pinv": PINV}


def ridge(problem: Problem, plan: Plan, solver: str, trusted: bool) -> tuple[Tensor, Tensor]:
    """Solve a batch: (out, packed report).

    `trusted`: alpha is a checked number and there are no weights, so values need no check.
    """
    if torch.compiler.is_compiling():
        out, _, _, packed = torch.ops.intention.ridge(*problem, *plan, solver, trusted)
    elif gradient_free(*problem):
        out, _, packed = _solve(problem, plan, solver, trusted)
    else:
        out, _, _, packed = Ridge.apply(*problem, *plan, solver, trusted)
    return out, packed


@no_autocast
def _solve(problem: Problem, plan: Plan, solver: str, trusted: bool) -> tuple[Tensor, Fit, Tensor]:
    """The one implementation: (out, fit, packed report)."""
    shape = (*problem.query.shape[:-1], problem.value.shape[-1])
    problem = problem.expanded()
    if solver != "auto":
        out, fitted, packed = _named(problem, plan, solver, trusted)
        return out.reshape(shape), fitted, packed
    fitted = fit(problem, plan, "cholesky")
    out = predict(fitted, plan)
    ratio = fitted.factor.ratio
    if not trusted:
        ratio = screen(ratio, problem.weight, problem.alpha, problem.gain)
    if ratio.amax().item() < EASY[out.dtype]:  # the one look at the host; NaN is not less
        return out.reshape(shape), fitted, ratio
    out, coef, report = climb(problem, plan, fitted, out.contiguous())
    return out.reshape(shape), fitted._replace(coef=coef), pack(report)


def _named(problem: Problem, plan: Plan, solver: str, trusted: bool) -> tuple[Tensor, Fit, Tensor]:
    """One route for all, never looking at the host: elements that fail become NaN."""
    dtype = problem.query.dtype
    if solver == "float64":
        problem = problem.take(None, torch.float64)
    fitted = fit(problem, plan, METHODS[solver], max(problem.key.shape[1:]) * torch.finfo(dtype).eps)
    size = None
    if solver in _NAMED_ROUTE:
        fitted, size = refine(fitted, plan)
    ratio = fitted.factor.ratio
    if not trusted:
        ratio = screen(ratio, problem.weight, problem.alpha, problem.gain)
    out = torch.where(torch.isfinite(ratio).view(-1, 1, 1), predict(fitted, plan), torch.nan).to(dtype)
    report = base_report(plan.dual, ratio.to(dtype), dtype)
    if size is not None:
        report = report._replace(route=torch.full_like(report.route, _NAMED_ROUTE[solver]), error=size.to(dtype))
    return out, fitted, pack(report)


@no_autocast
def _backward(
    grad: Tensor,
    problem: Problem,
    coef: Tensor,
    matrix: Tensor,
    packed: Tensor,
    plan: Plan,
    solver: str,
    needs: Needs,
) -> Grads:
    """First-order gradients, each element by the route and in the precision of its forward."""
    shared = problem
    problem = problem.expanded()
    grad = grad.reshape(problem.query.shape[0], *grad.shape[-2:])
    if solver != "auto":
        grads = _replay(problem, plan, grad, coef, matrix, solver, needs)
    else:
        grads = _by_route(problem, plan, grad, coef, matrix, packed, needs)
    return _shaped_like(shared, grads)


def _shaped_like(problem: Problem, grads: Grads) -> Grads:
    """Undo `expanded`."""
    query, key, value = grads[:3]
    if problem.query.dim() > 3:
        query, key, value = (
            None if g is None else g.reshape(x.shape) for g, x in zip(grads[:3], problem[:3], strict=True)
        )
    else:
        times = problem.query.shape[0] // max(problem.key.shape[0], 1)
        key, value = sum_neighbours(key, times), sum_neighbours(value, times)
    return grads._replace(query=query, key=key, value=value)


def _by_route(
    problem: Problem, plan: Plan, grad: Tensor, coef: Tensor, matrix: Tensor, packed: Tensor, needs: Needs
) -> Grads:
    """All elements by the plain factor, then those of every other route again, their own way."""
    wide = grad.dtype != torch.float64 and has_float64(grad.device)
    needs_weight = needs.weight and problem.weight is not None
    if uneventful(packed) and not (wide and (needs.alpha or needs_weight)):
        return _replay(problem, plan, grad, coef, matrix, "auto", needs)
    route = unpack(packed, plan.dual, grad.dtype).route
    if wide and needs_weight:
        # a weight's gradient holds the residual V - KW, which float32 loses where the fit is close
        route = route.clamp_min(FLOAT64)
    codes = [int(code) for code in route.unique().tolist()]
    grads = None
    if codes[0] < REFINED:
        grads = _replay(problem, plan, grad, coef, matrix, "auto", needs)
    for code in codes:
        if code >= REFINED:
            index = None if len(codes) == 1 else (route == code).nonzero()[:, 0]
            part = _redo(problem, plan, grad, coef, matrix, index, code, needs)
            grads = part if index is None else _merge(grads, part, index, problem.query.shape[0])
    assert grads is not None
    if wide and needs.alpha and grads.alpha is not None and grads.alpha_terms is not None:
        # alpha's gradient is a sum that may cancel: where it does, the few that remain are made in float64
        cancelled = (grads.alpha.abs() < CANCELLED * grads.alpha_terms) & (route <= REFINED)
        index = cancelled.nonzero()[:, 0]
        if index.numel():
            only = Needs(False, False, False, False, True, False)
            part = _redo(problem, plan, grad, coef, matrix, index, FLOAT64, only)
            assert part.alpha is not None
            grads = grads._replace(alpha=grads.alpha.index_copy(0, index, part.alpha))
    return grads


def _replay(
    problem: Problem, plan: Plan, grad: Tensor, coef: Tensor, matrix: Tensor, solver: str, needs: Needs
) -> Grads:
    """Gradients with the saved factor, in its precision."""
    dtype = grad.dtype
    if matrix.dtype != dtype:
        problem, grad = problem.take(None, matrix.dtype), grad.to(matrix.dtype)
    n, k = matrix.shape[-1], coef.shape[-1]
    inverse = solver == "pinv" or (solver != "qr" and wants_inverse(n, k))
    factor = Factor(matrix, inverse, matrix)
    mode = Mode(refined=solver in _NAMED_ROUTE, deficient=solver == "pinv")
    grads = pullback(problem, plan, grad, lambda y: solve(factor, y), coef, needs, mode)
    return grads if matrix.dtype == dtype else _cast(grads, dtype)


def _redo(
    problem: Problem,
    plan: Plan,
    grad: Tensor,
    coef: Tensor,
    matrix: Tensor,
    index: Tensor | None,
    code: int,
    needs: Needs,
) -> Grads:
    """Gradients of the elements `index` by the route `code`."""
    dtype = grad.dtype
    if code == REFINED:
        sub, factor = (
            problem.take(index, dtype),
            Factor(pick(matrix, index, dtype), wants_inverse(matrix.shape[-1], coef.shape[-1]), matrix),
        )
        coef = pick(coef, index, dtype)
    else:
        sub = redo_problem(problem, index, code)
        method = {FLOAT64: "cholesky", PINV: "pinv", QR: "qr"}[code]
        fitted, _ = refine(fit(sub, plan, method, redo_rtol(problem)), plan)
        factor, coef = fitted.factor, fitted.coef
    g = pick(grad, index, sub.query.dtype)
    mode = Mode(refined=True, deficient=code == PINV)
    grads = pullback(sub, plan, g, lambda y: solve(factor, y), coef, needs, mode)
    return _cast(grads, dtype)


def _cast(grads: Grads, dtype: torch.dtype) -> Grads:
    return Grads(*(None if g is None else g.to(dtype) for g in grads))


def _merge(into: Grads | None, part: Grads, index: Tensor, batch: int) -> Grads:
    """Put the gradients of the elements `index` in their places."""

    def place(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        if new is None:
            return None
        return (new.new_zeros(batch, *new.shape[1:]) if old is None else old).index_copy(0, index, new)

    return Grads(*(place(old, new) for old, new in zip(into or (None,) * len(part), part, strict=True)))


class Ridge(torch.autograd.Function):
    """The eager door. A second derivative is taken of the pullback written with `Transform`, so any order works."""

    @staticmethod
    def forward(*args: Any) -> Any:
        """(*problem, *plan, solver, trusted) -> (out, coefficients, factor, packed report)"""
        out, fitted, packed = _solve(Problem(*args[:6]), Plan(*args[6:9]), *args[9:])
        return out, fitted.coef, fitted.factor.matrix, packed

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        dual, intercept, scale, ctx.solver, _ = inputs[6:]
        ctx.plan = Plan(dual, intercept, scale)
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:6], *output[1:])
        ctx.save_for_forward(*inputs[:6], *output[1:])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if (grad := grads[0]) is None:
            return (None,) * 11
        *tensors, coef, matrix, packed = ctx.saved_tensors
        problem, needs = Problem(*tensors), Needs(*ctx.needs_input_grad[:6])
        if torch.is_grad_enabled():
            pulled = _differentiable(grad, problem, packed, ctx.plan, ctx.solver, needs)
        else:
            pulled = _backward(grad, problem, coef, matrix, packed, ctx.plan, ctx.solver, needs)
        return *pulled[:6], *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *tensors, _, _, packed = ctx.saved_tensors
        return _tangent(Problem(*tensors), tangents[:6], packed, ctx.plan, ctx.solver), None, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        out = Ridge.apply(*(gather_batch(a, d, size) for a, d in zip(args, in_dims, strict=True)))
        return tuple(scatter_batch(x, size) for x in out), (0,) * 4


accept_any_arguments(Ridge)


def _differentiable_setting(
    problem: Problem, packed: Tensor, plan: Plan, solver: str, moving_weight: bool
) -> tuple[Problem, Plan, str]:
    """Precision, form and solver in which derivatives of the pullback are taken."""
    hard = solver == "float64" or (solver == "auto" and not uneventful(packed))
    if hard and has_float64(problem.query.device):
        problem = problem.take(None, torch.float64)
    if moving_weight:
        plan = plan._replace(dual=False)  # sqrt(w) has no derivative at 0; K'WK has
    return problem.expanded(), plan, {"auto": "auto", "qr": "qr", "pinv": "pinv"}.get(solver, "cholesky")


@no_autocast
def _differentiable(grad: Tensor, problem: Problem, packed: Tensor, plan: Plan, solver: str, needs: Needs) -> Grads:
    """The pullback as a differentiable function of everything it is made of."""
    moving = problem.weight is not None and (needs.weight or problem.weight.requires_grad)
    wide, plan, inner = _differentiable_setting(problem, packed, plan, solver, moving)
    refined = solver not in ("primal", "dual") and wide.query.dtype == torch.float64
    centred = wide.centred()[0] if plan.intercept else wide
    invert = inverter(centred, plan, inner)
    coef = _coefficients(centred, plan, invert, refined)
    mode = Mode(refined, deficient=inner in ("auto", "pinv"))
    grad = grad.reshape(wide.query.shape[0], *grad.shape[-2:])
    grads = pullback(wide, plan, grad.to(wide.query.dtype), invert, coef, needs, mode)
    grads = _shaped_like(problem, grads)
    return _cast(grads, grad.dtype)


@no_autocast
def _tangent(problem: Problem, tangents: Any, packed: Tensor, plan: Plan, solver: str) -> Tensor:
    still = [None if x is None else torch.zeros_like(x) for x in problem]
    moved: Any = [s if t is None else t for s, t in zip(still, tangents, strict=True)]
    filled = Problem(*moved)._replace(weight=tangents[3], gain=tangents[5])
    moving = tangents[3] is not None
    wide, plan, inner = _differentiable_setting(problem, packed, plan, solver, moving)
    centred = wide.centred()[0] if plan.intercept else wide
    tangent = filled.expanded().take(None, wide.query.dtype)
    out = pushforward(wide, tangent, plan, inverter(centred, plan, inner))
    return out.to(problem.query.dtype).reshape(*problem.query.shape[:-1], -1)


def _coefficients(problem: Problem, plan: Plan, invert: Invert, refined: bool) -> Tensor:
    """W or P as a differentiable function, with one refinement step where that is asked for."""
    gain = 1 if problem.gain is None else problem.gain.view(-1, 1, 1)
    alpha = problem.alpha.view(-1, 1, 1)
    if plan.dual:
        key, value = problem.weighted()
        coef = invert(value)
        if refined:
            coef = coef + invert(value - gain * mm(key, mm(key.mT, coef)) - alpha * coef)
        return coef
    weight = 1 if problem.weight is None else problem.weight.unsqueeze(-1)
    coef = invert(mm(problem.key.mT, weight * problem.value))
    if refined:
        rest = problem.value - gain * mm(problem.key, coef)
        coef = coef + invert(mm(problem.key.mT, weight * rest) - alpha * coef)
    return coef
