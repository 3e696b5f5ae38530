"""Linear problems of any size: the weights are asked for."""

from __future__ import annotations

import torch

from intention.lab.tasks import Episode

__all__ = ["regression"]


def regression(batch: int, n: int, d: int, generator: torch.Generator) -> Episode:
    """The scaling task: y = x W with W ~ N(0, I) and x ~ N(0, I). Asked is W itself.

    >>> regression(2, 10, 3, torch.Generator().manual_seed(0)).target.shape
    torch.Size([2, 3, 1])
    """
    w = torch.randn(batch, d, 1, generator=generator)
    x = torch.randn(batch, n, d, generator=generator)
    return Episode(query=x, key=x, value=x @ w, target=w)
