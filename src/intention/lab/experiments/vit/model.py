"""A small vision transformer whose mixer is exchanged; everything else is the same."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.fewshot.encoders import normalise
from intention.nn import Informer, SigmaInformer, Transformer

__all__ = ["MODELS", "ViT", "step_times"]

MIXERS = {"attention": Transformer, "sigma_intention": SigmaInformer, "intention": Informer}
MODELS = tuple(MIXERS)


class ViT(nn.Module):
    """Patches, learnt positions, layers with the norm first, the mean over patches, one linear layer.

    >>> model = ViT("intention", classes=5, size=8, channels=1, patch=4, width=16, heads=2, layers=1)
    >>> model(torch.zeros(3, 8, 8, 1, dtype=torch.uint8)).shape
    torch.Size([3, 5])
    """

    def __init__(
        self, mixer: str, *, classes: int, size: int, channels: int, patch: int, width: int, heads: int, layers: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, patch)
        self.positions = nn.Parameter(0.02 * torch.randn((size // patch) ** 2, width))
        options = {"dropout": 0.0, "activation": TF.gelu, "batch_first": True, "norm_first": True}
        self.layers = MIXERS[mixer](width, heads, layers, 4 * width, **options)
        self.classify = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(normalise(images)).flatten(2).mT + self.positions  # (B, patches, width)
        return self.classify(self.layers(x).mean(1))


def step_times(models: Sequence[nn.Module], loss: Callable[[nn.Module], Tensor], rounds: int) -> list[float]:
    """Median seconds of forward and backward of each model, by turns, so that all of them meet the same machine."""
    found: list[list[float]] = [[] for _ in models]
    for _ in range(rounds + 1):  # the first warms up
        for model, seconds in zip(models, found, strict=True):
            start = time.perf_counter()
            loss(model).backward()
            if next(model.parameters()).is_cuda:
                torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
            model.zero_grad()
    return [statistics.median(seconds[1:]) for seconds in found]
