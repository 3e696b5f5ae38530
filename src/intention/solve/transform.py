"""Rows times Sigma^-1: the query transform of sigma-Intention, and the solve that higher derivatives are made of.

    X = Q Sigma^-1,  Sigma = c K'WK + alpha I  (d x d)

The dual form is the same call on transposed points: K'G^-1 with G = c KK' + alpha I.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from intention import checks
from intention.solve.doors import (
    accept_any_arguments,
    gather_batch,
    gradient_free,
    no_autocast,
    scatter_batch,
    sum_neighbours,
)
from intention.solve.factor import (
    EASY,
    SMALL_CORRECTION,
    Factor,
    cholesky,
    mm,
    orthogonal,
    pseudo,
    sigma_times,
    solve,
    wants_inverse,
)
from intention.solve.ladder import (
    FLOAT64,
    PINV,
    PRIMAL,
    QR,
    Report,
    base_report,
    has_float64,
    pack,
    screen,
    uneventful,
    unpack,
    warn_inaccurate,
)
from intention.solve.problem import Plan, Problem, pick


class Points(NamedTuple):
    """Rows to transform and the points whose Sigma does it."""

    rows: Tensor  # (B, M, n)
    key: Tensor  # (B', N, n)
    weight: Tensor | None  # (B, N)
    alpha: Tensor  # (B,)
    gain: Tensor | None  # (B,)


def transform(points: Points, solver: str, trusted: bool) -> tuple[Tensor, Tensor]:
    """X = rows Sigma^-1 and a packed report. `solver` is "auto", "cholesky", "qr", "pinv" or "float64"."""
    inverse = wants_inverse(points.key.shape[-1], points.rows.shape[-2])
    if torch.compiler.is_compiling():
        out, _, packed = torch.ops.intention.transform(*points, solver, inverse, trusted, None, None)
    elif gradient_free(*points):
        out, _, packed = _forward(*points, solver, inverse, trusted, None, None)
    else:
        out, _, packed = Transform.apply(*points, solver, inverse, trusted, None, None)
    return out, packed


def inverter(problem: Problem, plan: Plan, solver: str) -> Any:
    """Sigma^-1 b as a function that can be differentiated any number of times; the factor is made once."""
    key = problem.weighted()[0].mT if plan.dual else problem.key
    weight = None if plan.dual else problem.weight
    memory: list[Tensor | None] = [None, None]

    def invert(b: Tensor) -> Tensor:
        inverse = wants_inverse(key.shape[-1], problem.value.shape[-1])
        out, matrix, packed = Transform.apply(
            b.mT, key, weight, problem.alpha, problem.gain, solver, inverse, True, *memory
        )
        memory[:] = [matrix, packed]
        return out.mT

    return invert


@no_autocast
def _forward(
    rows: Tensor,
    key: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    solver: str,
    inverse: bool,
    trusted: bool,
    matrix: Tensor | None,
    packed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (X, factor, packed report); a given factor and report are used again."""
    times = rows.shape[0] // max(key.shape[0], 1)
    if times > 1:
        key = key.repeat_interleave(times, 0)
    if solver == "float64" and rows.dtype != torch.float64:
        wide: Any = [pick(t, None, torch.float64) for t in (rows, key, weight, alpha, gain)]
        out, factor, report = _forward(*wide, solver, inverse, trusted, matrix, packed)
        return out.to(rows.dtype), factor, report
    x = key if weight is None else key * weight.sqrt().unsqueeze(-1)
    if solver in ("qr", "pinv"):
        inverse = solver == "pinv"
    if matrix is None:
        factor = _factor(x, alpha, gain, solver, inverse)
    else:
        factor = Factor(matrix, inverse, matrix.new_ones(matrix.shape[0]))
    out = solve(factor, rows.mT).mT
    if solver in ("qr", "pinv", "float64"):
        out, _ = _refine(out, x, rows, alpha, gain, factor)
    if matrix is not None and packed is not None:
        if solver == "auto" and not uneventful(packed):
            route = unpack(packed, False, rows.dtype).route
            out, _ = _climb(rows, x, alpha, gain, out, route == PRIMAL, route)
        return out, matrix.clone(), packed.clone()
    ratio = factor.ratio if trusted else screen(factor.ratio, weight, alpha, gain)
    if solver != "auto":
        out = torch.where(torch.isfinite(ratio).view(-1, 1, 1), out, torch.nan)
        report = base_report(False, ratio, rows.dtype)
        code = {"cholesky": PRIMAL, "float64": FLOAT64, "qr": QR, "pinv": PINV}[solver]
        return out, factor.matrix, pack(report._replace(route=torch.full_like(ratio, code)))
    if not ratio.amax().item() < EASY[rows.dtype]:  # the one look at the host; NaN is not less
        checks.require_values(weight, alpha, gain)
        out, report = _climb(rows, x, alpha, gain, out, ratio < EASY[rows.dtype], None)
        warn_inaccurate(report)
        return out, factor.matrix, pack(report)
    return out, factor.matrix, ratio


def _factor(x: Tensor, alpha: Tensor, gain: Tensor | None, solver: str, inverse: bool) -> Factor:
    if solver == "qr":
        return orthogonal(x, alpha, gain)
    if solver == "pinv":
        return pseudo(x, alpha, gain, max(x.shape[1:]) * torch.finfo(x.dtype).eps)[0]
    return cholesky(x, alpha, gain, inverse)


def _refine(
    out: Tensor, x: Tensor, rows: Tensor, alpha: Tensor, gain: Tensor | None, factor: Factor
) -> tuple[Tensor, Tensor]:
    step = solve(factor, rows.mT - sigma_times(x, alpha, gain, out.mT)).mT
    tiny = torch.finfo(out.dtype).tiny
    size = torch.linalg.vector_norm(step, dim=(-2, -1)) / torch.linalg.vector_norm(out, dim=(-2, -1)).clamp_min(tiny)
    return out + step, size


def _climb(
    rows: Tensor, x: Tensor, alpha: Tensor, gain: Tensor | None, out: Tensor, ok: Tensor, known: Tensor | None
) -> tuple[Tensor, Report]:
    """Redo the elements that are not ok in float64, by Cholesky or by SVD (as `known` says, where it does)."""
    out, dtype = out.contiguous().clone(), out.dtype
    report = base_report(False, out.new_ones(out.shape[0]), dtype)
    todo = (~ok).nonzero()[:, 0]
    finite = torch.isfinite(x[todo]).flatten(1).all(-1) & torch.isfinite(alpha[todo])
    out[todo[~finite]] = torch.nan
    report.error[todo[~finite]] = torch.nan
    todo = todo[finite]
    working = torch.float64 if has_float64(out.device) else dtype
    for code in (FLOAT64, PINV) if working == torch.float64 else (QR,):
        if known is not None:
            todo = (known == code).nonzero()[:, 0]
        if not todo.numel():
            continue
        r, p, a, c = (
            pick(rows, todo, working),
            pick(x, todo, working),
            pick(alpha, todo, working),
            pick(gain, todo, working),
        )
        if code == PINV:
            factor, _ = pseudo(p, a, c, max(p.shape[1:]) * torch.finfo(working).eps)
        elif code == QR:
            factor = orthogonal(p, a, c)
        else:
            factor = cholesky(p, a, c, wants_inverse(p.shape[-1], r.shape[1]))
        new, size = _refine(solve(factor, r.mT).mT, p, r, a, c, factor)
        good = torch.ones_like(size, dtype=torch.bool)
        if code == FLOAT64 and known is None:
            good = torch.isfinite(factor.ratio) & ((size < SMALL_CORRECTION[dtype]) | size.isnan())
        # rounding X to the working precision moves each score x.k by up to eps |x| |k|
        reach = torch.linalg.vector_norm(new, dim=-1).amax(-1) * torch.linalg.vector_norm(p, dim=-1).amax(-1)
        where = todo[good]
        out[where] = new[good].to(dtype)
        report.route[where] = code
        report.condition[where] = factor.ratio[good].to(dtype)
        report.error[where] = (torch.maximum(size, reach * torch.finfo(dtype).eps))[good].to(dtype)
        todo = todo[~good]
    return out, report


class Transform(torch.autograd.Function):
    """The eager door. Its derivatives are made of itself, so any order works."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return _forward(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        tensors, (ctx.solver, ctx.inverse, _, _, _) = inputs[:5], inputs[5:]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *output)
        ctx.save_for_forward(*tensors, *output)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out, matrix, packed = ctx.saved_tensors
        if (grad := grads[0]) is None:
            return (None,) * 10
        return *_pull(grad, Points(*tensors), out, matrix, packed, ctx.solver, ctx.inverse), *(None,) * 5

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        *tensors, out, matrix, packed = ctx.saved_tensors
        tangent = _push(Points(*tensors), tangents[:5], out, matrix, packed, ctx.solver, ctx.inverse)
        return tangent, None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        out = Transform.apply(*(gather_batch(a, d, size) for a, d in zip(args, in_dims, strict=True)))
        return tuple(scatter_batch(x, size) for x in out), (0,) * 3


accept_any_arguments(Transform)


def _again(rows: Tensor, points: Points, solver: str, inverse: bool, matrix: Tensor, packed: Tensor) -> Tensor:
    return Transform.apply(rows, *points[1:], solver, inverse, True, matrix, packed)[0]  # type: ignore[no-any-return]


@no_autocast
def _pull(
    grad: Tensor, points: Points, out: Tensor, matrix: Tensor, packed: Tensor, solver: str, inverse: bool
) -> tuple[Tensor | None, ...]:
    dtype = grad.dtype
    if dtype != torch.float64 and solver == "auto" and has_float64(grad.device) and not uneventful(packed):
        # ill-conditioned: products of X and K cancel, so all of it runs in float64
        wide = Points(*(pick(t, None, torch.float64) for t in points))  # type: ignore[arg-type]
        fresh, matrix, packed = Transform.apply(*wide, solver, inverse, True, None, None)
        pulled = _pull(grad.double(), wide, fresh, matrix, packed, solver, inverse)
        return tuple(None if g is None else g.to(dtype) for g in pulled)
    y = _again(grad, points, solver, inverse, matrix, packed)  # Y = g Sigma^-1
    times = points.rows.shape[0] // max(points.key.shape[0], 1)
    key = points.key.repeat_interleave(times, 0) if times > 1 else points.key
    gain = 1 if points.gain is None else points.gain.view(-1, 1, 1)
    cross = -torch.bmm(out.mT, y)  # dSigma = -X'Y
    if not uneventful(packed):
        # where Sigma is singular, Sigma^+ also turns with its null space (along changes that keep the rank)
        outside = grad - _times_sigma(y, points, key), points.rows - _times_sigma(out, points, key)
        turn = torch.bmm(_again(out, points, solver, inverse, matrix, packed).mT, outside[0])
        turn = turn + torch.bmm(outside[1].mT, _again(y, points, solver, inverse, matrix, packed))
        singular = (unpack(packed, False, out.dtype).route == PINV) & (points.alpha == 0)
        cross = cross + torch.where(singular.view(-1, 1, 1), turn, 0.0)
    pulled = torch.bmm(key, cross + cross.mT)
    along = (pulled * key).sum(-1) / 2  # k_i dSigma k_i'
    counted = along if points.weight is None else points.weight * along
    key_grad = gain * (pulled if points.weight is None else points.weight.unsqueeze(-1) * pulled)
    return (
        y,
        sum_neighbours(key_grad, times),
        None if points.weight is None else (along if points.gain is None else points.gain.unsqueeze(1) * along),
        -(out * y).sum((-2, -1)),
        None if points.gain is None else counted.sum(-1),
    )


def _times_sigma(rows: Tensor, points: Points, key: Tensor) -> Tensor:
    """rows Sigma"""
    reach = mm(key, rows.mT)  # (B, N, M)
    if points.weight is not None:
        reach = points.weight.unsqueeze(-1) * reach
    product = mm(key.mT, reach).mT
    if points.gain is not None:
        product = points.gain.view(-1, 1, 1) * product
    return product + points.alpha.view(-1, 1, 1) * rows


@no_autocast
def _push(
    points: Points, tangents: Any, out: Tensor, matrix: Tensor, packed: Tensor, solver: str, inverse: bool
) -> Tensor:
    rows_t, key_t, weight_t, alpha_t, gain_t = tangents
    times = points.rows.shape[0] // max(points.key.shape[0], 1)
    key = points.key.repeat_interleave(times, 0)
    weighted = key if points.weight is None else points.weight.unsqueeze(-1) * key
    gain = 1 if points.gain is None else points.gain.view(-1, 1, 1)
    moved = torch.zeros_like(out)
    if key_t is not None:
        half = torch.bmm(key_t.repeat_interleave(times, 0).mT, weighted)
        moved = moved + torch.bmm(out, gain * (half + half.mT))
    if weight_t is not None:
        moved = moved + torch.bmm(out, gain * torch.bmm(key.mT, weight_t.unsqueeze(-1) * key))
    if gain_t is not None:
        moved = moved + torch.bmm(out, gain_t.view(-1, 1, 1) * torch.bmm(key.mT, weighted))
    if alpha_t is not None:
        moved = moved + alpha_t.view(-1, 1, 1) * out
    if rows_t is not None:
        moved = moved - rows_t
    return _again(-moved, points, solver, inverse, matrix, packed)
