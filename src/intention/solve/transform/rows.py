"""Rows times Sigma^-1, by the route each element needs."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.factor import (
    EASY,
    LIMITS,
    SMALL_CORRECTION,
    Factor,
    factored,
    sigma_times,
    solve_rows,
    wants_inverse,
)
from intention.solve.ladder import (
    FLOAT64,
    METHODS,
    PINV,
    PRIMAL,
    QR,
    Report,
    base_report,
    has_float64,
    pack,
    screen,
    unpack,
    warn_inaccurate,
)
from intention.solve.native import rows as native
from intention.solve.native.call import PLAIN, SOME_LEFT
from intention.solve.problem import pick, relative_size


class Points(NamedTuple):
    """Rows to transform and the points whose Sigma does it."""

    rows: Tensor  # (B, M, n)
    key: Tensor  # (B', N, n)
    weight: Tensor | None  # (B, N)
    alpha: Tensor  # (B,)
    gain: Tensor | None  # (B,)


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
    times = rows.shape[0] // max(key.shape[0], 1)
    found = None
    if solver == "auto" and matrix is None:
        found = native.forward(rows, key, weight, alpha, gain, inverse, keep)
        if found is not None and found.status == PLAIN:
            return (found.out, found.matrix, found.packed), True
        if found is not None and found.status != SOME_LEFT:
            warn_inaccurate(unpack(found.packed))
            return (found.out, found.matrix, found.packed), False
    if times > 1:
        key = key.repeat_interleave(times, 0)
    if solver == "float64" and rows.dtype != torch.float64:
        wide = Points._make(pick(t, None, torch.float64) for t in (rows, key, weight, alpha, gain))
        (out, factor, report), plain = transform_rows(*wide, matrix, packed, solver, inverse, plain)
        return (out.to(rows.dtype), factor, report), plain
    x = key if weight is None else key * weight.sqrt().unsqueeze(-1)
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
        out, _ = _refine(out, x, rows, alpha, gain, factor)
    if matrix is not None and packed is not None:
        if solver == "auto" and not plain:
            report = unpack(packed)
            out, _ = _climb(rows, x, alpha, gain, out, report, report.route)
        return (out, matrix.clone(), packed.clone()), plain
    ratio = screen(factor.ratio, weight, alpha, gain)
    if solver != "auto":
        out = torch.where(torch.isfinite(ratio).view(-1, 1, 1), out, torch.nan)
        report = base_report(False, ratio, rows.dtype)
        code = {"cholesky": PRIMAL, "float64": FLOAT64, "qr": QR, "pinv": PINV}[solver]
        return (out, factor.matrix, pack(report._replace(route=torch.full_like(ratio, code)))), False
    if not ratio.amax().item() < EASY[rows.dtype]:  # the one look at the host; NaN is not less
        checks.require_values(weight, alpha, gain)
        start = base_report(False, ratio, rows.dtype) if found is None else unpack(found.packed)
        out, report = _climb(rows, x, alpha, gain, out, start, None)
        warn_inaccurate(report)
        return (out, factor.matrix, pack(report)), False
    return (out, factor.matrix, pack(base_report(False, ratio, rows.dtype))), True


def _refine(
    out: Tensor, x: Tensor, rows: Tensor, alpha: Tensor, gain: Tensor | None, factor: Factor
) -> tuple[Tensor, Tensor]:
    step = solve_rows(factor, rows - sigma_times(x, alpha, gain, out.mT).mT)
    return out + step, relative_size(step, out)


def _climb(
    rows: Tensor, x: Tensor, alpha: Tensor, gain: Tensor | None, out: Tensor, report: Report, known: Tensor | None
) -> tuple[Tensor, Report]:
    """Redo the elements whose ratio is too large in float64, by Cholesky or by SVD (as `known` says, where it does)."""
    out, dtype = out.contiguous().clone(), out.dtype
    report = Report(*(x.clone() for x in report))
    todo = ((report.route == PRIMAL) & ~(report.condition < EASY[dtype])).nonzero()[:, 0]
    finite = torch.isfinite(x[todo]).flatten(1).all(-1) & torch.isfinite(alpha[todo])
    out[todo[~finite]] = torch.nan
    report.condition[todo[~finite]] = report.error[todo[~finite]] = torch.nan
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
        factor = factored(METHODS[code], p, a, c, wants_inverse(p.shape[-1], r.shape[1]))
        new, size = _refine(solve_rows(factor, r), p, r, a, c, factor)
        good = torch.ones_like(size, dtype=torch.bool)
        if code == FLOAT64 and known is None:
            good = (factor.ratio < LIMITS[working, False].hard) & (size < SMALL_CORRECTION[dtype])
        where = todo[good]
        out[where] = new[good].to(dtype)
        report.route[where] = code
        report.condition[where] = factor.ratio[good].to(dtype)
        report.error[where] = (size + torch.finfo(dtype).eps)[good].to(dtype)
        todo = todo[~good]
    return out, report
