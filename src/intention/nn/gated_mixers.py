"""What gated layers can do with queries, keys and values along a sequence, by name.

All take heads (batch, kv heads, groups or 1, n, features), gates (batch, kv heads, 1, n) and a memory: a tuple of
tensors whose first dimension is the batch. `seen` (batch,) says how many tokens each sequence had.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention._call.masks_and_weights import triangle
from intention.nn.scaling import scale_queries
from intention.sequences import ragged
from intention.sequences.recurrent import delta_stream, linear_stream
from intention.sequences.state import CausalState, causal_intention, sigma_stream

__all__ = ["RULES", "Gated", "Memory"]

Memory = tuple[Tensor, ...]
LEAST = 1e-38  # a gate that has become 0 has no logarithm


class Gated(NamedTuple):
    """Tokens of a gated layer. Padding stands behind the others, with decays of 1 and keys of 0."""

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    decay: Tensor | None
    seen: Tensor
    alpha: Tensor | None  # (kv heads, 1, d or 1)
    scale: Tensor | None  # of scores, (kv heads, groups, 1, 1)
    remember: bool  # whether the memory is asked for


def intention(tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
    query, key, alpha = ridge_of_one(tokens)
    value, weight, decay = tokens.value.to(key.dtype), tokens.weight, tokens.decay
    if memory is None and not tokens.remember:
        return causal_intention(query, key, value, alpha=alpha, weight=weight, decay=decay), None
    if memory is None:
        state = CausalState.empty(key.shape[-1], value.shape[-1], tuple(key.shape[:-2]), alpha=alpha, device=key.device)
    else:
        gram, cross = memory
        state = CausalState(gram, cross, torch.full((), alpha, dtype=torch.float64, device=key.device))
    out, state = state.prefill(query, key, value, weight=weight, decay=decay)
    return out, (state.gram[:, :, :1], state.cross[:, :, :1])  # groups share it


def sigma_intention(tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
    """softmax(Q Sigma^-1 K' scale) V, with Sigma of the keys so far. Remembers keys and values."""
    query, key, alpha = ridge_of_one(tokens)
    groups = query.shape[2]
    n = tokens.seen.view(-1, 1, 1, 1, 1) + torch.arange(1, query.shape[-2] + 1, device=query.device).unsqueeze(-1)
    query = scale_queries(query, "variance", n, alpha, "ridge")
    query = query if tokens.scale is None else query * tokens.scale
    key, value = _per_query_head(key, groups), _per_query_head(tokens.value.to(key.dtype), groups)
    own = torch.full((), alpha, dtype=torch.float64, device=key.device)
    before = None if memory is None else (memory[0], memory[1], CausalState(memory[2], memory[2][..., :0], own))
    out, (keys, values, state) = sigma_stream(query.flatten(1, 2), key, value, own, "ridge", None, before, tokens.seen)
    return out.unflatten(1, (-1, groups)), (keys, values, state.gram)


def attention(tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
    """softmax(Q K' scale) V in which a key counts its weight times what decays have left of it."""
    query, key, value, weight, decay, seen, *_ = tokens
    gated, groups = weight is not None or decay is not None, query.shape[2]
    scale = key.shape[-1] ** -0.5 if tokens.scale is None else tokens.scale
    dtype = torch.promote_types(value.dtype, torch.float32) if gated else value.dtype  # of log-weights
    query, key, value = (query * scale).to(dtype), key.to(dtype), value.to(dtype)
    keys, values, *rest = (key[..., :0, :], value[..., :0, :]) if memory is None else memory
    keys, values = ragged.appended(keys, key, seen), ragged.appended(values, value, seen)
    shown = None
    if memory is not None or gated:
        shown = triangle(key.shape[-2], keys.shape[-2], key.device, seen)
    if gated:
        bias, *rest = _log_weights(tokens, rest, dtype)
        shown = bias.masked_fill(~shown.unsqueeze(1), -torch.inf)  # pyright: ignore[reportOptionalMemberAccess]
        shown = _per_query_head(shown, groups)
    k, v = _per_query_head(keys, groups), _per_query_head(values, groups)
    out = TF.scaled_dot_product_attention(query.flatten(1, 2), k, v, shown, is_causal=shown is None, scale=1.0)
    return out.unflatten(1, (-1, groups)), (keys, values, *rest)


def _log_weights(tokens: Gated, before: list[Tensor], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """log(w_s D_ts) (batch, kv heads, 1, n, S), and what is remembered for that of the next tokens.

    That is the sum of the logarithms of decays up to t, and for each key log w_s minus this sum up to s.
    """
    none = tokens.key.new_zeros(tokens.key.shape[:-1], dtype=torch.float64)
    total = none if tokens.decay is None else tokens.decay.double().clamp_min(LEAST).log().cumsum(-1)
    total = total + before[1] if before else total
    own = (none if tokens.weight is None else tokens.weight.double().clamp_min(LEAST).log()) - total
    own = own.unsqueeze(-1)
    counts = ragged.appended(before[0], own, tokens.seen) if before else own
    first = total[..., :1].unsqueeze(-1)  # sums since the first of these tokens are rounded less
    return (total.unsqueeze(-1) - first).to(dtype) + (counts + first).mT.to(dtype), counts, total[..., -1:]


def _per_query_head(x: Tensor, groups: int) -> Tensor:
    """(batch, kv heads, 1, n, features) -> (batch, heads, n, features)"""
    return x.expand(-1, -1, groups, -1, -1).flatten(1, 2)


def linear_attention(tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
    query, key, value, weight, decay, *_ = tokens
    out, sums = linear_stream(query, key, value, None if memory is None else memory[0], weight, decay)
    return out, (sums,)


def delta(tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
    """The delta rule, with decays the gated one."""
    query, key, value, weight, decay, *_ = tokens
    weight = torch.ones_like(key[..., 0]) if weight is None else weight
    out, sums = delta_stream(query, key, value, weight, None if memory is None else memory[0], decay)
    return out, (sums,)


def ridge_of_one(tokens: Gated) -> tuple[Tensor, Tensor, float]:
    """Queries and keys whose ridge is 1 in place of `alpha`: both divided by its square root, for each channel."""
    assert tokens.alpha is not None
    root = tokens.alpha.sqrt().unsqueeze(-2)  # (kv heads, 1, 1, d or 1)
    wide = torch.promote_types(tokens.query.dtype, torch.float32)
    return tokens.query.to(wide) / root, tokens.key.to(wide) / root, 1.0


class Parts(NamedTuple):
    """A mixer and the parts that it has if nothing else is said; None is a part that it cannot have."""

    mix: Callable[[Gated, Memory | None], tuple[Tensor, Memory | None]]
    beta: bool | None
    gamma: bool | None
    norm: bool
    ridge: bool
    softmax: bool


RULES = {
    "intention": Parts(intention, True, True, False, True, False),
    "sigma_intention": Parts(sigma_intention, None, None, False, True, True),
    "attention": Parts(attention, False, False, False, False, True),
    "linear_attention": Parts(linear_attention, True, True, True, False, False),  # sums grow, a norm holds them
    "delta": Parts(delta, True, None, False, False, False),
    "gated_delta": Parts(delta, True, True, False, False, False),
}
