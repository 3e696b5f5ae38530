"""The softmax forms: what sigma-Intention hands to torch's fused attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention import checks, layout, masks
from intention.layout import Inputs
from intention.masks import Counted
from intention.prepare import is_dual, problem_of, unflatten_report
from intention.solve.doors import gradient_free
from intention.solve.ladder import DUAL, PRIMAL, Report
from intention.solve.rows import Points
from intention.solve.sigma import sigma
from intention.solve.transform import transform


def fused(inputs: Inputs, dtype: torch.dtype) -> tuple[Tensor, Report] | None:
    """The whole answer in one compiled kernel, or None: an element must climb, a call is transformed, ..."""
    if inputs.weight is not None or is_dual("auto", inputs.key):
        return None
    if dtype != inputs.key.dtype or torch.is_autocast_enabled("cpu"):  # the softmax is one in half precision
        return None
    flat, restore = layout.flatten(inputs)
    found = sigma(*problem_of(flat))
    return None if found is None else (restore(found[0]), unflatten_report(found[1], False, inputs))


def transform_shared(inputs: Inputs, solver: str) -> tuple[Tensor, Tensor, Report]:
    """(queries, keys, report) for the softmax: Q Sigma^-1 and K, or Q and G^-1 K where the dual Gram is smaller.

    Both give the scores Q Sigma^-1 K'. With float weights the first is used at any shape: it has a derivative at w = 0.
    """
    dual = is_dual(solver, inputs.key) and inputs.weight is None
    if dual:
        # scores Q K'(c KK' + alpha I)^-1 = Q (G^-1 K)': the transform acts on the keys
        flat, restore = layout.flatten(inputs._replace(query=inputs.key))
    else:
        flat, restore = layout.flatten(inputs)
    problem, trusted = problem_of(flat)
    if dual:
        points = Points(problem.key.mT, problem.key.mT, None, problem.alpha, problem.gain)
        moved, packed = transform(points, transform_solver(solver), trusted)
        report = unflatten_report(packed, True, inputs)
        report = report._replace(route=torch.where(report.route == PRIMAL, DUAL, report.route))
        return inputs.query, restore(moved.mT), report
    points = Points(problem.query, problem.key, problem.weight, problem.alpha, problem.gain)
    moved, packed = transform(points, transform_solver(solver), trusted)
    return restore(moved), inputs.key, unflatten_report(packed, False, inputs)


def transform_solver(solver: str) -> str:
    return "cholesky" if solver in ("primal", "dual") else solver


def centred_key(inputs: Inputs, keep: Tensor | None) -> Tensor:
    """Keys minus their weighted mean. Scores change by a constant per query only, which a softmax does not see."""
    key, weight = inputs.key, inputs.weight
    if weight is None:
        for _ in range(2):
            key = key - key.mean(-2, keepdim=True)
        return key
    total = weight.sum(-1, keepdim=True)
    share = (weight / torch.where(total > 0, total, 1.0)).unsqueeze(-2)
    for _ in range(2):  # the second pass removes the rounding of the first mean
        key = key - share @ key
    return masks.fill(key, keep)


def counted_softmax(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    counted: Counted,
    dropout_p: float,
    is_causal: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Softmax attention (scale 1) in which points count as `counted` says, in the dtype of the inputs if it can be."""
    mask, is_causal = masks.score_mask(counted, is_causal, query.shape[-2], key.shape[-2], query.device)
    watched = counted.weight is not None and not gradient_free(counted.weight)
    if not watched:  # half precision has no room for the 1e-30 that a weight of 0 counts
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    out = softmax_attention(query, key, value, mask, dropout_p, is_causal, 1.0, False)
    if watched and counted.weight is not None:
        out = torch.where((counted.weight > 0).any(-1).unsqueeze(-1).unsqueeze(-1), out, 0.0)
    return out


def softmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    gqa: bool,
) -> Tensor:
    """F.scaled_dot_product_attention on 4-D tensors, where it is fused; other leading dimensions are reshaped."""
    heads = 1 if gqa else 0  # the head dimension is left to torch
    lead = checks.leading(query=query.shape[: -2 - heads], key=key.shape[: -2 - heads], value=value.shape[: -2 - heads])
    if mask is not None and not gqa:
        lead = checks.leading(context=lead, mask=tuple(mask.shape[:-2]))
    rows = (math.prod(lead),) if gqa else (math.prod(lead[:-1]), lead[-1] if lead else 1)

    def four(x: Tensor) -> Tensor:
        own = x.shape[-2 - heads :]
        if x.shape != (*lead, *own):
            x = x.expand(*lead, *own)
        return x if x.dim() == 4 else x.reshape(*rows, *own)

    if mask is not None and mask.dim() > 2:
        if gqa:
            mask = mask.expand(*lead, *mask.shape[-3:]).reshape(*rows, *mask.shape[-3:])
        else:
            mask = mask.expand(*lead, *mask.shape[-2:]).reshape(*rows, *mask.shape[-2:])
    elif mask is not None and mask.dim() < 2:
        mask = mask.expand(1, key.shape[-2])
    q, k, v = four(query), four(key), four(value)
    out = TF.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=gqa)
    if out.shape[:-2] == query.shape[:-2]:
        return out
    return out.reshape(*lead, *out.shape[len(rows) :])
