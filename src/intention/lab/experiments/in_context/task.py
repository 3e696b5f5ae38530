"""Pairs of one linear map, one after the other along a sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

__all__ = ["Pairs", "before", "pairs"]


class Pairs(NamedTuple):
    """Points of one linear map per task, in turn. Asked is y at every position, from x there and the pairs before."""

    x: Tensor  # (B, N, d)
    y: Tensor  # (B, N, 1), with noise
    clear: Tensor  # (B, N, 1), without


def pairs(batch: int, generator: torch.Generator, *, dims: int, length: int, noise: float, drift: float = 0.0) -> Pairs:
    """y = w'x + noise with w ~ N(0, I) and x ~ N(0, I). With drift, w loses that share of its variance at each
    position, and new coefficients take its place: w is N(0, I) at all of them.

    >>> pairs(2, torch.Generator().manual_seed(0), dims=3, length=12, noise=0.1).y.shape
    torch.Size([2, 12, 1])
    """
    w = torch.randn(batch, dims, 1, generator=generator)
    x = torch.randn(batch, length, dims, generator=generator)
    if drift:
        w = _drifting(w, length, drift, generator)
        clear = (x * w).sum(-1, keepdim=True)
    else:
        clear = x @ w
    return Pairs(x, clear + noise * torch.randn(clear.shape, generator=generator), clear)


def _drifting(w: Tensor, length: int, drift: float, generator: torch.Generator) -> Tensor:
    """(B, N, d) from the first coefficients (B, d, 1)."""
    found = [w.mT]
    for _ in range(length - 1):
        found.append((1 - drift) ** 0.5 * found[-1] + drift**0.5 * torch.randn(w.mT.shape, generator=generator))
    return torch.cat(found, 1)


def before(x: Tensor) -> Tensor:
    """What stands one position earlier (B, N, d); 0 at the first. With it, nothing sees its own y.

    >>> before(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist()
    [0.0, 1.0, 2.0]
    """
    return TF.pad(x[..., :-1, :], (0, 0, 1, 0))
