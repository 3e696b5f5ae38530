"""Masks, weights and dropout, all read as one thing: how much each context point counts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention import checks


class Counted(NamedTuple):
    """How points count: `keep` and `weight` (..., N) for all queries, `per_query` (..., M, N) for each its own."""

    keep: Tensor | None  # bool: False = the point is not there, whatever it holds
    weight: Tensor | None  # >= 0
    per_query: Tensor | None  # bool, or log-weights


def same_for_all_queries(mask: Tensor) -> bool:
    """Decided by shape and stride, never by content."""
    return mask.dim() < 2 or mask.shape[-2] == 1 or mask.stride(-2) == 0


def count(mask: Tensor | None, weight: Tensor | None, is_causal: bool, dtype: torch.dtype) -> Counted:
    """Read an attn_mask of F.scaled_dot_product_attention and sample weights."""
    if weight is not None:
        weight = weight.to(dtype)
    if mask is None:
        return Counted(None, weight, None)
    if not same_for_all_queries(mask):
        if is_causal:
            raise ValueError(
                f"is_causal combines with a mask that is equal for all queries (..., 1, N), got {tuple(mask.shape)}; "
                "put the causal triangle into the mask and pass is_causal=False"
            )
        return Counted(None, weight, mask)
    shared = mask if mask.dim() < 2 else mask.select(-2, 0)
    if shared.dtype == torch.bool:
        return Counted(shared, weight, None)
    factor = shared.to(dtype).exp()
    return Counted(shared > -torch.inf, factor if weight is None else weight * factor, None)


def drop_points(weight: Tensor | None, lead: tuple[int, ...], like: Tensor, p: float) -> Tensor:
    """Leave each context point out with probability p; the rest count 1 / (1 - p)."""
    checks.probability(p)
    kept = torch.empty(*lead, like.shape[-2], dtype=like.dtype, device=like.device).bernoulli_(1 - p) / (1 - p)
    return kept if weight is None else weight * kept


def fill(x: Tensor, keep: Tensor | None) -> Tensor:
    """Zeros where a point is masked, so that what it holds (NaN included) cannot matter."""
    return x if keep is None else torch.where(keep.unsqueeze(-1), x, 0.0)


def seen_by_any(mask: Tensor) -> Tensor:
    """(..., N): points that at least one query sees."""
    return (mask if mask.dtype == torch.bool else mask > -torch.inf).any(-2)


def as_weight(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask.to(dtype) if mask.dtype == torch.bool else mask.to(dtype).exp()


def causal(m: int, n: int, device: torch.device, start: int = 0) -> Tensor:
    """(m, n) bool: query start + t sees keys <= start + t (top-left aligned)."""
    rows = torch.arange(start, start + m, device=device)
    return torch.arange(n, device=device) <= rows.unsqueeze(-1)


def score_mask(counted: Counted, is_causal: bool, m: int, n: int, device: torch.device) -> tuple[Tensor | None, bool]:
    """The attn_mask and is_causal that make a softmax count points the same way."""
    if counted.per_query is not None:
        mask = counted.per_query
        if counted.weight is not None:
            logs = _log(counted.weight).unsqueeze(-2)
            mask = logs + (torch.where(mask, 0.0, -torch.inf).to(logs) if mask.dtype == torch.bool else mask)
        return mask, False
    mask = None if counted.keep is None else counted.keep.unsqueeze(-2)
    if counted.weight is not None:
        logs = _log(counted.weight).unsqueeze(-2)
        mask = logs if mask is None else torch.where(mask, logs, -torch.inf)
    if mask is None or not is_causal:
        return mask, is_causal
    triangle = causal(m, n, device)
    return (mask & triangle, False) if mask.dtype == torch.bool else (torch.where(triangle, mask, -torch.inf), False)


def _log(weight: Tensor) -> Tensor:
    """log(w). Where a gradient is wanted a weight of 0 counts 1e-30: its own derivative then stays finite and right."""
    return torch.log(weight + 1e-30) if weight.requires_grad else weight.log()
