"""Sets of points (key, value, weight): joined, and told apart again."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intention import _checks as checks

PointSet = tuple[Tensor, Tensor, Tensor | None]
CHUNK = 1 << 26  # pairs of points that are compared at once


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
    whole = key.expand(*lead, *key.shape[-2:]), value.expand(*lead, *value.shape[-2:]), _spread(weight, lead)
    return _take(whole, left), _take(whole, out)


def _rows(points: PointSet, lead: tuple[int, ...], with_weight: bool) -> list[Tensor]:
    """Keys, values and (as a column, 1 where there are none) weights, each (B, N, columns)."""
    key, value, _ = points
    parts = [key, value] + ([_mass(points).unsqueeze(-1)] if with_weight else [])
    return [x.detach().expand(*lead, *x.shape[-2:]).reshape(math.prod(lead), *x.shape[-2:]) for x in parts]


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


def _spread(weight: Tensor | None, lead: tuple[int, ...]) -> Tensor | None:
    return None if weight is None else weight.expand(*lead, weight.shape[-1])


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
