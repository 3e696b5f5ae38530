"""What is learnt in bfloat16 (a piece that comes again and again), and what is solved for the table of errors."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Fits", "Repeated", "conjugate_gradients", "fits", "repeated", "token_by_token"]

DRAWN = torch.float64


class Repeated(NamedTuple):
    """Sequences in which a piece is repeated with mistakes. At each token but the last the next one is asked."""

    tokens: Tensor  # (B, n + 1)


def repeated(
    batch: int, generator: torch.Generator, *, length: int, period: int, vocabulary: int, mistakes: float
) -> Repeated:
    """A piece of 1/2 to 1 times `period` random tokens, again and again; a share of all tokens is drawn anew.

    >>> repeated(2, torch.Generator().manual_seed(0), length=9, period=4, vocabulary=5, mistakes=0.1).tokens.shape
    torch.Size([2, 10])
    """
    size = torch.randint(-(-period // 2), period + 1, (batch, 1), generator=generator)
    piece = torch.randint(vocabulary, (batch, period), generator=generator)
    tokens = piece.gather(1, torch.arange(length + 1).expand(batch, -1) % size)
    other = torch.randint(vocabulary, tokens.shape, generator=generator)
    wrong = torch.rand(tokens.shape, generator=generator) < mistakes
    return Repeated(torch.where(wrong, other, tokens))


class Fits(NamedTuple):
    """Queries, keys of length 1, and values (B, N, d), in float32."""

    query: Tensor
    key: Tensor
    value: Tensor


def fits(batch: int, generator: torch.Generator, *, length: int, dims: int) -> Fits:
    """Normal ones, from a generator.

    >>> fits(2, torch.Generator().manual_seed(0), length=9, dims=4).key.norm(dim=-1).min().item() > 0.999
    True
    """
    query, key, value = (torch.randn(batch, length, dims, generator=generator) for _ in range(3))
    return Fits(query / query.norm(dim=-1, keepdim=True), key / key.norm(dim=-1, keepdim=True), value)


def token_by_token(drawn: Fits, alpha: float, decay: float, dtype: torch.dtype) -> Tensor:
    """q_t (H_t + alpha I)^-1 G_t with sums and a solve for each token in this dtype."""
    query, key, value = (x.to(dtype) for x in drawn)
    gram, cross = key.new_zeros(2, len(key), key.shape[-1], key.shape[-1])
    ridge, answers = alpha * torch.eye(key.shape[-1], dtype=dtype), []
    for t in range(key.shape[1]):
        k = key[:, t, :, None]
        gram, cross = decay * gram + k @ k.mT, decay * cross + k @ value[:, t, None]
        answers.append(query[:, t, None] @ torch.linalg.solve(gram + ridge, cross))
    return torch.cat(answers, 1)


def conjugate_gradients(drawn: Fits, alpha: float, decay: float, steps: int) -> Tensor:
    """The same by so many steps for all tokens at once, in the dtype of the tokens."""
    query, key, value = drawn
    place = torch.arange(key.shape[1], dtype=DRAWN)
    left = (decay ** (place[:, None] - place).clamp_min(0)).tril().to(key.dtype)

    def times(x: Tensor) -> Tensor:
        return alpha * x + ((x @ key.mT) * left) @ key

    z, rest, direction = torch.zeros_like(query), query, query
    size = rest.square().sum(-1, keepdim=True)
    for _ in range(steps):
        moved = times(direction)
        step = size / (direction * moved).sum(-1, keepdim=True).clamp_min(1e-30)
        z, rest = z + step * direction, rest - step * moved
        before, size = size, rest.square().sum(-1, keepdim=True)
        direction = rest + size / before.clamp_min(1e-30) * direction
    return ((z @ key.mT) * left) @ value
