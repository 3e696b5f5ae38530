"""How a batch is handed to the compiled kernels: one block of numbers per call, in the order of arguments.h."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import LIMITS
from intention.solve.problem import Plan

# `status`, as in arguments.h: the worst of all elements
PLAIN, SOME_REFINED, SOME_LEFT = range(3)
_COMMON = "12q 4d 12q 8q 2q"
FORWARD = struct.Struct(_COMMON + "2q")
BACKWARD = struct.Struct(_COMMON + "2q 1q 4q 7q")
_DTYPES = (torch.float32, torch.float64)
_PLAIN_TYPES = (Tensor, torch.nn.Parameter)
# Beyond this size of Sigma products dominate, and torch's run on every core.
LARGEST = 512
# those of a problem, or without values
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor, Tensor | None]


def readable(x: Tensor, dtype: torch.dtype) -> bool:
    """Whether the memory can be read as it is: no subclass with its own storage, no pending negation."""
    return type(x) in _PLAIN_TYPES and x.dtype == dtype and x.is_cpu and not x.is_neg()


def all_readable(tensors: Iterable[Tensor | None], dtype: torch.dtype, *others: Tensor | None) -> bool:
    """Of one dtype; `others` have their own."""
    return all(x is None or readable(x, dtype) for x in tensors) and all(
        x is None or readable(x, x.dtype) for x in others
    )


def described(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """(pointer, strides of an outer and an inner batch and of rows); columns lie side by side."""
    if x.dim() > 4:
        x = x.flatten(0, -3)
    strides = x.stride()
    if strides[-1] != 1 and x.shape[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    if len(strides) == 3:
        return x, (x.data_ptr(), strides[0], 0, strides[1])
    return x, (x.data_ptr(), strides[0], strides[1], strides[2])


def incoming(grad: Tensor, dtype: torch.dtype) -> tuple[Tensor, tuple[int, int, int, int]] | None:
    """`described`; None where it cannot be read as it is."""
    try:
        return described(grad) if readable(grad, dtype) else None
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a tensor without memory of its own
        return None


def room(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Uninitialised and contiguous; half the time of `new_empty` in the usual case."""
    return torch.empty_like(like) if like.shape == shape and like.is_contiguous() else like.new_empty(shape)


def pointer(x: Tensor | None) -> int:
    return 0 if x is None else x.data_ptr()


def _per_element(x: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    if x is None:
        return None, (0, 0)
    if x.dim() == 2 and x.stride(1) != 1:
        x = x.contiguous()
    return x, (x.data_ptr(), x.stride(0))


class Call(NamedTuple):
    """The part of the block that all kernels share."""

    numbers: tuple[float, ...]
    alive: tuple[Tensor | None, ...]  # the pointers look at these


def call(tensors: Tensors, plan: Plan, inverse: bool) -> Call | None:
    """None where the kernels do not apply. The shapes are those of `Problem`."""
    query, key, value, weight, alpha, gain = tensors
    dtype = query.dtype
    if dtype not in _DTYPES:
        return None
    for x in tensors:
        if x is not None and not readable(x, dtype):
            return None
    (points, features), queries = key.shape[-2:], query.shape[-2]
    batch, columns = alpha.shape[0], 0 if value is None else value.shape[-1]
    if not (batch and points and features and queries and (columns or value is None)):
        return None
    if (points if plan.dual else features) > LARGEST:
        return None
    dim = query.dim()
    times, inner = (batch // key.shape[0], 1) if dim == 3 else (1, query.shape[1] if dim == 4 else 1)
    query, q = described(query)
    key, k = described(key)
    value, v = (None, (0, 0, 0, 0)) if value is None else described(value)
    weight, w = _per_element(weight)
    alpha, a = _per_element(alpha)  # pyright: ignore[reportAssignmentType] - a tensor for a tensor
    gain, g = _per_element(gain)
    sizes = dtype == torch.float64, torch.get_num_threads(), batch, inner, times, points, queries, features, columns
    limits = LIMITS[dtype, plan.dual]
    everyone = 0, 0  # no mask: all points are there
    numbers = (*sizes, plan.dual, plan.intercept, inverse, plan.scale, *limits, *q, *k, *v, *w, *a, *g, *everyone)
    return Call(numbers, (query, key, value, weight, alpha, gain))
