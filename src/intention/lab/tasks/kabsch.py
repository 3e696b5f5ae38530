"""Generalised Kabsch: points and their rotated, rescaled, translated images with noise; where do other points go?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.lab.tasks import Episode


class Similarity(NamedTuple):
    """Maps x -> a R x + t, one per task; points are rows."""

    scale: Tensor  # (B, 1, 1)
    rotation: Tensor  # (B, d, d)
    translation: Tensor  # (B, 1, d)

    def __call__(self, points: Tensor) -> Tensor:
        return self.scale * points @ self.rotation.mT + self.translation


def rotations(batch: int, dims: int, generator: torch.Generator) -> Tensor:
    """Uniform over all rotations (B, d, d): by the angle in 2-D, by Gram-Schmidt of Gaussian vectors in 3-D.

    >>> turn = rotations(7, 3, torch.Generator().manual_seed(0))
    >>> torch.allclose(turn @ turn.mT, torch.eye(3), atol=1e-5), torch.allclose(turn.det(), torch.ones(7))
    (True, True)
    """
    if dims == 2:
        angle = 2 * torch.pi * torch.rand(batch, generator=generator)
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))
    # QR of a Gaussian matrix, written out for 3 columns: batched LAPACK calls cost more than a step of training.
    # The third column is the cross product, which makes det = +1.
    first, second = torch.randn(2, batch, 3, generator=generator)
    first = torch.nn.functional.normalize(first, dim=-1)
    second = torch.nn.functional.normalize(second - (second * first).sum(-1, keepdim=True) * first, dim=-1)
    return torch.stack([first, second, torch.linalg.cross(first, second)], -1)


def similarities(
    batch: int, generator: torch.Generator, *, dims: int = 2, smallest: float = 0.5, largest: float = 2.0
) -> Similarity:
    """Rotation uniform, scale U(smallest, largest), translation N(0, I)."""
    scale = smallest + (largest - smallest) * torch.rand(batch, 1, 1, generator=generator)
    rotation = rotations(batch, dims, generator)
    return Similarity(scale, rotation, torch.randn(batch, 1, dims, generator=generator))


def sample(
    batch: int,
    generator: torch.Generator,
    *,
    points: int = 5,
    queries: int = 5,
    dims: int = 2,
    noise: float = 0.05,
    smallest: float = 0.5,
    largest: float = 2.0,
) -> Episode:
    """Tasks v = a R k + t + noise, with keys and queries ~ N(0, I). The target is without noise.

    >>> episode = sample(7, torch.Generator().manual_seed(0), queries=11, dims=3)
    >>> episode.query.shape, episode.value.shape
    (torch.Size([7, 11, 3]), torch.Size([7, 5, 3]))
    """
    mapping = similarities(batch, generator, dims=dims, smallest=smallest, largest=largest)
    place = torch.randn(batch, points + queries, dims, generator=generator)
    image = mapping(place)  # (B, N + M, d)
    blur = noise * torch.randn(batch, points, dims, generator=generator)
    return Episode(place[:, points:], place[:, :points], image[:, :points] + blur, image[:, points:])
