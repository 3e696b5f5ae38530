"""Linear attention and the delta rule along a sequence: a matrix that every token adds to."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from intention._call.per_query import linear_causal
from intention.solve.operator import no_autocast

CHUNK = 64  # tokens


@no_autocast
def linear_stream(query: Tensor, key: Tensor, value: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor]:
    """Linear attention of the next tokens, (q_t K_{<=t}') V_{<=t}, and the sum K'V; chunks, O(N d k)."""
    dtype, (query, key, value) = _widened(query, key, value)
    out, sums = linear_causal(query, key, value, None if memory is None else memory.to(key.dtype))
    return out.to(dtype), sums


@no_autocast
def delta_stream(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    """S_t = S_{t-1} + beta_t k_t (v_t - k_t'S_{t-1})', o_t = q_t S_t: in a chunk, one triangular system."""

    def corrections(q: Tensor, k: Tensor, v: Tensor, before: Tensor, start: int) -> Tensor:
        rate = beta[..., start : start + k.shape[-2]].unsqueeze(-1).to(k.dtype)
        size = k.shape[-2]
        system = torch.eye(size, dtype=k.dtype, device=k.device) + (rate * (k @ k.mT)).tril(-1)
        return torch.linalg.solve_triangular(system, rate * (v - k @ before), upper=False, unitriangular=True)

    return _in_turn(query, key, value, memory, corrections)


def _in_turn(query: Tensor, key: Tensor, value: Tensor, memory: Tensor | None, rows: Any) -> tuple[Tensor, Tensor]:
    """Chunk by chunk: o = q S + tril(q k') u and S + k'u, with the rows u that `rows` makes of a chunk's values."""
    dtype, (query, key, value) = _widened(query, key, value)
    sums = key.new_zeros(*key.shape[:-2], key.shape[-1], value.shape[-1]) if memory is None else memory.to(key.dtype)
    outs = [query[..., :0, :] @ sums]
    for start in range(0, key.shape[-2], CHUNK):
        q, k, v = (x[..., start : start + CHUNK, :] for x in (query, key, value))
        u = rows(q, k, v, sums, start)
        outs.append(q @ sums + (q @ k.mT).tril() @ u)
        sums = sums + k.mT @ u
    return torch.cat(outs, -2).to(dtype), sums


def _widened(*tokens: Tensor) -> tuple[torch.dtype, tuple[Tensor, ...]]:
    """The dtype of answers, and the tokens for the sums: in half precision those round, and LAPACK has none."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tokens))
    return dtype, tuple(x.to(torch.promote_types(dtype, torch.float32)) for x in tokens)
