"""Attention, linear attention, Intention and sigma-Intention, called like F.scaled_dot_product_attention.

Shapes: query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); leading dimensions broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, Protocol, cast, overload

import torch
from torch import Tensor

from intention import _checks as checks
from intention._call import arguments, own_sigma, softmax
from intention._call import masks_and_weights as masks
from intention._call.arguments import Prepared, flatten, plain_problem, prepare
from intention._call.per_query import in_chunks, linear_causal, linear_per_query, per_query
from intention._covariance import ON_KEYS, Covariance, alpha_of
from intention.solve.ladder import ROUTES, TOLERATED, Report, unpack, warn_inaccurate
from intention.solve.operator import no_autocast
from intention.solve.problem import Plan, Problem
from intention.solve.ridge.by_route import is_dual
from intention.solve.ridge.plain import plain
from intention.solve.ridge.ridge import ridge
from intention.solve.torch_state import compiling
from intention.solve.transform.fused import SMALL_ROUNDING
from intention.solve.transform.transform import transform

__all__ = ["ROUTES", "Info", "attention", "intention", "linear_attention", "sigma_intention"]

FEW_TOKENS = 512  # up to which a causal call is solved again query by query, where alpha's gradient needs it


Info = Report  # what `return_info=True` tells


class _Call(Protocol):
    """How `intention` and `sigma_intention` are called: what comes back depends on `return_info`."""

    @overload
    def __call__(
        self,
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
        covariance: Covariance = "ridge",
        solver: str = "auto",
        return_info: Literal[False] = False,
    ) -> Tensor: ...
    @overload
    def __call__(
        self,
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
        covariance: Covariance = "ridge",
        solver: str = "auto",
        return_info: Literal[True],
    ) -> tuple[Tensor, Info]: ...


def _tells_info(call: Callable[..., Tensor | tuple[Tensor, Info]]) -> _Call:
    """The function as it is, with these two types."""
    return cast(_Call, call)


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

    query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); attn_mask broadcasts to (..., M, N).
    """
    groups, _ = arguments.check_call(query, key, value, attn_mask, enable_gqa)
    checks.probability(dropout_p)
    mask = attn_mask
    if is_causal:
        key, value, mask, _ = arguments.visible(query.shape[-2], key, value, mask, None)
    seen = masks.count(mask, None, is_causal, key.shape[-2], query.dtype).seen()
    if seen is not None and groups > 1 and seen.dim() > 1 and seen.shape[-2] == query.shape[-3]:
        seen = seen.unflatten(-2, (-1, groups)).any(-2)  # a key head serves all query heads of its group
    if is_causal and mask is not None:
        mask, is_causal = masks.both(mask, masks.triangle(query.shape[-2], key.shape[-2], query.device)), False
    key, value = masks.fill(key, seen), masks.fill(value, seen)
    return softmax.softmax_attention(query, key, value, mask, dropout_p, is_causal, scale, enable_gqa)


@no_autocast
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
    """(Q K') V scale, in the cheaper order. Masks and dropout count points as in `intention`; causal is O(N d k).

    >>> q, k, v = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    >>> torch.allclose(linear_attention(q, k, v), q @ (k.mT @ v), atol=1e-5)
    True

    query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); attn_mask broadcasts to (..., M, N).
    """
    checks.scale(scale)
    call = prepare(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, None, None, "ridge", "auto")
    inputs, counted = call.inputs, call.counted
    query, key, value = inputs.query, inputs.key, inputs.value
    if inputs.weight is not None:
        value = value * inputs.weight.unsqueeze(-1)
    if is_causal and not call.empty:
        out, _ = linear_causal(query, key, value)
    elif counted.per_query is not None:
        out = linear_per_query(query, key, value, counted.per_query)
    else:
        m, (n, d), k = query.shape[-2], key.shape[-2:], value.shape[-1]
        map_first = m * n * (d + k) < (n + m) * d * k
        out = (query @ key.mT) @ value if map_first else query @ (key.mT @ value)
    return call.result(out if scale is None else out * float(scale))


@_tells_info
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
    covariance: Covariance = "ridge",
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
        attn_mask: broadcasts to (..., M, N). Bool: True = take part. Float: log-weights (-inf = masked). A mask equal
            for all queries (size 1 or stride 0 in M) costs nothing extra; any other is solved query by query, at
            O(M (N d^2 + d^3)).
        dropout_p: each context point is left out with this probability, the rest count 1 / (1 - p). Gate it on
            training.
        is_causal: the fit of query t sees keys <= t only, top-left aligned. Solved in chunks, O(N (d^2 + d k)); with an
            intercept, another covariance or a named solver, query by query.
        scale: multiplies the map Q Sigma^-1 K'; default 1.
        enable_gqa: fewer key and value heads than query heads, at dimension -3.
        alpha: number >= 0, or a tensor that broadcasts to the leading dimensions (one per head). Default 1 ("convex":
            0.5). 0 is the minimum-norm fit.
        weight: (..., N) sample weights >= 0. 0 leaves a point out.
        intercept: add an unregularised constant feature.
        covariance: "ridge" is K'K + alpha I, "convex" is (1 - alpha) K'K + alpha I with alpha in [0, 1], "within" is
            the scatter of the keys around the mean of their class + alpha I (values are one-hot). Or a callable
            (key, value, weight) -> (..., d, d), symmetric and positive semidefinite, without alpha I; with an intercept
            it sees centred keys. The last two are solved in float64.
        solver: "auto" picks the smaller Gram and climbs the accuracy ladder. "primal", "dual", "qr", "pinv" (minimum
            norm, tolerance of the dtype) and "float64" do just that, uncertified: they never read the host (torch's SVD
            in "pinv" excepted) and give NaN where the factorisation fails.
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
    checks.scale(scale)
    scale = 1.0 if scale is None else float(scale)
    if weight is None and not (dropout_p or is_causal or enable_gqa or return_info):
        keep = None if attn_mask is None else masks.same_points(attn_mask, query)
        if covariance in ON_KEYS and solver == "auto" and (attn_mask is None or keep is not None):
            number = alpha if isinstance(alpha, Tensor) else alpha_of(alpha, covariance)
            found = plain(query, key, value, keep, number, covariance == "convex", intercept, scale)
            if found is not None:
                return found
        problem = plain_problem(query, key, value, alpha, covariance, solver) if attn_mask is None else None
        if problem is not None:
            out, _ = ridge(problem, Plan(is_dual(solver, key), intercept, scale), solver)
            return out
    checks.probability(dropout_p)
    # a dropout that can do without weights
    rows = dropout_p if dropout_p and not intercept and covariance in ON_KEYS else 0.0
    call = prepare(
        query, key, value, attn_mask, dropout_p - rows, is_causal, enable_gqa, alpha, weight, covariance, solver
    )
    inputs, counted = call.inputs, call.counted
    if rows and not call.empty:
        inputs = arguments.drop_rows(inputs, rows)
    queries_differ = is_causal or counted.per_query is not None
    estimated = call.own_sigma
    if estimated:
        own_sigma.check_estimated(covariance, solver, queries_differ, inputs.value, counted.seen())
    if counted.keep is not None and (intercept or queries_differ or estimated):
        inputs = arguments.weigh_mask(inputs, counted.keep)
    if call.empty:
        out, report = call.zeros()
    elif estimated and not queries_differ:
        out, report = own_sigma.predict(inputs, covariance, intercept, solver, scale)
    elif queries_differ:

        def solve(part: Problem) -> tuple[Tensor, Report]:
            if estimated:
                out, report = own_sigma.predict(part.expanded(), covariance, intercept, solver, scale)
                return out.to(part.query.dtype), report
            plan = Plan(is_dual(solver, part.key), intercept, scale)
            out, packed = ridge(part, plan, solver)
            return out, unpack(packed)

        if is_causal and not estimated and not intercept and solver == "auto":
            out, report = in_chunks(inputs, transform_only=False)
            out = out if scale == 1 else out * scale
        else:
            out, report = per_query(inputs, counted.per_query, solve)
    else:
        problem, restore = flatten(inputs)
        plan = Plan(is_dual(solver, problem.key), intercept, scale)
        out, packed = ridge(problem, plan, solver)
        out, report = restore(out), arguments.unflatten_report(packed, inputs)
    out = call.result(out)
    return (out, call.report(report).told()) if return_info else out


@_tells_info
@no_autocast
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
    covariance: Covariance = "ridge",
    solver: str = "auto",
    return_info: bool = False,
) -> Tensor | tuple[Tensor, Info]:
    """softmax(Q Sigma^-1 K' scale) V with Sigma = K'WK + alpha I: softmax attention whose queries are Q Sigma^-1.

    >>> q, k, v = torch.randn(2, 4, 7, 3), torch.randn(2, 4, 11, 3), torch.randn(2, 4, 11, 5)
    >>> same = sigma_intention(q, k, v, covariance="convex", alpha=1, scale=3**-0.5)
    >>> torch.allclose(same, attention(q, k, v), atol=1e-5)
    True

    query (..., M, d), key (..., N, d), value (..., N, k) -> (..., M, k); weight (..., N), alpha (...).

    Arguments as in `intention`, except: `dropout_p` acts on the softmax as in F.scaled_dot_product_attention; masks and
    weights enter Sigma and, as log-weights, the softmax; `intercept` means Sigma of the centred keys.
    """
    checks.scale(scale)
    scale = 1.0 if scale is None else float(scale)
    problem, plain = None, attn_mask is None and weight is None and solver == "auto" and not compiling()
    if plain and not (dropout_p or is_causal or enable_gqa or return_info or intercept):
        problem = plain_problem(query, key, value, alpha, covariance, solver)
    if problem is not None:  # the kernel is asked once
        out = softmax.fused_plain(problem, scale)
        if out is not None:
            return out
    call = prepare(query, key, value, attn_mask, 0.0, is_causal, enable_gqa, alpha, weight, covariance, solver)
    checks.probability(dropout_p)
    inputs, counted = call.inputs, call.counted
    queries_differ = is_causal or counted.per_query is not None
    estimated = call.own_sigma
    if estimated:
        own_sigma.check_estimated(covariance, solver, queries_differ, inputs.value, counted.seen())
    found = call.zeros() if call.empty else None
    if found is None and solver == "auto" and not (queries_differ or estimated or intercept or dropout_p):
        found = softmax.fused(inputs, scale) if counted.keep is None and problem is None else None
    if found is None:
        found = _softmax_of(call, intercept, scale, dropout_p)
    out, report = call.result(found[0]), found[1]
    return (out, call.report(report).told()) if return_info else out


def _softmax_of(call: Prepared, intercept: bool, scale: float, dropout_p: float) -> tuple[Tensor, Report]:
    """Transformed queries, then attention; in float64 where scores ask for it."""
    inputs, is_causal, solver = call.inputs, call.is_causal, call.solver
    moved, keys, solved = _transformed(call, intercept, scale)
    moved, report, again = softmax.scored(moved, keys, solved, solver, inputs)
    # n: tokens after which keys that point everywhere have been seen from all sides
    if again and is_causal and 2 * (n := 32 * math.ceil(1.5 * inputs.key.shape[-1] / 32)) <= inputs.key.shape[-2]:
        # what no key has been seen of is q / alpha, whose rounding the scores of the first tokens feel
        later = Problem(inputs.query[..., n:, :], *inputs[1:])
        _, told, again = softmax.scored(moved[..., n:, :], keys, solved, solver, later)
        if not again:
            first, hard = _softmax_of(call.first(n).double(), intercept, scale, dropout_p)
            rest = softmax.counted_softmax(moved, keys, inputs.value, call.counted, dropout_p, True)[..., n:, :]
            report = Report(*map(torch.fmax, softmax.narrowed(hard, moved.dtype), told))
            return torch.cat([first.to(moved.dtype), rest], -2), report
    if again:
        call = call.double()
        moved, keys, report = _transformed(call, intercept, scale)
        moved, report, _ = softmax.scored(moved, keys, report, solver, call.inputs)
    if is_causal and solver == "auto" and not compiling():
        lost = softmax.rounding_of_alpha(moved, report, call.inputs)
        if lost > SMALL_ROUNDING and keys.shape[-2] <= FEW_TOKENS:  # each query by itself knows what it cannot see
            moved, keys, report = _transformed(call, intercept, scale, each=True)
        elif lost > TOLERATED:
            warn_inaccurate(Report(report.route, report.condition, torch.full_like(report.error, lost)))
    if call.inputs.key.dtype != inputs.key.dtype:
        report = softmax.narrowed(report, inputs.key.dtype)
    return softmax.counted_softmax(moved, keys, call.inputs.value, call.counted, dropout_p, is_causal), report


def _transformed(call: Prepared, intercept: bool, scale: float, each: bool = False) -> tuple[Tensor, Tensor, Report]:
    """(queries, keys, report) whose products are the scores Q Sigma^-1 K' scale.

    What is scaled are the transformed queries: a rounding of those that came would meet Sigma^-1. `each`: query by
    query, where chunks would do.
    """
    inputs, counted, _, _, _, is_causal, covariance, solver, estimated = call
    keys = inputs.key
    weighed = inputs if counted.keep is None else arguments.weigh_mask(inputs, counted.keep)
    if intercept and not estimated:  # keys around one point give the same answers, and nothing large cancels in them
        keys = softmax.centred_key(weighed, counted.keep)
        inputs, weighed = (Problem(x.query, keys, *x[2:]) for x in (inputs, weighed))
    if is_causal or counted.per_query is not None:

        def solve(part: Problem) -> tuple[Tensor, Report]:
            if estimated:
                return own_sigma.transform(part.expanded(), covariance, intercept, solver)
            centred = part.expanded().centred()[0] if intercept else part
            out, packed = transform(Problem(part.query, *centred[1:]), softmax.transform_solver(solver))
            return out, unpack(packed)

        if is_causal and not (estimated or intercept or each) and solver == "auto":
            moved, report = in_chunks(weighed, transform_only=True)
        else:
            moved, report = per_query(weighed, counted.per_query, solve)
    elif estimated:
        moved, report = own_sigma.transform(weighed, covariance, intercept, solver)
    else:
        moved, keys, report = softmax.transform_shared(inputs, solver)
    return moved if scale == 1 else moved * scale, keys, report
