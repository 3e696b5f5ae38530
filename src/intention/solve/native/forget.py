"""Calls of the compiled causal solve that forgets: one block of numbers per call, in the order of forget.h."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.native.call import all_readable, pointer
from intention.solve.native.causal import described_rows, rows
from intention.solve.native.library import kernel

_BLOCK = struct.Struct("6q 12q 2q 3q q 2q 2d 2q 9q")
_LARGEST = 128  # features: beyond, a factor does not fit into the cache
# Errors of answers, over the largest one, up to which float32 serves: for themselves, and for gradients.
EASY, EASY_SLOPES = 1e-5, 2e-5


class Pulled(NamedTuple):
    """Gradients, and the sums over all tokens from which those of a state follow."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor
    decay: Tensor | None
    alpha: Tensor  # (B, N)
    gain: Tensor | None  # (B,), float64
    gram: Tensor  # (B, d, d), float64: sum D (z r' + r z')
    cross: Tensor  # (B, d, k), float64: sum D z g'


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    gram: Tensor | None,
    cross: Tensor | None,
    decay: Tensor | None,
) -> tuple[Tensor, Tensor] | None:
    """Answers and a packed report (B, 3). None where the kernels do not apply."""
    given = _given(query, key, value, weight, alpha, gain, gram, cross, decay, None)
    call = kernel("intention_forget_forward")
    if given is None or call is None:
        return None
    numbers, alive = given
    out = (query if value is None else value).new_empty((query if value is None else value).shape)
    report = key.new_empty((key.shape[0], 3))
    call(_BLOCK.pack(*numbers, EASY, EASY_SLOPES, out.data_ptr(), report.data_ptr(), *(0,) * 9))
    del alive
    return out, report


def backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    gram: Tensor | None,
    cross: Tensor | None,
    decay: Tensor | None,
    fades: bool = True,
) -> Pulled | None:
    """First-order gradients, in the precisions that they need; of decays only where they are asked for."""
    given = _given(query, key, value, weight, alpha, gain, gram, cross, decay, grad)
    call = kernel("intention_forget_backward")
    if given is None or call is None:
        return None
    numbers, alive = given
    (batch, n, d), k = key.shape, value.shape[2]
    found = Pulled(
        query.new_empty(query.shape),
        key.new_empty(key.shape),
        value.new_empty(value.shape),
        key.new_empty((batch, n)),
        key.new_empty((batch, n)) if fades else None,
        key.new_empty((batch, n)),
        None if gain is None else key.new_empty(batch, dtype=torch.float64),
        key.new_empty((batch, d, d), dtype=torch.float64),
        key.new_empty((batch, d, k), dtype=torch.float64),
    )
    call(_BLOCK.pack(*numbers, EASY, EASY_SLOPES, 0, 0, *map(pointer, found)))
    del alive
    return found


def _given(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    gram: Tensor | None,
    cross: Tensor | None,
    decay: Tensor | None,
    grad: Tensor | None,
) -> tuple[tuple[float, ...], list[Tensor | None]] | None:
    dtype = key.dtype
    if dtype not in (torch.float32, torch.float64) or key.shape[2] > _LARGEST or not key.numel():
        return None
    if decay is not None:
        decay = decay.to(dtype)
    if not all_readable((query, key, value, weight, alpha, gain, decay, grad), dtype, gram, cross):
        return None
    if value is not None and not value.shape[2]:
        return None
    tokens = [None if x is None else rows(x) for x in (query, key, value, grad)]
    flat = [None if x is None else x.contiguous() for x in (weight, decay)]
    alpha = alpha.unsqueeze(1).expand(key.shape[:2]) if alpha.dim() == 1 else alpha
    gain = None if gain is None else gain.contiguous()
    sums = [None if x is None else x.double().contiguous() for x in (gram, cross)]
    numbers = (
        dtype == torch.float64,
        torch.get_num_threads(),
        *key.shape,
        0 if value is None else value.shape[2],
        *(number for x in tokens for number in described_rows(x)),
        *map(pointer, flat),
        alpha.data_ptr(),
        *alpha.stride(),
        pointer(gain),
        *map(pointer, sums),
    )
    return numbers, [*tokens, *flat, alpha, gain, *sums]
