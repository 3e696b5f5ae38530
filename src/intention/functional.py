"""Attention, linear attention, Intention and sigma-Intention, called like F.scaled_dot_product_attention.

Shapes: query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); leading dimensions broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention import checks, layout, masks
from intention.layout import Inputs
from intention.masks import Counted
from intention.solve.ladder import DUAL, PRIMAL, ROUTES, Report, unpack
from intention.solve.problem import Plan, Problem
from intention.solve.ridge import ridge
from intention.solve.transform import Points, transform

__all__ = ["ROUTES", "Info", "attention", "intention", "linear_attention", "sigma_intention"]

# Elements that a chunk of query-by-query solves may hold at once (64 MiB in float32).
CHUNK = 1 << 24


class Info(NamedTuple):
    """What `return_info=True` tells, per batch element (leading dimensions of the context).

    `route` indexes `ROUTES`; `condition` is a lower bound of cond(Sigma); `error` estimates the relative error of the
    prediction (for sigma_intention: of the scores). With a mask that differs between queries: the worst over queries.
    """

    route: Tensor
    condition: Tensor
    error: Tensor


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q K' scale) V: F.scaled_dot_product_attention for any number of leading dimensions.

    >>> q, k, v = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    >>> attention(q, k, v).shape
    torch.Size([2, 7, 5])
    """
    _check_call(query, key, value, attn_mask, enable_gqa)
    counted = masks.count(attn_mask, None, is_causal, query.dtype)
    seen = counted.keep if counted.per_query is None else masks.seen_by_any(counted.per_query)
    mask = attn_mask
    if is_causal and mask is not None:
        # a shared mask keeps its own dtype semantics: log-weights are added to scores, not exponentiated first
        triangle = masks.causal(query.shape[-2], key.shape[-2], query.device)
        mask = mask & triangle if mask.dtype == torch.bool else torch.where(triangle, mask, -torch.inf)
        is_causal = False
    key, value = masks.fill(key, seen), masks.fill(value, seen)
    return _softmax_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


def linear_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """(Q K') V scale, in the cheaper order. Masks and dropout count points as in `intention`.

    >>> q, k, v = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    >>> torch.allclose(linear_attention(q, k, v), q @ (k.mT @ v), atol=1e-5)
    True
    """
    inputs, counted, unsplit, dtype = _prepare(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, None, None, "ridge", "auto"
    )
    query, key, value = inputs.query, inputs.key, inputs.value
    if inputs.weight is not None:
        value = value * inputs.weight.unsqueeze(-1)
    if is_causal or counted.per_query is not None:
        out = _linear_per_query(query, key, value, counted.per_query)
    else:
        out = query @ (key.mT @ value)
    out = out if scale is None else out * scale
    return unsplit(out).to(dtype)


def intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    alpha: float | Tensor | None = None,
    weight: Tensor | None = None,
    intercept: bool = False,
    covariance: str = "ridge",
    solver: str = "auto",
    return_info: bool = False,
) -> Tensor | tuple[Tensor, Info]:
    """Regularised least squares, fitted on (key, value) and evaluated at query: Q (K'WK + alpha I)^-1 K'WV.

    >>> q, k = torch.randn(2, 7, 3), torch.randn(2, 11, 3)
    >>> v = k @ torch.tensor([[1.0], [2.0], [3.0]])
    >>> out = intention(q, k, v, alpha=0)
    >>> torch.allclose(out, q @ torch.tensor([[1.0], [2.0], [3.0]]), atol=1e-4)
    True

    Args:
        query: (..., M, d).
        key: (..., N, d).
        value: (..., N, k).
        attn_mask: broadcasts to (..., M, N). Bool: True = take part. Float: log-weights (-inf = masked). A mask equal for
            all queries (size 1 or stride 0 in M) costs nothing extra; any other is solved query by query, O(M (N d^2 + d^3)).
        dropout_p: each context point is left out with this probability, the rest count 1 / (1 - p). Gate it on training.
        is_causal: the fit of query t sees keys <= t only, top-left aligned. Solved query by query.
        scale: multiplies the map Q Sigma^-1 K'; default 1.
        enable_gqa: fewer key and value heads than query heads, at dimension -3.
        alpha: number >= 0, or a tensor that broadcasts to the leading dimensions (one per head). Default 1 ("convex": 0.5).
            0 is the minimum-norm fit.
        weight: (..., N) sample weights >= 0. 0 leaves a point out.
        intercept: add an unregularised constant feature.
        covariance: "ridge" is K'K + alpha I, "convex" is (1 - alpha) K'K + alpha I with alpha in [0, 1].
        solver: "auto" picks the smaller Gram and climbs the accuracy ladder. "primal", "dual", "qr", "pinv" (minimum norm,
            tolerance of the dtype) and "float64" do just that, never read the host, and give NaN where they fail.
        return_info: also return `Info`.

    Returns:
        (..., M, k) in the dtype of the inputs, or a pair with `Info`.

    Raises:
        ValueError, TypeError: naming what came and what was wanted.

    Warns:
        AccuracyWarning: the estimated relative error is above 1e-3 after every route.

    NaN or inf in keys (or weights) makes the outputs of that batch element NaN; in values, the columns they touch; in a
    query, its row. Rows that a mask removes for all queries may hold anything.
    """
    scale = 1.0 if scale is None else float(scale)
    if attn_mask is None and weight is None and not (dropout_p or is_causal or enable_gqa or return_info):
        problem = _plain_problem(query, key, value, alpha, covariance, solver)
        if problem is not None:
            out, _ = ridge(problem, Plan(_is_dual(solver, key), intercept, scale), solver, trusted=True)
            return out
    inputs, counted, unsplit, dtype = _prepare(
        query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, alpha, weight, covariance, solver
    )
    if 0 in (*inputs.query.shape, *inputs.key.shape, *inputs.value.shape):
        out = inputs.query @ (inputs.key.mT @ inputs.value)  # N = 0 gives 0, M = 0 and k = 0 give nothing
        report = _empty_report(inputs)
    elif is_causal or counted.per_query is not None:
        if counted.keep is not None:
            inputs = _weigh_mask(inputs, counted.keep)

        def solve(part: Problem, trusted: bool) -> tuple[Tensor, Report]:
            plan = Plan(_is_dual(solver, part.key), intercept, scale)
            out, packed = ridge(part, plan, solver, trusted)
            return out, unpack(packed, plan.dual, out.dtype)

        out, report = _per_query(inputs, counted.per_query, solve)
    else:
        if intercept and counted.keep is not None:
            inputs = _weigh_mask(inputs, counted.keep)
        flat, restore = layout.flatten(inputs)
        problem, trusted = _problem(flat)
        plan = Plan(_is_dual(solver, problem.key), intercept, scale)
        out, packed = ridge(problem, plan, solver, trusted)
        out, report = restore(out), _unflatten_report(packed, plan.dual, inputs)
    out = unsplit(out).to(dtype)
    return (out, _info(report)) if return_info else out


def sigma_intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
    alpha: float | Tensor | None = None,
    weight: Tensor | None = None,
    intercept: bool = False,
    covariance: str = "ridge",
    solver: str = "auto",
    return_info: bool = False,
) -> Tensor | tuple[Tensor, Info]:
    """softmax(Q Sigma^-1 K' scale) V with Sigma = K'WK + alpha I: softmax attention whose queries are Q Sigma^-1.

    >>> q, k, v = torch.randn(2, 4, 7, 3), torch.randn(2, 4, 11, 3), torch.randn(2, 4, 11, 5)
    >>> same = sigma_intention(q, k, v, covariance="convex", alpha=1, scale=3**-0.5)
    >>> torch.allclose(same, attention(q, k, v), atol=1e-5)
    True

    Arguments as in `intention`, except: `dropout_p` acts on the softmax as in F.scaled_dot_product_attention; masks and
    weights enter Sigma and, as log-weights, the softmax; `intercept` means Sigma of the centred keys.
    """
    gqa = enable_gqa
    inputs, counted, unsplit, dtype = _prepare(
        query, key, value, attn_mask, 0.0, is_causal, gqa, alpha, weight, covariance, solver
    )
    m, n = inputs.query.shape[-2], inputs.key.shape[-2]
    if 0 in (*inputs.query.shape, *inputs.key.shape, *inputs.value.shape):
        out, report = inputs.query @ (inputs.key.mT @ inputs.value), _empty_report(inputs)
        out = unsplit(out).to(dtype)
        return (out, _info(report)) if return_info else out
    keys = inputs.key
    weighed = inputs if counted.keep is None else _weigh_mask(inputs, counted.keep)
    if is_causal or counted.per_query is not None:

        def solve(part: Problem, trusted: bool) -> tuple[Tensor, Report]:
            centred = part.expanded().centred()[0] if intercept else part
            points = Points(part.query, centred.key, part.weight, part.alpha, part.gain)
            out, packed = transform(points, _transform_solver(solver), trusted)
            return out, unpack(packed, False, out.dtype)

        moved, report = _per_query(weighed, counted.per_query, solve)
    else:
        if intercept:
            keys = _centred_key(weighed, counted.keep)
        moved, keys, report = _transform_shared(inputs._replace(key=keys), solver)
    mask, is_causal = masks.score_mask(counted, is_causal, m, n, query.device)
    scale = 1.0 if scale is None else float(scale)
    moved, keys, values = (x.to(dtype) for x in (moved, keys, inputs.value))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    out = _softmax_attention(moved, keys, values, mask, dropout_p, is_causal, scale, False)
    if counted.weight is not None and counted.weight.requires_grad:
        out = torch.where((counted.weight > 0).any(-1).unsqueeze(-1).unsqueeze(-1), out, 0.0)
    out = unsplit(out)
    return (out, _info(report)) if return_info else out


# --- preparing a call -------------------------------------------------------------------------------------------------


def _check_call(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, gqa: bool
) -> tuple[int, tuple[int, ...]]:
    """How many query heads share a key head, and the leading dimensions of the call."""
    checks.points(query, key, value)
    if gqa:
        groups = checks.grouped_heads(query, key, value)
        rest = checks.leading(query=query.shape[:-3], key=key.shape[:-3], value=value.shape[:-3])
        lead = (*rest, query.shape[-3])
    else:
        groups, lead = 1, checks.leading(query=query.shape[:-2], key=key.shape[:-2], value=value.shape[:-2])
    if mask is not None:
        checks.mask(mask, query.device, query.shape[-2], key.shape[-2], lead)
    return groups, lead


def _plain_problem(
    query: Tensor, key: Tensor, value: Tensor, alpha: float | Tensor | None, covariance: str, solver: str
) -> Problem | None:
    """The common call needs no broadcasting, casting or folding: flat views, in a quarter of the time of `_prepare`."""
    checks.points(query, key, value)
    lead, dtype = query.shape[:-2], query.dtype
    if isinstance(alpha, Tensor) or covariance != "ridge" or dtype not in (torch.float32, torch.float64):
        return None
    if not (key.shape[:-2] == value.shape[:-2] == lead and key.dtype == value.dtype == dtype) or query.dim() < 3:
        return None
    if 0 in query.shape or 0 in value.shape:
        return None
    checks.solver(solver, query.device)
    number = _alpha_number(alpha, covariance)
    return Problem(query, key, value, None, key.new_full((math.prod(lead),), number), None)


def _prepare(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    gqa: bool,
    alpha: float | Tensor | None,
    weight: Tensor | None,
    covariance: str,
    solver: str,
) -> tuple[Inputs, Counted, Callable[[Tensor], Tensor], torch.dtype]:
    """Check, cast to the working precision, split grouped heads, and read masks, weights, dropout and covariance."""
    groups, lead = _check_call(query, key, value, mask, gqa)
    checks.covariance(covariance)
    checks.solver(solver, query.device)
    dtype = _common_dtype(query, key, value)
    working = torch.float64 if dtype == torch.float64 else torch.float32
    if weight is not None:
        checks.weight(weight, query.device, key.shape[-2])
        if groups == 1:
            checks.leading(call=lead, weight=weight.shape[:-1])
    heads, shared = (query.shape[-3], key.shape[-3]) if groups > 1 else (1, 1)

    def split(x: Tensor, trailing: int) -> Tensor:
        return layout.split_groups(x, trailing, heads, shared) if groups > 1 else x

    if isinstance(alpha, Tensor):
        checks.alpha_tensor(alpha, query.device, lead)
        alpha = split(alpha.to(query.device, working), 0)
    query, key, value = query.to(working), key.to(working), value.to(working)
    inputs = Inputs(split(query, 2), split(key, 2), split(value, 2), None, *_regulariser(alpha, covariance, key))
    if mask is not None:
        mask = split(mask, 2)
    counted = masks.count(mask, None if weight is None else split(weight, 1), is_causal, working)
    if dropout_p:
        lead = layout.context_lead(inputs._replace(weight=counted.weight))
        counted = counted._replace(weight=masks.drop_points(counted.weight, lead, inputs.key, dropout_p))
    seen = counted.keep if counted.per_query is None else masks.seen_by_any(counted.per_query)
    inputs = inputs._replace(
        key=masks.fill(inputs.key, seen), value=masks.fill(inputs.value, seen), weight=counted.weight
    )

    def unsplit(out: Tensor) -> Tensor:
        return out.flatten(-4, -3) if groups > 1 else out

    return inputs, counted, unsplit, dtype


def _common_dtype(*tensors: Tensor) -> torch.dtype:
    dtype = tensors[0].dtype
    for t in tensors[1:]:
        dtype = torch.promote_types(dtype, t.dtype)
    return dtype


def _regulariser(alpha: float | Tensor | None, covariance: str, like: Tensor) -> tuple[float | Tensor, Tensor | None]:
    """(alpha, c) of Sigma = c K'K + alpha I; c = 1 - alpha for the convex covariance, else None."""
    if not isinstance(alpha, Tensor):
        alpha = _alpha_number(alpha, covariance)
    if covariance == "ridge":
        return alpha, None
    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(alpha, dtype=like.dtype, device=like.device)
    return alpha, 1 - alpha


def _alpha_number(alpha: float | None, covariance: str) -> float:
    if alpha is None:
        return 1.0 if covariance == "ridge" else 0.5
    checks.alpha_number(alpha, 1.0 if covariance == "convex" else math.inf)
    return float(alpha)


def _problem(flat: Inputs) -> tuple[Problem, bool]:
    """A Problem of a flat batch, and whether its values are known to be right."""
    alpha, trusted = flat.alpha, flat.weight is None
    if not isinstance(alpha, Tensor):
        alpha = flat.key.new_full((flat.key.shape[0],), alpha)
    else:
        trusted = False
    return Problem(flat.query, flat.key, flat.value, flat.weight, alpha, flat.gain), trusted


def _is_dual(solver: str, key: Tensor) -> bool:
    if solver in ("primal", "dual"):
        return solver == "dual"
    return key.shape[-2] < key.shape[-1]


def _transform_solver(solver: str) -> str:
    return "cholesky" if solver in ("primal", "dual") else solver


def _weigh_mask(inputs: Inputs, keep: Tensor) -> Inputs:
    """Masked points have zero rows, which is enough for Sigma; a mean must also not count them."""
    kept = keep.to(inputs.key.dtype)
    return inputs._replace(weight=kept if inputs.weight is None else inputs.weight * kept)


def _unflatten_report(packed: Tensor, dual: bool, inputs: Inputs) -> Report:
    lead = layout.context_lead(inputs)
    return Report(*(x.reshape(lead) for x in unpack(packed, dual, inputs.key.dtype)))


def _info(report: Report) -> Info:
    return Info(report.route.to(torch.int8), report.condition, report.error)


def _empty_report(inputs: Inputs) -> Report:
    one = inputs.key.new_zeros(layout.context_lead(inputs))
    return Report(one, one + 1, one)


# --- query by query ---------------------------------------------------------------------------------------------------


def _per_query(
    inputs: Inputs, mask: Tensor | None, solve: Callable[[Problem, bool], tuple[Tensor, Report]]
) -> tuple[Tensor, Report]:
    """One fit per query, in chunks over M. `mask` None means causal: query t sees keys <= t."""
    whole = layout.context_lead(inputs)
    if mask is not None:
        whole = checks.leading(context=whole, mask=tuple(mask.shape[:-2]))
    m, n = inputs.query.shape[-2], inputs.key.shape[-2]
    flat, restore = layout.flatten(inputs._replace(key=inputs.key.expand(*whole, *inputs.key.shape[-2:])), fold=False)
    base, _ = _problem(flat)
    batch, _, d = base.query.shape
    if mask is not None:
        lead = restore(base.query).shape[:-2]
        mask = mask.expand(*lead, m, n)
    width = max(d, base.value.shape[-1])
    step = max(1, CHUNK // (batch * max(n, d) * width))
    outs, reports = [], []
    for start in range(0, m, step):
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


def _linear_per_query(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    """(Q K' * counts) V in chunks over M, so that no M x N tensor is held at once."""
    m, n = query.shape[-2], key.shape[-2]
    batch = math.prod(torch.broadcast_shapes(query.shape[:-2], key.shape[:-2], value.shape[:-2]))
    step = max(1, CHUNK // max(1, batch * n))
    outs = []
    for start in range(0, m, step):
        size = min(step, m - start)
        rows = query.narrow(-2, start, size)
        if mask is None:
            counts = masks.causal(size, n, query.device, start).to(query.dtype)
        else:
            counts = masks.as_weight(mask.narrow(-2, start, size), query.dtype)
        outs.append(((rows @ key.mT) * counts) @ value)
    return torch.cat(outs, -2) if outs else query @ (key.mT @ value)


# --- softmax forms ----------------------------------------------------------------------------------------------------


def _transform_shared(inputs: Inputs, solver: str) -> tuple[Tensor, Tensor, Report]:
    """(queries, keys, report) for the softmax: Q Sigma^-1 and K, or Q and G^-1 K where the dual Gram is smaller.

    Both give the scores Q Sigma^-1 K'. With float weights the first is used at any shape: it has a derivative at w = 0.
    """
    dual = _is_dual(solver, inputs.key) and inputs.weight is None
    if dual:
        # scores Q K'(c KK' + alpha I)^-1 = Q (G^-1 K)': the transform acts on the keys
        flat, restore = layout.flatten(inputs._replace(query=inputs.key))
    else:
        flat, restore = layout.flatten(inputs)
    problem, trusted = _problem(flat)
    if dual:
        points = Points(problem.key.mT, problem.key.mT, None, problem.alpha, problem.gain)
        moved, packed = transform(points, _transform_solver(solver), trusted)
        report = _unflatten_report(packed, True, inputs)
        report = report._replace(route=torch.where(report.route == PRIMAL, DUAL, report.route))
        return inputs.query, restore(moved.mT), report
    points = Points(problem.query, problem.key, problem.weight, problem.alpha, problem.gain)
    moved, packed = transform(points, _transform_solver(solver), trusted)
    return restore(moved), inputs.key, _unflatten_report(packed, False, inputs)


def _centred_key(inputs: Inputs, keep: Tensor | None) -> Tensor:
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


def _softmax_attention(
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
    if gqa:
        rows = (math.prod(lead),)
    else:
        rows = (math.prod(lead[:-1]), lead[-1] if lead else 1)

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
