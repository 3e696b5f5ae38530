"""Calls of the compiled causal solve that forgets: one block of numbers per call, in the order of forget.h."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from intention.solve.native.call import all_readable, pointer
from intention.solve.native.causal import described_rows, rows
from intention.solve.native.library import kernel

_BLOCK = struct.Struct("6q 12q 2q 3q q 2q 2d 2q 9q")
_LARGEST = 128  # features: beyond, a factor does not fit into the cache
# Errors of answers, over the largest one, up to which float32 serves: for themselves (below SEQUENCE_ERROR,
# from which on tokens are fitted one by one), and for gradients.
EASY, EASY_SLOPES = 8e-6, 4e-5


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
    value: Tensor | None,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    gram: Tensor | None,
    cross: Tensor | None,
    decay: Tensor,
    gates: bool = True,
) -> tuple[Tensor | None, ...] | None:
    """First-order gradients of all nine, in the order of the arguments and in the precisions that they need; of decays
    only with `gates`, as they need the sums before every piece. None also where there are no values."""
    call = kernel("intention_forget_backward")
    if value is None or call is None:
        return None
    given = _given(query, key, value, weight, alpha, gain, gram, cross, decay, grad)
    if given is None:
        return None
    numbers, alive = given
    each, wide = key.shape[:2], torch.float64
    to_tokens = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    to_weight = None if weight is None else weight.new_empty(each)
    to_decay, to_alpha = key.new_empty(each) if gates else None, key.new_empty(each)
    to_gain = None if gain is None else gain.new_empty(gain.shape, dtype=wide)
    to_state = None, None
    if gram is not None and cross is not None:
        to_state = gram.new_empty(gram.shape, dtype=wide), cross.new_empty(cross.shape, dtype=wide)
    ends = map(pointer, (*to_tokens, to_weight, to_decay, to_alpha, to_gain, *to_state))
    call(_BLOCK.pack(*numbers, EASY, EASY_SLOPES, 0, 0, *ends))
    del alive
    to_gram, to_cross = to_state
    if gram is not None and to_gram is not None:  # sum D (z r' + r z')
        to_gram = (to_gram * (-0.5 if gain is None else -0.5 * gain.view(-1, 1, 1))).to(gram.dtype)
    return (
        *to_tokens,
        to_weight,
        to_alpha.sum(1, dtype=wide).to(alpha.dtype) if alpha.dim() == 1 else to_alpha,
        None if gain is None or to_gain is None else to_gain.to(gain.dtype),
        to_gram,
        None if cross is None or to_cross is None else to_cross.to(cross.dtype),
        None if to_decay is None else to_decay.to(decay.dtype),
    )


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
