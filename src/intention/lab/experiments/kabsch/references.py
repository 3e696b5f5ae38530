"""Where do the queries go? Closed forms of the generalised Kabsch task: batches in float64, never trained."""

from __future__ import annotations

import torch
from torch import Tensor

from intention.lab.models.references import RIDGE_ALPHA, ridge
from intention.lab.tasks import Episode

__all__ = ["affine", "ridge_raw", "umeyama"]


def affine(episode: Episode) -> Tensor:
    """Affine least squares: Intention with an intercept and alpha = 0, on the raw points."""
    query, key, value, _ = (x.double() for x in episode)
    return ridge(query, key, value, 0.0, intercept=True).to(episode.target.dtype)


def ridge_raw(episode: Episode) -> Tensor:
    """Intention on the raw points without intercept: it cannot translate."""
    query, key, value, _ = (x.double() for x in episode)
    return ridge(query, key, value, RIDGE_ALPHA, intercept=False).to(episode.target.dtype)


def umeyama(episode: Episode) -> Tensor:
    """The best rotation, scale and translation (Umeyama 1991), applied to the queries; any number of dimensions.

    With centred points and U S W' = V'K (SVD):  R = U D W' with D = diag(1, ..., det(U W')),  a = tr(S D) / |K|^2.
    """
    query, key, value, _ = (x.double() for x in episode)
    key_mean, value_mean = key.mean(-2, keepdim=True), value.mean(-2, keepdim=True)
    key, value = key - key_mean, value - value_mean
    left, spread, right = torch.linalg.svd(value.mT @ key)  # (B, d, d), (B, d), (B, d, d)
    proper = torch.ones_like(spread)
    proper[..., -1] = torch.det(left @ right).sign()  # a reflection is not a rotation
    rotation = left * proper.unsqueeze(-2) @ right
    scale = (spread * proper).sum(-1) / key.square().sum((-2, -1)).clamp_min(torch.finfo(key.dtype).tiny)
    moved = scale[..., None, None] * (query - key_mean) @ rotation.mT + value_mean
    return moved.to(episode.target.dtype)
