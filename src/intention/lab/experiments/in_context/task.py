"""Tasks along a sequence: pairs of one linear map, and keys that are asked for again."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor


class Pairs(NamedTuple):
    """Points of one linear map per task, in turn. Asked is y at every position, from x there and the pairs before."""

    x: Tensor  # (B, N, d)
    y: Tensor  # (B, N, 1), with noise
    clear: Tensor  # (B, N, 1), without


def pairs(batch: int, generator: torch.Generator, *, dims: int, length: int, noise: float) -> Pairs:
    """y = w'x + noise with w ~ N(0, I) and x ~ N(0, I).

    >>> pairs(2, torch.Generator().manual_seed(0), dims=3, length=12, noise=0.1).y.shape
    torch.Size([2, 12, 1])
    """
    w = torch.randn(batch, dims, 1, generator=generator)
    x = torch.randn(batch, length, dims, generator=generator)
    clear = x @ w
    return Pairs(x, clear + noise * torch.randn(clear.shape, generator=generator), clear)


def before(x: Tensor) -> Tensor:
    """What stands one position earlier (B, N, d); 0 at the first. With it, nothing sees its own y.

    >>> before(torch.tensor([[[1.0], [2.0], [3.0]]])).flatten().tolist()
    [0.0, 1.0, 2.0]
    """
    return TF.pad(x[..., :-1, :], (0, 0, 1, 0))


class Recall(NamedTuple):
    """Pairs of a key and a value, then the keys alone in another order. Asked is the value of each of these."""

    tokens: Tensor  # (B, 3 P)
    answers: Tensor  # (B, P): what follows the last P tokens


def recall(batch: int, generator: torch.Generator, *, pairs: int, keys: int, values: int) -> Recall:
    """Tokens 0 ... keys - 1 are keys, those after them values. Those of a sequence are distinct: who guesses one of
    the values that were shown is right once in P.

    >>> recall(2, torch.Generator().manual_seed(0), pairs=3, keys=8, values=5).tokens.shape
    torch.Size([2, 9])
    """
    key, value, order = (
        torch.rand(batch, size, generator=generator).argsort(-1)[:, :pairs] for size in (keys, values, pairs)
    )
    value = keys + value
    shown = torch.stack([key, value], -1).flatten(1)
    return Recall(torch.cat([shown, key.gather(1, order)], 1), value.gather(1, order))
