"""A batch of problems, forward and first-order backward, each element by the route it needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve import ladder
from intention.solve.factor import LIMITS, Factor, solve, wants_inverse
from intention.solve.ladder import FLOAT64, PINV, PRIMAL, QR, REFINED, has_float64, pack, unpack
from intention.solve.native import ridge as native
from intention.solve.native.call import PLAIN, SOME_LEFT
from intention.solve.problem import Fit, Grads, Needs, Plan, Problem, fit, pick, predict, refine
from intention.solve.ridge.gradients import Mode, pullback
from intention.solve.torch_state import sum_neighbours, unobserved

# alpha's gradient is made again in float64 where it is smaller than this times the root sum of squares of its terms
CANCELLED = 0.1
# At the conditions of an SVD one step leaves too much of V - KW wrong, which a key's gradient multiplies by Z.
STEPS_OF_SVD = 3
_NAMED_ROUTE = {"float64": FLOAT64, "qr": QR, "pinv": PINV}


Solution = tuple[Tensor, Tensor, Tensor, Tensor]


def is_dual(solver: str, key: Tensor) -> bool:
    """Whether to solve the N x N form: there are fewer points than features, or it is asked for by name."""
    if solver in ("primal", "dual"):
        return solver == "dual"
    return key.shape[-2] < key.shape[-1]


def solve_batch(problem: Problem, plan: Plan, solver: str, keep: bool = True) -> tuple[Solution, bool]:
    """The one implementation: (out, coefficients, factor, packed report), and whether the plain factor served all.

    Without `keep` there will be no backward: the coefficients and the factor may be anything.
    """
    if solver == "auto" and (found := native.forward(problem, plan, keep)) is not None:
        return _checked(problem, plan, found), found.status == PLAIN
    shape = (*problem.query.shape[:-1], problem.value.shape[-1])
    problem = problem.expanded()
    if solver != "auto":
        out, fitted, packed = _named(problem, plan, solver)
        return (out.view(shape), fitted.coef, fitted.factor.matrix, packed), False
    fitted = fit(problem, plan, "cholesky")
    out, coef = predict(fitted, plan), fitted.coef
    ratio = ladder.screen(fitted.factor.ratio, problem.weight, problem.alpha, problem.gain)
    plain = ratio.amax().item() < LIMITS[out.dtype, plan.dual].easy  # the one look at the host; NaN is not less
    if plain:
        report = ladder.base_report(plan.dual, ratio, out.dtype)
    else:
        out, coef, report = ladder.climb(problem, plan, fitted, out.contiguous())
    return (out.view(shape), coef, fitted.factor.matrix, pack(report)), plain


def _checked(problem: Problem, plan: Plan, found: native.Fitted) -> Solution:
    """An answer of the compiled kernels, which have looked at the values and climbed; as it is, or after the SVD."""
    out, coef, matrix, packed, status = found
    if status == SOME_LEFT:
        checks.require_values(problem.weight, problem.alpha, problem.gain)
        flat, report = problem.expanded(), unpack(packed)
        left = ~(report.condition < LIMITS[out.dtype, plan.dual].easy) & (report.route < REFINED)
        todo = left.nonzero()[:, 0]
        ladder.climb_on(flat, plan, out.view(flat.query.shape[0], *out.shape[-2:]), report, todo)
    return out, coef, matrix, packed


def _named(problem: Problem, plan: Plan, solver: str) -> tuple[Tensor, Fit, Tensor]:
    """One route for all, never looking at the host: elements that fail become NaN."""
    dtype = problem.query.dtype
    if solver == "float64":
        problem = problem.take(None, torch.float64)
    fitted = fit(problem, plan, solver)
    size = None
    if solver in _NAMED_ROUTE:
        fitted, size = refine(fitted, plan)
    ratio = ladder.screen(fitted.factor.ratio, problem.weight, problem.alpha, problem.gain)
    out = torch.where(torch.isfinite(ratio).view(-1, 1, 1), predict(fitted, plan), torch.nan).to(dtype)
    report = ladder.base_report(plan.dual, ratio.to(dtype), dtype)
    if size is not None:
        report = report._replace(route=torch.full_like(report.route, _NAMED_ROUTE[solver]), error=size.to(dtype))
    return out, fitted, pack(report)


class Known(NamedTuple):
    """What a backward is told of its forward."""

    problem: Problem
    plan: Plan
    coef: Tensor
    matrix: Tensor  # the factor
    packed: Tensor
    plain: bool | None  # whether all elements are by the plain factor; None: nobody has looked


def backward_batch(grad: Tensor, known: Known, solver: str, needs: Needs) -> Grads:
    """First-order gradients, each element by the route and in the precision of its forward."""
    shared = known.problem
    if solver == "auto" and (grads := _compiled(grad, known, needs)) is not None:
        return grads if grads.query is not None and grads.query.dim() > 3 else shaped_like(shared, grads)
    known = known._replace(problem=shared.expanded())
    grad = grad.reshape(known.problem.query.shape[0], *grad.shape[-2:])
    grads = _by_route(grad, known, needs) if solver == "auto" else _replay(grad, known, solver, needs)
    return shaped_like(shared, grads)


def shaped_like(problem: Problem, grads: Grads) -> Grads:
    """Undo `expanded`."""
    if problem.query.dim() > 3:
        pairs = zip(grads[:3], problem[:3], strict=True)
        return Grads._make((*(None if g is None else g.reshape(x.shape) for g, x in pairs), *grads[3:]))
    times = problem.query.shape[0] // max(problem.key.shape[0], 1)
    return grads._replace(key=sum_neighbours(grads.key, times), value=sum_neighbours(grads.value, times))


def _compiled(grad: Tensor, known: Known, needs: Needs) -> Grads | None:
    """By the compiled kernels, where autograd does not watch: all routes but the SVD."""
    problem, plan, coef, matrix, packed, plain = known
    if not unobserved():
        return None
    found = native.backward(problem, plan, grad, coef, matrix, None if plain else packed, needs)
    if found is None or found[1] != SOME_LEFT:
        return None if found is None else found[0]
    grads, route = found[0], unpack(packed).route
    index = (route == PINV).nonzero()[:, 0]
    if not index.numel():
        return grads
    grad = grad.reshape(route.shape[0], *grad.shape[-2:])
    part = _redo(grad, known._replace(problem=problem.expanded()), index, PINV, needs)
    if problem.query.dim() > 3:  # one flat batch, like the part
        grads = Grads._make((*(None if g is None else g.flatten(0, -3) for g in grads[:3]), *grads[3:]))
    return _merge(grads, part, index, route.shape[0])


def _widened(grad: Tensor, needed: bool) -> bool:
    """Whether a gradient that float32 may lose to cancellation is asked for in float32."""
    return needed and grad.dtype != torch.float64 and has_float64(grad.device)


def _by_route(grad: Tensor, known: Known, needs: Needs) -> Grads:
    """All elements by the plain factor, then those of every other route again, their own way."""
    needs_weight = needs.weight and known.problem.weight is not None
    plain = ladder.served_all(known.packed) if known.plain is None else known.plain
    if plain and not _widened(grad, needs.alpha or needs_weight):
        return _replay(grad, known, "auto", needs)
    route = unpack(known.packed).route
    if _widened(grad, needs_weight):
        # a weight's gradient holds the residual V - KW, which float32 loses where the fit is close
        route = route.clamp_min(FLOAT64)
    codes = [PRIMAL] if plain and not needs_weight else [int(code) for code in route.unique().tolist()]
    grads = None
    if codes[0] < REFINED:
        grads = _replay(grad, known, "auto", needs)
    for code in codes:
        if code >= REFINED:
            index = None if len(codes) == 1 else (route == code).nonzero()[:, 0]
            part = _redo(grad, known, index, code, needs)
            grads = part if index is None else _merge(grads, part, index, len(grad))
    assert grads is not None
    return _sure_alpha(grad, known, route, grads) if _widened(grad, needs.alpha) else grads


def _sure_alpha(grad: Tensor, known: Known, route: Tensor, grads: Grads) -> Grads:
    """alpha's gradient is a sum that may cancel: where it does, the few that remain are made in float64."""
    if grads.alpha is None or grads.alpha_terms is None:
        return grads
    cancelled = (grads.alpha.abs() < CANCELLED * grads.alpha_terms) & (route <= REFINED)
    index = cancelled.nonzero()[:, 0]
    if not index.numel():
        return grads
    part = _redo(grad, known, index, FLOAT64, Needs(False, False, False, False, True, False))
    assert part.alpha is not None
    return grads._replace(alpha=grads.alpha.index_copy(0, index, part.alpha))


def _replay(grad: Tensor, known: Known, solver: str, needs: Needs) -> Grads:
    """Gradients with the saved factor, in its precision."""
    problem, plan, coef, matrix, *_ = known
    dtype = grad.dtype
    if matrix.dtype != dtype:
        problem, grad = problem.take(None, matrix.dtype), grad.to(matrix.dtype)
    inverse = solver == "pinv" or (solver != "qr" and wants_inverse(matrix.shape[-1], coef.shape[-1]))
    factor = Factor(matrix, inverse, matrix)
    mode = Mode(refined=solver in _NAMED_ROUTE, deficient=solver == "pinv")
    grads = pullback(problem, plan, grad, lambda y: solve(factor, y), coef, needs, mode)
    return grads if matrix.dtype == dtype else cast_grads(grads, dtype)


def _redo(grad: Tensor, known: Known, index: Tensor | None, code: int, needs: Needs) -> Grads:
    """Gradients of the elements `index` by the route `code`."""
    problem, plan, coef, matrix, *_ = known
    dtype = grad.dtype
    if code == REFINED:
        sub, inverse = problem.take(index, dtype), wants_inverse(matrix.shape[-1], coef.shape[-1])
        factor, coef = Factor(pick(matrix, index, dtype), inverse, matrix), pick(coef, index, dtype)
    else:
        sub = ladder.redo_problem(problem, index, code)
        fitted = fit(sub, plan, ladder.METHODS[code])
        for _ in range(STEPS_OF_SVD if code == PINV else 1):
            fitted, _ = refine(fitted, plan)
        factor, coef = fitted.factor, fitted.coef
    g = pick(grad, index, sub.query.dtype)
    mode = Mode(refined=True, deficient=code == PINV)
    grads = pullback(sub, plan, g, lambda y: solve(factor, y), coef, needs, mode)
    return cast_grads(grads, dtype)


def cast_grads(grads: Grads, dtype: torch.dtype) -> Grads:
    return Grads(*(None if g is None else g.to(dtype) for g in grads))


def _merge(into: Grads | None, part: Grads, index: Tensor, batch: int) -> Grads:
    """Put the gradients of the elements `index` in their places."""

    def place(old: Tensor | None, new: Tensor | None) -> Tensor | None:
        if new is None:
            return None
        return (new.new_zeros(batch, *new.shape[1:]) if old is None else old).index_copy(0, index, new)

    return Grads(*(place(old, new) for old, new in zip(into or (None,) * len(part), part, strict=True)))
