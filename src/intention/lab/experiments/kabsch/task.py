"""Generalised Kabsch: points and their rotated, rescaled, translated images with noise; where do other points go?"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.lab.tasks import Episode

__all__ = ["Similarity", "rotations", "sample", "similarities"]


class Similarity(NamedTuple):
    """Maps x -> a R x + t, one per task; points are rows."""

    scale: Tensor  # (B, 1, 1)
    rotation: Tensor  # (B, d, d)
    translation: Tensor  # (B, 1, d)

    def __call__(self, points: Tensor) -> Tensor:
        # t + x (a R)'
        return torch.baddbmm(self.translation, points, (self.scale * self.rotation).mT)


# The entries of a rotation are linear in a unit number a + bi (2-D: [[a, -b], [b, a]]), and in the products of a unit
# quaternion w + xi + yj + zk (3-D). Each row holds what an entry is made of.
COMPLEX = torch.tensor([[1.0, 0.0], [0.0, -1.0], [0.0, 1.0], [1.0, 0.0]])
PRODUCTS = {name: place for place, name in enumerate(a + b for a in "wxyz" for b in "wxyz")}
ENTRIES = (
    *("ww xx -yy -zz", "xy xy -wz -wz", "xz xz wy wy"),
    *("xy xy wz wz", "ww -xx yy -zz", "yz yz -wx -wx"),
    *("xz xz -wy -wy", "yz yz wx wx", "ww -xx -yy zz"),
)
QUATERNION = torch.zeros(9, 16)
for _row, _entry in enumerate(ENTRIES):
    for _product in _entry.split():
        QUATERNION[_row, PRODUCTS[_product[-2:]]] += -1.0 if _product[0] == "-" else 1.0


UNITS = {2: 2, 3: 4}  # numbers from which a rotation is made


def rotations(batch: int, dims: int, generator: torch.Generator) -> Tensor:
    """Uniform over all rotations (B, d, d): from Gaussian complex numbers in 2-D, Gaussian quaternions in 3-D.

    Few large operations: sampling must cost next to nothing beside a step of training, which a batched QR does not.

    >>> turn = rotations(7, 3, torch.Generator().manual_seed(0))
    >>> torch.allclose(turn @ turn.mT, torch.eye(3), atol=1e-5), torch.allclose(turn.det(), torch.ones(7))
    (True, True)
    """
    return _rotations_of(torch.randn(batch, UNITS[dims], generator=generator))


def _rotations_of(number: Tensor) -> Tensor:
    """(B, 2) -> (B, 2, 2) and (B, 4) -> (B, 3, 3)"""
    number = number / torch.linalg.vector_norm(number, dim=-1, keepdim=True)
    if number.shape[-1] == 2:
        return (number @ COMPLEX.mT).view(-1, 2, 2)
    products = (number.unsqueeze(-1) * number.unsqueeze(-2)).view(-1, 16)
    return (products @ QUATERNION.mT).view(-1, 3, 3)


def similarities(
    batch: int, generator: torch.Generator, *, dims: int = 2, smallest: float = 0.5, largest: float = 2.0
) -> Similarity:
    """Rotation uniform, scale U(smallest, largest), translation N(0, I)."""
    scale = torch.empty(batch, 1, 1).uniform_(smallest, largest, generator=generator)
    drawn = torch.randn(batch, UNITS[dims] + dims, generator=generator)
    number, translation = drawn.split([UNITS[dims], dims], -1)
    return Similarity(scale, _rotations_of(number), translation.unsqueeze(1))


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
    drawn = torch.randn(batch, 2 * points + queries, dims, generator=generator)
    key, query, blur = drawn.split([points, queries, points], 1)
    image = mapping(drawn[:, : points + queries])
    value = torch.add(image[:, :points], blur, alpha=noise)
    return Episode(query, key, value, image[:, points:])
