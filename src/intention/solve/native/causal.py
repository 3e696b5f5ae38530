"""Calls of the compiled causal solve: one block of numbers per call, in the order of causal.h."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from intention.solve.ladder import SEQUENCE_ERROR, SEQUENCE_RATIO
from intention.solve.native.call import PLAIN, all_readable, pointer, readable
from intention.solve.native.library import kernel
from intention.solve.problem import Tokens

_BLOCK = struct.Struct("25q 2d 8q")
_LARGEST = 256  # features: beyond, torch's products on every core win


def forward(tokens: Tokens) -> tuple[Tensor, Tensor, bool] | None:
    """Answers, a packed report (B, 3), and whether all may stay as it is. None where the kernels do not apply."""
    if (read := given(tokens, _LARGEST)) is None:
        return None
    numbers = _numbers(read, None)
    if (call := kernel("intention_causal_forward")) is None:
        return None
    answered = tokens.query if tokens.value is None else tokens.value
    out = answered.new_empty(answered.shape)
    report = answered.new_empty((answered.shape[0], 3))
    block = *numbers, out.data_ptr(), report.data_ptr(), SEQUENCE_RATIO, SEQUENCE_ERROR, *(0,) * 8
    return out, report, call(_BLOCK.pack(*block)) == PLAIN


def backward(grad: Tensor, tokens: Tokens) -> Tokens | None:
    """First-order gradients, in the precisions of the forward, of alpha and gain (with or without one) in float64.

    In the place of those of a state stand the sums over all tokens, float64, from which they follow.
    """
    call = kernel("intention_causal_backward")
    query, key, value, weight, _, _, gram, *_ = tokens
    if call is None or not readable(grad, key.dtype) or (read := given(tokens, _LARGEST)) is None:
        return None
    grad = rows(grad)
    (batch, _, d), k = key.shape, 0 if value is None else value.shape[2]
    wide = torch.float64
    found = Tokens(
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        None if value is None else value.new_empty(value.shape),
        None if weight is None else weight.new_empty(weight.shape),
        key.new_empty(batch, dtype=wide),
        key.new_empty(batch, dtype=wide),
        None if gram is None else key.new_zeros(batch, d, d, dtype=wide),
        None if gram is None else key.new_zeros(batch, d, k, dtype=wide),
    )
    call(_BLOCK.pack(*_numbers(read, grad), 0, 0, 0, 0, *map(pointer, found[:8])))
    return found


def _numbers(tokens: Tokens, grad: Tensor | None) -> tuple[int, ...]:
    query, key, value, *others, _ = tokens
    sizes = (*key.shape, 0 if value is None else value.shape[2])
    strides = [number for x in (query, key, value, grad) for number in described_rows(x)]
    ends = [0 if x is None else x.data_ptr() for x in others]
    return (key.dtype == torch.float64, torch.get_num_threads(), *sizes, *strides, *ends)


def given(tokens: Tokens, largest: int) -> Tokens | None:
    """As a call reads them; to hold them keeps copies alive. None where the kernels do not apply: to more features."""
    query, key, value, weight, alpha, gain, gram, cross, decay = tokens
    if key.dtype not in (torch.float32, torch.float64) or key.shape[2] > largest or not key.numel():
        return None
    if not all_readable(tokens[:6], key.dtype, gram, cross, decay) or (value is not None and not value.shape[2]):
        return None
    gram, cross = (None if x is None else x.double().contiguous() for x in (gram, cross))
    weight, gain = (None if x is None else x.contiguous() for x in (weight, gain))
    query, key, value = rows(query), rows(key), None if value is None else rows(value)
    decay = None if decay is None else decay.to(key.dtype).contiguous()
    return Tokens(query, key, value, weight, alpha.contiguous(), gain, gram, cross, decay)


def rows(x: Tensor) -> Tensor:
    """Columns side by side."""
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


def described_rows(x: Tensor | None) -> tuple[int, int, int]:
    return (0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1))
