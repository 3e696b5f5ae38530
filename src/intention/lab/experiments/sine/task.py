"""Sine curves with random amplitude and phase: y = a sin(x - b)."""

from __future__ import annotations

import math

import torch

from intention.lab.tasks import Episode

__all__ = ["AMPLITUDE", "PHASE", "X", "sample"]

X = (-6.0, 6.0)  # x in [-6, 6)
AMPLITUDE = (0.1, 5.0)
PHASE = (0.0, math.pi)


def sample(batch: int, generator: torch.Generator, *, points: int = 10, queries: int = 200) -> Episode:
    """Queries on a grid of [-6, 6), one for all tasks; `points` of them, drawn for each task, are the context.

    >>> episode = sample(3, torch.Generator().manual_seed(0), points=5)
    >>> episode.query.shape, episode.key.shape, episode.value.shape
    (torch.Size([1, 200, 1]), torch.Size([3, 5, 1]), torch.Size([3, 5, 1]))
    """
    x = X[0] + (X[1] - X[0]) * torch.arange(queries) / queries
    a, b = torch.rand(2, batch, 1, generator=generator)
    a, b = AMPLITUDE[0] + (AMPLITUDE[1] - AMPLITUDE[0]) * a, PHASE[0] + (PHASE[1] - PHASE[0]) * b
    target = a * torch.sin(x - b)  # (B, M)
    chosen = torch.rand(batch, queries, generator=generator).argsort(-1)[:, :points]
    key, value = x[chosen], target.gather(-1, chosen)
    return Episode(x[None, :, None], key[..., None], value[..., None], target[..., None])
