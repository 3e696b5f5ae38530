"""Calls of the compiled causal solve that forgets: one block of numbers per call, in the order of forget.h."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from intention.solve.native.call import pointer, readable
from intention.solve.native.causal import described_rows, given, rows
from intention.solve.native.library import kernel
from intention.solve.problem import Tokens

_BLOCK = struct.Struct("6q 12q 2q 3q q 2q 2d 2q 9q")
_LARGEST = 128  # features: beyond, a factor does not fit into the cache
# Errors of answers, over the largest one, up to which float32 serves: for themselves (below SEQUENCE_ERROR,
# from which on tokens are fitted one by one), and for gradients.
EASY, EASY_SLOPES = 8e-6, 4e-5


def forward(tokens: Tokens) -> tuple[Tensor, Tensor] | None:
    """Answers and a packed report (B, 3). None where the kernels do not apply."""
    read, call = given(tokens, _LARGEST), kernel("intention_forget_forward")
    if read is None or call is None:
        return None
    answered = tokens.query if tokens.value is None else tokens.value
    out, report = answered.new_empty(answered.shape), answered.new_empty((answered.shape[0], 3))
    call(_BLOCK.pack(*_numbers(read, None), EASY, EASY_SLOPES, out.data_ptr(), report.data_ptr(), *(0,) * 9))
    return out, report


def backward(grad: Tensor, tokens: Tokens, gates: bool = True) -> tuple[Tensor | None, ...] | None:
    """First-order gradients of all nine, in the order of the tokens and in the precisions that they need; of decays
    only with `gates`, as they need the sums before every piece. None also where there are no values."""
    query, key, value, weight, alpha, gain, gram, cross, _ = tokens
    call = kernel("intention_forget_backward")
    if call is None or value is None or not readable(grad, key.dtype) or (read := given(tokens, _LARGEST)) is None:
        return None
    each, wide, grad = key.shape[:2], torch.float64, rows(grad)
    to_tokens = query.new_empty(query.shape), key.new_empty(key.shape), value.new_empty(value.shape)
    to_weight = None if weight is None else weight.new_empty(each)
    to_decay, to_alpha = key.new_empty(each) if gates else None, key.new_empty(each)
    to_gain = None if gain is None else gain.new_empty(gain.shape, dtype=wide)
    to_state = None, None
    if gram is not None and cross is not None:
        to_state = gram.new_empty(gram.shape, dtype=wide), cross.new_empty(cross.shape, dtype=wide)
    ends = map(pointer, (*to_tokens, to_weight, to_decay, to_alpha, to_gain, *to_state))
    call(_BLOCK.pack(*_numbers(read, grad), EASY, EASY_SLOPES, 0, 0, *ends))
    to_gram, to_cross = to_state
    if to_gram is not None:  # sum D (z r' + r z')
        to_gram = to_gram * (-0.5 if gain is None else -0.5 * gain.view(-1, 1, 1))
    to_alpha = to_alpha.sum(1, dtype=wide) if alpha.dim() == 1 else to_alpha
    found = (*to_tokens, to_weight, to_alpha, to_gain, to_gram, to_cross, to_decay)
    return tuple(None if x is None or y is None else y.to(x.dtype) for x, y in zip(tokens, found, strict=True))


def _numbers(tokens: Tokens, grad: Tensor | None) -> tuple[float, ...]:
    query, key, value, weight, alpha, gain, gram, cross, decay = tokens
    alpha = alpha.unsqueeze(1).expand(key.shape[:2]) if alpha.dim() == 1 else alpha
    return (
        key.dtype == torch.float64,
        torch.get_num_threads(),
        *key.shape,
        0 if value is None else value.shape[2],
        *(number for x in (query, key, value, grad) for number in described_rows(x)),
        *map(pointer, (weight, decay)),
        alpha.data_ptr(),
        *alpha.stride(),
        *map(pointer, (gain, gram, cross)),
    )
