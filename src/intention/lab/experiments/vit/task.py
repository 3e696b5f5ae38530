"""Labelled images in batches; those of each class are split: to learn from, to choose by and to ask about."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.lab.data import Labelled

__all__ = ["Images", "Pools", "sample", "split"]

SHARES = (0.8, 0.1)  # of each class: to learn from, to choose learning rates by; the rest is asked about


class Images(NamedTuple):
    x: Tensor  # (B, h, w, c) of bytes
    y: Tensor  # (B,)


class Pools(NamedTuple):
    """Other images of the same classes."""

    train: Images
    chosen_by: Images
    test: Images


def split(labelled: Labelled, seed: int) -> Pools:
    """Each class in three, drawn by the seed; each part has at least one image of it.

    >>> pools = split(Labelled(torch.zeros(40, 8, 8, 1), torch.arange(40) % 2, ("a", "b")), 0)
    >>> [len(pool.y) for pool in pools]
    [32, 4, 4]
    """
    generator = torch.Generator().manual_seed(seed)
    parts: tuple[list[Tensor], ...] = ([], [], [])
    for number in range(len(labelled.classes)):
        own = (labelled.y == number).nonzero().flatten()
        own = own[torch.randperm(len(own), generator=generator)]
        kept = max(1, round(SHARES[1] * len(own)))
        first = min(max(1, round(SHARES[0] * len(own))), len(own) - 2 * kept)
        for part, some in zip(parts, own.tensor_split([first, first + kept]), strict=True):
            part.append(some)
    return Pools(*(_taken(labelled, torch.cat(part)) for part in parts))


def _taken(labelled: Labelled, which: Tensor) -> Images:
    return Images(labelled.x[which], labelled.y[which])


def sample(pool: Images, batch: int, generator: torch.Generator) -> Images:
    which = torch.randint(len(pool.y), (batch,), generator=generator)
    return Images(pool.x[which], pool.y[which])
