"""One fit per query: causal fits, and masks that differ between queries. Exact, and O(M) times the work of one fit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from intention import checks, layout, masks
from intention.layout import Inputs
from intention.prepare import problem_of
from intention.solve.ladder import Report
from intention.solve.problem import Problem

# Elements that a chunk of query-by-query solves may hold at once (64 MiB in float32).
CHUNK = 1 << 24


def per_query(
    inputs: Inputs, mask: Tensor | None, solve: Callable[[Problem, bool], tuple[Tensor, Report]]
) -> tuple[Tensor, Report]:
    """One fit per query, in chunks over M. `mask` None means causal: query t sees keys <= t."""
    whole = layout.context_lead(inputs)
    if mask is not None:
        whole = checks.leading(context=whole, mask=tuple(mask.shape[:-2]))
    m, n = inputs.query.shape[-2], inputs.key.shape[-2]
    flat, restore = layout.flatten(inputs._replace(key=inputs.key.expand(*whole, *inputs.key.shape[-2:])), fold=False)
    base, _ = problem_of(flat)
    batch, _, d = base.query.shape
    if mask is not None:
        lead = restore(base.query).shape[:-2]
        mask = mask.expand(*lead, m, n)
    width = max(d, base.value.shape[-1])
    step = max(1, CHUNK // (batch * max(n, d) * width))
    outs, reports = [], []
    for start in _starts(m, step):
        rows = min(step, m - start)
        seen = n if mask is not None else min(start + rows, n)
        if mask is None:
            taken = masks.causal(rows, seen, base.key.device, start).to(base.key.dtype).expand(batch, rows, seen)
        else:
            taken = masks.as_weight(mask.narrow(-2, start, rows), base.key.dtype).reshape(batch, rows, n)
        if base.weight is not None:
            taken = taken * base.weight.narrow(1, 0, seen).unsqueeze(1)
        part = Problem(
            base.query.narrow(1, start, rows).reshape(batch * rows, 1, d),
            base.key.narrow(1, 0, seen),
            base.value.narrow(1, 0, seen),
            taken.reshape(batch * rows, seen),
            base.alpha.repeat_interleave(rows, 0),
            None if base.gain is None else base.gain.repeat_interleave(rows, 0),
        )
        out, report = solve(part, False)
        outs.append(out.reshape(batch, rows, -1))
        reports.append(Report(*(x.reshape(batch, rows).amax(1) for x in report)))
    joined = Report(*(torch.stack(x).amax(0) for x in zip(*reports, strict=True)))
    lead = restore(base.query).shape[:-2]
    return restore(torch.cat(outs, 1)), Report(*(x.reshape(lead) for x in joined))


def linear_per_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """(Q K' * counts) V in chunks over M, so that no M x N tensor is held at once."""
    m, n = query.shape[-2], key.shape[-2]
    batch = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
    step = max(1, CHUNK // max(1, batch * n))
    outs = []
    for start in _starts(m, step):
        size = min(step, m - start)
        rows = query.narrow(-2, start, size)
        if mask is None:
            counts = masks.causal(size, n, query.device, start).to(query.dtype)
        else:
            counts = masks.as_weight(mask.narrow(-2, start, size), query.dtype)
        outs.append(((rows @ key.mT) * counts) @ value)
    return torch.cat(outs, -2) if outs else query @ (key.mT @ value)


def _starts(m: int, step: int) -> Iterable[int]:
    """Where chunks of M queries start. Most calls are one chunk, and to count those would fix M in a compiled graph."""
    return (0,) if m <= step else range(0, m, step)
