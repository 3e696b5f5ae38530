"""Calls of the compiled causal solve: one block of numbers per call, in the order of causal.h."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.ladder import SEQUENCE_ERROR, SEQUENCE_RATIO
from intention.solve.native.call import PLAIN, all_readable, pointer, readable
from intention.solve.native.library import kernel

_BLOCK = struct.Struct("25q 2d 8q")
_LARGEST = 256  # features: beyond, torch's products on every core win


class Pulled(NamedTuple):
    """Gradients, and the sums over all tokens from which those of a state follow."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    weight: Tensor | None
    alpha: Tensor  # (B,), float64
    gain: Tensor  # (B,), float64
    gram: Tensor | None  # (B, d, d), float64; None without a state
    cross: Tensor | None  # (B, d, k), float64


def forward(*tokens: Tensor | None) -> tuple[Tensor, Tensor, bool] | None:
    """Answers, a packed report (B, 3), and whether all may stay as it is. None where the kernels do not apply."""
    if (given := _given(tokens)) is None:
        return None
    numbers = _numbers(given, None)
    if (call := kernel("intention_causal_forward")) is None:
        return None
    query, _, value, *_ = tokens
    answered = query if value is None else value
    assert answered is not None
    out = answered.new_empty(answered.shape)
    report = answered.new_empty((answered.shape[0], 3))
    block = *numbers, out.data_ptr(), report.data_ptr(), SEQUENCE_RATIO, SEQUENCE_ERROR, *(0,) * 8
    return out, report, call(_BLOCK.pack(*block)) == PLAIN


def backward(grad: Tensor, *tokens: Tensor | None) -> Pulled | None:
    """First-order gradients, in the precisions of the forward."""
    call = kernel("intention_causal_backward")
    query, key, value, weight, _, _, gram, _ = tokens
    assert query is not None
    assert key is not None
    if call is None or not readable(grad, key.dtype) or (given := _given(tokens)) is None:
        return None
    grad = rows(grad)
    (batch, _, d), k = key.shape, 0 if value is None else value.shape[2]
    wide = torch.float64
    found = Pulled(
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        None if value is None else value.new_empty(value.shape),
        None if weight is None else weight.new_empty(weight.shape),
        key.new_empty(batch, dtype=wide),
        key.new_empty(batch, dtype=wide),
        None if gram is None else key.new_zeros(batch, d, d, dtype=wide),
        None if gram is None else key.new_zeros(batch, d, k, dtype=wide),
    )
    call(_BLOCK.pack(*_numbers(given, grad), 0, 0, 0, 0, *map(pointer, found)))
    return found


def _numbers(given: tuple[Tensor | None, ...], grad: Tensor | None) -> tuple[int, ...]:
    query, key, value, *others = given
    assert key is not None
    sizes = (*key.shape, 0 if value is None else value.shape[2])
    strides = [number for x in (query, key, value, grad) for number in described_rows(x)]
    ends = [0 if x is None else x.data_ptr() for x in others]
    return (key.dtype == torch.float64, torch.get_num_threads(), *sizes, *strides, *ends)


def _given(tokens: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...] | None:
    """The tokens as a call reads them; holding them keeps copies alive. None where the kernels do not apply."""
    query, key, value, weight, alpha, gain, gram, cross = tokens
    assert key is not None
    if key.dtype not in (torch.float32, torch.float64) or key.shape[2] > _LARGEST or not key.numel():
        return None
    if not all_readable((query, key, value, weight, alpha, gain), key.dtype, gram, cross):
        return None
    if value is not None and not value.shape[2]:
        return None
    sums = [None if x is None else x.double().contiguous() for x in (gram, cross)]
    side = [None if x is None else rows(x) for x in (query, key, value)]
    flat = [None if x is None else x.contiguous() for x in (weight, alpha, gain)]
    return (*side, *flat, *sums)


def rows(x: Tensor) -> Tensor:
    """Columns side by side."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def described_rows(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))
