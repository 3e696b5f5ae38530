"""The compiled ridge: what `solve_batch` and its backward do, for CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from intention.solve.factor import wants_inverse
from intention.solve.native.call import BACKWARD, FORWARD, call, described, pointer, readable, room
from intention.solve.native.library import kernel
from intention.solve.problem import Grads, Needs, Plan, Problem


class Found(NamedTuple):
    out: Tensor
    coef: Tensor  # (B, n, k)
    matrix: Tensor  # (B, n, n): Sigma^-1 or L, as `factor.Factor` has it
    report: Tensor  # (B, 3), packed as in `ladder`
    status: int


def forward(problem: Problem, plan: Plan, keep: bool = True) -> Found | None:
    """Gram, factor, solution and prediction of every element; None where the kernels do not apply.

    Coefficients and factor are what a backward needs; without `keep` they are anything.
    """
    function = kernel("intention_ridge_forward")
    if function is None:
        return None
    query, columns = problem.query, problem.value.shape[-1]
    size, batch = problem.key.shape[-2 if plan.dual else -1], problem.alpha.shape[0]
    inverse = wants_inverse(size, columns)
    if (block := call(*problem, plan, inverse)) is None:
        return None
    out, report = query.new_empty((*query.shape[:-1], columns)), query.new_empty((batch, 3))
    coef = matrix = report  # without `keep` nobody looks at them
    if keep:
        coef, matrix = query.new_empty((batch, size, columns)), query.new_empty((batch, size, size))
    ends = coef.data_ptr() if keep else 0, matrix.data_ptr() if keep else 0, out.data_ptr(), report.data_ptr()
    status = function(FORWARD.pack(*block.numbers, *ends))
    return Found(out, coef, matrix, report, status)


def backward(
    problem: Problem, plan: Plan, grad: Tensor, coef: Tensor, matrix: Tensor, packed: Tensor | None, needs: Needs
) -> tuple[Grads, int] | None:
    """Gradients, each in the precision of its forward or better, and a status: whether elements were left open.

    Those are beyond the kernels' routes. Without a report all are by the plain factor.
    """
    query, key, value, weight, alpha, gain = problem
    needs_weight, needs_gain = needs.weight and weight is not None, needs.gain and gain is not None
    function = kernel("intention_ridge_backward")
    if function is None:
        return None
    if not (readable(grad, query.dtype) and readable(coef, query.dtype) and readable(matrix, query.dtype)):
        return None
    block = call(*problem, plan, wants_inverse(matrix.shape[-1], coef.shape[-1]))
    if block is None:
        return None
    try:
        grad, g = described(grad)
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a tensor without memory of its own
        return None
    coef, matrix = coef.contiguous(), matrix.contiguous()
    route = (0, 0) if packed is None else (packed.data_ptr(), packed.stride(0))
    batch = alpha.shape[0]
    lead = (batch,) if query.dim() == 3 else query.shape[:-2]
    grads = Grads(
        room(query, query.shape) if needs.query else None,
        room(key, (*lead, *key.shape[-2:])) if needs.key else None,
        room(value, (*lead, *value.shape[-2:])) if needs.value else None,
        key.new_empty((batch, key.shape[-2])) if needs_weight else None,
        key.new_empty(batch) if needs.alpha else None,
        key.new_empty(batch) if needs_gain else None,
        key.new_empty(batch) if needs.alpha else None,
    )
    d_query, d_key, d_value, d_weight, d_alpha, d_gain, terms = map(pointer, grads)
    ends = coef.data_ptr(), matrix.data_ptr(), *route, 0, *g
    status = function(BACKWARD.pack(*block.numbers, *ends, d_query, d_key, d_value, d_weight, d_alpha, terms, d_gain))
    return grads, status
