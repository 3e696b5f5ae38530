"""The odd one out: sets of features, all of one class but one; and rules that find it without training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.lab.core.files import LabError
from intention.lab.data import Data

__all__ = [
    "SPLITS",
    "Pool",
    "Sets",
    "Split",
    "SplitBy",
    "distinct",
    "lonely",
    "lowest_cosine",
    "over_images",
    "sample",
    "split",
    "whitening",
]

UNSEEN = 0.17  # share of the classes that training never sees, where the data do not say
KEPT_BACK = 1 / 6  # share of the images of each seen class, where the data do not say
SPLITS = 4_000_000  # seeds of splits begin here
SplitBy = Literal["labels", "images"]


class Sets(NamedTuple):
    """A batch of sets."""

    items: Tensor  # (B, N, d), of length 1
    outlier: Tensor  # (B,) its place


@dataclass(frozen=True)
class Pool:
    """Features of some classes, one class after the other."""

    x: Tensor  # (n, d)
    start: Tensor  # (C,) where a class begins
    count: Tensor  # (C,) how many it has

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> Pool:
        """Labels may leave numbers out."""
        order = y.argsort(stable=True)
        count = y.unique(return_counts=True)[1]
        return cls(x[order], count.cumsum(0) - count, count)

    def check(self, what: str, classes: int, items: int) -> None:
        least = int(self.count.min()) if len(self.count) else 0
        if len(self.count) < classes or least < items - 1:
            raise LabError(
                f"the {what} have {len(self.count)} classes, the smallest with {least} images; sets of {items} want at "
                f"least {classes} classes, each with {items - 1} or more: give data with more, or a smaller --items"
            )


Part = tuple[Tensor, Tensor]  # features or images, labels


@dataclass(frozen=True)
class Split:
    """What is trained on, and what is asked for: other images of the same classes, and classes never seen."""

    train: Pool
    seen: Pool
    unseen: Pool | None  # None: all classes are trained on
    images: Pool | None = None  # other images of all classes, where these are trained on


def split(data: Data, seed: int, *, dims: int, items: int = 10, validate: bool = False) -> Split:
    """Features of length 1: centred, then `dims` principal components, both fitted to the images that are trained on.
    With dims = 0 they are as they came, but for their length; the order of the images is the same.

    Where the parts of the data have the same classes, 17% of the classes, drawn by `seed`, are unseen, and the seen
    ones are asked for with images of the other parts. Where the parts have classes of their own, those of "test" are
    unseen, and a sixth of the images of each class of "train", drawn by `seed`, is kept back.

    `validate`: the test classes are left aside, and others, taken from training, play their role.
    """
    generator = torch.Generator().manual_seed(SPLITS + seed)
    if data.by_class:
        parts = _parts_of_classes(data, generator, items, validate)
    else:
        parts = _split_classes(data, generator, items, validate)
    pools = [Pool.of(TF.normalize(x, dim=-1), y) for (_, y), x in zip(parts, _reduced(parts, dims), strict=True)]
    pools[0].check("images for training", 4, items)
    pools[1].check("images kept back", 2, items)
    pools[2].check("images of unseen classes", 2, items)
    return Split(*pools)


def over_images(data: Data, seed: int, *, dims: int, items: int = 10, validate: bool = False) -> Split:
    """All classes are trained on, and other images of them are asked for: those of the other parts, or a sixth that is
    kept back where there are none or these have classes of their own. Nothing is unseen.

    `validate`: a sixth of the images of training plays the role of the others.
    """
    generator = torch.Generator().manual_seed(SPLITS + seed)
    train = data.parts["train"]
    others = [] if data.by_class or validate else [part for name, part in data.parts.items() if name != "train"]
    if others:
        fit, kept = (train.x, train.y), (torch.cat([part.x for part in others]), torch.cat([part.y for part in others]))
    else:
        fit, kept = _keep_back((train.x, train.y), generator, items)
    pools = [
        Pool.of(TF.normalize(x, dim=-1), y) for (_, y), x in zip((fit, kept), _reduced((fit, kept), dims), strict=True)
    ]
    pools[0].check("images for training", 4, items)
    pools[1].check("images kept back", 2, items)
    return Split(pools[0], seen=pools[1], unseen=None, images=pools[1])


def _reduced(parts: Sequence[Part], dims: int) -> list[Tensor]:
    flat = [_flat(x) for x, _ in parts]
    if not dims:
        return flat
    mean = flat[0].mean(0)
    centred = flat[0] - mean
    # eigenvectors of the covariance, the largest variance first
    axes = torch.linalg.eigh(centred.mT @ centred / len(centred))[1].flip(-1)[:, :dims]
    return [(x - mean) @ axes for x in flat]


def _flat(x: Tensor) -> Tensor:
    return x.flatten(1).float() / 255 if x.dtype == torch.uint8 else x


def _split_classes(data: Data, generator: torch.Generator, items: int, validate: bool) -> tuple[Part, Part, Part]:
    train = data.parts["train"]
    others = [part for name, part in data.parts.items() if name != "train"]
    count = len(train.classes)
    order, unseen = torch.randperm(count, generator=generator), round(UNSEEN * count)
    if validate:  # the unseen ones are not looked at
        order = order[: count - unseen]
    asked = order[len(order) - unseen :]
    known = order[: len(order) - unseen]
    if others:
        x, y = (torch.cat([getattr(part, name) for part in others]) for name in "xy")
        fit, kept = _of((train.x, train.y), known), _of((x, y), known)
        whole = (torch.cat([train.x, x]), torch.cat([train.y, y]))
    else:
        whole = (train.x, train.y)
        fit, kept = _keep_back(_of(whole, known), generator, items)
    return fit, kept, _of(whole, asked)


def _parts_of_classes(data: Data, generator: torch.Generator, items: int, validate: bool) -> tuple[Part, Part, Part]:
    unseen = "val" if validate else "test"
    if unseen not in data.parts:
        raise LabError(f"{data.name} has no part {unseen!r}, only {', '.join(data.parts)}; its classes are asked for")
    train, asked = data.parts["train"], data.parts[unseen]
    return *_keep_back((train.x, train.y), generator, items), (asked.x, asked.y)


def _of(part: Part, classes: Tensor) -> Part:
    kept = torch.isin(part[1], classes)
    return part[0][kept], part[1][kept]


def _keep_back(part: Part, generator: torch.Generator, items: int) -> tuple[Part, Part]:
    """A sixth of each class, and no fewer than a set needs."""
    x, y = part
    back = torch.zeros(len(y), dtype=torch.bool)
    for label in y.unique():
        place = (y == label).nonzero().squeeze(-1)
        shuffled = place[torch.randperm(len(place), generator=generator)]
        back[shuffled[: max(items - 1, round(KEPT_BACK * len(place)))]] = True
    return (x[~back], y[~back]), (x[back], y[back])


def distinct(count: Tensor, k: int, generator: torch.Generator) -> Tensor:
    """k different numbers (B, k) below `count` (B,), in no special order: Floyd's algorithm. Any k are as likely.

    >>> chosen = distinct(torch.tensor([3, 5]), 3, torch.Generator().manual_seed(0))
    >>> chosen[0].sort().values
    tensor([0, 1, 2])
    """
    drawn = torch.rand(len(count), k, generator=generator, dtype=torch.float64)
    chosen = torch.empty(len(count), k, dtype=torch.long)
    for place in range(k):
        last = count - k + place
        number = (drawn[:, place] * (last + 1)).long()
        taken = (chosen[:, :place] == number.unsqueeze(-1)).any(-1)
        chosen[:, place] = torch.where(taken, last, number)
    return chosen


def sample(pool: Pool, batch: int, generator: torch.Generator, *, items: int = 10, mixed: float = 0.0) -> Sets:
    """Sets of different items: all but one of one class, the other one of another class and at a random place.

    `mixed`: the share of sets from virtual classes. A class is mixed with another one, item by item and with one weight
    from U(0, 1), and so is that of the outlier; all four differ.
    """
    # as the order matters here, `distinct` would not do
    classes = torch.rand(batch, len(pool.count), generator=generator).topk(4 if mixed else 2).indices
    found = _draw(pool, classes[:, 0], classes[:, 1], items, generator)
    if mixed:
        other = _draw(pool, classes[:, 2], classes[:, 3], items, generator)
        weight = torch.rand(batch, 2, 1, generator=generator)
        weight[torch.rand(batch, generator=generator) >= mixed] = 1.0
        own, odd = weight[:, :1].expand(-1, items - 1, -1), weight[:, 1:]
        found = TF.normalize(torch.lerp(other, found, torch.cat([own, odd], 1)), dim=-1)
    outlier = torch.randint(items, (batch,), generator=generator)
    place = torch.arange(items)
    # the outlier is the last one that was drawn: it moves to its place and the others make room
    order = torch.where(place == outlier.unsqueeze(-1), items - 1, place - (place > outlier.unsqueeze(-1)).long())
    return Sets(found.take_along_dim(order.unsqueeze(-1), 1), outlier)


def _draw(pool: Pool, usual: Tensor, odd: Tensor, items: int, generator: torch.Generator) -> Tensor:
    """(B, N, d): items of the usual class, the last one of the odd one."""
    own = distinct(pool.count[usual], items - 1, generator) + pool.start[usual].unsqueeze(-1)
    other = distinct(pool.count[odd], 1, generator) + pool.start[odd].unsqueeze(-1)
    return pool.x[torch.cat([own, other], -1)]


# ---- rules without training: items (B, N, d) -> scores (B, N), the highest is the outlier


def lowest_cosine(items: Tensor) -> Tensor:
    """Minus the mean cosine to the others. For items of length 1 the largest distance to the mean is the same rule."""
    return -(items @ items.sum(-2).unsqueeze(-1)).squeeze(-1)


def lonely(items: Tensor) -> Tensor:
    """Minus the cosine to the nearest of the others."""
    cosine = items @ items.mT
    return -cosine.diagonal_scatter(torch.full(items.shape[:-1], -2.0), dim1=-2, dim2=-1).amax(-1)


def whitening(pool: Pool) -> Tensor:
    """(d, d) W^-1/4, with W the covariance within the classes (and a tenth of its mean variance): halfway to spheres.

    Classes become rounder, so the mean cosine tells them apart better; what is learned is linear, and little.
    """
    n = len(pool.count)
    label = torch.arange(n).repeat_interleave(pool.count)
    mean = torch.zeros(n, pool.x.shape[-1]).index_add_(0, label, pool.x) / pool.count.unsqueeze(-1)
    inside = pool.x - mean[label]
    variance, axes = torch.linalg.eigh(inside.mT @ inside / len(inside))
    return axes * (variance + 0.1 * variance.mean()) ** -0.25 @ axes.mT
