"""Rows times Sigma^-1, by the route each element needs."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.factor import EASY, Factor, factored, sigma_times, solve_rows, wants_inverse
from intention.solve.ladder import (
    FLOAT64,
    PINV,
    PRIMAL,
    QR,
    Again,
    Report,
    base_report,
    pack,
    redo,
    routes_beyond,
    screen,
    set_non_finite,
    unpack,
    warn_inaccurate,
)
from intention.solve.native import ridge as native
from intention.solve.native.call import PLAIN, SOME_LEFT
from intention.solve.problem import Problem, relative_size


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
            warn_inaccurate(unpack(found.packed))
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
    ratio = screen(factor.ratio, weight, alpha, gain)
    if solver != "auto":
        out = torch.where(torch.isfinite(ratio).view(-1, 1, 1), out, torch.nan)
        report = base_report(False, ratio, rows.dtype)
        code = {"cholesky": PRIMAL, "float64": FLOAT64, "qr": QR, "pinv": PINV}[solver]
        return (out, factor.matrix, pack(report._replace(route=torch.full_like(ratio, code)))), False
    if not ratio.amax().item() < EASY[rows.dtype]:  # the one look at the host; NaN is not less
        checks.require_values(weight, alpha, gain)
        start = base_report(False, ratio, rows.dtype) if found is None else unpack(found.packed)
        out, report = _climb(problem, out, start, None)
        warn_inaccurate(report)
        return (out, factor.matrix, pack(report)), False
    return (out, factor.matrix, pack(base_report(False, ratio, rows.dtype))), True


def _refine(out: Tensor, problem: Problem, factor: Factor) -> tuple[Tensor, Tensor]:
    rows, x, _, alpha, gain = problem.points()
    step = solve_rows(factor, rows - sigma_times(x, alpha, gain, out.mT).mT)
    return out + step, relative_size(step, out)


def _again(problem: Problem, method: str) -> Again:
    rows, x, _, alpha, gain = problem.points()
    factor = factored(method, x, alpha, gain, wants_inverse(x.shape[-1], rows.shape[1]))
    out, size = _refine(solve_rows(factor, rows), problem, factor)
    return Again(out, factor.ratio, size, size)


def _climb(problem: Problem, out: Tensor, report: Report, known: Tensor | None) -> tuple[Tensor, Report]:
    """Redo the elements whose ratio is too large in float64, by Cholesky or by SVD (as `known` says, where it does)."""
    out, report = out.contiguous().clone(), Report(*(x.clone() for x in report))
    todo = ((report.route == PRIMAL) & ~(report.condition < EASY[out.dtype])).nonzero()[:, 0]
    todo = set_non_finite(problem, out, report, todo)
    for route in routes_beyond(out):
        if known is None:
            todo = redo(problem, out, report, todo, route, _again)
        else:
            redo(problem, out, report, (known == route).nonzero()[:, 0], route, _again, judged=False)
    return out, report
