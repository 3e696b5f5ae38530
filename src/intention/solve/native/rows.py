"""The compiled rows Sigma^-1: what `transform_rows` and its pullback do, for CPU tensors."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from intention.solve.native.call import BACKWARD, FORWARD, call, described, pointer, readable
from intention.solve.native.library import kernel
from intention.solve.problem import Plan

_PLAN = Plan(dual=False, intercept=False, scale=1.0)


class Moved(NamedTuple):
    out: Tensor  # (B, M, n)
    matrix: Tensor  # (B, n, n): Sigma^-1 or L
    packed: Tensor  # (B, 3), as in `ladder`; ratios are screened
    status: int


Points = tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]  # rows, key, weight, alpha, gain


def forward(points: Points, inverse: bool, keep: bool = True) -> Moved | None:
    """None where the kernels do not apply. The factor is what a backward needs; without `keep` it is anything."""
    rows, key, weight, alpha, gain = points
    function = kernel("intention_transform_forward")
    if function is None or (block := call(rows, key, None, weight, alpha, gain, _PLAN, inverse)) is None:
        return None
    batch, n = alpha.shape[0], key.shape[-1]
    out, packed = rows.new_empty(rows.shape), rows.new_empty((batch, 3))
    matrix = rows.new_empty((batch, n, n)) if keep else packed
    kept = matrix.data_ptr() if keep else 0
    status = function(FORWARD.pack(*block.numbers, 0, kept, out.data_ptr(), packed.data_ptr()))
    return Moved(out, matrix, packed, status)


def backward(
    grad: Tensor, out: Tensor, points: Points, matrix: Tensor, packed: Tensor | None, inverse: bool
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None] | None:
    """Gradients of rows, keys (one per element of the batch), weight, alpha and gain; of elements the kernel solved."""
    rows, key, weight, alpha, gain = points
    function = kernel("intention_transform_backward")
    if function is None or not (readable(grad, out.dtype) and readable(matrix, out.dtype)):
        return None
    if (block := call(rows, key, None, weight, alpha, gain, _PLAN, inverse)) is None:
        return None
    try:
        grad, g = described(grad)
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a tensor without memory of its own
        return None
    matrix, out = matrix.contiguous(), out.contiguous()
    route = (0, 0) if packed is None else (packed.data_ptr(), packed.stride(0))
    batch = alpha.shape[0]
    d_rows, d_key = out.new_empty(out.shape), out.new_empty((batch, *key.shape[-2:]))
    d_weight = None if weight is None else out.new_empty(weight.shape)
    d_alpha, d_gain = out.new_empty(batch), None if gain is None else out.new_empty(batch)
    places = map(pointer, (d_rows, d_key, None, d_weight, d_alpha, None, d_gain))
    function(BACKWARD.pack(*block.numbers, 0, matrix.data_ptr(), *route, out.data_ptr(), *g, *places))
    return d_rows, d_key, d_weight, d_alpha, d_gain
