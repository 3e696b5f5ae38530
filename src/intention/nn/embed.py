"""Embeddings: small networks that act on the features of each point."""

from __future__ import annotations

import itertools

import torch
from torch import nn

__all__ = ["mlp"]


def mlp(
    *sizes: int,
    activation: type[nn.Module] = nn.ReLU,
    device: torch.device | str | int | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Sequential:
    """Linear layers of the given sizes with an activation between them, none at the end.

    >>> mlp(3, 64, 5)
    Sequential(
      (0): Linear(in_features=3, out_features=64, bias=True)
      (1): ReLU()
      (2): Linear(in_features=64, out_features=5, bias=True)
    )
    """
    if len(sizes) < 2:
        raise ValueError(f"mlp needs at least an input and an output size, got {sizes}; use mlp(d, hidden, out)")
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside, device=device, dtype=dtype), activation()]
    return nn.Sequential(*layers[:-1])
