"""Linear problems with a given condition number."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intention.lab.tasks import Problem

__all__ = ["conditioned"]


def conditioned(batch: int, n: int, d: int, kappa: float, generator: torch.Generator) -> Problem:
    """Keys with K'K of smallest eigenvalue 1 and largest kappa, the others log-uniform between; w ~ N(0, I), float64.

    >>> problem = conditioned(2, 11, 5, 30.0, torch.Generator().manual_seed(0))
    >>> round(float(torch.linalg.cond(problem.key[0].mT @ problem.key[0])), 6)
    30.0
    """

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    between = torch.rand(batch, d, generator=generator, dtype=torch.float64)
    between[:, 0], between[:, -1] = 0.0, 1.0
    roots = (0.5 * math.log(kappa) * between).exp()  # singular values of K
    left, right = torch.linalg.qr(normal(batch, n, d)).Q, torch.linalg.qr(normal(batch, d, d)).Q
    key = left * roots.unsqueeze(-2) @ right.mT
    w = normal(batch, d, 1)
    return Problem(key, key @ w, w)
