"""Rotary positions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Rotary"]


class Rotary(nn.Module):
    """Rotary positions: pairs of features are turned by angles that grow with the position."""

    def __init__(self, d: int, base: float = 10_000.0) -> None:
        super().__init__()
        self.d, self.base = d, base

    def forward(self, query: Tensor, key: Tensor, seen: int | Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (..., n, d) of the tokens that come after `seen` others; a tensor is (..., 1) of them."""
        # in bfloat16, which a buffer would be after .bfloat16(), 256 and 257 are the same position
        place: Any = {"device": query.device, "dtype": torch.promote_types(query.dtype, torch.float32)}
        speed = self.base ** (-torch.arange(0, self.d - self.d % 2, 2, **place) / self.d)
        position = seen + torch.arange(query.shape[-2], device=query.device)
        angle = position.to(place["dtype"]).unsqueeze(-1) * speed
        cos, sin = angle.cos(), angle.sin()
        return _turned(query, cos, sin).to(query.dtype), _turned(key, cos, sin).to(key.dtype)


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    one, two, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([one * cos - two * sin, one * sin + two * cos, rest], -1)
