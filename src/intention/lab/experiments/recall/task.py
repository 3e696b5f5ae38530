"""Keys that are asked for again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Recall", "recall"]


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
