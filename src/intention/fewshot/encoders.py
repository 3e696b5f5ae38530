"""Encoders of small images: Conv4 of Matching Networks and ResNet-12; images (n, c, h, w) become features (n, d)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

__all__ = ["KINDS", "Conv4", "Encoder", "ResNet12", "build", "normalise"]

MEAN, SPREAD = 0.45, 0.27  # of natural images in [0, 1], about
SLOPE = 0.1  # of ResNet-12's leaky ReLU
KINDS = ("conv4", "resnet12")


def normalise(x: Tensor) -> Tensor:
    """Images (..., h, w, c) of bytes as floats (..., c, h, w) around 0; the memory stays channels last."""
    return ((x.float() - 255 * MEAN) / (255 * SPREAD)).movedim(-1, -3)


class Encoder(nn.Module):
    """What both encoders share: the shape of their input, the precision of their convolutions, the features' number."""

    d: int  # features of an image
    round_up = False

    def __init__(self, kind: str, size: int, channels: int, width: int, precision: str) -> None:
        super().__init__()
        self.kind, self.size, self.channels, self.width = kind, size, channels, width
        self.precision = precision

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16, enabled=self.precision == "bfloat16"):
            return self.features(x).float()

    def features(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class Conv4(Encoder):
    """Four times convolution 3x3, batch norm, ReLU, pooling 2x2.

    >>> Conv4(size=28, channels=3)(torch.randn(7, 3, 28, 28)).shape
    torch.Size([7, 64])

    Args:
        running: batch norm keeps running statistics for evaluation; without, it uses those of the batch always.
        round_up: pooling keeps the last row and column of an odd size ("SAME" in JAX), so that 28 pixels become 2.
    """

    def __init__(
        self,
        size: int,
        channels: int,
        width: int = 64,
        precision: str = "float32",
        running: bool = True,
        round_up: bool = False,
    ) -> None:
        super().__init__("conv4", size, channels, width, precision)
        self.round_up = round_up
        inside = (channels, width, width, width)
        self.blocks = nn.Sequential(*(_block(each, width, running, round_up) for each in inside))
        self.d = width * (-(-size // 16) if round_up else size // 16) ** 2
        _channels_last(self)

    def features(self, x: Tensor) -> Tensor:
        return self.blocks(x).flatten(1)


def _channels_last(module: Any) -> None:
    """The weights stay what they are, in another order of the memory. torch's own types leave this form of `to` out."""
    module.to(memory_format=torch.channels_last)


def _block(inside: int, outside: int, running: bool, round_up: bool) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, padding=1),
        nn.BatchNorm2d(outside, track_running_stats=running),
        nn.MaxPool2d(2, ceil_mode=round_up),  # before the ReLU: the same numbers, on a quarter of the pixels
        nn.ReLU(),
    )


class ResNet12(Encoder):
    """Four residual blocks of three convolutions, widths 1, 2, 4, 8 times `width`, pooling after each, then the mean.

    >>> ResNet12(size=28, channels=3, width=16)(torch.randn(2, 3, 28, 28)).shape
    torch.Size([2, 128])

    Args:
        dropblock: share of the last two blocks' outputs that is dropped in 3x3 squares in training; 0 is none.
    """

    def __init__(
        self, size: int, channels: int, width: int = 64, precision: str = "float32", dropblock: float = 0.0
    ) -> None:
        super().__init__("resnet12", size, channels, width, precision)
        sizes = [channels, width, 2 * width, 4 * width, 8 * width]
        drops = (0.0, 0.0, dropblock, dropblock)
        self.blocks = nn.Sequential(*(Residual(sizes[i], sizes[i + 1], drops[i]) for i in range(4)))
        self.d = 8 * width
        _channels_last(self)

    def features(self, x: Tensor) -> Tensor:
        return self.blocks(x).mean((-2, -1))


class Residual(nn.Module):
    def __init__(self, inside: int, outside: int, dropblock: float) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for number in range(3):
            layers += [
                nn.Conv2d(inside if number == 0 else outside, outside, 3, padding=1, bias=False),
                nn.BatchNorm2d(outside),
                nn.LeakyReLU(SLOPE, inplace=True),
            ]
        self.path = nn.Sequential(*layers[:-1])
        self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, bias=False), nn.BatchNorm2d(outside))
        self.dropblock = dropblock

    def forward(self, x: Tensor) -> Tensor:
        x = nnf.leaky_relu_(nnf.max_pool2d(self.path(x) + self.short(x), 2), SLOPE)
        return drop_squares(x, self.dropblock) if self.training and self.dropblock else x


def drop_squares(x: Tensor, share: float, edge: int = 3) -> Tensor:
    """DropBlock: squares of neighbouring features are zero, the rest is scaled up to the same sum of weights."""
    edge = min(edge, *x.shape[-2:])
    seeds = torch.rand_like(x, dtype=torch.float32) < share / edge**2
    # a square around each seed, cut at the border
    dropped = nnf.max_pool2d(nnf.pad(seeds.float(), (edge // 2, (edge - 1) // 2) * 2), edge, stride=1)
    kept = 1 - dropped
    return x * (kept * (kept.numel() / kept.sum().clamp(min=1))).to(x.dtype)


def build(
    kind: str,
    size: int,
    channels: int,
    width: int,
    precision: str = "float32",
    *,
    running: bool = True,
    round_up: bool = False,
    dropblock: float = 0.0,
) -> Encoder:
    """An encoder by its name; the first two options are Conv4's, the last one is ResNet-12's."""
    if kind == "conv4":
        return Conv4(size, channels, width, precision, running, round_up)
    if kind == "resnet12":
        return ResNet12(size, channels, width, precision, dropblock)
    raise ValueError(f"there is no encoder {kind!r}; there are {', '.join(KINDS)}")
