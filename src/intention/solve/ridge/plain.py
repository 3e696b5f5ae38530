"""The plain call: no weights, alpha is a number or has no gradient, and the kernels answer. Points may be masked.

What such a call has to know follows from shapes and strides, and is worked out once for each of them: a small batch
takes the kernels less time than it takes to look at its tensors. Everything else goes the way of `ridge`.
"""

from __future__ import annotations

import array
import functools
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from intention.solve.factor import LIMITS, wants_inverse
from intention.solve.native.call import BACKWARD, FORWARD, LARGEST, PLAIN, SOME_LEFT, described, readable
from intention.solve.native.library import kernel
from intention.solve.operator import Door, no_autocast
from intention.solve.problem import Grads, Needs, Plan, Problem
from intention.solve.ridge.by_route import backward_batch
from intention.solve.ridge.ridge import differentiable
from intention.solve.torch_state import Ctx, forward_mode, transformed, unobserved

_TYPES = (Tensor, torch.nn.Parameter)
_LARGEST_ALPHA = 1e38  # that float32 can hold


class Layout(NamedTuple):
    """What shapes, strides and options tell."""

    sizes: tuple[int, ...]  # the first numbers of the block in arguments.h
    limits: tuple[float, ...]
    query: tuple[int, int, int]  # strides, as `described` has them
    key: tuple[int, int, int]
    value: tuple[int, int, int]
    dense: bool  # all three are contiguous
    dual: bool
    batch: int
    points: int
    out: tuple[int, ...]
    coef: tuple[int, int, int]  # report (B, 3), coefficients and factor lie in one buffer, in this order
    matrix: tuple[int, int, int]
    kept: int  # numbers in that buffer
    ends: tuple[int, int]  # bytes before the coefficients, and before the factor


@functools.lru_cache(maxsize=1024)
def _layout(
    dtype: torch.dtype, threads: int, intercept: bool, shapes: tuple[tuple[int, ...], ...], *strides: tuple[int, ...]
) -> Layout | None:
    """None where the call is not plain: it is broadcast, empty, too large, or wrong."""
    query, key, value = shapes
    if len(query) not in (3, 4) or not query[:-2] == key[:-2] == value[:-2]:
        return None
    (queries, features), (points, columns), lead = query[-2:], value[-2:], query[:-2]
    if key[-2:] != (points, features) or 0 in query or 0 in value:
        return None
    if any(s[-1] != 1 and x[-1] != 1 for x, s in zip(shapes, strides, strict=True)):
        return None
    dual, batch = points < features, math.prod(lead)
    size = points if dual else features
    if size > LARGEST or dtype not in (torch.float32, torch.float64):
        return None
    inner, inverse = lead[1] if len(lead) == 2 else 1, wants_inverse(size, columns)
    told = (dtype == torch.float64, threads, batch, inner, 1, points, queries, features, columns)
    q, k, v = ((s[0], s[1] if len(s) == 4 else 0, s[-2]) for s in strides)
    dense = all(_contiguous(x, s) for x, s in zip(shapes, strides, strict=True))
    first, second, width = 3 * batch, 3 * batch + batch * size * columns, dtype.itemsize
    return Layout(
        (*told, dual, intercept, inverse),
        LIMITS[dtype, dual],
        q,
        k,
        v,
        dense,
        dual,
        batch,
        points,
        (*lead, queries, columns),
        (batch, size, columns),
        (batch, size, size),
        second + batch * size * size,
        (first * width, second * width),
    )


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    wanted = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != wanted:
            return False
        wanted *= size
    return True


class Regulariser(NamedTuple):
    numbers: tuple[int, int, int, int]  # where alpha and gain are, and the steps between elements
    alive: object  # what they look at


@functools.lru_cache(maxsize=256)
def _number(alpha: float, dtype: torch.dtype) -> Regulariser:
    """One number in memory, which all elements read."""
    cell = array.array("f" if dtype == torch.float32 else "d", [alpha])
    return Regulariser((cell.buffer_info()[0], 0, 0, 0), cell)


def _kept(keep: Tensor, layout: Layout) -> Tensor | None:
    """One byte for each point of each element (..., N)."""
    wanted = (*layout.out[:-2], layout.points)
    if not (readable(keep, torch.bool) and 1 <= keep.dim() <= len(wanted)):
        return None
    if any(have not in (1, want) for have, want in zip(keep.shape[::-1], wanted[::-1], strict=False)):
        return None
    return keep.expand(wanted).contiguous()


class Setting(NamedTuple):
    alpha: float
    intercept: bool
    scale: float
    plain: bool  # the factor alone served all elements


class Found(NamedTuple):
    out: Tensor
    kept: Tensor
    setting: Setting


def _looked_at(query: Tensor, key: Tensor, value: Tensor, intercept: bool) -> Layout | None:
    dtype = query.dtype
    if not (key.dtype is dtype and value.dtype is dtype and query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    shapes = query.shape, key.shape, value.shape
    return _layout(dtype, torch.get_num_threads(), intercept, shapes, query.stride(), key.stride(), value.stride())


def plain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    alpha: float | Tensor,
    convex: bool,
    intercept: bool,
    scale: float,
) -> Tensor | None:
    """The answer (..., M, k); None where another way must be taken: whatever may be wrong is looked at there.

    `keep` (bool) broadcasts to (..., N): False = the point is not there. A number alpha >= 0 is checked. Elements that
    need the SVD are few, and are solved again with all others.
    """
    if torch.compiler.is_compiling() or torch._C._is_tracing():
        return None
    if not (type(query) in _TYPES and type(key) in _TYPES and type(value) in _TYPES):
        return None
    layout = _looked_at(query, key, value, intercept)
    if layout is None or (function := kernel("intention_ridge_forward")) is None or transformed() or forward_mode():
        return None
    pulled = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    told = _regulariser(alpha, convex, query.dtype, layout, pulled)
    if told is None:
        return None
    if keep is not None and (intercept or (keep := _kept(keep, layout)) is None):
        return None
    out, kept = query.new_empty(layout.out), query.new_empty(layout.kept if pulled else 3 * layout.batch)
    at, (coef, matrix) = kept.data_ptr(), layout.ends
    ends = (at + coef, at + matrix, out.data_ptr(), at) if pulled else (0, 0, out.data_ptr(), at)
    status = function(FORWARD.pack(*_block(layout, query, key, value, keep, told.numbers, scale), *ends))
    if status == SOME_LEFT:
        return None
    if not pulled:
        return out
    assert not isinstance(alpha, Tensor)
    return Plain.apply(query, key, value, keep, Found(out, kept, Setting(alpha, intercept, scale, status == PLAIN)))


def _regulariser(
    alpha: float | Tensor, convex: bool, dtype: torch.dtype, layout: Layout, pulled: bool
) -> Regulariser | None:
    if not isinstance(alpha, Tensor):
        return None if convex or alpha > _LARGEST_ALPHA else _number(alpha, dtype)
    lead = layout.out[:-2]
    if pulled or not readable(alpha, dtype) or (alpha.requires_grad and torch.is_grad_enabled()):
        return None
    if alpha.shape not in (lead[-1:], ()):
        return None
    alpha = alpha.expand(lead).reshape(-1)
    gain = 1 - alpha if convex else None
    at, step = (0, 0) if gain is None else (gain.data_ptr(), gain.stride(0))
    return Regulariser((alpha.data_ptr(), alpha.stride(0), at, step), (alpha, gain))


def _block(
    layout: Layout, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, told: tuple[int, ...], scale: float
) -> tuple[float, ...]:
    q, k, v = query.data_ptr(), key.data_ptr(), value.data_ptr()
    there = (0, 0) if keep is None else (keep.data_ptr(), layout.points)
    return (
        *layout.sizes, scale, *layout.limits, q, *layout.query, k, *layout.key, v, *layout.value, 0, 0, *told, *there
    )  # fmt: skip


class Kept(Ctx, Protocol):
    setting: Setting


class Plain(Door):
    """The door of a plain call, which nothing transforms."""

    @staticmethod
    def forward(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, found: Found) -> Tensor:
        return found.out

    @staticmethod
    def setup_context(ctx: Kept, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, Found], output: Tensor) -> None:
        query, key, value, keep, found = inputs
        ctx.setting = found.setting
        ctx.save_for_backward(query, key, value, keep, found.kept)

    @staticmethod
    def backward(ctx: Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, keep, kept = ctx.saved_tensors
        pulled = None
        if unobserved():
            pulled = _pulled(grads[0], query, key, value, keep, kept, ctx.setting, ctx.needs_input_grad)
        if pulled is None:
            pulled = _otherwise(grads[0], query, key, value, keep, kept, ctx.setting, ctx.needs_input_grad)
        return *pulled[:3], None, None


def _pulled(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    kept: Tensor,
    setting: Setting,
    needs: tuple[bool, ...],
) -> tuple[Tensor | None, ...] | None:
    """By the compiled kernel; None where memory cannot be read as it is."""
    function, layout = kernel("intention_ridge_backward"), _looked_at(query, key, value, setting.intercept)
    if function is None or layout is None or not (readable(grad, query.dtype) and readable(kept, query.dtype)):
        return None
    if keep is not None and (keep := _kept(keep, layout)) is None:
        return None
    try:
        grad, g = described(grad)
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a tensor without memory of its own
        return None
    found: list[Tensor | None] = [None, None, None]
    ends = [0, 0, 0]
    for i, x in enumerate((query, key, value)):
        if needs[i]:
            found[i] = to = torch.empty_like(x) if layout.dense else x.new_empty(x.shape)
            ends[i] = to.data_ptr()
    at, (coef, matrix) = kept.data_ptr(), layout.ends
    route = (0, 0) if setting.plain else (at, 3)
    told = _number(setting.alpha, query.dtype)
    block = _block(layout, query, key, value, keep, told.numbers, setting.scale)
    function(BACKWARD.pack(*block, at + coef, at + matrix, *route, 0, *g, *ends, 0, 0, 0, 0))
    return tuple(found)


@no_autocast
def _otherwise(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    kept: Tensor,
    setting: Setting,
    needs: tuple[bool, ...],
) -> Grads:
    """By the ways of `ridge`: derivatives of the gradients are asked for, or they come in a batch."""
    lead, (points, features), columns = query.shape[:-2], key.shape[-2:], value.shape[-1]
    batch, dual = math.prod(lead), points < features
    size = points if dual else features
    packed, coef, matrix = kept.split([3 * batch, batch * size * columns, batch * size * size])
    alpha = key.new_full((batch,), setting.alpha)
    if keep is not None:  # the kernels fill in zeros by themselves
        keep = keep.unsqueeze(-1)
        key, value = torch.where(keep, key, 0.0), torch.where(keep, value, 0.0)
    problem = Problem(query, key, value, None, alpha, None)
    plan, asked = Plan(dual, setting.intercept, setting.scale), Needs(needs[0], needs[1], needs[2], False, False, False)
    if torch.is_grad_enabled():
        grads = differentiable(grad, problem, setting.plain, plan, "auto", asked)
    else:
        coef, matrix = coef.view(batch, size, columns), matrix.view(batch, size, size)
        seen = packed.view(batch, 3), setting.plain
        grads = backward_batch(grad, problem, coef, matrix, *seen, plan, "auto", asked)
    if keep is None:
        return grads
    d_key, d_value = (None if x is None else torch.where(keep, x, 0.0) for x in (grads.key, grads.value))
    return grads._replace(key=d_key, value=d_value)
