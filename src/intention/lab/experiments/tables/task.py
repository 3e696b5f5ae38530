"""Made-up regression tasks to train on, and the tables that come with scikit-learn to be asked about."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from intention.lab.tasks import Episode

__all__ = ["FEATURES", "NAMES", "drawn_from", "sample", "standardised", "table"]

FEATURES = 10  # columns that a model reads; what a table does not have is 0
NAMES = ("diabetes", "linnerud")  # regression sets that scikit-learn brings with it
HIDDEN = 16  # bends of a made-up function


def sample(batch: int, generator: torch.Generator, *, fewest: int = 10, most: int = 200, queries: int = 50) -> Episode:
    """Noisy functions of 2 to 10 columns: a line and, in most tasks, some bends. The number of rows is drawn per batch.

    >>> sample(7, torch.Generator().manual_seed(0), fewest=11, most=11, queries=5).key.shape
    torch.Size([7, 11, 10])
    """

    def uniform(low: float, high: float, *shape: int) -> Tensor:
        return low + (high - low) * torch.rand(batch, *shape, generator=generator)

    n = int(torch.randint(fewest, most + 1, (), generator=generator))
    d = torch.randint(2, FEATURES + 1, (batch, 1, 1), generator=generator)
    there = (torch.arange(FEATURES) < d).float()  # (B, 1, d)
    # columns are correlated: a mixture of noise of their own and of a few common causes
    causes = torch.randn(batch, n + queries, 4, generator=generator)
    loads = torch.randn(batch, 4, FEATURES, generator=generator) * uniform(0, 1, 1, 1)
    x = (torch.randn(batch, n + queries, FEATURES, generator=generator) + causes @ loads) * there
    x = x / (1 + loads.square().sum(1, keepdim=True)).sqrt()
    line = x @ torch.randn(batch, FEATURES, 1, generator=generator) / d.sqrt()
    slopes = torch.randn(batch, FEATURES, HIDDEN, generator=generator) / d.sqrt()
    bends = torch.tanh(2 * x @ slopes + torch.randn(batch, 1, HIDDEN, generator=generator))
    curve = bends @ torch.randn(batch, HIDDEN, 1, generator=generator) / HIDDEN**0.5
    y = line + uniform(0, 1.5, 1, 1) * curve
    y = y + uniform(0.1, 1.5, 1, 1) * torch.randn(y.shape, generator=generator)
    return standardised(x[:, n:], x[:, :n], y[:, :n], y[:, n:])


def standardised(query: Tensor, key: Tensor, value: Tensor, target: Tensor) -> Episode:
    """Columns and values have mean 0 and variance 1 over the context, which alone is known. Constant columns are 0."""
    middle, spread = key.mean(-2, keepdim=True), key.std(-2, keepdim=True, correction=0)
    wide = torch.where(spread > 1e-6, spread, torch.inf)
    low, high = value.mean(-2, keepdim=True), value.std(-2, keepdim=True, correction=0).clamp_min(1e-6)
    return Episode((query - middle) / wide, (key - middle) / wide, (value - low) / high, (target - low) / high)


@cache
def table(name: str) -> tuple[Tensor, Tensor]:
    """Columns (rows, 10), padded with zeros, and targets (rows, k)."""
    from sklearn import datasets

    loaded = {"diabetes": datasets.load_diabetes, "linnerud": datasets.load_linnerud}[name](return_X_y=True)
    x, y = (torch.tensor(each, dtype=torch.float32) for each in loaded)
    return torch.nn.functional.pad(x, (0, FEATURES - x.shape[1])), y.reshape(len(y), -1)


def drawn_from(name: str, rows: int, count: int, generator: torch.Generator) -> Episode:
    """`count` times some rows of a table as context and all others as queries; targets of a table take turns."""
    x, y = table(name)
    order = torch.rand(count, len(x), generator=generator).argsort(-1)
    which = torch.arange(count) % y.shape[1]
    targets = y[order, which.unsqueeze(-1)].unsqueeze(-1)  # (count, rows, 1)
    columns = x[order]
    return standardised(columns[:, rows:], columns[:, :rows], targets[:, :rows], targets[:, rows:])
