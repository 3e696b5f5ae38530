"""Images as functions of the place: some pixels are observed, all (or others) are asked for."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from intention.lab.tasks import Episode

__all__ = ["codes", "grey", "held_out", "sample"]

GREY = (0.299, 0.587, 0.114)  # of red, green and blue (ITU-R BT.601)


def grey(images: Tensor) -> Tensor:
    """(n, height, width, channels) to (n, height * width), uint8, row by row; three channels become one.

    >>> grey(torch.full((5, 28, 28, 3), 7, dtype=torch.uint8)).shape
    torch.Size([5, 784])
    """
    if images.shape[-1] == 1:
        return images.flatten(1)
    # in parts: a large set as floats needs much memory
    parts = [(part.float() @ torch.tensor(GREY)).round().to(torch.uint8) for part in images.split(10_000)]
    return torch.cat(parts).flatten(1)


def codes(side: int, frequencies: Sequence[float]) -> Tensor:
    """The positional encoding of all pixels, (side * side, 2 + 4 len(frequencies)).

    Row and column lie in (-1, 1), each pixel's centre in its place: u, and sin(pi f u), cos(pi f u) for each frequency,
    so f is the number of periods across the image.

    >>> codes(28, (1, 2)).shape
    torch.Size([784, 10])
    """
    axis = (torch.arange(side) + 0.5) * (2 / side) - 1
    place = torch.cartesian_prod(axis, axis)  # (pixels, 2)
    angle = (place[..., None] * math.pi * torch.tensor(frequencies, dtype=torch.float32)).flatten(-2)
    return torch.cat([place, angle.sin(), angle.cos()], -1)


def sample(images: Tensor, batch: int, generator: torch.Generator, *, points: int, queries: int) -> Episode:
    """Images (n, pixels) as uint8; keys and queries are numbers of pixels, values and targets their grey in [0, 1].

    Each task has its own image and its own distinct `points`; the `queries` are drawn once for all tasks.

    >>> images = torch.randint(256, (10, 784), dtype=torch.uint8)
    >>> episode = sample(images, 3, torch.Generator().manual_seed(0), points=264, queries=784)
    >>> episode.query.shape, episode.key.shape, episode.value.shape
    (torch.Size([1, 784, 1]), torch.Size([3, 264, 1]), torch.Size([3, 264, 1]))
    """
    pixels = images.shape[1]
    shown = images[torch.randint(len(images), (batch,), generator=generator)].float() / 255
    key = torch.rand(batch, pixels, generator=generator).argsort(-1)[:, :points]
    query = torch.arange(pixels)
    if queries < pixels:
        query = torch.randperm(pixels, generator=generator)[:queries]
    return Episode(query[None, :, None], key[..., None], shown.gather(-1, key)[..., None], shown[:, query, None])


def held_out(images: Tensor, count: int, generator: torch.Generator, *, points: Sequence[int]) -> dict[int, Episode]:
    """Distinct images with contexts of several sizes, each part of the next larger; all pixels are asked for."""
    pixels = images.shape[1]
    shown = images[torch.randperm(len(images), generator=generator)[:count]].float() / 255
    order = torch.rand(len(shown), pixels, generator=generator).argsort(-1)
    value = shown.gather(-1, order)
    query = torch.arange(pixels)[None, :, None]
    return {n: Episode(query, order[:, :n, None], value[:, :n, None], shown[..., None]) for n in points}
