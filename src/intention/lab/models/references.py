"""Closed forms beside the trained models: what the tasks of 5 points are worth to one who knows the mathematics.

All of them take and return batches, work in float64 and are never trained.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention import functional as F
from intention.lab.tasks import Episode
from intention.lab.tasks.policy import Reward, squared_distance_of

RIDGE_ALPHA = 0.1  # of "ridge on raw features"

LABELS = {
    "zero": "predicting the mean",
    "ridge_raw": "ridge on raw features",
    "trilateration": "trilateration",
    "intention_exact": "Intention with intercept, untrained",
    "affine": "affine least squares",
    "umeyama": "Umeyama",
    "ridge": "exact ridge",
    "counted_pairs": "counted pairs of characters",
}


def zero(episode: Episode) -> Tensor:
    """The mean of the prior: the origin, in both tasks."""
    return torch.zeros_like(episode.target)


# ---- policy distillation: where is the target of these rewards?


def trilateration(episode: Episode, reward: Reward = "squared", width: float = 1.0) -> Tensor:
    """d_i - d_0 = |x_i|^2 - |x_0|^2 - 2 (x_i - x_0)'t: one equation from the others, then least squares by QR."""
    seen, squared = _observed(episode, reward, width)
    left = 2 * (seen[..., 1:, :] - seen[..., :1, :])  # (B, N - 1, 2)
    gap = seen.square().sum(-1, keepdim=True) - squared  # |x_i|^2 - d_i
    return torch.linalg.lstsq(left, gap[..., 1:, :] - gap[..., :1, :]).solution.mT.to(episode.target.dtype)


def intention_exact(episode: Episode, reward: Reward = "squared", width: float = 1.0) -> Tensor:
    """Intention, untrained: d_i - |x_i|^2 = -2 x_i't + |t|^2 is linear in x_i with an intercept, so w = -2 t."""
    seen, squared = _observed(episode, reward, width)
    w = slope(seen, squared - seen.square().sum(-1, keepdim=True), alpha=0.0)
    return (w / -2).mT.to(episode.target.dtype)


def policy_ridge(episode: Episode, reward: Reward = "squared", width: float = 1.0) -> Tensor:
    """Ridge from the place to the reward as observed, its slope read as the gradient at the origin.

    squared: grad d(0) = -2 t.      gaussian: grad log r(0) = t / width^2, so t = width^2 grad r / r.
    """
    seen, observed = episode.key[..., :2].double(), episode.key[..., 2:].double()
    w = slope(seen, observed, alpha=RIDGE_ALPHA)  # (B, 2, 1)
    if reward == "squared":
        return (w / -2).mT.to(episode.target.dtype)
    return (width**2 * w / observed.mean(-2, keepdim=True)).mT.to(episode.target.dtype)


def slope(key: Tensor, value: Tensor, *, alpha: float) -> Tensor:
    """w of a fit with intercept: the prediction at the unit vectors less that at the origin, (B, d, k)."""
    d = key.shape[-1]
    at = _ridge(torch.eye(d + 1, d, dtype=key.dtype), key, value, alpha, intercept=True)
    return at[..., :d, :] - at[..., d:, :]


def _ridge(query: Tensor, key: Tensor, value: Tensor, alpha: float, *, intercept: bool) -> Tensor:
    return F.intention(query, key, value, alpha=alpha, intercept=intercept)  # type: ignore[return-value]


def _observed(episode: Episode, reward: Reward, width: float) -> tuple[Tensor, Tensor]:
    """Places (B, N, 2) and squared distances (B, N, 1) in float64."""
    seen, observed = episode.key[..., :2].double(), episode.key[..., 2:].double()
    return seen, squared_distance_of(observed, reward, width)


# ---- generalised Kabsch: where do the queries go?


def affine(episode: Episode) -> Tensor:
    """Affine least squares: Intention with an intercept and alpha = 0, on the raw points."""
    query, key, value, _ = (x.double() for x in episode)
    return _ridge(query, key, value, 0.0, intercept=True).to(episode.target.dtype)


def kabsch_ridge(episode: Episode) -> Tensor:
    """Intention on the raw points without intercept: it cannot translate."""
    query, key, value, _ = (x.double() for x in episode)
    return _ridge(query, key, value, RIDGE_ALPHA, intercept=False).to(episode.target.dtype)


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
