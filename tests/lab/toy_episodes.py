"""Small pools of images for tests of few-shot classification."""

from __future__ import annotations

import torch

from intention.lab.experiments.fewshot.task import Pool

WAY, SHOT, QUERIES = 3, 2, 5
SIZES = {"way": WAY, "shot": SHOT, "queries": QUERIES}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ragged() -> Pool:
    """Classes of 4 to 13 images in no order; an image is its own number."""
    y = torch.cat([torch.full((size,), number) for number, size in enumerate((7, 13, 4, 8, 11))])
    y = y[torch.randperm(len(y), generator=seeded())]
    return Pool(torch.arange(len(y)).float()[:, None], y, "ragged")


def pictures(size: int = 16, classes: int = 5, each: int = 8) -> Pool:
    x = torch.randint(256, (classes * each, size, size, 1), dtype=torch.uint8, generator=seeded())
    return Pool(x, torch.arange(classes * each) % classes, "noise")
