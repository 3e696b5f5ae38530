"""Samplers of tasks: seeded, batched, pure torch. Each returns an `Episode` with the batch in front."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

__all__ = ["Episode", "Problem"]


class Episode(NamedTuple):
    """Tasks of one batch: context (key, value), what is asked (query) and the answer (target)."""

    query: Tensor  # (B, M, d), or (1, M, d) where all tasks ask the same
    key: Tensor  # (B, N, d)
    value: Tensor  # (B, N, k)
    target: Tensor  # (B, M, k)


class Problem(NamedTuple):
    """Noise-free linear problems: value = key w."""

    key: Tensor  # (B, N, d)
    value: Tensor  # (B, N, 1)
    w: Tensor  # (B, d, 1)
