"""Sets of points (key, value, weight): joined, and told apart again."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import checks

PointSet = tuple[Tensor, Tensor, Tensor | None]


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
    lead = checks.leading(
        key=points[0].shape[:-2], value=points[1].shape[:-2], gone=gone[0].shape[:-2], gone_value=gone[1].shape[:-2]
    )
    key, value = (x.expand(*lead, *x.shape[-2:]) for x in points[:2])
    weight = None if points[2] is None else points[2].expand(*lead, points[2].shape[-1])
    free = torch.ones(key.shape[:-1], dtype=torch.bool, device=key.device)
    taken = []
    for j in range(gone[0].shape[-2]):
        same = (key == gone[0][..., j : j + 1, :]).all(-1) & (value == gone[1][..., j : j + 1, :]).all(-1) & free
        if gone[2] is not None:
            mass = torch.ones_like(key[..., 0]) if weight is None else weight
            same = same & (mass == gone[2][..., j : j + 1])
        if not bool(same.any(-1).all()):
            raise ValueError(
                f"point {j} of those to remove is not in the context (in every batch element, with equal key and value"
                f"{' and weight' if gone[2] is not None else ''}); remove points as they were added, in their dtype"
            )
        at = same.to(torch.uint8).argmax(-1, keepdim=True)
        free = free.scatter(-1, at, False)
        taken.append(at)
    left = free.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., : key.shape[-2] - len(taken)]
    out = torch.cat(taken, -1) if taken else left[..., :0]
    return _take((key, value, weight), left), _take((key, value, weight), out)


def _take(points: PointSet, at: Tensor) -> PointSet:
    def rows(x: Tensor) -> Tensor:
        return x.gather(-2, at.unsqueeze(-1).expand(*at.shape, x.shape[-1]))

    return rows(points[0]), rows(points[1]), None if points[2] is None else points[2].gather(-1, at)


def _mass(points: PointSet) -> Tensor:
    return torch.ones_like(points[0][..., 0]) if points[2] is None else points[2]


def _concatenate(a: Tensor, b: Tensor, trailing: int) -> Tensor:
    lead = checks.leading(context=a.shape[: a.dim() - trailing], points=b.shape[: b.dim() - trailing])
    dtype = torch.promote_types(a.dtype, b.dtype)
    rows = [x.to(dtype).expand(*lead, *x.shape[x.dim() - trailing :]) for x in (a, b)]
    return torch.cat(rows, -trailing)
