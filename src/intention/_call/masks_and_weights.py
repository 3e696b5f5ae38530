"""Masks, weights and dropout, all read as one thing: how much each context point counts."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.causal.each_query import triangle
from intention.solve.torch_state import eager, gradient_free

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


class Counted(NamedTuple):
    """How points count: `keep`, `weight`, `log` (..., N) for all queries, `per_query` (..., M, N) for each its own."""

    keep: Tensor | None  # bool: False = the point is not there, whatever it holds
    weight: Tensor | None  # >= 0
    # log-weights, counted besides `weight`; kept as logs for the softmax, which needs no exp of them
    log: Tensor | None
    per_query: Tensor | None  # bool, or log-weights

    def in_sigma(self) -> Tensor | None:
        """The weights that enter Sigma."""
        if self.log is None:
            return self.weight
        return self.log.exp() if self.weight is None else self.weight * self.log.exp()

    def total(self, dtype: torch.dtype) -> Tensor | None:
        """(..., N): weights and mask as one weight."""
        weight = self.in_sigma()
        if self.keep is None:
            return weight
        return self.keep.to(dtype) if weight is None else weight * self.keep

    def seen(self) -> Tensor | None:
        """(..., N): points that at least one query sees."""
        if self.per_query is None:
            return self.keep
        mask = self.per_query
        return (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-2)


def same_for_all_queries(mask: Tensor) -> bool:
    """Decided by shape and stride, never by content."""
    return mask.dim() < 2 or mask.shape[-2] == 1 or mask.stride(-2) == 0


def same_points(mask: object, query: object) -> Tensor | None:
    """Which points (..., N) there are for all queries (..., M, d); None where a mask says more, or one is wrong."""
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or not same_for_all_queries(mask):
        return None
    if mask.dim() < 2:
        return mask
    if not isinstance(query, Tensor) or query.dim() < 2:
        return None
    return mask.select(-2, 0) if mask.shape[-2] in (1, query.shape[-2]) else None


def with_own_rows(mask: Tensor) -> Tensor:
    """A leaf that repeats one row (stride 0) is as many variables as it has entries: each row has its own gradient."""
    if mask.requires_grad and mask.is_leaf and mask.dim() > 1 and mask.shape[-2] > 1 and mask.stride(-2) == 0:
        return mask.contiguous()
    return mask


def count(mask: Tensor | None, weight: Tensor | None, is_causal: bool, n: int, dtype: torch.dtype) -> Counted:
    """Read an attn_mask of F.scaled_dot_product_attention and sample weights."""
    if weight is not None:
        weight = weight.to(dtype)
    if mask is None:
        return Counted(None, weight, None, None)
    mask = mask.expand(*mask.shape[:-1], n)
    if not same_for_all_queries(mask):
        if is_causal:
            raise ValueError(
                f"is_causal combines with a mask that is equal for all queries (..., 1, N), got {tuple(mask.shape)}; "
                "put the causal triangle into the mask and pass is_causal=False"
            )
        return Counted(None, weight, None, mask)
    shared = mask if mask.dim() < 2 else mask.select(-2, 0)
    if shared.dtype == torch.bool:
        return Counted(shared, weight, None, None)
    return Counted(shared > -torch.inf, weight, shared.to(dtype), None)


def drop_points(weight: Tensor | None, lead: tuple[int, ...], like: Tensor, p: float) -> Tensor:
    """Leave each context point out with probability p; the rest count 1 / (1 - p)."""
    kept = torch.empty(*lead, like.shape[-2], dtype=like.dtype, device=like.device).bernoulli_(1 - p) / (1 - p)
    return kept if weight is None else weight * kept


def fill(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zeros where a point is masked, so that what it holds (NaN included) cannot matter."""
    if keep is None:
        return x
    keep = keep.unsqueeze(-1)
    if type(x) is Tensor and x.is_cpu and x.dtype in _BITS and eager() and gradient_free(x):
        bits = _BITS[x.dtype]  # a quarter of the time of torch.where, which looks at every entry of the mask it repeats
        return (x.view(bits) & -keep.to(bits)).view(x.dtype)
    return torch.where(keep, x, 0.0)


def as_weight(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.to(dtype) if mask.dtype == torch.bool else mask.to(dtype).exp()


def number_seen(counted: Counted, is_causal: bool, m: int, n: int, device: torch.device) -> int | Tensor:
    """How many points count for a query, with a weight above 0: a number, or (..., M or 1, 1)."""
    there = counted.keep if counted.log is None else _above_zero(counted.log)
    if counted.weight is not None:
        there = counted.weight > 0 if there is None else there & (counted.weight > 0)
    if counted.per_query is not None:
        seen = _above_zero(counted.per_query)
        return (seen if there is None else seen & there.unsqueeze(-2)).sum(-1, keepdim=True)
    if not is_causal:
        return n if there is None else there.sum(-1, keepdim=True).unsqueeze(-1)
    last = torch.arange(1, m + 1, device=device).clamp_max(n)  # query t sees that many of the first keys
    if there is None or n == 0:
        return last.unsqueeze(-1)
    return there.cumsum(-1)[..., last - 1].unsqueeze(-1)


def score_mask(counted: Counted, is_causal: bool, m: int, n: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """The attn_mask and is_causal that make a softmax count points the same way."""
    logs = counted.log
    if counted.weight is not None:
        logs = counted.weight.log() if logs is None else logs + counted.weight.log()
    mask = counted.per_query
    if mask is None and counted.keep is not None and counted.log is None:
        mask = counted.keep.unsqueeze(-2)
    if logs is not None:
        mask = both(mask, logs.unsqueeze(-2))
    if mask is None or not is_causal:
        return mask, is_causal
    return both(mask, triangle(m, n, device)), False


def both(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Two masks as one: bool, or log-weights."""
    if a is None or b is None:
        return b if a is None else a
    if a.dtype == b.dtype == torch.bool:
        return a & b
    if a.dtype == torch.bool:
        return torch.where(a, b, -torch.inf)
    return torch.where(b, a, -torch.inf) if b.dtype == torch.bool else a.to(b.dtype) + b


def _above_zero(mask: Tensor) -> Tensor:
    """Where exp(mask) is not 0: masks say "not there" by -inf, by the lowest number, or by -1e9."""
    return mask if mask.dtype == torch.bool else mask > math.log(torch.finfo(mask.dtype).tiny)
