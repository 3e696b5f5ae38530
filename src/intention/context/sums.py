"""A context as sums: what is enough to fit, to add points, to take them away and to join contexts.

Sums are kept around the mean, in float64, and joined by the pairwise-mean formula: with a shift d = mean_b - mean_a
and counts a, b the joint scatter is S_a + S_b + ab/(a+b) d d'. Nothing cancels, however far the points lie from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.centring import EPS, FLAT, centred, value_zero
from intention.solve.torch_state import eager, gradient_free

# Rounding that a sum of products may show: beyond this share of the trace a negative direction is real.
ROUNDING = 1e-10


class Sums(NamedTuple):
    """float64; leading dimensions broadcast against each other."""

    total: Tensor  # (...): the total weight
    mean_key: Tensor  # (..., d)
    mean_value: Tensor  # (..., k)
    scatter: Tensor  # (..., d, d): sum w (key - mean)(key - mean)'
    cross: Tensor  # (..., d, k): sum w (key - mean)(value - mean)'
    noise: Tensor  # (..., d): the rounding in the diagonal of `scatter`, which what was removed leaves behind

    @staticmethod
    def of(key: Tensor, value: Tensor, weight: Tensor | None = None) -> Sums:
        """The sums of points (..., N, d), (..., N, k) with weights (..., N)."""
        key, value = key.double(), value.double()
        weight = None if weight is None else weight.double()
        count = key.new_full(key.shape[:-2], key.shape[-2]) if weight is None else weight.sum(-1)
        key, mean_key = centred(key, weight)
        value, mean_value = centred(value, weight)
        weighed = key if weight is None else weight.unsqueeze(-1) * key
        scatter, cross = weighed.mT @ key, weighed.mT @ value
        noise = EPS * _diagonal(scatter)
        return Sums(count, mean_key.squeeze(-2), mean_value.squeeze(-2), scatter, cross, noise)

    def merge(self, other: Sums) -> Sums:
        """The sums of both sets of points."""
        return self._joined(other, 1.0)

    def add(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Sums:
        """The sums with more points."""
        other = Sums.of(key, value, weight)
        both = self.merge(other)
        if weight is None or gradient_free(weight):
            return both
        # Points that all count 0 have no mean, but each has a slope: sums around the mean that is there have it
        #   n + b,   m + s / (n + b),   S + sum w (k - m)(k - m)' - s s' / (n + b)   with s = sum w (k - m)
        weight = weight.double().unsqueeze(-1)
        near, level = key.double() - self.mean_key.unsqueeze(-2), value.double() - self.mean_value.unsqueeze(-2)
        total = torch.where(both.total > 0, both.total, 1.0)[..., None]
        moved, raised = (weight * near).sum(-2) / total, (weight * level).sum(-2) / total
        lever = total.unsqueeze(-1) * moved.unsqueeze(-1)
        slopes = Sums(
            both.total,
            self.mean_key + moved,
            self.mean_value + raised,
            self.scatter + (weight * near).mT @ near - lever * moved.unsqueeze(-2),
            self.cross + (weight * near).mT @ level - lever * raised.unsqueeze(-2),
            both.noise,
        )
        none = (other.total == 0) & (self.total > 0)
        pairs = zip(slopes, both, (0, 1, 1, 2, 2, 1), strict=True)
        return Sums(*(torch.where(none.reshape(none.shape + (1,) * own), x, y) for x, y, own in pairs))

    def remove(self, other: Sums) -> tuple[Sums, Tensor]:
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
        return Sums(size, *means, *sums, left.noise * row), info.bool() | (size < 0) | (empty & foreign)

    def _joined(self, other: Sums, sign: float) -> Sums:
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
        scatter, cross = value_zero(scatter, flat | flat.mT), value_zero(cross, flat)
        return Sums(
            count,
            self.mean_key + share[..., None] * key,
            self.mean_value + share[..., None] * value,
            (scatter + scatter.mT) / 2,
            cross,
            torch.where(flat.squeeze(-1), 0.0, noise),
        )

    def _without_noise(self) -> Sums:
        """A scatter that is not positive definite has directions of rounding alone, which are 0."""
        if not eager() or not bool(torch.linalg.cholesky_ex(self.scatter)[1].any()):
            return self
        finite = torch.isfinite(self.scatter).flatten(-2).all(-1)[..., None, None]
        values, vectors = torch.linalg.eigh(torch.where(finite, self.scatter.detach(), 0.0))
        real = torch.where(values.abs() > 4 * self.noise.sum(-1, keepdim=True), values, 0.0)
        clean = value_zero(self.scatter, finite) + (vectors * real.unsqueeze(-2)) @ vectors.mT
        return self._replace(scatter=clean)

    def forget(self, gamma: Tensor) -> Sums:
        """Every point counts `gamma` times what it did."""
        wide = gamma[..., None, None]
        return self._replace(
            total=gamma * self.total,
            scatter=wide * self.scatter,
            cross=wide * self.cross,
            noise=gamma[..., None] * self.noise,
        )

    def within(self) -> Tensor:
        """The scatter around the class means, for one-hot values: scatter - sum_c n_c (m_c - mean)(m_c - mean)'."""
        size = (self.total[..., None] * self.mean_value).unsqueeze(-2)  # n_c
        # cross_c = n_c (m_c - mean)
        scaled = self.cross / torch.where(size > 0, size, 1.0)
        return self.scatter - scaled @ self.cross.mT


def _diagonal(matrix: Tensor) -> Tensor:
    return matrix.detach().diagonal(0, -2, -1)


def _trace(matrix: Tensor) -> Tensor:
    return _diagonal(matrix).sum(-1)
