"""The context split over the ranks of a torch.distributed process group: a fit of the points of all ranks.

    n = sum w,   m = sum w k / n,   S = sum w (k - m)(k - m)',   C = sum w (k - m)(v - mean v)'

Each rank sums its own points, in float64, around a constant c near their mean. A first all-reduce of 1 + d + k numbers
gives the means of all points; moved there, the sums of the ranks simply add, in a second one of d (d + 1) / 2 + d k + d
numbers. Raw moments would need the first one not, and lose the digits of c^2: at keys 1e4 from 0, eight of them. To
gather and merge what the ranks have would need one round, but memory and traffic that grow with their number.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from intention import checks, masks
from intention.context import Context
from intention.covariance import Covariance, gain_of, is_named
from intention.prepare import alpha_of, check_call
from intention.solve.doors import eager, gradient_free
from intention.solve.stats import EPS, Stats

__all__ = ["fit", "intention"]

CHUNK = 1 << 20  # numbers of keys or values that are made float64 at a time
TEXT = 512  # bytes in which a rank says what it was called with, sent only when ranks differ


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

    def read() -> Local:
        checks.scale(scale)
        _, lead = check_call(query, key, value, attn_mask, False)
        _check(key, value, weight, covariance)
        if weight is not None:
            checks.leading(call=lead, weight=weight.shape[:-1])
        return _local(*_counted(key, value, attn_mask, weight, covariance), _alpha(alpha, covariance, key, lead))

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

    def read() -> Local:
        checks.fitted_points(key, value)
        lead = checks.leading(key=key.shape[:-2], value=value.shape[:-2])
        _check(key, value, weight, covariance)
        if weight is not None:
            lead = checks.leading(call=lead, weight=weight.shape[:-1])
        return _local(*_counted(key, value, None, weight, covariance), _alpha(alpha, covariance, key, lead))

    return _fit(read, key, intercept, covariance, group, replicated_query)


class Moments(NamedTuple):
    """Sums of points around constants c (of keys) and e (of values), which are in the leading dimensions of the sums.

    The sums around any other place follow from these for every c and e, so both are detached and derivatives of any
    order are still exact, also where all weights are 0.
    """

    place_key: Tensor  # c (..., d)
    place_value: Tensor  # e (..., k)
    total: Tensor  # (...): sum w
    key: Tensor  # (..., d): sum w (k - c), 0 but for rounding and its derivatives
    value: Tensor  # (..., k): sum w (v - e)
    scatter: Tensor  # (..., d, d): sum w (k - c)(k - c)'
    cross: Tensor  # (..., d, k): sum w (k - c)(v - e)'


class Local(NamedTuple):
    """What a rank brings: its sums, and what all ranks must agree on."""

    moments: Moments
    alpha: Tensor  # (...) float64
    dtype: torch.dtype
    text: str


def _fit(
    read: Callable[[], Local], key: Any, intercept: bool, covariance: Covariance, group: Any, replicated: bool
) -> Context:
    group = _member(group)
    options = f"covariance={covariance!r}, intercept={bool(intercept)}, replicated_query={bool(replicated)}"
    local, wanted = _agree(read, options, group, _device(key, group))
    back = 1 / dist.get_world_size(group) if replicated else 1.0
    return Context(
        key=None,
        value=None,
        weight=None,
        stats=_joined(local.moments, lambda x: _sum_over_ranks(x, group, back, wanted)),
        alpha=local.alpha,
        fits_intercept=bool(intercept),
        covariance=covariance,
        kernel=None,
        features=None,
        dtype=local.dtype,
    )


# -- reading what this rank was given ----------------------------------------------------------------------------------


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


def _counted(
    key: Tensor, value: Tensor, mask: Tensor | None, weight: Tensor | None, covariance: Covariance
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Points and weights, with the mask among the weights; what is masked may hold anything."""
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
    return masks.fill(key, keep), masks.fill(value, keep), weight


def _alpha(alpha: Any, covariance: Covariance, key: Tensor, lead: tuple[int, ...]) -> Tensor:
    if isinstance(alpha, (str, list, tuple)):
        raise TypeError(
            f"alpha must be a number or a tensor, got {alpha!r}: leave-one-out needs the points, and each rank has "
            "only some; choose it by intention.fit on a sample"
        )
    if not isinstance(alpha, Tensor):
        return torch.tensor(alpha_of(alpha, covariance), dtype=torch.float64, device=key.device)
    checks.alpha_tensor(alpha, key.device, lead)
    alpha = alpha.to(key.device, torch.float64)
    checks.require_values(None, alpha, gain_of(alpha, covariance))
    return alpha


def _local(key: Tensor, value: Tensor, weight: Tensor | None, alpha: Tensor) -> Local:
    dtype, moments = torch.promote_types(key.dtype, value.dtype), _moments(key, value, weight)
    d, k = moments.cross.shape[-2:]
    seen = (*moments.scatter.shape[:-2], "N", d), (*moments.cross.shape[:-2], "N", k)
    names = ["(" + ", ".join(map(str, shape)) + ")" for shape in seen]
    grad = "" if torch.is_grad_enabled() else ", no_grad"
    return Local(moments, alpha, dtype, f"key {names[0]} {key.dtype}, value {names[1]} {value.dtype}{grad}")


# -- sums --------------------------------------------------------------------------------------------------------------


def _moments(key: Tensor, value: Tensor, weight: Tensor | None) -> Moments:
    """The sums of a rank's points, made chunk by chunk."""
    own = () if weight is None else weight.shape[:-1]
    lead = checks.leading(key=key.shape[:-2], weight=own)
    whole = checks.leading(key=lead, value=value.shape[:-2])
    d, k = key.shape[-1], value.shape[-1]
    rows = max(4 * d, CHUNK // max(math.prod(whole) * max(d, k), 1))  # fewer than d, and adding costs more than K'K
    splits = key.split(rows, -2), value.split(rows, -2)
    weights = [None] * len(splits[0]) if weight is None else weight.split(rows, -1)
    chunks = list(zip(*splits, weights, strict=True))
    with torch.no_grad():
        total, sum_key, sum_value = _added(_sums(_weighed(*chunk, 0.0, 0.0)) for chunk in chunks)
        size = torch.where(total > 0, total, 1.0)[..., None]
        c, e = (sum_key / size).expand(*lead, d), (sum_value / size).expand(*whole, k)
    around = c.unsqueeze(-2), e.unsqueeze(-2)
    total, sum_key, sum_value, scatter, cross = _added(_products(_weighed(*chunk, *around)) for chunk in chunks)
    return Moments(
        c,
        e,
        total.expand(lead),
        sum_key.expand(*lead, d),
        sum_value.expand(*whole, k),
        scatter.expand(*lead, d, d),
        cross.expand(*whole, d, k),
    )


class Weighed(NamedTuple):
    """Points of a chunk minus (c, e), in float64, as they are and times their weights."""

    total: Tensor  # (...)
    key: Tensor  # (..., n, d)
    weighed_key: Tensor
    value: Tensor  # (..., n, k)
    weighed_value: Tensor


def _weighed(key: Tensor, value: Tensor, weight: Tensor | None, c: Tensor | float, e: Tensor | float) -> Weighed:
    key, value = key.double() - c, value.double() - e
    if weight is None:
        return Weighed(key.new_full((), key.shape[-2]), key, key, value, value)
    weight = weight.double()
    return Weighed(weight.sum(-1), key, weight[..., None] * key, value, weight[..., None] * value)


def _sums(x: Weighed) -> list[Tensor]:
    """sum w, sum w (k - c), sum w (v - e)"""
    return [x.total, x.weighed_key.sum(-2), x.weighed_value.sum(-2)]


def _products(x: Weighed) -> list[Tensor]:
    """The same, sum w (k - c)(k - c)' and sum w (k - c)(v - e)'"""
    return [*_sums(x), x.weighed_key.mT @ x.key, x.weighed_key.mT @ x.value]


def _added(rows: Iterable[list[Tensor]]) -> list[Tensor]:
    return functools.reduce(lambda x, y: [a + b for a, b in zip(x, y, strict=True)], rows)


def _joined(own: Moments, reduce: Callable[[Tensor], Tensor]) -> Stats:
    """The sums of all ranks around the mean of all points, from those of each around places of their own."""
    wide = own.total[..., None]
    total, sum_key, sum_value = _reduced(
        reduce, own.total, wide * own.place_key + own.key, wide * own.place_value + own.value
    )
    size = torch.where(total > 0, total, 1.0)[..., None]
    mean_key, mean_value = sum_key / size, sum_value / size
    a, b = (mean_key - own.place_key).unsqueeze(-1), (mean_value - own.place_value).unsqueeze(-2)
    s, t, n = own.key.unsqueeze(-1), own.value.unsqueeze(-2), wide.unsqueeze(-1)
    # sum w (k - c - a)(k - c - a)' = T - s a' - a s' + n a a': s is about 0, so nothing cancels
    scatter = own.scatter - s * a.mT - a * s.mT + n * a * a.mT
    cross = own.cross - s * b - a * t + n * a * b
    # as in Stats.merge: means far from 0 know their difference less well
    moved = wide * a.squeeze(-1).abs() * (mean_key.abs() + own.place_key.abs())
    noise = EPS * (own.scatter.diagonal(0, -2, -1) + 4 * moved).detach()
    upper = torch.ones_like(scatter, dtype=torch.bool).triu()
    half, cross, noise = _reduced(reduce, scatter.masked_select(upper), cross, noise)
    half = half.new_zeros(scatter.shape).masked_scatter(upper, half)
    scatter = half + half.triu(1).mT
    noise = noise.detach() + EPS * scatter.detach().diagonal(0, -2, -1)
    return Stats(total, mean_key, mean_value, scatter, cross, noise)


def _reduced(reduce: Callable[[Tensor], Tensor], *tensors: Tensor) -> list[Tensor]:
    """One all-reduce of several tensors."""
    packed = reduce(torch.cat([x.flatten() for x in tensors]))
    parts = packed.split([x.numel() for x in tensors])
    return [part.reshape(x.shape) for part, x in zip(parts, tensors, strict=True)]


# -- what ranks say to each other --------------------------------------------------------------------------------------


class SumOverRanks(torch.autograd.Function):
    """(x, group, forth, back) -> forth * (sum of x over ranks); the derivative is the same with the factors swapped.

    Where every rank has a loss of its own both factors are 1: the x of a rank enters the sums of all, so its gradient
    is the sum of theirs. Where all compute the same loss `back` is 1 / ranks: theirs are copies of one gradient. That
    one is handed to every rank, so its own derivative is a sum again.
    """

    @staticmethod
    def forward(x: Tensor, group: Any, forth: float, back: float) -> Tensor:
        return _all_reduce(x.clone(memory_format=torch.contiguous_format), group) * forth

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, ctx.group, ctx.forth, ctx.back = inputs

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return SumOverRanks.apply(grads[0], ctx.group, ctx.back, ctx.forth), None, None, None


def _sum_over_ranks(x: Tensor, group: Any, back: float, wanted: bool) -> Tensor:
    """x is ours. `wanted`: some rank wants a gradient, so all must take part in the backward."""
    if wanted and not x.requires_grad:
        x.requires_grad_()
    return _all_reduce(x, group) if gradient_free(x) else SumOverRanks.apply(x, group, 1.0, back)  # type: ignore[return-value]


def _all_reduce(x: Tensor, group: Any, op: Any = dist.ReduceOp.SUM) -> Tensor:
    dist.all_reduce(x, op=op, group=group)
    return x


def _agree(read: Callable[[], Local], options: str, group: Any, device: torch.device) -> tuple[Local, bool]:
    """What `read` gives, and whether any rank wants a gradient; or an error, on all ranks instead of on some."""
    local, error = None, None
    try:
        local = read()
        text = f"{local.text}, {options}"
    except Exception as caught:  # whatever it is, the other ranks are waiting
        text, error = f"{type(caught).__name__}: {caught}", caught
    mark = int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")
    wanted = local is not None and any(x.requires_grad for x in local.moments)
    told = torch.tensor([mark, -mark, error is not None, wanted], dtype=torch.int64, device=device)
    high, low, failed, wanted = _all_reduce(told, group, dist.ReduceOp.MAX).tolist()
    if failed or high != -low:
        _raise_together(text, error, bool(failed), group, device)
    assert local is not None
    return local, bool(wanted)


def _raise_together(text: str, error: Exception | None, failed: bool, group: Any, device: torch.device) -> NoReturn:
    mine = bytes([error is not None]) + text.encode()[: TEXT - 1]
    sent = torch.tensor(list(mine.ljust(TEXT, b"\0")), dtype=torch.uint8, device=device)
    got = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(got, sent, group=group)
    if error is not None:
        raise error
    told = [bytes(x.tolist()) for x in got]
    texts = {rank: x[1:].rstrip(b"\0").decode(errors="replace") for rank, x in enumerate(told) if x[0] or not failed}
    listing = "\n".join(f"  rank {rank}: {x}" for rank, x in texts.items())
    if failed:
        raise RuntimeError(f"another rank of {len(told)} cannot take part:\n{listing}")
    raise ValueError(
        "all ranks must be called with the same leading dimensions, d, k, dtypes, grad mode and options (N may differ, "
        f"and be 0), got\n{listing}"
    )


def _member(group: Any) -> Any:
    """The process group, of which this process is part."""
    if not dist.is_available():
        raise RuntimeError("this build of torch has no torch.distributed; use intention.fit, of one process")
    if not dist.is_initialized():
        raise RuntimeError(
            "torch.distributed has no process group; start with torchrun and call "
            "torch.distributed.init_process_group, or use intention.fit, of one process"
        )
    group = dist.group.WORLD if group is None else group
    if dist.get_rank(group) < 0:
        raise ValueError(f"rank {dist.get_rank()} is no member of this group; call on the ranks that are, only")
    return group


def _device(key: Any, group: Any) -> torch.device:
    """Where the ranks talk: beside the keys, or, where those are no tensor, where the backend can."""
    if isinstance(key, Tensor):
        return key.device
    return torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
