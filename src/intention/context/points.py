"""The points of a context, as they came and as sums: joined, and told apart again.

Sums are enough to fit. They are kept around the mean, in float64, and joined by the pairwise-mean formula: with a shift
d = mean_b - mean_a and counts a, b the joint scatter is S_a + S_b + ab/(a+b) d d'. Nothing cancels, however far the
points lie from 0.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.centring import EPS, FLAT, centred, value_zero
from intention.solve.operator import flat
from intention.solve.torch_state import eager, gradient_free

__all__ = ["PointSet", "Sums", "join", "split"]

PointSet = tuple[Tensor, Tensor, Tensor | None]  # key, value, weight
CHUNK = 1 << 26  # pairs of points that are compared at once
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
        left = self.merge(other, -1.0)._without_noise()
        size = torch.where(left.total.abs() < ROUNDING * self.total, 0.0, left.total)
        eye = torch.eye(left.scatter.shape[-1], dtype=torch.float64, device=left.scatter.device)
        slack = ROUNDING * _diagonal(self.scatter).sum(-1) + 100 * left.noise.sum(-1) + torch.finfo(torch.float64).tiny
        _, info = torch.linalg.cholesky_ex(left.scatter + slack[..., None, None] * eye)
        empty, foreign = size == 0, _diagonal(left.scatter).sum(-1).abs() > slack
        there = (~empty).to(size.dtype)  # where all points went, what is left is rounding
        row, matrix = there[..., None], there[..., None, None]
        means, sums = (left.mean_key * row, left.mean_value * row), (left.scatter * matrix, left.cross * matrix)
        return Sums(size, *means, *sums, left.noise * row), info.bool() | (size < 0) | (empty & foreign)

    def merge(self, other: Sums, sign: float = 1.0) -> Sums:
        """The sums of both sets of points; with -1 of those that are left without the other ones."""
        a, b = self.total, sign * other.total
        count = a + b
        share = b / torch.where(count > 0, count, 1.0)
        share = torch.where(count > 0, share, 0.0)
        key, value = other.mean_key - self.mean_key, other.mean_value - self.mean_value
        lever = (a * share)[..., None]  # ab / (a + b)
        # means far from 0 know their difference less well
        reach = self.mean_key.abs() + other.mean_key.abs()
        moved = (lever * key * reach).abs().detach()
        spread = _diagonal(self.scatter) + sign * _diagonal(other.scatter) + (lever * key.square()).detach()
        noise = self.noise + other.noise + EPS * (spread.abs() + 4 * moved)
        # a column that is constant has a mean that is rounded, and nothing else
        rounding = (a + b.abs())[..., None] * (FLAT * EPS * reach).square()
        flat = (spread.abs() <= rounding) & (noise <= 100 * rounding)
        step = value_zero(key, flat)  # of numbers, not of d x d of them: each pass over those counts
        weighed = (lever * step).unsqueeze(-1)
        scatter = torch.add(self.scatter, other.scatter, alpha=sign)
        scatter = torch.addcmul(scatter, weighed, step.unsqueeze(-2))
        return Sums(
            count,
            self.mean_key + share[..., None] * key,
            self.mean_value + share[..., None] * value,
            (scatter + scatter.mT) / 2,
            self.cross + sign * other.cross + weighed * value.unsqueeze(-2),
            torch.where(flat, 0.0, noise),
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


def join(old: PointSet, new: PointSet) -> PointSet:
    """Both sets, one after the other along N; leading dimensions broadcast."""
    key, value = _concatenate(old[0], new[0], 2), _concatenate(old[1], new[1], 2)
    if old[2] is None and new[2] is None:
        return key, value, None
    return key, value, _concatenate(_mass(old), _mass(new), 1)


def split(points: PointSet, gone: PointSet) -> tuple[PointSet, PointSet]:
    """(what is left of `points`, the members that equal `gone`), or a ValueError naming a point that is not there.

    A point of `gone` matches one member whose key and value are equal to it (and its weight, where `gone` has any).
    """
    shapes = {
        "key": points[0].shape[:-2],
        "value": points[1].shape[:-2],
        "weight": () if points[2] is None else points[2].shape[:-1],
        "gone": gone[0].shape[:-2],
        "gone_value": gone[1].shape[:-2],
        "gone_weight": () if gone[2] is None else gone[2].shape[:-1],
    }
    lead = checks.leading(**shapes)
    old, new = _rows(points, lead, gone[2] is not None), _rows(gone, lead, gone[2] is not None)
    n, m = points[0].shape[-2], gone[0].shape[-2]
    free = torch.ones(old[0].shape[0], n, dtype=torch.bool, device=points[0].device)
    taken = []
    step = max(1, CHUNK // max(1, free.numel()))
    for start in range(0, m, step):
        same = _equal_rows(old, [x[:, start : start + step] for x in new]) & free.unsqueeze(1)
        if bool((same.sum(-1) == 1).all() & (same.sum(1) <= 1).all()):  # each its own: no need to go one by one
            at = same.to(torch.uint8).argmax(-1)
            free = free.scatter(-1, at, False)
            taken.append(at)
            continue
        for j in range(same.shape[1]):
            found = same[:, j] & free
            if not bool(found.any(-1).all()):
                raise ValueError(
                    f"point {start + j} of those to remove is not in the context (in every batch element, with equal "
                    f"key and value{' and weight' if gone[2] is not None else ''}); remove points as they were added"
                )
            at = found.to(torch.uint8).argmax(-1, keepdim=True)
            free = free.scatter(-1, at, False)
            taken.append(at)
    left = free.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[:, : n - m].reshape(*lead, n - m)
    out = torch.cat(taken, -1).reshape(*lead, m) if taken else left[..., :0]
    key, value, weight = points
    weight = None if weight is None else weight.expand(*lead, n)
    whole = key.expand(*lead, *key.shape[-2:]), value.expand(*lead, *value.shape[-2:]), weight
    return _take(whole, left), _take(whole, out)


def _rows(points: PointSet, lead: tuple[int, ...], with_weight: bool) -> list[Tensor]:
    """Keys, values and (as a column, 1 where there are none) weights, each (B, N, columns)."""
    key, value, _ = points
    parts = [key, value] + ([_mass(points).unsqueeze(-1)] if with_weight else [])
    return [flat(x.detach(), lead, *x.shape[-2:]) for x in parts]


def _equal_rows(old: list[Tensor], new: list[Tensor]) -> Tensor:
    """(B, m, N): which rows of `old` equal which of `new`, in all parts.

    Column by column until few pairs are left, and those as a whole: for most data that is one column.
    """
    old = [x.to(y.dtype) if x.dtype != y.dtype and i == 2 else x for i, (x, y) in enumerate(zip(old, new, strict=True))]
    columns = [(x[..., i], y[..., i]) for x, y in zip(old, new, strict=True) for i in range(x.shape[-1])]
    same = torch.ones(old[0].shape[0], new[0].shape[1], old[0].shape[1], dtype=torch.bool, device=old[0].device)
    for mine, theirs in columns:
        same &= mine.unsqueeze(-2) == theirs.unsqueeze(-1)
        if int(same.sum()) <= 4 * same.shape[0] * same.shape[1]:
            break
    batch, row, at = same.nonzero(as_tuple=True)
    equal = [(x[batch, at] == y[batch, row]).all(-1) for x, y in zip(old, new, strict=True)]
    same[batch, row, at] = torch.stack(equal).all(0)
    return same


def _take(points: PointSet, at: Tensor) -> PointSet:
    def rows(x: Tensor) -> Tensor:
        return x.gather(-2, at.unsqueeze(-1).expand(*at.shape, x.shape[-1]))

    return rows(points[0]), rows(points[1]), None if points[2] is None else points[2].gather(-1, at)


def _mass(points: PointSet) -> Tensor:
    return torch.ones_like(points[0][..., 0]) if points[2] is None else points[2]


def _concatenate(a: Tensor, b: Tensor, trailing: int) -> Tensor:
    mine, theirs = a.shape[: a.dim() - trailing], b.shape[: b.dim() - trailing]
    if mine != theirs:
        lead = checks.leading(context=mine, points=theirs)
        a, b = (x.expand(*lead, *x.shape[x.dim() - trailing :]) for x in (a, b))
    dtype = torch.promote_types(a.dtype, b.dtype)
    return torch.cat([a.to(dtype), b.to(dtype)], -trailing)
