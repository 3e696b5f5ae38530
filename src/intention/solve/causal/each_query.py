"""One fit per query: what every query sees is its own. Exact, and O(M) times the work of one fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from intention.solve.ladder import Report
from intention.solve.problem import Problem

# Elements that a chunk of query-by-query solves may hold at once (64 MiB in float32).
CHUNK = 1 << 24

Solve = Callable[[Problem], tuple[Tensor, Report]]
# (first query, queries, keys) -> how much the keys count (B, queries, keys); None: as causality says
Taken = Callable[[int, int, int], Tensor | None]


def each_query(base: Problem, taken: Taken, causal: bool, solve: Solve) -> tuple[Tensor, Report]:
    """Answers (B, M, ...), in chunks over M, and the worst report over the queries of each element.

    causal: query t sees keys <= t only, so that `taken` is asked for those alone.
    """
    batch, m, d = base.query.shape
    n, alpha = base.key.shape[1], base.alpha
    width = max(d, base.value.shape[-1])
    step = max(1, CHUNK // (batch * max(n, d) * width))
    outs, reports = [], []
    for start in starts(m, step):
        rows = min(step, m - start)
        seen = min(start + rows, n) if causal else n
        counted = taken(start, rows, seen)
        if counted is None:
            shown = triangle(rows, seen, base.key.device, start)
            counted = shown.to(base.key.dtype).expand(batch, rows, seen)
        if base.weight is not None:
            counted = counted * base.weight.narrow(1, 0, seen).unsqueeze(1)
        query = base.query.narrow(1, start, rows).reshape(batch * rows, 1, d)
        points = base.key.narrow(1, 0, seen), base.value.narrow(1, 0, seen), counted.reshape(batch * rows, seen)
        own = alpha.narrow(1, start, rows).flatten() if alpha.dim() > 1 else alpha.repeat_interleave(rows, 0)
        gain = None if base.gain is None else base.gain.repeat_interleave(rows, 0)
        out, report = solve(Problem(query, *points, own, gain))
        outs.append(out.reshape(batch, rows, -1))
        reports.append(Report(*(x.reshape(batch, rows).amax(1) for x in report)))
    return torch.cat(outs, 1), Report(*(torch.stack(x).amax(0) for x in zip(*reports, strict=True)))


def triangle(m: int, n: int, device: torch.device, start: int | Tensor = 0) -> Tensor:
    """(m, n) bool: query start + t sees keys <= start + t (top-left aligned); of starts (batch,) (batch, 1, m, n)."""
    start = start.view(-1, 1, 1, 1) if isinstance(start, Tensor) else start
    return torch.arange(n, device=device) <= start + torch.arange(m, device=device).unsqueeze(-1)


def starts(m: int, step: int) -> Iterable[int]:
    """Where chunks of M queries start. Most calls are one chunk, and to count those would fix M in a compiled graph."""
    return (0,) if m <= step else range(0, m, step)
