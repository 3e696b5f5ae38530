"""A slow reference for every option of the functional calls: one query at a time, by the paper's formulas."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import naive


def broadcast(query: Tensor, key: Tensor, value: Tensor, gqa: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    if gqa:
        groups = query.shape[-3] // key.shape[-3]
        key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2])
    return tuple(x.expand(*lead, *x.shape[-2:]) for x in (query, key, value))  # type: ignore[return-value]


def counts(query: Tensor, key: Tensor, mask: Tensor | None, weight: Tensor | None, causal: bool) -> Tensor:
    """(..., M, N): how much each point counts for each query."""
    m, n = query.shape[-2], key.shape[-2]
    count = torch.ones(*query.shape[:-2], m, n, dtype=query.dtype)
    if mask is not None:
        count = count * (mask.to(query.dtype) if mask.dtype == torch.bool else mask.exp())
    if weight is not None:
        count = count * weight[..., None, :]
    if causal:
        count = count * torch.ones(m, n, dtype=query.dtype).tril()
    return count


def _per_batch(alpha: Tensor | float, lead: torch.Size) -> Tensor | float:
    return alpha.expand(lead) if isinstance(alpha, Tensor) else alpha


def covariance_of(key: Tensor, alpha: Tensor | float, count: Tensor, kind: str) -> Tensor:
    return (naive.sigma if kind == "ridge" else naive.convex)(key, alpha, count)


def centre(x: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
    mean = (count[..., None] * x).sum(-2, keepdim=True) / count.sum(-1)[..., None, None].clamp_min(1e-300)
    return x - mean, mean


def intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    causal: bool = False,
    alpha: Tensor | float = 1.0,
    scale: float = 1.0,
    intercept: bool = False,
    covariance: str = "ridge",
    gqa: bool = False,
) -> Tensor:
    query, key, value = broadcast(query, key, value, gqa)
    count = counts(query, key, mask, weight, causal)
    alpha = _per_batch(alpha, query.shape[:-2])
    rows = []
    for t in range(query.shape[-2]):
        row, k, v, offset = query[..., t : t + 1, :], key, value, 0.0
        if intercept:
            k, mean_key = centre(key, count[..., t, :])
            v, offset = centre(value, count[..., t, :])
            row = row - mean_key
        cov = covariance_of(k, alpha, count[..., t, :], covariance)
        rows.append(scale * naive.intention(row, k, v, cov, count[..., t, :]) + offset)
    return torch.cat(rows, -2)


def sigma_intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    weight: Tensor | None = None,
    causal: bool = False,
    alpha: Tensor | float = 1.0,
    scale: float = 1.0,
    intercept: bool = False,
    covariance: str = "ridge",
    gqa: bool = False,
) -> Tensor:
    query, key, value = broadcast(query, key, value, gqa)
    count = counts(query, key, mask, weight, causal)
    alpha = _per_batch(alpha, query.shape[:-2])
    rows = []
    for t in range(query.shape[-2]):
        w = count[..., t, :]
        k = centre(key, w)[0] if intercept else key
        cov = covariance_of(k, alpha, w, covariance)
        # around a constant near the answer: for one point that counts 1e-6, the slope of odds / sum is off by 1e-10
        offset = centre(value, w)[1].detach()
        rows.append(naive.sigma_intention(query[..., t : t + 1, :], key, value - offset, cov, w, scale) + offset)
    return torch.cat(rows, -2)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    gqa: bool = False,
) -> Tensor:
    query, key, value = broadcast(query, key, value, gqa)
    return scale * ((query @ key.mT) * counts(query, key, mask, None, causal)) @ value


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float = 1.0,
    gqa: bool = False,
) -> Tensor:
    query, key, value = broadcast(query, key, value, gqa)
    odds = (query @ key.mT * scale).exp() * counts(query, key, mask, None, causal)
    return odds / odds.sum(-1, keepdim=True) @ value
