"""Pairs, then many tokens that say nothing, then the keys again."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["Needle", "needle"]


class Needle(NamedTuple):
    """Pairs of a key and a value, filler, then the keys alone in another order. Asked is the value of each of these."""

    tokens: Tensor  # (B, 2 P + filler + P)
    answers: Tensor  # (B, P): what follows the last P tokens


def needle(batch: int, generator: torch.Generator, *, pairs: int, filler: int, keys: int, values: int) -> Needle:
    """Tokens 0 ... keys - 1 are keys, then values, then as many kinds of filler as keys. All keys and values of a
    sequence are distinct: who guesses one of the values that were shown is right once in P.

    >>> needle(2, torch.Generator().manual_seed(0), pairs=3, filler=10, keys=8, values=5).tokens.shape
    torch.Size([2, 19])
    """
    key, value, order = (
        torch.rand(batch, size, generator=generator).argsort(-1)[:, :pairs] for size in (keys, values, pairs)
    )
    value = keys + value
    between = keys + values + torch.randint(keys, (batch, filler), generator=generator)
    shown = torch.stack([key, value], -1).flatten(1)
    return Needle(torch.cat([shown, between, key.gather(1, order)], 1), value.gather(1, order))
