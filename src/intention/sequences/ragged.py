"""Sequences of different lengths side by side: a padded batch whose tokens stand at the left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

__all__ = ["Compact", "States", "appended", "groups", "in_groups", "last", "last_columns"]

States = tuple[Any, ...]  # tensors; None where a sequence has none


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


def in_groups(
    tokens: tuple[Tensor, ...],
    ends: list[int],
    call: Callable[[tuple[Tensor, ...], Tensor, Tensor], tuple[Tensor, States]],
) -> tuple[Tensor, States]:
    """A call on padded sequences for tokens (1, N, ...) in a row; what it gives is put back into the row.

    `call`: (tokens (sequences, longest, ...) with 0 in the place of padding, which of them are there, the numbers of
    the sequences) -> (out (sequences, longest, ...), tensors (sequences, ...), which may hold tokens at dimension -2).
    """
    device = tokens[0].device
    outs, back, states, order = [], [], [], []
    for which, places, there in groups(ends, device):
        hidden = ~there
        rows = tuple(x[0][places].masked_fill(hidden.view(*hidden.shape, *(1,) * (x.dim() - 2)), 0.0) for x in tokens)
        out, state = call(rows, there, torch.tensor(which, device=device))
        outs.append(out[there])
        back.append(places[there])
        states.append(state)
        order += which
    y = torch.cat(outs)[torch.cat(back).argsort()].unsqueeze(0)
    at = torch.tensor(order, device=device).argsort()
    return y, tuple(None if x[0] is None else _padded_cat(x)[at] for x in zip(*states, strict=True))


def _padded_cat(parts: tuple[Tensor, ...]) -> Tensor:
    """Along the first dimension; where some have fewer tokens than others, 0 behind them."""
    if parts[0].dim() < 2:
        return torch.cat(parts)
    longest = max(x.shape[-2] for x in parts)
    return torch.cat([TF.pad(x, (0, 0, 0, longest - x.shape[-2])) for x in parts])


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


def last_columns(mask: Tensor | None, n: int) -> Tensor | None:
    """Of a padding mask (batch, tokens so far) the columns of the last n tokens; None where all of them are there."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < n:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be (batch, tokens so far), 0 where padding is, got {got} for {n} tokens")
    mask = mask[:, mask.shape[1] - n :]
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask


def _places(x: Tensor, n: int, seen: Tensor) -> Tensor:
    place = seen.unsqueeze(1) + torch.arange(n, device=x.device)  # (batch, n)
    lead = x.shape[1:-2]
    return place.view(-1, *(1 for _ in lead), n, 1).expand(-1, *lead, -1, x.shape[-1])


def _rows(x: Tensor, index: Tensor) -> Tensor:
    return x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))
