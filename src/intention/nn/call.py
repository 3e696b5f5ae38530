"""From what modules hold to one call of `functional`: an alpha that may be computed, a scale that may be named."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention import masks
from intention.covariance import Covariance
from intention.nn.alpha import alpha_of_call
from intention.nn.scaling import Scale, scale_queries


def solve(
    call: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    alpha: Any,
    scale: Scale,
    covariance: Covariance,
    is_causal: bool = False,
    read: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`call` is F.intention or F.sigma_intention; `read` are the values for an alpha that reads them, if others."""
    dtype, weight = query.dtype, options.get("weight")
    counted = masks.count(attn_mask, weight, is_causal, key.shape[-2], key.dtype)
    alpha = alpha_of_call(alpha, covariance, key, value if read is None else read, counted, is_causal)
    if isinstance(scale, str):
        seen = seen_by(query, key, attn_mask, weight, is_causal)
        query, scale = scale_queries(query, scale, seen, alpha, covariance), None
    out = call(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, alpha=alpha, covariance=covariance, **options
    )
    return out.to(torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype))


def seen_by(
    query: Tensor, key: Tensor, attn_mask: Tensor | None, weight: Tensor | None, is_causal: bool
) -> int | Tensor:
    """How many points each query sees: a number, or (..., M or 1, 1)."""
    m, n = query.shape[-2], key.shape[-2]
    return masks.number_seen(masks.count(attn_mask, weight, is_causal, n, key.dtype), is_causal, m, n, query.device)


def unit_vectors(key: Tensor, origin: bool = False) -> Tensor:
    """(d, d), and one more row for the origin."""
    d = key.shape[-1]
    return torch.eye(d + origin, d, dtype=key.dtype, device=key.device)


def need_shared(attn_mask: Tensor | None, is_causal: bool) -> None:
    """One w serves all queries only if they see the same points."""
    if is_causal or (attn_mask is not None and not masks.same_for_all_queries(attn_mask)):
        got = "is_causal=True" if is_causal else f"a mask {tuple(attn_mask.shape)}"  # type: ignore[union-attr]
        raise ValueError(
            f"w, a kernel or constraints need one fit for all queries, got {got}; use a mask (..., 1, N), or a head "
            "without embed_w, return_w, kernel and constraints"
        )


def mean_per_query(x: Tensor, mask: Tensor | None, weight: Tensor | None, m: int) -> Tensor:
    """(..., M, f): for each query the mean of the rows it sees, each as much as it counts; no mask means causal."""
    taken = masks.as_weight(masks.causal(m, x.shape[-2], x.device) if mask is None else mask, x.dtype)
    taken = taken if weight is None else taken * weight.unsqueeze(-2)
    total = taken.sum(-1, keepdim=True)
    return (taken / torch.where(total > 0, total, 1.0)) @ x
