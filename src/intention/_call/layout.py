"""Leading dimensions: broadcast them, fold them into one flat batch, and put them back."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from intention import _checks as checks

Restore = Callable[[Tensor], Tensor]


class Inputs(NamedTuple):
    """The tensors of a call with their own leading dimensions; `weight` is (..., N), `alpha` and `gain` are (...).

    Changed by its constructor: torch.compile of torch 2.5 and 2.6 refuses `_replace`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    weight: Tensor | None
    alpha: Tensor | float
    gain: Tensor | None

    def with_query(self, query: Tensor) -> Inputs:
        return Inputs(query, self.key, self.value, self.weight, self.alpha, self.gain)

    def with_points(self, key: Tensor, value: Tensor) -> Inputs:
        return Inputs(self.query, key, value, self.weight, self.alpha, self.gain)

    def with_weight(self, weight: Tensor | None) -> Inputs:
        return Inputs(self.query, self.key, self.value, weight, self.alpha, self.gain)


def split_groups(x: Tensor, trailing: int, heads: int, shared: int) -> Tensor:
    """Grouped heads: (..., heads, *) -> (..., shared, group, *); (..., shared or 1, *) -> (..., shared or 1, 1, *)."""
    axis = x.dim() - trailing - 1
    if axis < 0:
        return x
    if x.shape[axis] == heads:
        return x.unflatten(axis, (shared, heads // shared))
    return x.unsqueeze(axis + 1)


def context_lead(inputs: Inputs) -> tuple[int, ...]:
    """The leading dimensions of what is fitted: queries do not count."""
    shapes = {"key": inputs.key.shape[:-2], "value": inputs.value.shape[:-2]}
    if inputs.weight is not None:
        shapes["weight"] = inputs.weight.shape[:-1]
    if isinstance(inputs.alpha, Tensor):
        shapes["alpha"] = inputs.alpha.shape
    return checks.leading(**shapes)


def flatten(inputs: Inputs, fold: bool = True) -> tuple[Inputs, Restore]:
    """One flat batch, and the way back for a result (B, M, ...).

    With `fold`, dimensions that only the queries have become more queries: a context shared by many of them (a
    broadcast batch, grouped heads) is fitted once.
    """
    context = context_lead(inputs)
    whole = checks.leading(query=tuple(inputs.query.shape[:-2]), context=context)
    context = (1,) * (len(whole) - len(context)) + context
    if not fold:
        context = whole
    own = [i for i, (a, b) in enumerate(zip(context, whole, strict=True)) if a != b]
    m = inputs.query.shape[-2]
    query = inputs.query
    if query.shape[:-2] != whole:
        query = query.expand(*whole, *query.shape[-2:])
    order = [i for i in range(len(whole)) if i not in own] + own
    if own:
        query = query.permute(*order, -2, -1)
    batch = math.prod(context)
    copies = math.prod([whole[i] for i in own])
    alpha = inputs.alpha
    flat = Inputs(
        query.reshape(batch, copies * m, query.shape[-1]),
        _flat(inputs.key, context, 2, batch),
        _flat(inputs.value, context, 2, batch),
        None if inputs.weight is None else _flat(inputs.weight, context, 1, batch),
        _flat(alpha, context, 0, batch) if isinstance(alpha, Tensor) else alpha,
        None if inputs.gain is None else _flat(inputs.gain, context, 0, batch),
    )

    def restore(out: Tensor) -> Tensor:
        if not own:
            return out.reshape(*whole, *out.shape[1:])
        split = out.reshape(*(whole[i] for i in order), m, *out.shape[2:])
        back = [order.index(i) for i in range(len(whole))]
        return split.permute(*back, *range(len(whole), split.dim()))

    return flat, restore


def _flat(x: Tensor, lead: tuple[int, ...], trailing: int, batch: int) -> Tensor:
    own, rest = x.shape[: x.dim() - trailing], x.shape[x.dim() - trailing :]
    if len(own) != len(lead) or own != lead:
        x = x.expand(*lead, *rest)
    return x.reshape(batch, *rest)
