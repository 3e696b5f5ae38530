"""The context split over the ranks of a torch.distributed process group: a fit of the points of all ranks.

    n = sum w,   m = sum w k / n,   S = sum w (k - m)(k - m)',   C = sum w (k - m)(v - mean v)'

Each rank sums its own points, in float64, around a constant c near their mean. A first all-reduce of 1 + d + k numbers
gives the means of all points; moved there, the sums of the ranks simply add, in a second one of d (d + 1) / 2 + d k + d
numbers. Raw moments would need the first one not, and lose the digits of c^2: at keys 1e4 from 0, eight of them. To
gather and merge what the ranks have would need one round, but memory and traffic that grow with their number.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from intention import _checks as checks
from intention._call import masks_and_weights as masks
from intention._call.arguments import check_call
from intention._covariance import Covariance, is_named, wide_alpha
from intention.context import Context
from intention.distributed.moments import Moments, joined, moments_of
from intention.distributed.ranks import agree, member, place, sum_over_ranks
from intention.solve.torch_state import eager

__all__ = ["fit", "intention"]


def intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    scale: float | None = None,
    alpha: float | Tensor | None = None,
    weight: Tensor | None = None,
    intercept: bool = False,
    covariance: Covariance = "ridge",
    group: dist.ProcessGroup | None = None,
    replicated_query: bool = False,
) -> Tensor:
    """`functional.intention` of this rank's queries, fitted on the keys and values of all ranks.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> query, key, value = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    >>> intention(query, key, value, alpha=0.1).shape
    torch.Size([2, 7, 5])
    >>> dist.destroy_process_group()

    Every rank of the group calls this, with points of its own: N may differ and may be 0; d, k, leading dimensions and
    dtypes are the same. What is sent does not depend on N.

    Args:
        query: (..., M, d), this rank's own; M may differ.
        key: (..., N, d).
        value: (..., N, k).
        attn_mask: of this rank's points, equal for all queries: (..., 1, N), or of stride 0.
        weight: (..., N), of this rank's points.
        scale, alpha, intercept, covariance: as in `functional.intention`; the covariance by name.
        group: the process group; default all ranks.
        replicated_query: every rank has the same queries and computes the same loss.

    Gradients. Without `replicated_query` the loss is the sum over ranks of each rank's loss. Keys, values, weights and
    masks get the gradient of that sum; query and alpha that of this rank's loss, which for the query is the same. So a
    parameter that all ranks share, alpha or what embeds the points, has the gradient of the sum in an all-reduce SUM of
    its local ones. DDP and FSDP average instead: the gradient of the mean of the losses, as ever.

    With `replicated_query` the loss is the one that every rank computes. Keys, values, weights and masks get its
    gradient; so do query and alpha, whole on every rank, and need no all-reduce; a shared parameter behind the keys
    still needs SUM. DDP and FSDP know one rule for all parameters, so under them leave it False also where the queries
    are the same: the mean of equal losses is the loss.

    All ranks call backward, in the same order: it communicates as much as forward. Any order of derivative works.

    Raises:
        RuntimeError: without process group, or where another rank cannot take part.
        ValueError, TypeError: naming what came and what was wanted. Shapes that differ raise on all ranks.

    Warns:
        AccuracyWarning: the estimated relative error is above 1e-3.
    """

    def read() -> Read:
        checks.scale(scale)
        _, lead = check_call(query, key, value, attn_mask, False)
        return _local(key, value, attn_mask, weight, alpha, covariance, lead)

    context = _fit(read, key, intercept, covariance, group, replicated_query)
    out = context(query.double())
    if scale is not None:  # of the map: the mean of the values stays
        mean = context.stats.mean_value.unsqueeze(-2) if intercept and context.stats is not None else 0.0
        out = mean + float(scale) * (out - mean)
    return out.to(torch.promote_types(query.dtype, context.dtype))


def fit(
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | None = None,
    weight: Tensor | None = None,
    intercept: bool = False,
    covariance: Covariance = "ridge",
    *,
    group: dist.ProcessGroup | None = None,
    replicated_query: bool = False,
) -> Context:
    """`intention.fit(..., keep_points=False)` of the points of all ranks; every rank gets the same context.

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ctx = fit(torch.randn(2, 11, 3), torch.randn(2, 11, 5), alpha=0.1, intercept=True)
    >>> ctx.w.shape, ctx(torch.randn(2, 7, 3)).shape, ctx.variance(torch.randn(2, 7, 3)).shape
    (torch.Size([2, 3, 5]), torch.Size([2, 7, 5]), torch.Size([2, 7]))
    >>> dist.destroy_process_group()

    Arguments and gradients as in `intention`. What comes after is local: predictions send nothing, and `add` or
    `remove` change the context of this rank alone.
    """

    def read() -> Read:
        return _local(key, value, None, weight, alpha, covariance, checks.fitted_points(key, value, weight))

    return _fit(read, key, intercept, covariance, group, replicated_query)


# what a rank brings (with alpha in float64), what all must have the same, and whether a gradient is wanted
Read = tuple[tuple[Moments, Tensor, torch.dtype], str, bool]


def _fit(
    read: Callable[[], Read],
    key: object,
    intercept: bool,
    covariance: Covariance,
    group: dist.ProcessGroup | None,
    replicated: bool,
) -> Context:
    group = member(group)
    options = f"covariance={covariance!r}, intercept={bool(intercept)}, replicated_query={bool(replicated)}"
    (moments, alpha, dtype), wanted = agree(read, options, group, place(key, group))
    back = 1 / dist.get_world_size(group) if replicated else 1.0
    return Context(
        key=None,
        value=None,
        weight=None,
        stats=joined(moments, lambda x: sum_over_ranks(x, group, back, wanted)),
        alpha=alpha,
        fits_intercept=bool(intercept),
        covariance=covariance,
        kernel=None,
        features=None,
        dtype=dtype,
    )


def _check(key: Tensor, value: Tensor, weight: Tensor | None, covariance: Covariance) -> None:
    if not eager():
        raise RuntimeError("a fit over ranks reads the host: call it outside of torch.compile and torch.func")
    checks.float64(key.device)
    if not is_named(covariance):
        raise ValueError(
            "a callable covariance sees the points, and each rank has only some of them; use 'ridge', 'convex' or "
            "'within', which are sums"
        )
    for name, x in (("key", key), ("value", value)):
        if hasattr(x, "to_local"):
            raise TypeError(f"{name} is a DTensor; pass the points of this rank, {name}.to_local()")
    if weight is not None:
        checks.weight(weight, key.device, key.shape[-2])


def _local(
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    weight: Tensor | None,
    alpha: float | Tensor | None,
    covariance: Covariance,
    lead: tuple[int, ...],
) -> Read:
    _check(key, value, weight, covariance)
    if weight is not None:
        checks.leading(call=lead, weight=weight.shape[:-1])
    if mask is not None and not masks.same_for_all_queries(mask):
        raise ValueError(
            f"attn_mask must be equal for all queries, (..., 1, N) or of stride 0, got {tuple(mask.shape)}: a fit per "
            "query is no sum over ranks; gather the points and use functional.intention"
        )
    counted = masks.count(mask, weight, False, key.shape[-2], torch.float64)
    keep, weight = counted.keep, counted.total(torch.float64)
    if covariance == "within":
        checks.one_hot(value, keep)
    checks.require_values(weight, key.new_zeros(()), None)
    key, value = masks.fill(key, keep), masks.fill(value, keep)  # what is masked may hold anything
    if isinstance(alpha, (str, list, tuple)):
        raise TypeError(
            f"alpha must be a number or a tensor, got {alpha!r}: leave-one-out needs the points, and each rank has "
            "only some; choose it by intention.fit on a sample"
        )
    alpha = wide_alpha(alpha, covariance, key.device, lead)
    dtype, moments = torch.promote_types(key.dtype, value.dtype), moments_of(key, value, weight)
    d, k = moments.cross.shape[-2:]
    seen = (*moments.scatter.shape[:-2], "N", d), (*moments.cross.shape[:-2], "N", k)
    names = ["(" + ", ".join(map(str, shape)) + ")" for shape in seen]
    rest = f"alpha {alpha.detach().tolist()}" + ("" if torch.is_grad_enabled() else ", no_grad")
    text = f"key {names[0]} {key.dtype}, value {names[1]} {value.dtype}, {rest}"
    return (moments, alpha, dtype), text, any(x.requires_grad for x in moments)
