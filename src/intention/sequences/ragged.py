"""Sequences of different lengths side by side: a padded batch whose tokens stand at the left."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor


class Compact(NamedTuple):
    """Tokens (batch, n, ...) in the order in which those that count come first, and the way back."""

    order: Tensor  # (batch, n)
    there: Tensor  # (batch, n) bool, of the tokens as they came
    length: Tensor  # (batch,)

    @staticmethod
    def of(there: Tensor) -> Compact:
        return Compact((~there).to(torch.int8).argsort(dim=1, stable=True), there, there.sum(1))

    def moved(self, x: Tensor) -> Tensor:
        """Tokens that count first, 0 behind them."""
        return _rows(x.masked_fill(~self.there.unsqueeze(-1), 0.0), self.order)

    def back(self, x: Tensor) -> Tensor:
        """Tokens where they were, 0 where padding was."""
        return _rows(x, self.order.argsort(1)).masked_fill(~self.there.unsqueeze(-1), 0.0)


class Group(NamedTuple):
    """Some sequences of a packed batch."""

    which: list[int]
    places: Tensor  # (sequences, longest), of their tokens; those of padding are any
    there: Tensor  # (sequences, longest) bool


def groups(ends: list[int], device: torch.device) -> list[Group]:
    """Sequences of similar length, of those that end and begin at `ends`: at most half of a group is padding."""
    alike: dict[int, list[int]] = {}
    spans = list(pairwise(ends))
    for i, (a, b) in enumerate(spans):
        alike.setdefault(max(0, b - a - 1).bit_length(), []).append(i)
    found = []
    for which in alike.values():
        first, last = (torch.tensor([spans[i][side] for i in which], device=device).unsqueeze(1) for side in (0, 1))
        longest = max(1, *(spans[i][1] - spans[i][0] for i in which))  # an empty one is one token of padding
        places = first + torch.arange(longest, device=device)
        there = places < last
        found.append(Group(which, torch.where(there, places, 0), there))
    return found


def appended(old: Tensor, new: Tensor, seen: Tensor | None) -> Tensor:
    """Tokens (batch, ..., S, d) and n more behind the first `seen` (batch,) of each sequence; None is behind all."""
    if seen is None or not old.shape[-2]:
        return torch.cat([old, new], -2)
    room = TF.pad(old.to(new.dtype), (0, 0, 0, new.shape[-2]))
    return room.scatter(-2, _places(new, new.shape[-2], seen), new)


def last(x: Tensor, n: int, seen: Tensor | None) -> Tensor:
    """The n tokens that were appended."""
    if seen is None:
        return x.narrow(-2, x.shape[-2] - n, n)
    return x.gather(-2, _places(x, n, seen))


def visible(m: int, n: int, device: torch.device, seen: int | Tensor) -> Tensor:
    """(m, n), or (batch, 1, m, n): which of n tokens the m ones after `seen` see."""
    start = seen if isinstance(seen, int) else seen.view(-1, 1, 1, 1)
    return torch.arange(n, device=device) <= start + torch.arange(m, device=device).unsqueeze(-1)


def _places(x: Tensor, n: int, seen: Tensor) -> Tensor:
    place = seen.unsqueeze(1) + torch.arange(n, device=x.device)  # (batch, n)
    lead = x.shape[1:-2]
    return place.view(-1, *(1 for _ in lead), n, 1).expand(-1, *lead, -1, x.shape[-1])


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
