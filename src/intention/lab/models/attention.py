"""Multihead attention as the paper's appendix must mean it: 5 heads of 128, 256 or 512 dimensions each."""

from __future__ import annotations

from torch import Tensor, nn

from intention import functional as F
from intention.nn import LearnableAlpha, SigmaIntention

__all__ = ["WideAttention", "WideSigma"]


class WideAttention(nn.Module):
    """Heads of the full size d beside each other (a split into 5 would not divide 128), projected back to d_out.

    >>> import torch
    >>> mixer = WideAttention(9, 128, heads=5)
    >>> mixer(torch.randn(2, 7, 9), torch.randn(2, 11, 9), torch.randn(2, 11, 128)).shape
    torch.Size([2, 7, 128])
    """

    def __init__(self, d: int, k: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(d, heads * d), nn.Linear(d, heads * d)
        self.value, self.output = nn.Linear(k, heads * k), nn.Linear(heads * k, k)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self.query(query), self.key(key), self.value(value)
        query, key, value = (self._split(x) for x in (query, key, value))
        return self.output(self.mix(query, key, value).transpose(-3, -2).flatten(-2))

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """(..., heads, M, k)"""
        return F.attention(query, key, value)

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(-3, -2)  # (..., heads, points, size)


class WideSigma(WideAttention):
    """The same heads with softmax(Q Sigma^-1 K' scale) V in each: σIntention with all that attention has."""

    def __init__(self, d: int, k: int, heads: int, alpha: LearnableAlpha, scale: str | None = "variance") -> None:
        super().__init__(d, k, heads)
        self.sigma = SigmaIntention(alpha, scale=scale)

    def mix(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.sigma(query, key, value)
