"""Episodes: tasks of a few classes with a few examples each, drawn from data with labels. Seeded, without a loop."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

__all__ = ["ClassIndex", "EpisodeSampler", "Episodes", "check_labelled", "episodes", "support_first", "task_labels"]

PART = 64  # episodes that are drawn at once by the sampler


class Episodes(NamedTuple):
    """Tasks, the batch B of them in front. Support and queries are sorted by class; classes count 0, 1, ... in a task.

    A head takes the first three: `head(*found[:3])`.
    """

    support: Tensor  # (B, way * shot, ...)
    labels: Tensor  # (B, way * shot): 0 to way - 1
    query: Tensor  # (B, way * queries, ...)
    targets: Tensor  # (B, way * queries): 0 to way - 1
    classes: Tensor  # (B, way): which labels of the data these are
    chosen: Tensor  # (B, way * (shot + queries)): where in the data; the support first


class ClassIndex:
    """Where the examples of each class are, and draws of some of them.

    >>> index = ClassIndex(torch.tensor([7, 3, 7, 3, 7]))
    >>> index.classes, index.sizes
    (tensor([3, 7]), tensor([2, 3]))
    >>> chosen, classes = index.draw(4, torch.Generator().manual_seed(0), way=2, examples=2)
    >>> chosen.shape, classes.shape
    (torch.Size([4, 2, 2]), torch.Size([4, 2]))
    """

    def __init__(self, labels: Tensor) -> None:
        self.classes, number = labels.unique(return_inverse=True)
        self.order = number.argsort(stable=True)
        self.sizes = torch.bincount(number, minlength=len(self.classes))
        self.starts = self.sizes.cumsum(0) - self.sizes

    def check(self, way: int, shot: int, query: int, name: str = "the data") -> None:
        """Whether there is enough for such episodes."""
        for what, number, least in (("way", way, 2), ("shot", shot, 1), ("query", query, 1)):
            if number < least:
                raise ValueError(f"{what} must be at least {least}, got {number}")
        large = int((self.sizes >= shot + query).sum())
        if large < way:
            raise ValueError(
                f"{name} has {large} classes with at least {shot} + {query} examples (shot + query), and {way}-way "
                f"episodes need {way}; its classes have {int(self.sizes.min())} to {int(self.sizes.max())} examples. "
                "Add examples, or use smaller way, shot or query"
            )

    def draw(self, batch: int, generator: torch.Generator, way: int, examples: int) -> tuple[Tensor, Tensor]:
        """Indices (batch, way, examples), all different, and the classes (batch, way), of those that have enough."""
        enough = (self.sizes >= examples).nonzero().flatten()
        chosen = enough[torch.rand(batch, len(enough), generator=generator).argsort(-1)[:, :way]]
        sizes = self.sizes[chosen].unsqueeze(-1)  # (batch, way, 1)
        lots = torch.rand(batch, way, int(self.sizes.max()), generator=generator)
        lots = lots.masked_fill(torch.arange(lots.shape[-1]) >= sizes, 2.0)  # classes differ in size
        first = lots.topk(examples, dim=-1, largest=False).indices
        return self.order[self.starts[chosen].unsqueeze(-1) + first], self.classes[chosen]


def support_first(index: Tensor, shot: int) -> Tensor:
    """(B, way, shot + query) -> (B, way * (shot + query)): the shots of all classes, then their queries."""
    return torch.cat([index[..., :shot].flatten(1), index[..., shot:].flatten(1)], 1)


def task_labels(way: int, shot: int, query: int) -> tuple[Tensor, Tensor]:
    """Labels (way * shot,) and targets (way * query,) of an episode that is sorted by class."""
    each = torch.arange(way)
    return each.repeat_interleave(shot), each.repeat_interleave(query)


def episodes(
    features: Tensor,
    labels: Tensor,
    *,
    way: int = 5,
    shot: int = 5,
    query: int = 15,
    count: int = 1,
    seed: int | torch.Generator = 0,
) -> Episodes:
    """Tasks drawn from features (or images) (n, ...) with labels (n,), all at once.

    >>> features, labels = torch.randn(60, 8), torch.arange(60) % 6
    >>> found = episodes(features, labels, way=5, shot=1, query=3, count=4)
    >>> found.support.shape, found.query.shape, found.targets.shape
    (torch.Size([4, 5, 8]), torch.Size([4, 15, 8]), torch.Size([4, 15]))

    Args:
        way, shot, query: classes of a task, examples and queries of each class.
        count: tasks.
        seed: a number, or a generator that goes on.
    """
    check_labelled(features, labels)
    generator = torch.Generator().manual_seed(seed) if isinstance(seed, int) else seed
    known = ClassIndex(labels)
    known.check(way, shot, query)
    drawn, classes = known.draw(count, generator, way, shot + query)
    index = support_first(drawn, shot)
    own, targets = task_labels(way, shot, query)
    split = [way * shot, way * query]
    support, asked = features[index].split(split, 1)
    return Episodes(support, own.expand(count, -1), asked, targets.expand(count, -1), classes, index)


def check_labelled(features: Tensor, labels: Tensor) -> None:
    """Whether each of these has a label."""
    if not isinstance(labels, Tensor):
        raise TypeError(
            f"wanted a tensor of integer labels (n,), got {type(labels).__name__}; number the classes first"
        )
    if labels.dim() != 1 or len(features) != len(labels) or labels.is_floating_point():
        raise ValueError(
            f"wanted features (n, ...) and integer labels (n,), got {tuple(features.shape)} and {labels.dtype} "
            f"{tuple(labels.shape)}"
        )


class EpisodeSampler(Sampler[list[int]]):
    """A batch sampler: each batch of a DataLoader is one episode, its support first, sorted by class.

    >>> from torch.utils.data import DataLoader, TensorDataset
    >>> data = TensorDataset(torch.randn(60, 8), torch.arange(60) % 6)
    >>> sampler = EpisodeSampler(data, way=5, shot=1, query=3, episodes=2, labels=data.tensors[1])
    >>> for x, _ in DataLoader(data, batch_sampler=sampler):
    ...     support, labels, query, targets = sampler.split(x)
    >>> support.shape, query.shape
    (torch.Size([5, 8]), torch.Size([15, 8]))

    Each pass over it draws other episodes, the same ones for the same seed, with workers and without.

    Args:
        data: a map-style Dataset.
        way, shot, query: classes of an episode, examples and queries of each class.
        episodes: of one pass.
        labels: of all members of the data; None takes `data.targets` or `data.labels`.
        seed: of all draws.
    """

    def __init__(
        self,
        data: Dataset[object],
        *,
        way: int = 5,
        shot: int = 5,
        query: int = 15,
        episodes: int = 100,
        labels: Tensor | Sequence[int] | None = None,
        seed: int = 0,
    ) -> None:
        self.way, self.shot, self.query, self.episodes, self.seed = way, shot, query, episodes, seed
        self.index = ClassIndex(_labels_of(data, labels))
        self.index.check(way, shot, query)
        self.passes = 0

    def __len__(self) -> int:
        return self.episodes

    def __iter__(self) -> Iterator[list[int]]:
        # a generator for each pass: how far a DataLoader has read ahead in the last one does not matter
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + self.passes)
        self.passes += 1
        left = self.episodes
        while left > 0:
            drawn, _ = self.index.draw(min(PART, left), generator, self.way, self.shot + self.query)
            yield from support_first(drawn, self.shot).tolist()
            left -= len(drawn)

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(support, labels, query, targets) of what the DataLoader, or an encoder after it, made of a batch."""
        labels, targets = task_labels(self.way, self.shot, self.query)
        support, query = x.split([len(labels), len(targets)])
        return support, labels.to(x.device), query, targets.to(x.device)


def _labels_of(data: Dataset[object], given: Tensor | Sequence[int] | None) -> Tensor:
    found = given
    for name in ("targets", "labels"):
        found = getattr(data, name, None) if found is None else found
    if found is None:
        raise ValueError(
            f"{type(data).__name__} has neither targets nor labels; give labels=, one integer for each of its members"
        )
    try:
        labels = torch.as_tensor(found)
    except (TypeError, ValueError) as error:  # text
        raise ValueError(
            f"labels must be integers ({error}); number the classes: sorted(set(labels)).index(label)"
        ) from error
    count = getattr(data, "__len__", None)
    if labels.dim() != 1 or labels.is_floating_point() or (count is not None and count() != len(labels)):
        size = f"{count()} members" if count is not None else "members"
        raise ValueError(f"wanted one integer label for each of {size}, got {labels.dtype} {tuple(labels.shape)}")
    return labels
