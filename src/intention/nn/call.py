"""From what modules hold to one call of `functional`: an alpha that may be computed, a scale that may be named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from intention._call import masks_and_weights as masks
from intention._covariance import Covariance
from intention.functional import intention
from intention.nn.alpha import Alpha, alpha_of_call
from intention.nn.scaling import Scale, factor_of, scale_queries
from intention.solve.torch_state import unobserved

__all__ = ["shared_mask", "solve", "unit_vectors"]


def solve(
    call: Callable[..., Tensor],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    *,
    alpha: Alpha,
    scale: Scale,
    covariance: Covariance,
    is_causal: bool = False,
    read: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """`call` is F.intention or F.sigma_intention.

    `read`: the values that an alpha or a covariance of the user's own reads, where `value` stands in their place.
    """
    m, n, after = query.shape[-2], key.shape[-2], None
    dtype = query.dtype
    if not key.dtype == value.dtype == dtype:
        dtype = torch.promote_types(torch.promote_types(dtype, key.dtype), value.dtype)
    counted = masks.count(attn_mask, options.get("weight"), is_causal, n, key.dtype)
    alpha = alpha_of_call(alpha, covariance, key, value if read is None else read, counted, is_causal)
    if isinstance(scale, str):
        seen = masks.number_seen(counted, is_causal, m, n, query.device)
        if call is intention and not options.get("intercept"):  # queries that are rounded far from 0 move the answer
            after, scale = factor_of(query, scale, seen, alpha, covariance), None
            query = query if query.dtype == torch.float64 else query.float()
        else:
            query, scale = scale_queries(query, scale, seen, alpha, covariance), None
    if read is not None and callable(covariance):
        own, shown = covariance, read
        covariance = lambda key, value, weight: own(key, shown.to(key.dtype), weight)  # noqa: E731
    out = call(
        query, key, value, attn_mask, is_causal=is_causal, scale=scale, alpha=alpha, covariance=covariance, **options
    )
    if after is None:
        return out.to(dtype)
    if unobserved() and (not isinstance(after, Tensor) or after.dtype == out.dtype):
        return out.mul_(after).to(dtype)  # fresh memory takes longer than the product
    return (out * after).to(dtype)


def unit_vectors(key: Tensor, origin: bool = False) -> Tensor:
    """(d, d), and one more row for the origin."""
    d = key.shape[-1]
    return torch.eye(d + origin, d, dtype=key.dtype, device=key.device)


def shared_mask(attn_mask: Tensor | None, is_causal: bool) -> Tensor | None:
    """(..., 1, N): one w serves all queries only if they see the same points."""
    if is_causal or (attn_mask is not None and not masks.same_for_all_queries(attn_mask)):
        got = "is_causal=True" if is_causal or attn_mask is None else f"a mask {tuple(attn_mask.shape)}"
        raise ValueError(
            f"w, a kernel or constraints need one fit for all queries, got {got}; use a mask (..., 1, N), or a head "
            "without embed_w, return_w, kernel and constraints"
        )
    return attn_mask if attn_mask is None or attn_mask.dim() < 2 else attn_mask[..., :1, :]
