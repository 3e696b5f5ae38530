"""Calls of the compiled causal solves: one block of numbers per call, in the order of causal.h and forget.h."""

from __future__ import annotations

import itertools
import struct

import torch
from torch import Tensor

from intention.solve.ladder import SEQUENCE_ERROR, SEQUENCE_RATIO
from intention.solve.native.call import PLAIN, all_readable, pointer, readable
from intention.solve.native.library import kernel
from intention.solve.problem import Tokens

_BLOCK = struct.Struct("25q 2d 8q")
_LARGEST = 256  # features: beyond, torch's products on every core win
_FORGET = struct.Struct("6q 12q 2q 3q q 2q 2d 2q 9q")
_LARGEST_FORGETTING = 128  # features: beyond, a factor does not fit into the cache
# Errors of answers where tokens are forgotten, over the largest one, up to which float32 serves: for themselves (below
# SEQUENCE_ERROR, from which on tokens are fitted one by one), and for gradients.
EASY, EASY_SLOPES = 8e-6, 4e-5


def forward(tokens: Tokens) -> tuple[Tensor, Tensor, bool] | None:
    """Answers, a packed report (B, 3), and whether all may stay as it is. None where the kernels do not apply."""
    if (read := given(tokens, _LARGEST)) is None:
        return None
    numbers = *_numbers(read, None), *[0 if x is None else x.data_ptr() for x in read[3:8]]
    out, report = _empty(tokens)
    if (call := kernel("intention_causal_forward")) is None:
        return None
    block = *numbers, out.data_ptr(), report.data_ptr(), SEQUENCE_RATIO, SEQUENCE_ERROR, *(0,) * 8
    return out, report, call(_BLOCK.pack(*block)) == PLAIN


def backward(grad: Tensor, tokens: Tokens) -> Tokens | None:
    """First-order gradients, in the precisions of the forward, of alpha and gain (with or without one) in float64.

    In the place of those of a state stand the sums over all tokens, float64, from which they follow.
    """
    call = kernel("intention_causal_backward")
    key, value, gram = tokens.key, tokens.value, tokens.gram
    if call is None or not readable(grad, key.dtype) or (read := given(tokens, _LARGEST)) is None:
        return None
    (batch, _, d), k, wide = key.shape, 0 if value is None else value.shape[2], torch.float64
    own = (None if x is None else x.new_empty(x.shape) for x in tokens[:4])
    sums = (None if gram is None else key.new_zeros(batch, d, width, dtype=wide) for width in (d, k))
    each = (key.new_empty(batch, dtype=wide) for _ in range(2))  # alpha and gain
    found = Tokens._make((*own, *each, *sums, None))
    grad = rows(grad)
    numbers = *_numbers(read, grad), *map(pointer, read[3:8])
    call(_BLOCK.pack(*numbers, 0, 0, 0, 0, *map(pointer, found[:8])))
    return found


def forget_forward(tokens: Tokens) -> tuple[Tensor, Tensor] | None:
    """Answers and a packed report (B, 3). None where the kernels do not apply."""
    read, call = given(tokens, _LARGEST_FORGETTING), kernel("intention_forget_forward")
    if read is None or call is None:
        return None
    out, report = _empty(tokens)
    numbers = *_numbers(read, None), *_of_tokens(read), EASY, EASY_SLOPES
    call(_FORGET.pack(*numbers, out.data_ptr(), report.data_ptr(), *(0,) * 9))
    return out, report


def forget_backward(grad: Tensor, tokens: Tokens, gates: bool = True) -> tuple[Tensor | None, ...] | None:
    """First-order gradients of all nine, in the order of the tokens and in the precisions that they need; of decays
    only with `gates`, as they need the sums before every piece. None also where there are no values."""
    query, key, value, weight, alpha, gain, gram, cross, _ = tokens
    read, call = given(tokens, _LARGEST_FORGETTING), kernel("intention_forget_backward")
    if read is None or call is None or value is None or not readable(grad, key.dtype):
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
    call(_FORGET.pack(*_numbers(read, grad), *_of_tokens(read), EASY, EASY_SLOPES, 0, 0, *ends))
    to_gram, to_cross = to_state
    if to_gram is not None:  # sum D (z r' + r z')
        to_gram = to_gram * (-0.5 if gain is None else -0.5 * gain.view(-1, 1, 1))
    to_alpha = to_alpha.sum(1, dtype=wide) if alpha.dim() == 1 else to_alpha
    found = (*to_tokens, to_weight, to_alpha, to_gain, to_gram, to_cross, to_decay)
    return tuple(None if x is None or y is None else y.to(x.dtype) for x, y in zip(tokens, found, strict=True))


def _empty(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Room for answers and their report."""
    answered = tokens.query if tokens.value is None else tokens.value
    return answered.new_empty(answered.shape), answered.new_empty((answered.shape[0], 3))


def _numbers(tokens: Tokens, grad: Tensor | None) -> tuple[int, ...]:
    """What both kernels are told first."""
    query, key, value, *_ = tokens
    sizes = (*key.shape, 0 if value is None else value.shape[2])
    places = [(0, 0, 0) if x is None else (x.data_ptr(), x.stride(0), x.stride(1)) for x in (query, key, value, grad)]
    return (key.dtype == torch.float64, torch.get_num_threads(), *sizes, *itertools.chain(*places))


def _of_tokens(tokens: Tokens) -> tuple[int, ...]:
    """Weights, decays and alpha of each token, gain and state."""
    alpha = tokens.alpha
    alpha = alpha.unsqueeze(1).expand(tokens.key.shape[:2]) if alpha.dim() == 1 else alpha
    ends = map(pointer, tokens[5:8])
    return pointer(tokens.weight), pointer(tokens.decay), alpha.data_ptr(), *alpha.stride(), *ends


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
