"""Rows times Sigma^-1: the query transform of sigma-Intention, and the solve that higher derivatives are made of.

    X = Q Sigma^-1,  Sigma = c K'WK + alpha I  (d x d)

The dual form is the same call on transposed points: K'G^-1 with G = c KK' + alpha I.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve import ladder
from intention.solve.factor import EASY, Factor, by_gain, factored, sigma_times, solve_rows, spectrum, wants_inverse
from intention.solve.ladder import FLOAT64, PINV, PRIMAL, QR, Again, Report, has_float64, pack, unpack
from intention.solve.native import ridge as native
from intention.solve.native.call import PLAIN, SOME_LEFT
from intention.solve.operator import Note, Operator, Saved
from intention.solve.problem import Invert, Plan, Problem, pick, relative_size
from intention.solve.torch_state import eager, sum_neighbours, unobserved

# The share of alpha's gradient up to which a rounding of what comes in is let be.
SURE = 1e-5
ROUNDINGS = 32  # of a g that is a sum over keys


def transform(problem: Problem, solver: str) -> tuple[Tensor, Tensor]:
    """X = Q Sigma^-1, whatever the values, and a packed report; "auto", "cholesky", "qr", "pinv" or "float64"."""
    inverse = wants_inverse(problem.key.shape[-1], problem.query.shape[-2])
    out, packed = TRANSFORM(*problem.points(), None, None, solver, inverse, False)
    return out, packed


def inverter(problem: Problem, plan: Plan, solver: str) -> Invert:
    """Sigma^-1 b as a function that can be differentiated any number of times; the factor is made once."""
    key = problem.weighted()[0].mT if plan.dual else problem.key
    points = Problem.of_points(problem.query, key, None if plan.dual else problem.weight, problem.alpha, problem.gain)
    factor: Factored | None = None

    def invert(b: Tensor) -> Tensor:
        nonlocal factor
        inverse = wants_inverse(key.shape[-1], problem.value.shape[-1])
        out, factor = _again(b.mT, points, solver, inverse, factor)
        return out.mT

    return invert


class Factored(NamedTuple):
    """A factor that was made, its packed report, and whether the plain one served every element."""

    matrix: Tensor
    packed: Tensor
    plain: bool


def _again(
    rows: Tensor, problem: Problem, solver: str, inverse: bool, factor: Factored | None
) -> tuple[Tensor, Factored]:
    """rows Sigma^-1 with a factor that was made (None: make one), always recorded."""
    note = Note()
    given = (None, None) if factor is None else (factor.matrix, factor.packed)
    plain = factor is not None and factor.plain
    out, matrix, packed = TRANSFORM.function.apply(rows, *problem.points()[1:], *given, solver, inverse, plain, note)
    return out, Factored(matrix, packed, bool(note.seen))


def transform_rows(
    rows: Tensor,
    key: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    matrix: Tensor | None,
    packed: Tensor | None,
    solver: str,
    inverse: bool,
    plain: bool,
    keep: bool = True,
) -> tuple[tuple[Tensor, Tensor, Tensor], bool]:
    """Returns (X, factor, packed report), and whether the plain factor served every element.

    A given factor and report are used again; `plain` belongs to them. Without `keep` nobody looks at the factor, and it
    may be anything.
    """
    found = None
    if solver == "auto" and matrix is None:
        found = native.rows_forward((rows, key, weight, alpha, gain), inverse, keep)
        if found is not None and found.status == PLAIN:
            return (found.out, found.matrix, found.packed), True
        if found is not None and found.status != SOME_LEFT:
            ladder.warn_inaccurate(unpack(found.packed))
            return (found.out, found.matrix, found.packed), False
    problem = Problem.of_points(rows, key, weight, alpha, gain).expanded()
    if solver == "float64" and rows.dtype != torch.float64:
        wide = problem.take(None, torch.float64).points()
        (out, factor, report), plain = transform_rows(*wide, matrix, packed, solver, inverse, plain)
        return (out.to(rows.dtype), factor, report), plain
    x, _ = problem.weighted()
    problem = Problem.of_points(rows, x, None, alpha, gain)
    if solver in ("qr", "pinv"):
        inverse = solver == "pinv"
    if found is not None:
        factor = Factor(found.matrix, inverse, found.packed[:, 1])
    elif matrix is None:
        factor = factored(solver, x, alpha, gain, inverse)
    else:
        factor = Factor(matrix, inverse, matrix.new_ones(matrix.shape[0]))
    out = solve_rows(factor, rows) if found is None else found.out
    if solver in ("qr", "pinv", "float64"):
        out, _ = _refine(out, problem, factor)
    if matrix is not None and packed is not None:
        if solver == "auto" and not plain:
            report = unpack(packed)
            out, _ = _climb(problem, out, report, report.route)
        return (out, matrix.clone(), packed.clone()), plain
    ratio = ladder.screen(factor.ratio, weight, alpha, gain)
    if solver != "auto":
        out = torch.where(torch.isfinite(ratio).view(-1, 1, 1), out, torch.nan)
        report = ladder.base_report(False, ratio, rows.dtype)
        code = {"cholesky": PRIMAL, "float64": FLOAT64, "qr": QR, "pinv": PINV}[solver]
        return (out, factor.matrix, pack(report._replace(route=torch.full_like(ratio, code)))), False
    if not ratio.amax().item() < EASY[rows.dtype]:  # the one look at the host; NaN is not less
        checks.require_values(weight, alpha, gain)
        start = ladder.base_report(False, ratio, rows.dtype) if found is None else unpack(found.packed)
        out, report = _climb(problem, out, start, None)
        ladder.warn_inaccurate(report)
        return (out, factor.matrix, pack(report)), False
    return (out, factor.matrix, pack(ladder.base_report(False, ratio, rows.dtype))), True


def _refine(out: Tensor, problem: Problem, factor: Factor) -> tuple[Tensor, Tensor]:
    rows, x, _, alpha, gain = problem.points()
    step = solve_rows(factor, rows - sigma_times(x, alpha, gain, out.mT).mT)
    return out + step, relative_size(step, out)


def _factored_again(problem: Problem, method: str) -> Again:
    rows, x, _, alpha, gain = problem.points()
    factor = factored(method, x, alpha, gain, wants_inverse(x.shape[-1], rows.shape[1]))
    out, size = _refine(solve_rows(factor, rows), problem, factor)
    return Again(out, factor.ratio, size, size)


def _climb(problem: Problem, out: Tensor, report: Report, known: Tensor | None) -> tuple[Tensor, Report]:
    """Redo the elements whose ratio is too large in float64, by Cholesky or by SVD (as `known` says, where it does)."""
    out, report = out.contiguous().clone(), Report(*(x.clone() for x in report))
    todo = ((report.route == PRIMAL) & ~(report.condition < EASY[out.dtype])).nonzero()[:, 0]
    todo = ladder.set_non_finite(problem, out, report, todo)
    for route in ladder.routes_beyond(out):
        if known is None:
            todo = ladder.redo(problem, out, report, todo, route, _factored_again)
        else:
            ladder.redo(problem, out, report, (known == route).nonzero()[:, 0], route, _factored_again, judged=False)
    return out, report


def _pull(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """Of any order: made of transforms."""
    (grad,), (out, matrix, packed), problem = grads, saved.outputs, Problem.of_points(*saved.tensors[:5])
    plain = ladder.served_all(packed) if saved.seen is None else saved.seen
    factor, (solver, inverse) = Factored(matrix, packed, plain), saved.options[:2]
    if not any(needs[1:]):
        return _again(grad, problem, solver, inverse, factor)[0], *[None] * 6
    y, key, weight, alpha, gain = _pulled(grad, problem, out, factor, solver, inverse)
    if needs[3] and eager():
        alpha = _sure_alpha(alpha, grad, y, out, problem)
    return y, key, weight, alpha, gain, None, None


def _pulled(
    grad: Tensor, problem: Problem, out: Tensor, factor: Factored, solver: str, inverse: bool
) -> tuple[Any, ...]:
    matrix, packed, plain = factor
    times = problem.query.shape[0] // max(problem.key.shape[0], 1)
    # the kernels' backward knows no route of the SVD, and no NaN
    if (
        solver == "auto"
        and unobserved()
        and (plain or bool((unpack(packed).route < PINV).all() & packed.isfinite().all()))
    ):
        pulled = native.rows_backward(grad, out, problem.points(), matrix, None if plain else packed, inverse)
        if pulled is not None:
            return pulled[0], sum_neighbours(pulled[1], times), *pulled[2:]
    dtype = grad.dtype
    if dtype != torch.float64 and solver == "auto" and has_float64(grad.device) and not plain:
        # ill-conditioned: products of X and K cancel, so all of it runs in float64
        wide = problem.take(None, torch.float64)
        fresh, factor = _again(wide.query, wide, solver, inverse, None)
        pulled = _pulled(grad.double(), wide, fresh, factor, solver, inverse)
        return tuple(None if g is None else g.to(dtype) for g in pulled)

    def inverse_of(x: Tensor) -> Tensor:
        return _again(x, problem, solver, inverse, factor)[0]

    y = inverse_of(grad)  # Y = g Sigma^-1
    key = problem.expanded().key
    cross = -torch.bmm(out.mT, y)  # dSigma = -X'Y
    alpha = cross.diagonal(0, -2, -1).sum(-1)
    if not plain:
        # where Sigma is singular, Sigma^+ also turns with its null space (along changes that keep the rank)
        outside = grad - _times_sigma(y, problem, key), problem.query - _times_sigma(out, problem, key)
        turn = torch.bmm(inverse_of(out).mT, outside[0])
        turn = turn + torch.bmm(outside[1].mT, inverse_of(y))
        singular = (unpack(packed).route == PINV) & (problem.alpha == 0)
        cross = cross + torch.where(singular.view(-1, 1, 1), turn, 0.0)
    key_grad = torch.bmm(key, cross + cross.mT)
    weight = gain = None
    if problem.weight is not None or problem.gain is not None:
        along = (key_grad * key).sum(-1) / 2  # k_i dSigma k_i'
        if problem.gain is not None:
            gain = (along if problem.weight is None else problem.weight * along).sum(-1)
            key_grad = by_gain(problem.gain, key_grad)
        if problem.weight is not None:
            weight = along if problem.gain is None else problem.gain.unsqueeze(1) * along
            key_grad = problem.weight.unsqueeze(-1) * key_grad
    return y, sum_neighbours(key_grad, times), weight, alpha, gain


def _sure_alpha(alpha: Tensor, grad: Tensor, y: Tensor, out: Tensor, problem: Problem) -> Tensor:
    """-<X, Y> again where it may be rounding: along what no key has, X is Q / alpha and Y the rounding of g / alpha.

    A g of scores is made of the keys; where that of a row is, up to rounding, the product is taken along the keys. The
    derivatives of `alpha` stay.
    """
    with torch.no_grad():
        eps = torch.finfo(grad.dtype).eps
        sizes = torch.linalg.vector_norm(grad, dim=-1) * torch.linalg.vector_norm(out, dim=-1)
        doubtful = ~(eps * sizes.sum(-1) <= SURE * problem.alpha * alpha.abs())
        index = (doubtful & torch.isfinite(alpha) & (problem.alpha > 0)).nonzero()[:, 0]
        if not index.numel() or not has_float64(grad.device):
            return alpha
        sub = problem.expanded().take(index, torch.float64)
        found = spectrum(sub.weighted()[0], torch.zeros_like(sub.alpha), None)
        span = found.vt * found.kept.unsqueeze(-1)  # (B, r, d)
        g, x, z = (pick(t, index, torch.float64) for t in (grad, out, y))
        beyond = g - torch.bmm(torch.bmm(g, span.mT), span)
        beyond, reach = (torch.linalg.vector_norm(t, dim=-1) for t in (beyond, g))
        # g = dS K is rounded like dS and K, which may cancel
        least = (ROUNDINGS * eps * found.condition().sqrt()).clamp_max(eps**0.5).unsqueeze(-1)
        inside = (torch.bmm(x, span.mT) * torch.bmm(z, span.mT)).sum(-1)
        sure = -torch.where(beyond <= least * reach, inside, (x * z).sum(-1)).sum(-1)
        correction = torch.zeros_like(alpha).index_copy_(0, index, sure.to(alpha.dtype) - alpha.detach()[index])
    return alpha + correction


def _times_sigma(rows: Tensor, problem: Problem, key: Tensor) -> Tensor:
    """rows Sigma"""
    weighted = key if problem.weight is None else problem.weight.unsqueeze(-1) * key
    product = torch.bmm(rows, torch.bmm(key.mT, weighted))
    return by_gain(problem.gain, product) + problem.alpha.view(-1, 1, 1) * rows


def _shapes(rows: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    (batch, _, n), dtype = rows.shape, torch.float64 if rest[6] == "float64" else rows.dtype
    return rows.new_empty(rows.shape), rows.new_empty(batch, n, n, dtype=dtype), rows.new_empty(batch, 3, dtype=dtype)


TRANSFORM = Operator(
    "transform",
    tensors="rows key weight? alpha gain? matrix? packed?",  # the last two: a factor that was made, and its report
    options="str solver, bool inverse, bool plain",
    answers=1,
    outputs=3,  # X, factor, packed report
    solve=transform_rows,
    shapes=_shapes,
    pull=_pull,
    differentiable=_pull,
)
