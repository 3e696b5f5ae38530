"""The compiled ridge: what `solve_batch` and `transform_rows` and their backwards do, for CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from intention.solve.factor import wants_inverse
from intention.solve.native.call import BACKWARD, FORWARD, call, incoming, pointer, readable, room
from intention.solve.native.library import kernel
from intention.solve.problem import Grads, Needs, Plan, Problem

_ROWS = Plan(dual=False, intercept=False, scale=1.0)
Points = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]  # rows, key, weight, alpha, gain


class Fitted(NamedTuple):
    out: Tensor
    coef: Tensor  # (B, n, k)
    matrix: Tensor  # (B, n, n): Sigma^-1 or L, as `factor.Factor` has it
    report: Tensor  # (B, 3), packed as in `ladder`
    status: int


def forward(problem: Problem, plan: Plan, keep: bool = True) -> Fitted | None:
    """Gram, factor, solution and prediction of every element; None where the kernels do not apply.

    Coefficients and factor are what a backward needs; without `keep` they are anything.
    """
    function = kernel("intention_ridge_forward")
    if function is None:
        return None
    query, columns = problem.query, problem.value.shape[-1]
    size, batch = problem.key.shape[-2 if plan.dual else -1], problem.alpha.shape[0]
    inverse = wants_inverse(size, columns)
    if (block := call(problem, plan, inverse)) is None:
        return None
    out, report = query.new_empty((*query.shape[:-1], columns)), query.new_empty((batch, 3))
    coef = matrix = report  # without `keep` nobody looks at them
    if keep:
        coef, matrix = query.new_empty((batch, size, columns)), query.new_empty((batch, size, size))
    ends = coef.data_ptr() if keep else 0, matrix.data_ptr() if keep else 0, out.data_ptr(), report.data_ptr()
    status = function(FORWARD.pack(*block.numbers, *ends))
    return Fitted(out, coef, matrix, report, status)


def backward(
    problem: Problem, plan: Plan, grad: Tensor, coef: Tensor, matrix: Tensor, packed: Tensor | None, needs: Needs
) -> tuple[Grads, int] | None:
    """Gradients, each in the precision of its forward or better, and a status: whether elements were left open.

    Those are beyond the kernels' routes. Without a report all are by the plain factor.
    """
    query, key, _, weight, alpha, gain = problem
    needs_weight, needs_gain = needs.weight and weight is not None, needs.gain and gain is not None
    function = kernel("intention_ridge_backward")
    if function is None or not (readable(coef, query.dtype) and readable(matrix, query.dtype)):
        return None
    block = call(problem, plan, wants_inverse(matrix.shape[-1], coef.shape[-1]))
    if block is None or (read := incoming(grad, query.dtype)) is None:
        return None
    coef, matrix = coef.contiguous(), matrix.contiguous()
    route = (0, 0) if packed is None else (packed.data_ptr(), packed.stride(0))
    batch = alpha.shape[0]
    lead = (batch,) if query.dim() == 3 else query.shape[:-2]
    own = (room(x, (*lead, *x.shape[-2:])) if need else None for x, need in zip(problem[:3], needs[:3], strict=True))
    to_weight = key.new_empty((batch, key.shape[-2])) if needs_weight else None
    each = (key.new_empty(batch) if need else None for need in (needs.alpha, needs_gain, needs.alpha))
    grads = Grads._make((*own, to_weight, *each))
    d_query, d_key, d_value, d_weight, d_alpha, d_gain, terms = map(pointer, grads)
    ends = coef.data_ptr(), matrix.data_ptr(), *route, 0, *read[1]
    status = function(BACKWARD.pack(*block.numbers, *ends, d_query, d_key, d_value, d_weight, d_alpha, terms, d_gain))
    return grads, status


class Moved(NamedTuple):
    out: Tensor  # (B, M, n)
    matrix: Tensor  # (B, n, n): Sigma^-1 or L
    packed: Tensor  # (B, 3), as in `ladder`; ratios are screened
    status: int


def rows_forward(points: Points, inverse: bool, keep: bool = True) -> Moved | None:
    """rows Sigma^-1. None where the kernels do not apply. Without `keep` the factor is anything."""
    rows, key, weight, alpha, gain = points
    function = kernel("intention_transform_forward")
    if function is None or (block := call((rows, key, None, weight, alpha, gain), _ROWS, inverse)) is None:
        return None
    batch, n = alpha.shape[0], key.shape[-1]
    out, packed = rows.new_empty(rows.shape), rows.new_empty((batch, 3))
    matrix = rows.new_empty((batch, n, n)) if keep else packed
    kept = matrix.data_ptr() if keep else 0
    status = function(FORWARD.pack(*block.numbers, 0, kept, out.data_ptr(), packed.data_ptr()))
    return Moved(out, matrix, packed, status)


def rows_backward(
    grad: Tensor, out: Tensor, points: Points, matrix: Tensor, packed: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None] | None:
    """Gradients of rows, keys (one per element of the batch), weight, alpha and gain; of elements the kernel solved."""
    rows, key, weight, alpha, gain = points
    function = kernel("intention_transform_backward")
    if function is None or not readable(matrix, out.dtype):
        return None
    block = call((rows, key, None, weight, alpha, gain), _ROWS, inverse)
    if block is None or (read := incoming(grad, out.dtype)) is None:
        return None
    matrix, out = matrix.contiguous(), out.contiguous()
    route = (0, 0) if packed is None else (packed.data_ptr(), packed.stride(0))
    batch = alpha.shape[0]
    d_rows, d_key = out.new_empty(out.shape), out.new_empty((batch, *key.shape[-2:]))
    d_weight = None if weight is None else out.new_empty(weight.shape)
    d_alpha, d_gain = out.new_empty(batch), None if gain is None else out.new_empty(batch)
    places = map(pointer, (d_rows, d_key, None, d_weight, d_alpha, None, d_gain))
    function(BACKWARD.pack(*block.numbers, 0, matrix.data_ptr(), *route, out.data_ptr(), *read[1], *places))
    return d_rows, d_key, d_weight, d_alpha, d_gain
