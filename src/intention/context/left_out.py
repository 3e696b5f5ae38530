"""Leave-one-out the long way: a fit for each of the few points whose closed form has lost its digits."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks

HELD = 1 << 22  # entries of copied keys, or of the matrices made of them, held at once


def refit(context: Any, out: Tensor, risky: Tensor) -> Tensor:
    """The errors `out` (..., N, k), those of the points `risky` (..., N) from fits that count them 0."""
    lead = checks.leading(fit=out.shape[:-2], alpha=context.alpha.shape)
    key, value, weight = context._points
    if context.features is not None:
        key = context._wide[0]  # features belong to leading dimensions that are flattened here
    n = key.shape[-2]

    def flat(x: Tensor, *own: int) -> Tensor:
        return x.expand((*lead, *own)).reshape(-1, *own)

    key, value, out = (flat(x, *x.shape[-2:]) for x in (key, value, out))
    weight = flat(torch.ones_like(key[0, :, 0]) if weight is None else weight, n)
    alpha = flat(context.alpha)
    element, point = flat(risky, n).nonzero(as_tuple=True)
    errors = []
    step = max(1, HELD // (n * max(n, key.shape[-1])))
    for start in range(0, len(element), step):
        at, i = element[start : start + step], point[start : start + step]
        kept = torch.ones(len(at), n, dtype=weight.dtype, device=weight.device).scatter(1, i[:, None], 0.0)
        rest: dict[str, Any] = {"key": key[at], "value": value[at], "weight": weight[at] * kept, "alpha": alpha[at]}
        rest |= {"kernel": None if context.kernel is None else context.kernel.take(lead, at), "features": None}
        without = dataclasses.replace(context, **rest, stats=None, dtype=torch.float64)
        errors.append(value[at, i].double() - without(key[at, i].unsqueeze(-2)).squeeze(-2))
    return out.index_put((element, point), torch.cat(errors)).reshape(*lead, *out.shape[-2:])
