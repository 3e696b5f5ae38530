"""Sums of points around a place near their mean, made chunk by chunk, and the joint sums of several sets of points."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.context.points import Sums
from intention.solve.centring import EPS

__all__ = ["Moments", "joined", "moments_of"]

CHUNK = 1 << 20  # numbers of keys or values that are made float64 at a time


class Moments(NamedTuple):
    """Sums of points around constants c (of keys) and e (of values), which are in the leading dimensions of the sums.

    The sums around any other place follow from these for every c and e, so both are detached and derivatives of any
    order are still exact, also where all weights are 0.
    """

    place_key: Tensor  # c (..., d)
    place_value: Tensor  # e (..., k)
    total: Tensor  # (...): sum w
    key: Tensor  # (..., d): sum w (k - c), 0 but for rounding and its derivatives
    value: Tensor  # (..., k): sum w (v - e)
    scatter: Tensor  # (..., d, d): sum w (k - c)(k - c)'
    cross: Tensor  # (..., d, k): sum w (k - c)(v - e)'


def moments_of(key: Tensor, value: Tensor, weight: Tensor | None) -> Moments:
    """The sums of a rank's points, made chunk by chunk."""
    own = () if weight is None else weight.shape[:-1]
    lead = checks.leading(key=key.shape[:-2], weight=own)
    whole = checks.leading(key=lead, value=value.shape[:-2])
    d, k = key.shape[-1], value.shape[-1]
    rows = max(4 * d, CHUNK // max(math.prod(whole) * max(d, k), 1))  # fewer than d, and adding costs more than K'K
    splits = key.split(rows, -2), value.split(rows, -2)
    weights = [None] * len(splits[0]) if weight is None else weight.split(rows, -1)
    chunks = list(zip(*splits, weights, strict=True))
    with torch.no_grad():
        total, sum_key, sum_value = _added(_sums(*chunk, 0.0, 0.0, products=False) for chunk in chunks)
        size = torch.where(total > 0, total, 1.0)[..., None]
        c, e = (sum_key / size).expand(*lead, d), (sum_value / size).expand(*whole, k)
    around = c.unsqueeze(-2), e.unsqueeze(-2)
    total, sum_key, sum_value, scatter, cross = _added(_sums(*chunk, *around, products=True) for chunk in chunks)
    sums = total.expand(lead), sum_key.expand(*lead, d), sum_value.expand(*whole, k)
    return Moments(c, e, *sums, scatter.expand(*lead, d, d), cross.expand(*whole, d, k))


def _sums(
    key: Tensor, value: Tensor, weight: Tensor | None, c: Tensor | float, e: Tensor | float, products: bool
) -> list[Tensor]:
    """In float64: sum w, sum w (k - c), sum w (v - e); with `products` sum w (k - c)(k - c)' and w (k - c)(v - e)'."""
    key, value = key.double() - c, value.double() - e
    total, weighed, values = key.new_full((), key.shape[-2]), key, value
    if weight is not None:
        weight = weight.double()
        total, weighed, values = weight.sum(-1), weight[..., None] * key, weight[..., None] * value
    sums = [total, weighed.sum(-2), values.sum(-2)]
    return [*sums, weighed.mT @ key, weighed.mT @ value] if products else sums


def _added(rows: Iterable[list[Tensor]]) -> list[Tensor]:
    return functools.reduce(lambda x, y: [a + b for a, b in zip(x, y, strict=True)], rows)


def joined(own: Moments, reduce: Callable[[Tensor], Tensor]) -> Sums:
    """The sums of all ranks around the mean of all points, from those of each around places of their own."""
    wide = own.total[..., None]
    total, sum_key, sum_value = _reduced(
        reduce, own.total, wide * own.place_key + own.key, wide * own.place_value + own.value
    )
    size = torch.where(total > 0, total, 1.0)[..., None]
    mean_key, mean_value = sum_key / size, sum_value / size
    a, b = (mean_key - own.place_key).unsqueeze(-1), (mean_value - own.place_value).unsqueeze(-2)
    s, t, n = own.key.unsqueeze(-1), own.value.unsqueeze(-2), wide.unsqueeze(-1)
    # sum w (k - c - a)(k - c - a)' = T - s a' - a s' + n a a': s is about 0, so nothing cancels
    scatter = own.scatter - s * a.mT - a * s.mT + n * a * a.mT
    cross = own.cross - s * b - a * t + n * a * b
    # as in Sums.merge: means far from 0 know their difference less well
    moved = wide * a.squeeze(-1).abs() * (mean_key.abs() + own.place_key.abs())
    noise = EPS * (own.scatter.diagonal(0, -2, -1) + 4 * moved).detach()
    upper = torch.ones_like(scatter, dtype=torch.bool).triu()
    half, cross, noise = _reduced(reduce, scatter.masked_select(upper), cross, noise)
    half = half.new_zeros(scatter.shape).masked_scatter(upper, half)
    scatter = half + half.triu(1).mT
    noise = noise.detach() + EPS * scatter.detach().diagonal(0, -2, -1)
    return Sums(total, mean_key, mean_value, scatter, cross, noise)


def _reduced(reduce: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    """One all-reduce of several tensors."""
    packed = reduce(torch.cat([x.flatten() for x in tensors]))
    parts = packed.split([x.numel() for x in tensors])
    return [part.reshape(x.shape) for part, x in zip(parts, tensors, strict=True)]
