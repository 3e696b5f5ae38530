"""From what a user passes to flat problems and back: checks, precision, heads, masks, leading dimensions."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention._call import masks_and_weights as masks
from intention._call.masks_and_weights import Counted
from intention._covariance import ON_KEYS, Covariance, alpha_of, gain_of
from intention.solve.ladder import Report, unpack
from intention.solve.problem import Problem

Restore = Callable[[Tensor], Tensor]


def check_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool
) -> tuple[int, tuple[int, ...]]:
    """How many query heads share a key head, and the leading dimensions of the call."""
    checks.points(query, key, value)
    if gqa:
        groups = checks.grouped_heads(query, key, value)
        rest = checks.leading(query=query.shape[:-3], key=key.shape[:-3], value=value.shape[:-3])
        lead = (*rest, query.shape[-3])
    else:
        groups, lead = 1, checks.leading(query=query.shape[:-2], key=key.shape[:-2], value=value.shape[:-2])
    if mask is not None:
        checks.mask(mask, query.device, query.shape[-2], key.shape[-2], lead)
    return groups, lead


def plain_problem(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor | None, covariance: Covariance, solver: str
) -> Problem | None:
    """The common call needs no broadcasting, casting or folding: flat views, in a quarter of the time of `prepare`."""
    checks.points(query, key, value)
    lead, dtype = query.shape[:-2], query.dtype
    if covariance not in ON_KEYS or dtype not in (torch.float32, torch.float64):
        return None
    if not (key.shape[:-2] == value.shape[:-2] == lead and key.dtype == value.dtype == dtype) or query.dim() < 3:
        return None
    if 0 in query.shape or 0 in value.shape:
        return None
    checks.solver(solver, query.device)
    if isinstance(alpha, Tensor):
        checks.alpha_tensor(alpha, query.device, tuple(lead))
        each = alpha.to(query.device, dtype).expand(lead).reshape(-1)
    else:
        each = key.new_full((math.prod(lead),), alpha_of(alpha, covariance))
    return Problem(query, key, value, None, each, gain_of(each, covariance))


class Prepared(NamedTuple):
    """A call, checked and in the working precision; grouped heads are split into (shared, group)."""

    inputs: Problem  # with leading dimensions of its own; those of alpha are (...)
    counted: Counted
    grouped: bool
    dtype: torch.dtype
    empty: bool
    is_causal: bool
    covariance: Covariance
    solver: str
    own_sigma: bool  # Sigma is not made of the keys

    def double(self) -> Prepared:
        """The same call in float64."""
        counted = (x if x is None or not x.is_floating_point() else x.double() for x in self.counted)
        return Prepared(self.inputs.take(None, torch.float64), Counted(*counted), *self[2:])

    def first(self, n: int) -> Prepared:
        """The same call of the first n queries and points."""
        query, key, value = (x.narrow(-2, 0, n) for x in self.inputs[:3])
        weight = None if self.inputs.weight is None else self.inputs.weight.narrow(-1, 0, n)
        counted = Counted(*(None if x is None else x.narrow(-1, 0, n) for x in self.counted))
        return Prepared(Problem(query, key, value, weight, *self.inputs[4:]), counted, *self[2:])

    def zeros(self) -> tuple[Tensor, Report]:
        """The answer without points (0), without queries or without columns (nothing)."""
        one = self.inputs.key.new_zeros(context_lead(self.inputs))
        return self.inputs.query @ (self.inputs.key.mT @ self.inputs.value), Report(one, one + 1, one)

    def result(self, out: Tensor) -> Tensor:
        return (out.flatten(-4, -3) if self.grouped else out).to(self.dtype)

    def report(self, report: Report) -> Report:
        return Report(*(x.flatten(-2) for x in report)) if self.grouped else report


def prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    gqa: bool,
    alpha: float | Tensor | None,
    weight: Tensor | None,
    covariance: Covariance,
    solver: str,
) -> Prepared:
    """Check, cast to the working precision, split grouped heads, and read masks, weights, dropout and covariance."""
    groups, lead = check_call(query, key, value, mask, gqa)
    checks.covariance(covariance)
    checks.solver(solver, query.device)
    checks.probability(dropout_p)
    dtype = functools.reduce(torch.promote_types, (query.dtype, key.dtype, value.dtype))
    working = torch.float64 if dtype == torch.float64 else torch.float32
    if weight is not None:
        checks.weight(weight, query.device, key.shape[-2])
        if groups == 1:
            checks.leading(call=lead, weight=weight.shape[:-1])
        else:
            checks.grouped_weight(weight, lead, groups)
    if mask is not None:
        mask = masks.with_own_rows(mask)
    if is_causal:
        key, value, mask, weight = visible(query.shape[-2], key, value, mask, weight)
    heads, shared = (query.shape[-3], key.shape[-3]) if groups > 1 else (1, 1)

    def split(x: Tensor, trailing: int) -> Tensor:
        """Grouped heads: (..., heads, *) -> (..., shared, group, *), and (..., shared or 1, *) -> (..., same, 1, *)."""
        axis = x.dim() - trailing - 1
        if groups == 1 or axis < 0:
            return x
        return x.unflatten(axis, (shared, groups)) if x.shape[axis] == heads else x.unsqueeze(axis + 1)

    if isinstance(alpha, Tensor):
        checks.alpha_tensor(alpha, query.device, lead)
        alpha = split(alpha.to(query.device, working), 0)
    query, key, value = query.to(working), key.to(working), value.to(working)
    query, key, value = split(query, 2), split(key, 2), split(value, 2)
    own_sigma = covariance not in ON_KEYS
    if not isinstance(alpha, Tensor):  # a number keeps its digits until it is used
        wide = working if query.device.type == "mps" else torch.float64
        alpha = torch.tensor(alpha_of(alpha, covariance), dtype=wide, device=query.device)
    gain = 1 - alpha if covariance == "convex" else None  # Sigma = gain K'K + alpha I
    mask, weight = None if mask is None else split(mask, 2), None if weight is None else split(weight, 1)
    counted = masks.count(mask, weight, is_causal, key.shape[-2], working)
    if dropout_p:
        lead = context_lead(Problem(query, key, value, counted.in_sigma(), alpha, gain))
        dropped = masks.drop_points(counted.weight, lead, key, dropout_p)
        counted = Counted(counted.keep, dropped, counted.log, counted.per_query)
    seen = counted.seen()
    inputs = Problem(query, masks.fill(key, seen), masks.fill(value, seen), counted.in_sigma(), alpha, gain)
    empty = 0 in query.shape or 0 in key.shape or 0 in value.shape
    return Prepared(inputs, counted, groups > 1, dtype, empty, is_causal, covariance, solver, own_sigma)


def drop_rows(inputs: Problem, p: float) -> Problem:
    """Dropout of points as a scale of their rows: sqrt(w) K and sqrt(w) V have K'WK and K'WV, and need no weights.

    For fits that are made of these two alone; a mean over points must know the weights.
    """
    kept = masks.drop_points(None, context_lead(inputs), inputs.key, p).sqrt().unsqueeze(-1)
    return Problem(inputs.query, inputs.key * kept, inputs.value * kept, *inputs[3:])


def visible(
    m: int, key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The keys that M causal queries can see: the first M."""
    n = key.shape[-2]
    if n <= m:
        return key, value, mask, weight
    if mask is not None:
        mask = mask.expand(*mask.shape[:-1], n).narrow(-1, 0, m)
    return key.narrow(-2, 0, m), value.narrow(-2, 0, m), mask, None if weight is None else weight.narrow(-1, 0, m)


def weigh_mask(inputs: Problem, keep: Tensor) -> Problem:
    """Masked points have zero rows, which is enough for Sigma; a mean must also not count them."""
    kept = keep.to(inputs.key.dtype)
    return Problem(*inputs[:3], kept if inputs.weight is None else inputs.weight * kept, *inputs[4:])


def unflatten_report(packed: Tensor, inputs: Problem) -> Report:
    lead = context_lead(inputs)
    return Report(*(x.reshape(lead) for x in unpack(packed)))


def context_lead(inputs: Problem) -> tuple[int, ...]:
    """The leading dimensions of what is fitted: queries do not count."""
    _, key, value, weight, alpha, _ = inputs
    lead = key.shape[:-2]
    if weight is None and value.shape[:-2] == lead and not alpha.dim():
        return tuple(lead)
    weights = {} if weight is None else {"weight": weight.shape[:-1]}
    return checks.leading(key=lead, value=value.shape[:-2], **weights, alpha=alpha.shape)


def flatten(inputs: Problem, fold: bool = True) -> tuple[Problem, Restore]:
    """One flat batch, and the way back for a result (B, M, ...).

    With `fold`, dimensions that only the queries have become more queries: a context shared by many of them (a
    broadcast batch, grouped heads) is fitted once.
    """
    query, key, value, weight, alpha, gain = inputs
    context = context_lead(inputs)
    whole = tuple(query.shape[:-2])
    whole = context if whole == context else checks.leading(query=whole, context=context)
    context = (1,) * (len(whole) - len(context)) + context
    if not fold:
        context = whole
    own = [i for i, (a, b) in enumerate(zip(context, whole, strict=True)) if a != b]
    m = query.shape[-2]
    if query.shape[:-2] != whole:
        query = query.expand(*whole, *query.shape[-2:])
    order = [i for i in range(len(whole)) if i not in own] + own
    if own:
        query = query.permute(*order, -2, -1)
    batch = math.prod(context)
    copies = math.prod([whole[i] for i in own])

    def flat(x: Tensor, *own: int) -> Tensor:
        # the lengths first: in a program with symbolic sizes every number that is compared becomes a guard
        same = x.dim() == len(context) + len(own) and x.shape == (*context, *own)
        return (x if same else x.expand(*context, *own)).reshape(batch, *own)

    points = flat(key, *key.shape[-2:]), flat(value, *value.shape[-2:])
    weight = None if weight is None else flat(weight, key.shape[-2])
    alpha, gain = flat(alpha.to(key.dtype)), None if gain is None else flat(gain.to(key.dtype))
    base = Problem(query.reshape(batch, copies * m, query.shape[-1]), *points, weight, alpha, gain)

    def restore(out: Tensor) -> Tensor:
        if not own:
            return out.reshape(*whole, *out.shape[1:])
        split = out.reshape(*(whole[i] for i in order), m, *out.shape[2:])
        back = [order.index(i) for i in range(len(whole))]
        return split.permute(*back, *range(len(whole), split.dim()))

    return base, restore
