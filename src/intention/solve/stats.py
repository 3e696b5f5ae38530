"""A context as sums: what is enough to fit, to add points, to take them away and to join contexts.

Sums are kept around the mean, in float64, and joined by the pairwise-mean formula: with a shift d = mean_b - mean_a
and counts a, b the joint scatter is S_a + S_b + ab/(a+b) d d'. Nothing cancels, however far the points lie from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.doors import eager

# Rounding that a sum of products may show: beyond this share of the trace a negative direction is real.
ROUNDING = 1e-10
EPS = torch.finfo(torch.float64).eps
FLAT = 4  # a column that varies by less than so many roundings of its size is constant


class Stats(NamedTuple):
    """float64; leading dimensions broadcast against each other."""

    total: Tensor  # (...): the total weight
    mean_key: Tensor  # (..., d)
    mean_value: Tensor  # (..., k)
    scatter: Tensor  # (..., d, d): sum w (key - mean)(key - mean)'
    cross: Tensor  # (..., d, k): sum w (key - mean)(value - mean)'
    noise: Tensor  # (..., d): the rounding in the diagonal of `scatter`, which what was removed leaves behind

    @staticmethod
    def of(key: Tensor, value: Tensor, weight: Tensor | None = None) -> Stats:
        """The sums of points (..., N, d), (..., N, k) with weights (..., N)."""
        key, value = key.double(), value.double()
        weight = None if weight is None else weight.double()
        count = key.new_full(key.shape[:-2], key.shape[-2]) if weight is None else weight.sum(-1)
        key, mean_key = centred(key, weight)
        value, mean_value = centred(value, weight)
        weighed = key if weight is None else weight.unsqueeze(-1) * key
        scatter, cross = weighed.mT @ key, weighed.mT @ value
        noise = EPS * _diagonal(scatter)
        return Stats(count, mean_key.squeeze(-2), mean_value.squeeze(-2), scatter, cross, noise)

    def merge(self, other: Stats) -> Stats:
        """The sums of both sets of points."""
        return self._joined(other, 1.0)

    def remove(self, other: Stats) -> tuple[Stats, Tensor]:
        """The sums of what is left when the points of `other` go, and where they cannot all have been there.

        They cannot where a count or a direction of the scatter would turn negative, by more than rounding.
        """
        left = self._joined(other, -1.0)._without_noise()
        size = torch.where(left.total.abs() < ROUNDING * self.total, 0.0, left.total)
        eye = torch.eye(left.scatter.shape[-1], dtype=torch.float64, device=left.scatter.device)
        slack = ROUNDING * _trace(self.scatter) + 100 * left.noise.sum(-1) + torch.finfo(torch.float64).tiny
        _, info = torch.linalg.cholesky_ex(left.scatter + slack[..., None, None] * eye)
        empty, foreign = size == 0, _trace(left.scatter).abs() > slack
        there = (~empty).to(size.dtype)  # where all points went, what is left is rounding
        row, matrix = there[..., None], there[..., None, None]
        means, sums = (left.mean_key * row, left.mean_value * row), (left.scatter * matrix, left.cross * matrix)
        return Stats(size, *means, *sums, left.noise * row), info.bool() | (size < 0) | (empty & foreign)

    def _joined(self, other: Stats, sign: float) -> Stats:
        a, b = self.total, sign * other.total
        count = a + b
        share = b / torch.where(count > 0, count, 1.0)
        share = torch.where(count > 0, share, 0.0)
        key, value = other.mean_key - self.mean_key, other.mean_value - self.mean_value
        lever = (a * share)[..., None, None]  # ab / (a + b)
        scatter = self.scatter + sign * other.scatter + lever * key.unsqueeze(-1) * key.unsqueeze(-2)
        # means far from 0 know their difference less well
        moved = (lever.squeeze(-1) * key * (self.mean_key.abs() + other.mean_key.abs())).abs().detach()
        cross = self.cross + sign * other.cross + lever * key.unsqueeze(-1) * value.unsqueeze(-2)
        noise = self.noise + other.noise + EPS * (_diagonal(scatter).abs() + 4 * moved)
        # a column that is constant has a mean that is rounded, and nothing else
        rounding = (a + b.abs())[..., None] * (FLAT * EPS * (self.mean_key.abs() + other.mean_key.abs())).square()
        flat = ((_diagonal(scatter).abs() <= rounding) & (noise <= 100 * rounding)).unsqueeze(-1)
        scatter, cross = _value_zero(scatter, flat | flat.mT), _value_zero(cross, flat)
        return Stats(
            count,
            self.mean_key + share[..., None] * key,
            self.mean_value + share[..., None] * value,
            (scatter + scatter.mT) / 2,
            cross,
            torch.where(flat.squeeze(-1), 0.0, noise),
        )

    def _without_noise(self) -> Stats:
        """A scatter that is not positive definite has directions of rounding alone, which are 0."""
        if not eager() or not bool(torch.linalg.cholesky_ex(self.scatter)[1].any()):
            return self
        finite = torch.isfinite(self.scatter).flatten(-2).all(-1)[..., None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, self.scatter.detach(), 0.0))
        real = torch.where(values.abs() > 4 * self.noise.sum(-1, keepdim=True), values, 0.0)
        clean = _value_zero(self.scatter, finite) + (vectors * real.unsqueeze(-2)) @ vectors.mT
        return self._replace(scatter=clean)

    def forget(self, gamma: Tensor) -> Stats:
        """Every point counts `gamma` times what it did."""
        wide = gamma[..., None, None]
        return self._replace(
            total=gamma * self.total,
            scatter=wide * self.scatter,
            cross=wide * self.cross,
            noise=gamma[..., None] * self.noise,
        )

    def around_means(self) -> tuple[Tensor, Tensor]:
        """K'WK and K'WV of the points minus their means."""
        return self.scatter, self.cross

    def raw(self) -> tuple[Tensor, Tensor]:
        """K'WK and K'WV of the points themselves."""
        lifted = (self.total[..., None] * self.mean_key).unsqueeze(-1)
        return (
            self.scatter + lifted * self.mean_key.unsqueeze(-2),
            self.cross + lifted * self.mean_value.unsqueeze(-2),
        )

    def within(self) -> Tensor:
        """The scatter around the class means, for one-hot values: scatter - sum_c n_c (m_c - mean)(m_c - mean)'."""
        size = (self.total[..., None] * self.mean_value).unsqueeze(-2)  # n_c
        # cross_c = n_c (m_c - mean)
        scaled = self.cross / torch.where(size > 0, size, 1.0)
        return self.scatter - scaled @ self.cross.mT


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
    return _value_zero(near, flat if there is None else flat & there)


def _value_zero(x: Tensor, where: Tensor) -> Tensor:
    """0 there, with the derivative of x."""
    return x - torch.where(where, x.detach(), 0.0)


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.detach().diagonal(0, -2, -1)


def _trace(matrix: Tensor) -> Tensor:
    return _diagonal(matrix).sum(-1)
