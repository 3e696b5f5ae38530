"""One fit per query: causal fits, and masks that differ between queries. Exact, and O(M) times the work of one fit."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention import _checks as checks
from intention._call import masks_and_weights as masks
from intention._call.arguments import context_lead, flatten
from intention.solve.causal.each_query import CHUNK, Solve, each_query, starts
from intention.solve.causal.sequence import causal
from intention.solve.ladder import Report
from intention.solve.problem import Problem, Tokens

TOKENS = 64  # in a chunk of causal linear attention


def per_query(inputs: Problem, mask: Tensor | None, solve: Solve) -> tuple[Tensor, Report]:
    """One fit per query, in chunks over M. `mask` None means causal: query t sees keys <= t."""
    whole = context_lead(inputs)
    if mask is not None:
        whole = checks.leading(context=whole, mask=tuple(mask.shape[:-2]))
    m, n = inputs.query.shape[-2], inputs.key.shape[-2]
    query, key, *_ = inputs
    base, restore = flatten(Problem(query, key.expand(*whole, *key.shape[-2:]), *inputs[2:]), fold=False)
    batch = base.query.shape[0]
    if mask is not None:
        lead = restore(base.query).shape[:-2]
        mask = mask.expand(*lead, m, n)

    def taken(start: int, rows: int, seen: int) -> Tensor | None:
        if mask is None:
            return None
        return masks.as_weight(mask.narrow(-2, start, rows), base.key.dtype).reshape(batch, rows, n)

    out, report = each_query(base, taken, mask is None, solve)
    lead = restore(base.query).shape[:-2]
    return restore(out), Report(*(x.reshape(lead) for x in report))


def in_chunks(inputs: Problem, transform_only: bool) -> tuple[Tensor, Report]:
    """Causal fits of the named covariances that are made of the keys: chunks of tokens, O(N (d^2 + d k))."""
    whole = context_lead(inputs)
    query, key, *_ = inputs
    base, restore = flatten(Problem(query, key.expand(*whole, *key.shape[-2:]), *inputs[2:]), fold=False)
    query, key, value, weight, alpha, gain = base
    if (missing := query.shape[1] - key.shape[1]) > 0:  # queries beyond the last key see all keys
        key, value = (TF.pad(x, (0, 0, 0, missing)) for x in (key, value))
        weight = None if weight is None else TF.pad(weight, (0, missing))
    out, packed = causal(Tokens(query, key, None if transform_only else value, weight, alpha, gain, None, None))
    out = restore(out)
    return out, Report(*packed.view(*out.shape[:-2], 3).unbind(-1))


def linear_causal(query: Tensor, key: Tensor, value: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(q_t K_{<=t}') V_{<=t} and K'V, both on top of the sum `before`; chunks of tokens, O(N d k).

    In a chunk o = q S + tril(q k') v, with S the K'V of all chunks before it. Queries beyond the last key see all keys.
    """
    m, n = query.shape[-2], key.shape[-2]
    size = max(1, min(TOKENS, n))
    q = query.narrow(-2, 0, n)
    chunks = -(-n // size)
    q, k, v = (TF.pad(x, (0, 0, 0, -n % size)).unflatten(-2, (chunks, size)) for x in (q, key, value))
    sums = k.mT @ v  # (..., chunks, d, k)
    first = sums.new_zeros(*sums.shape[:-3], 1, *sums.shape[-2:])
    first = first if before is None else before.unsqueeze(-3).expand_as(first)
    sums = torch.cat([first, sums], -3).cumsum(-3)
    out = q @ sums.narrow(-3, 0, sums.shape[-3] - 1) + (q @ k.mT).tril() @ v
    out, total = out.flatten(-3, -2).narrow(-2, 0, n), sums.select(-3, -1)
    return out if m == n else torch.cat([out, query.narrow(-2, n, m - n) @ total], -2), total


def linear_per_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """(Q K' * counts) V in chunks over M, so that no M x N tensor is held at once."""
    m, n = query.shape[-2], key.shape[-2]
    batch = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
    step = max(1, CHUNK // max(1, batch * n))
    outs = []
    for start in starts(m, step):
        size = min(step, m - start)
        rows = query.narrow(-2, start, size)
        counts = masks.as_weight(mask.narrow(-2, start, size), query.dtype)
        outs.append(((rows @ key.mT) * counts) @ value)
    return torch.cat(outs, -2) if outs else query @ (key.mT @ value)
