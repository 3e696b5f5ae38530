"""Linear attention and the delta rule along a sequence: a matrix that every token adds to, and may let fade."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention._call.per_query import linear_causal
from intention.solve.operator import no_autocast

__all__ = ["delta_stream", "linear_stream"]

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
    if decay is None:
        out, sums = linear_causal(query, key, value, None if memory is None else memory.to(key.dtype))
        return out.to(dtype), sums
    chunks = Chunks.of(query, key, value, decay)
    states = [chunks.first(memory)]
    for left, written in zip(*chunks.each(chunks.left, chunks.lasting.mT @ chunks.value), strict=True):
        states.append(left * states[-1] + written)
    return chunks.answers(torch.stack(states[:-1], -3), chunks.value, key.shape[-2]).to(dtype), states[-1]


@no_autocast
def delta_stream(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, memory: Tensor | None, decay: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """S_t = g_t S_{t-1} + beta_t k_t (v_t - g_t k_t'S_{t-1})', o_t = q_t S_t with decays g_t, and the last S.

    Without decays the delta rule, with them the gated one. beta and decay (..., N); leading dimensions broadcast. In a
    chunk that starts with S the corrections u_t = beta_t (v_t - ...) solve a triangular system, and are linear in S:
    the systems of all chunks are solved at once, for v and for what k reads in S.
    """
    dtype, (query, key, value) = _widened(query, key, value)
    chunks = Chunks.of(query, key, value, decay)
    rate = _cut(beta.unsqueeze(-1).to(key.dtype), chunks.key.shape[-2])
    eye = torch.eye(rate.shape[-2], dtype=key.dtype, device=key.device)
    system = eye + (rate * chunks.between * (chunks.key @ chunks.key.mT)).tril(-1)
    targets = [rate * chunks.value, rate * chunks.carried * chunks.key]
    lead = torch.broadcast_shapes(*(x.shape[:-1] for x in targets))
    both = torch.cat([x.expand(*lead, x.shape[-1]) for x in targets], -1)
    solved = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True)
    fixed, read = solved.split([value.shape[-1], key.shape[-1]], -1)  # u = fixed - read S
    states, rows = [chunks.first(memory)], []
    for left, lasting, f, r in zip(*chunks.each(chunks.left, chunks.lasting, fixed, read), strict=True):
        rows.append(f - r @ states[-1])
        states.append(left * states[-1] + lasting.mT @ rows[-1])
    return chunks.answers(torch.stack(states[:-1], -3), torch.stack(rows, -3), key.shape[-2]).to(dtype), states[-1]


class Chunks(NamedTuple):
    """Tokens (..., chunks, n, features) cut into chunks, the last one filled with zeros, and what decays leave."""

    query: Tensor
    key: Tensor
    value: Tensor
    between: Tensor  # (..., n, n): what is left of token s at token t >= s; 0 for later ones
    carried: Tensor  # (..., n, 1): what is left at t of the state before the chunk

    @staticmethod
    def of(query: Tensor, key: Tensor, value: Tensor, decay: Tensor | None) -> Chunks:
        size = max(1, min(CHUNK, key.shape[-2]))
        q, k, v = (_cut(x, size) for x in (query, key, value))
        if decay is None:
            ones = k.new_ones(size, size)
            return Chunks(q, k, v, ones.tril(), ones[:, :1])
        return Chunks(q, k, v, *_left_of(_cut(decay.unsqueeze(-1), size, 1.0).squeeze(-1), k.dtype))

    @property
    def left(self) -> Tensor:
        """(..., 1, 1): what is left of the state before a chunk after it."""
        return self.carried[..., -1:, :]

    @property
    def lasting(self) -> Tensor:
        """Keys times what is left of them after the chunk."""
        return self.key * self.between[..., -1:, :].mT

    def first(self, memory: Tensor | None) -> Tensor:
        """The state before the first chunk."""
        if memory is not None:
            return memory.to(self.key.dtype)
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (self.key, self.value, self.between)))
        return self.key.new_zeros(*lead, self.key.shape[-1], self.value.shape[-1])

    def each(self, *tensors: Tensor) -> list[tuple[Tensor, ...]]:
        """Chunk by chunk."""
        return [x.expand(*x.shape[:-3], self.key.shape[-3], *x.shape[-2:]).unbind(-3) for x in tensors]

    def answers(self, before: Tensor, rows: Tensor, n: int) -> Tensor:
        """q_t S_t (..., N, k), where S_t is what is left of the state before the chunk and of all k_s rows_s'."""
        out = self.carried * (self.query @ before) + (self.between * (self.query @ self.key.mT)) @ rows
        return out.flatten(-3, -2).narrow(-2, 0, n)


def _cut(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """(..., N, features) -> (..., chunks, size, features)"""
    n = x.shape[-2]
    return TF.pad(x, (0, 0, 0, -n % size if n else size), value=fill).unflatten(-2, (-1, size))


def _left_of(decay: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`between` and `carried` of decays (..., n): exponentials of differences of summed logarithms, in float64.

    A decay of 0, a reset, has no logarithm and is a border instead, across which nothing is left.
    """
    decay = decay.double()
    reset = decay == 0
    segment = reset.cumsum(-1)
    total = decay.masked_fill(reset, 1.0).log().cumsum(-1)
    between = (total.unsqueeze(-1) - total.unsqueeze(-2)).tril().to(dtype).exp()
    alike = segment.unsqueeze(-1) == segment.unsqueeze(-2)
    carried = torch.where(segment == 0, total.to(dtype).exp(), 0.0)
    return torch.where(alike, between, 0.0).tril(), carried.unsqueeze(-1)


def _widened(*tokens: Tensor) -> tuple[torch.dtype, tuple[Tensor, ...]]:
    """The dtype of answers, and the tokens for the sums: in half precision those round, and LAPACK has none."""
    dtype = functools.reduce(torch.promote_types, (x.dtype for x in tokens))
    return dtype, tuple(x.to(torch.promote_types(dtype, torch.float32)) for x in tokens)
