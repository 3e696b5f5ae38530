"""Where is the target of these rewards? Closed forms: batches in float64, never trained."""

from __future__ import annotations

import torch
from torch import Tensor

from intention.lab.experiments.policy.task import Reward, squared_distance_of
from intention.lab.models.references import RIDGE_ALPHA, ridge
from intention.lab.tasks import Episode

__all__ = ["intention_exact", "ridge_raw", "trilateration"]


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


def ridge_raw(episode: Episode, reward: Reward = "squared", width: float = 1.0) -> Tensor:
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
    at = ridge(torch.eye(d + 1, d, dtype=key.dtype), key, value, alpha, intercept=True)
    return at[..., :d, :] - at[..., d:, :]


def _observed(episode: Episode, reward: Reward, width: float) -> tuple[Tensor, Tensor]:
    """Places (B, N, 2) and squared distances (B, N, 1) in float64."""
    seen, observed = episode.key[..., :2].double(), episode.key[..., 2:].double()
    return seen, squared_distance_of(observed, reward, width)
