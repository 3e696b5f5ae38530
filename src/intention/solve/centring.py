"""Points around their mean, without the rounding that this leaves in place of nothing."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = torch.finfo(torch.float64).eps
FLAT = 4  # a column that varies by less than so many roundings of its size is constant


def centred(x: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor]:
    """The rows of x (..., N, d) around their mean (..., 1, d), weighted, in float64; a constant column is exactly 0.

    Centred twice, which removes the rounding of the first mean: else it is a direction that only rounding has, and
    alpha = 0 divides by it.
    """
    n = x.shape[-2]
    if weight is None:
        share = x.new_full((1, n), 1 / max(n, 1))
    else:
        count = weight.sum(-1, keepdim=True)
        share = (weight / torch.where(count > 0, count, 1.0)).unsqueeze(-2)
    mean = share @ x
    near = x - mean
    rest = share @ near
    return without_rounding(near - rest, x, None if weight is None else weight > 0), mean + rest


def without_rounding(near: Tensor, x: Tensor, there: Tensor | None) -> Tensor:
    """Centred rows `near` of x: 0 in the columns that are constant over the points that are `there` (..., N)."""
    if not x.shape[-2]:
        return near
    low = high = x.detach()
    if there is not None:
        there = there.unsqueeze(-1)
        low, high = torch.where(there, low, torch.inf), torch.where(there, high, -torch.inf)
    low, high = low.amin(-2, keepdim=True), high.amax(-2, keepdim=True)
    flat = high - low <= FLAT * EPS * torch.maximum(low.abs(), high.abs())
    return value_zero(near, flat if there is None else flat & there)


def value_zero(x: Tensor, where: Tensor) -> Tensor:
    """0 there, with the derivative of x."""
    return x - torch.where(where, x.detach(), 0.0)
