"""Linear problems V = K w on a plane."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor

from intention.lab.tasks import Problem

__all__ = ["PLANE", "REPAIRS", "SQUARES", "Repair", "plane", "plane_root", "square"]

Repair = Literal["absolute", "nearest"]
REPAIRS: tuple[Repair, ...] = ("absolute", "nearest")

# As printed; its eigenvalues are -0.062 and 1.762, so no Gaussian has it.
PLANE = ((0.7, 0.9), (0.9, 1.0))
SQUARES = {"inside": 1.0, "outside": 25.0}  # queries: U(-r, r)^2


def plane_root(repair: Repair) -> Tensor:
    """The symmetric root of the printed covariance once it is repaired: |eigenvalues|, or negative ones set to 0.

    The first is what numpy's multivariate_normal draws from the printed matrix (its root comes from an SVD), the second
    is the nearest positive semidefinite matrix. That one is singular: all points lie on a line.
    """
    values, vectors = torch.linalg.eigh(torch.tensor(PLANE, dtype=torch.float64))
    values = values.abs() if repair == "absolute" else values.clamp_min(0)
    return vectors * values.sqrt() @ vectors.mT


def plane(batch: int, n: int, repair: Repair, generator: torch.Generator) -> Problem:
    """Points of a skewed Gaussian on the plane with w ~ N(0, 10 I), in float64.

    Both repairs of one seed have the same w and the same normal numbers.

    >>> plane(2, 50, "absolute", torch.Generator().manual_seed(0)).key.shape
    torch.Size([2, 50, 2])
    """
    w = math.sqrt(10) * torch.randn(batch, 2, 1, generator=generator, dtype=torch.float64)
    key = torch.randn(batch, n, 2, generator=generator, dtype=torch.float64) @ plane_root(repair)
    return Problem(key, key @ w, w)


def square(batch: int, m: int, reach: float, generator: torch.Generator) -> Tensor:
    """Queries of the plane: U(-reach, reach)^2, (B, M, 2) in float64."""
    return reach * (2 * torch.rand(batch, m, 2, generator=generator, dtype=torch.float64) - 1)
