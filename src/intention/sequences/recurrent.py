"""Linear attention and the delta rule along a sequence: a matrix that every token adds to, and may let fade."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention._call.per_query import linear_causal
from intention.solve.operator import no_autocast

CHUNK = 64  # tokens


@no_autocast
def linear_stream(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor | None,
    weight: Tensor | None = None,
    decay: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention of the next tokens, q_t S_t with S_t = decay_t S_{t-1} + weight_t k_t v_t', and the last S.

    weight and decay (..., N); leading dimensions broadcast. Chunks, O(N d k).
    """
    dtype, (query, key, value) = _widened(query, key, value)
    value = value if weight is None else value * weight.unsqueeze(-1).to(value.dtype)
    if decay is not None:
        out, sums = _in_turn(query, key, value, memory, decay, lambda chunk, before: chunk.value)
    else:
        out, sums = linear_causal(query, key, value, None if memory is None else memory.to(key.dtype))
    return out.to(dtype), sums


@no_autocast
def delta_stream(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, memory: Tensor | None, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = g_t S_{t-1} + beta_t k_t (v_t - g_t k_t'S_{t-1})', o_t = q_t S_t with decays g_t, and the last S.

    Without decays the delta rule, with them the gated one. beta and decay (..., N); leading dimensions broadcast. In a
    chunk the corrections are one triangular system.
    """
    dtype, (query, key, value) = _widened(query, key, value)
    rate = beta.unsqueeze(-1).to(key.dtype)

    def corrections(chunk: Chunk, before: Tensor) -> Tensor:
        own = rate.narrow(-2, chunk.start, chunk.key.shape[-2])
        eye = torch.eye(chunk.key.shape[-2], dtype=key.dtype, device=key.device)
        system = eye + (own * chunk.faded(chunk.key @ chunk.key.mT)).tril(-1)
        target = own * (chunk.value - chunk.carried(chunk.key @ before))
        return torch.linalg.solve_triangular(system, target, upper=False, unitriangular=True)

    out, sums = _in_turn(query, key, value, memory, decay, corrections)
    return out.to(dtype), sums


class Fading(NamedTuple):
    """What is left of tokens of a chunk, and of what was before it, at each of its tokens."""

    between: Tensor  # (..., n, n): of token s at token t >= s
    carried: Tensor  # (..., n, 1)

    @staticmethod
    def of(decay: Tensor, dtype: torch.dtype) -> Fading:
        """decay (..., n). In logarithms of float64; a decay of 0, a reset, has none and is a border instead."""
        decay = decay.double()
        reset = decay == 0
        segment = reset.cumsum(-1)
        total = decay.masked_fill(reset, 1.0).log().cumsum(-1)
        between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().to(dtype).exp()
        alike = segment.unsqueeze(-1) == segment.unsqueeze(-2)
        carried = torch.where(segment == 0, total.to(dtype).exp(), 0.0)
        return Fading(torch.where(alike, between, 0.0).tril(), carried.unsqueeze(-1))


class Chunk(NamedTuple):
    start: int
    query: Tensor
    key: Tensor
    value: Tensor
    fading: Fading | None

    def faded(self, scores: Tensor) -> Tensor:
        """Products (..., n, n) of tokens with what is left of those at or before them; others hold anything."""
        return scores if self.fading is None else scores * self.fading.between

    def carried(self, read: Tensor) -> Tensor:
        """What tokens read (..., n, k) in the state before the chunk, of which only a part is left for them."""
        return read if self.fading is None else read * self.fading.carried


def _in_turn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    memory: Tensor | None,
    decay: Tensor | None,
    rows: Callable[[Chunk, Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Chunk by chunk: o = c q S + tril(D q k') u and S <- c S + (D k)'u, with the rows u that `rows` makes of it.

    D_ts is what is left of token s at token t, c_t what is left of S.
    """
    lead = torch.broadcast_shapes(key.shape[:-2], value.shape[:-2], () if decay is None else decay.shape[:-1])
    sums = key.new_zeros(*lead, key.shape[-1], value.shape[-1]) if memory is None else memory.to(key.dtype)
    outs = [query[..., :0, :] @ sums]
    for start in range(0, key.shape[-2], CHUNK):
        size = min(CHUNK, key.shape[-2] - start)
        q, k, v = (x.narrow(-2, start, size) for x in (query, key, value))
        fading = None if decay is None else Fading.of(decay.narrow(-1, start, size), key.dtype)
        chunk = Chunk(start, q, k, v, fading)
        u = rows(chunk, sums)
        outs.append(chunk.carried(q @ sums) + chunk.faded(q @ k.mT).tril() @ u)
        if fading is not None:
            k, sums = k * fading.between[..., -1:, :].mT, fading.carried[..., -1:, :] * sums
        sums = sums + k.mT @ u
    return torch.cat(outs, -2), sums


def _widened(*tokens: Tensor) -> tuple[torch.dtype, tuple[Tensor, ...]]:
    """The dtype of answers, and the tokens for the sums: in half precision those round, and LAPACK has none."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tokens))
    return dtype, tuple(x.to(torch.promote_types(dtype, torch.float32)) for x in tokens)
