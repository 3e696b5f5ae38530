"""Few-shot classification: episodes of `way` classes with `shot` labelled images each, from images or features."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

from intention.fewshot.sampling import ClassIndex, support_first, task_labels
from intention.lab.core.files import LabError

__all__ = ["Pool", "Prefetch", "Shots", "varied"]


class Shots(NamedTuple):
    """Tasks of one batch. Both context and queries are sorted by class."""

    x: Tensor  # (B, N + M, ...): the context's images or features, then the queries'
    value: Tensor  # (B, N, way): the context's labels, one-hot
    labels: Tensor  # (B, M): the queries' classes, 0 to way - 1
    classes: Tensor  # (B, way): which classes of the data set these are


class Pool:
    """Images (n, ...) of classes y (n,), from which episodes are drawn without a loop.

    >>> pool = Pool(torch.arange(12.0)[:, None], torch.arange(12) % 3)
    >>> shots = pool.sample(2, torch.Generator().manual_seed(0), way=2, shot=1, queries=3)
    >>> shots.x.shape, shots.value.shape, shots.labels.shape
    (torch.Size([2, 8, 1]), torch.Size([2, 2, 2]), torch.Size([2, 6]))
    """

    def __init__(self, x: Tensor, y: Tensor, name: str = "the data") -> None:
        self.x, self.y, self.name = x, y, name
        self.index = ClassIndex(y)
        self.sizes = torch.bincount(y)  # of each class

    def check(self, way: int, shot: int, queries: int) -> None:
        """Whether there is enough for such episodes."""
        try:
            self.index.check(way, shot, queries, self.name)
        except ValueError as error:
            raise LabError(f"{error}: --way, --shot, --queries") from error

    def sample(self, batch: int, generator: torch.Generator, *, way: int, shot: int, queries: int) -> Shots:
        drawn, classes = self.index.draw(batch, generator, way, shot + queries)
        labels, targets = task_labels(way, shot, queries)
        value = torch.eye(way)[labels].expand(batch, -1, -1)
        return Shots(self.x[support_first(drawn, shot)], value, targets.expand(batch, -1), classes)


Sample = Callable[[int, torch.Generator], Shots]


def varied(sample: Sample, batch: int, generator: torch.Generator, most: int) -> Shots:
    """Episodes of images (..., h, w, c), half of them mirrored, each shifted by up to `most` pixels; edges repeat."""
    shots = sample(batch, generator)
    x = shots.x.flatten(0, 1)
    n, height, width = x.shape[:3]
    down, right = torch.randint(-most, most + 1, (2, n, 1), generator=generator)
    mirrored = torch.rand(n, 1, generator=generator) < 0.5
    rows = (torch.arange(height) + down).clamp(0, height - 1)
    columns = (torch.arange(width) + right).clamp(0, width - 1)
    columns = torch.where(mirrored, columns.flip(1), columns)
    moved = x[torch.arange(n)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return shots._replace(x=moved.unflatten(0, shots.x.shape[:2]))


class Prefetch:
    """The next batch is drawn by a thread while the present one is worked on; the same batches as without.

    What comes next is known from the state of the generator: if a call comes with another state (a checkpoint was
    loaded), the batch is drawn anew.
    """

    def __init__(self, sample: Sample) -> None:
        self.sample = sample
        self.threads = ThreadPoolExecutor(1)
        self.next: tuple[int, Tensor, Future[tuple[Shots, Tensor]]] | None = None

    def __call__(self, batch: int, generator: torch.Generator) -> Shots:
        state = generator.get_state()
        if self.next is not None and self.next[0] == batch and torch.equal(self.next[1], state):
            shots, after = self.next[2].result()
        else:
            shots, after = self._draw(batch, state)
        generator.set_state(after)
        self.next = (batch, after, self.threads.submit(self._draw, batch, after))
        return shots

    def _draw(self, batch: int, state: Tensor) -> tuple[Shots, Tensor]:
        generator = torch.Generator()
        generator.set_state(state)
        return self.sample(batch, generator), generator.get_state()
