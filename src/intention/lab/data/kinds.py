"""What a data set is: labelled images or features, in parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from intention.lab.core.files import LabError

__all__ = ["PARTS", "Data", "Labelled", "split_classes", "take_classes"]

PARTS = ("train", "val", "test")


@dataclass(frozen=True)
class Labelled:
    """One part of a data set. Loaded parts are shared: do not write into the tensors."""

    x: Tensor  # images (n, height, width, channels) uint8, channels 1 or 3; or features (n, d) float32
    y: Tensor  # (n,) int64, index into classes
    classes: tuple[str, ...]

    @property
    def images(self) -> bool:
        return self.x.dtype == torch.uint8


@dataclass(frozen=True)
class Data:
    name: str  # of a known set, or the path as it was given
    parts: Mapping[str, Labelled]  # some of train, val, test; a set without parts has train only
    by_class: bool  # True: parts have disjoint classes; False: the same classes, other images


def split_classes(
    labelled: Labelled, shares: Sequence[float] = (0.64, 0.16, 0.20), seed: int = 0
) -> dict[str, Labelled]:
    """Disjoint classes for training, validation and test, drawn by `seed`; labels are renumbered in each part.

    >>> whole = Labelled(torch.zeros(20, 3), torch.arange(20) % 10, tuple("abcdefghij"))
    >>> {part: len(some.classes) for part, some in split_classes(whole, (0.5, 0.2, 0.3)).items()}
    {'train': 5, 'val': 2, 'test': 3}
    """
    if len(shares) != 3 or min(shares) <= 0 or abs(sum(shares) - 1) > 1e-6:
        raise ValueError(f"shares are three positive numbers with sum 1, got {tuple(shares)}")
    count = len(labelled.classes)
    if count < 3:
        raise LabError(
            f"{count} classes cannot be split into classes for training, validation and test; give 3 or more"
        )
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()
    # each part has at least one class
    first = min(max(round(shares[0] * count), 1), count - 2)
    second = min(max(round((shares[0] + shares[1]) * count), first + 1), count - 1)
    chosen = (order[:first], order[first:second], order[second:])
    return {part: take_classes(labelled, sorted(some)) for part, some in zip(PARTS, chosen, strict=True)}


def take_classes(labelled: Labelled, chosen: Sequence[int]) -> Labelled:
    """The images of some classes, whose labels become 0, 1, ... in the order of `chosen`."""
    number = torch.full((len(labelled.classes),), -1)
    number[list(chosen)] = torch.arange(len(chosen))
    y = number[labelled.y]
    kept = y >= 0
    return Labelled(labelled.x[kept], y[kept], tuple(labelled.classes[index] for index in chosen))
