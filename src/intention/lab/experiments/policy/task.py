"""Policy distillation: find the target from 5 observed places and their rewards."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from intention.lab.tasks import Episode

__all__ = ["REWARDS", "SPREAD", "Reward", "sample", "squared_distance_of"]

Reward = Literal["squared", "gaussian"]
REWARDS: tuple[Reward, ...] = ("squared", "gaussian")
SPREAD = 0.5  # x, y ~ N(0, 1/4): a variance


def reward_of(squared: Tensor, reward: Reward, width: float = 1.0) -> Tensor:
    """What is observed at a squared distance from the target: itself, or a bell of the given width around the target.

    >>> reward_of(torch.tensor([0.0, 2.0]), "gaussian")
    tensor([1.0000, 0.3679])
    """
    # squared: ||x - t||^2      gaussian: exp(-||x - t||^2 / (2 width^2))
    return squared if reward == "squared" else torch.exp(squared / (-2 * width**2))


def squared_distance_of(observed: Tensor, reward: Reward, width: float = 1.0) -> Tensor:
    """The inverse of `reward_of`; a reward that underflowed to 0 counts as the smallest number there is."""
    tiny = torch.finfo(observed.dtype).tiny
    return observed if reward == "squared" else observed.clamp_min(tiny).log() * (-2 * width**2)


def sample(
    batch: int, generator: torch.Generator, *, points: int = 5, reward: Reward = "squared", width: float = 1.0
) -> Episode:
    """Tasks with K = V = Q = O: rows (x, y, reward). The target is the place t ~ N(0, I), (B, 1, 2).

    >>> episode = sample(7, torch.Generator().manual_seed(0))
    >>> episode.key.shape, episode.target.shape
    (torch.Size([7, 5, 3]), torch.Size([7, 1, 2]))
    """
    place = torch.randn(batch, points + 1, 2, generator=generator)
    target, seen = place[:, :1], place[:, 1:] * SPREAD
    squared = (seen - target).square().sum(-1, keepdim=True)  # d_i = ||x_i - t||^2
    observed = torch.cat([seen, reward_of(squared, reward, width)], -1)  # (B, N, 3)
    return Episode(observed, observed, observed, target)
