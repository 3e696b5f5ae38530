"""The plain call: no weights, alpha is a number or has no gradient, and the kernels answer. Points may be masked.

What such a call has to know follows from shapes and strides, and is worked out once for each of them: a small batch
takes the kernels less time than it takes to look at its tensors. Everything else goes the way of `ridge`.
"""

from __future__ import annotations

import array
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import LIMITS, wants_inverse
from intention.solve.native.call import BACKWARD, LARGEST, PLAIN, SOME_LEFT, described, readable
from intention.solve.native.library import available, kernel
from intention.solve.operator import Kept, Operator, Saved, no_autocast
from intention.solve.problem import Grads, Needs, Plan, Problem
from intention.solve.ridge.by_route import Known, backward_batch, solve_batch
from intention.solve.ridge.ridge import differentiable
from intention.solve.torch_state import forward_mode, transformed, unobserved

_TYPES = (Tensor, torch.nn.Parameter)
_DTYPES = (torch.float32, torch.float64)
_LARGEST_ALPHA = 1e38  # that float32 can hold
_NUMBERS = BACKWARD.size // 8


# Where in the block what only a call knows goes: the order is that of arguments.h.
_QUERY, _KEY, _VALUE, _ALPHA, _KEEP, _COEF, _MATRIX, _OUT, _REPORT = 16, 20, 24, 30, 34, 36, 37, 38, 39
_ROUTE, _GRAD, _TO = 38, 41, 45  # in a backward


class Layout(NamedTuple):
    """What shapes, strides and options tell."""

    block: array.array[int]  # all that the kernels are told of it, as numbers of 8 bytes
    alive: array.array[float] | None  # alpha, which the block points to
    dense: bool  # all three are contiguous
    like_value: bool  # so is the answer, of the shape of `value`
    batch: int
    out: tuple[int, ...]
    kept: int  # numbers in one buffer: report (B, 3), coefficients and factor, in this order
    ends: tuple[int, int]  # bytes before the coefficients, and before the factor


@functools.lru_cache(maxsize=1024)
def _layout(
    dtype: torch.dtype,
    threads: int,
    intercept: bool,
    scale: float,
    alpha: float | None,
    shapes: tuple[tuple[int, ...], ...],
    *strides: tuple[int, ...],
) -> Layout | None:
    """None where the call is not plain: it is broadcast, empty, too large, or wrong. alpha None: a tensor."""
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
    if size > LARGEST or dtype not in _DTYPES:
        return None
    inner, inverse = lead[1] if len(lead) == 2 else 1, wants_inverse(size, columns)
    told = (dtype == torch.float64, threads, batch, inner, 1, points, queries, features, columns)
    places = [x for s in strides for x in (0, s[0], s[1] if len(s) == 4 else 0, s[-2])]
    cell = None if alpha is None else array.array("f" if dtype == torch.float32 else "d", [alpha])
    at = 0 if cell is None else cell.buffer_info()[0]  # one number in memory, which all elements read
    given = (*told, dual, intercept, inverse, scale, *LIMITS[dtype, dual], *places, 0, 0, at, 0)
    block = array.array("q", BACKWARD.pack(*given, *[0] * (_NUMBERS - len(given))))
    dense = all(_contiguous(x, s) for x, s in zip(shapes, strides, strict=True))
    out, first, second = (*lead, queries, columns), 3 * batch, 3 * batch + batch * size * columns
    ends = first * dtype.itemsize, second * dtype.itemsize
    return Layout(block, cell, dense, dense and out == value, batch, out, second + batch * size * size, ends)


def _contiguous(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    wanted = 1
    for size, step in zip(reversed(shape), reversed(stride), strict=True):
        if size != 1 and step != wanted:
            return False
        wanted *= size
    return True


def _fits(keep: Tensor, key: Tensor) -> bool:
    """Whether it broadcasts to the points (..., N)."""
    wanted = key.shape[:-1]
    if keep.dtype != torch.bool or not (keep.is_cpu and 1 <= keep.dim() <= len(wanted)):
        return False
    return all(have in (1, want) for have, want in zip(keep.shape[::-1], wanted[::-1], strict=False))


def _kept(keep: Tensor, key: Tensor) -> Tensor | None:
    """One byte for each point of each element (..., N)."""
    return keep.expand(key.shape[:-1]).contiguous() if readable(keep, torch.bool) and _fits(keep, key) else None


class Found(NamedTuple):
    out: Tensor
    kept: Tensor
    plain: bool  # the factor alone served all elements


def _looked_at(
    query: Tensor, key: Tensor, value: Tensor, intercept: bool, scale: float, alpha: float | None
) -> Layout | None:
    if not (type(query) in _TYPES and type(key) in _TYPES and type(value) in _TYPES):
        return None
    dtype = query.dtype
    if not (key.dtype is dtype and value.dtype is dtype and query.is_cpu and key.is_cpu and value.is_cpu):
        return None
    if query.is_neg() or key.is_neg() or value.is_neg():
        return None
    shapes, threads = (query.shape, key.shape, value.shape), torch.get_num_threads()
    return _layout(dtype, threads, intercept, scale, alpha, shapes, query.stride(), key.stride(), value.stride())


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
    if not (isinstance(query, Tensor) and isinstance(key, Tensor) and isinstance(value, Tensor)):
        return None
    if torch.compiler.is_compiling():
        if isinstance(alpha, Tensor) or convex or not _serves(query, key, value, keep, intercept):
            return None
        keep = None if keep is None else keep.expand(key.shape[:-1])
        return ANSWERED(query, key, value, keep, alpha, intercept, scale)[0]
    if torch._C._is_tracing() or transformed() or forward_mode():
        return None
    pulled = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad)
    found = _answer(query, key, value, keep, alpha, convex, intercept, scale, pulled)
    if found is None or not pulled:
        return None if found is None else found.out
    return _apply(query, key, value, keep, found, (alpha, intercept, scale))


def _answer(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    alpha: float | Tensor,
    convex: bool,
    intercept: bool,
    scale: float,
    pulled: bool,
) -> Found | None:
    number = None if isinstance(alpha, Tensor) else alpha
    if number is not None and (convex or number > _LARGEST_ALPHA):
        return None
    layout = _looked_at(query, key, value, intercept, scale, number)
    if layout is None or (function := kernel("intention_ridge_forward")) is None:
        return None
    if keep is not None and (intercept or (keep := _kept(keep, key)) is None):
        return None
    block = _block(layout, query, key, value, keep)
    if number is None:
        told = _regulariser(alpha, convex, query.dtype, layout, pulled)
        if told is None:
            return None
        regulariser, gain = told
        block[_ALPHA], block[_ALPHA + 1] = regulariser.data_ptr(), regulariser.stride(0)
        if gain is not None:
            block[_ALPHA + 2], block[_ALPHA + 3] = gain.data_ptr(), gain.stride(0)
    out = torch.empty_like(value) if layout.like_value else query.new_empty(layout.out)
    kept = out
    if pulled:
        kept = query.new_empty(layout.kept)
        at, (coef, matrix) = kept.data_ptr(), layout.ends
        block[_COEF], block[_MATRIX], block[_REPORT] = at + coef, at + matrix, at
    block[_OUT] = out.data_ptr()
    status = function(block.tobytes())
    return None if status == SOME_LEFT else Found(out, kept, status == PLAIN)


def _regulariser(
    alpha: Any, convex: bool, dtype: torch.dtype, layout: Layout, pulled: bool
) -> tuple[Tensor, Tensor | None] | None:
    """alpha and gain of each element."""
    lead = layout.out[:-2]
    if pulled or not readable(alpha, dtype) or (alpha.requires_grad and torch.is_grad_enabled()):
        return None
    if alpha.shape not in (lead[-1:], ()):
        return None
    alpha = alpha.expand(lead).reshape(-1)
    return alpha, 1 - alpha if convex else None


def _block(layout: Layout, query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> array.array[int]:
    block = layout.block[:]
    block[_QUERY], block[_KEY], block[_VALUE] = query.data_ptr(), key.data_ptr(), value.data_ptr()
    if keep is not None:
        block[_KEEP], block[_KEEP + 1] = keep.data_ptr(), keep.shape[-1]
    return block


class Plain(torch.autograd.Function):
    """The eager door: that of an operator without what a plain call never needs, a tenth of the time of a small one."""

    @staticmethod
    def forward(ctx: Kept, *args: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        query, key, value, keep, found, ctx.options = args
        ctx.seen = found.plain
        ctx.save_for_backward(query, key, value, keep, found.kept)
        return found.out

    @staticmethod
    def backward(ctx: Kept, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, kept = ctx.saved_tensors
        pull = _pull if unobserved() else ANSWERED.differentiable
        saved = Saved(tuple(tensors), ctx.options, (kept,), ctx.seen)
        return *pull(grads, saved, ctx.needs_input_grad[:4]), None, None


# Not the `apply` of Python, which looks for torch.func: `plain` has done so.
_apply: Callable[..., Tensor] = super(torch.autograd.Function, Plain).apply  # pyright: ignore[reportAttributeAccessIssue]


def _serves(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None, intercept: bool) -> bool:
    """What a graph must know before there are values."""
    lead, dtype = query.shape[:-2], query.dtype
    if not (lead == key.shape[:-2] == value.shape[:-2] and dtype == key.dtype == value.dtype and len(lead)):
        return False
    if key.shape[-1] != query.shape[-1] or key.shape[-2] != value.shape[-2] or 0 in query.shape or 0 in value.shape:
        return False
    if keep is not None and (intercept or not _fits(keep, key)):
        return False
    return query.is_cpu and key.is_cpu and value.is_cpu and dtype in _DTYPES and available()


def _solve(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    keep: Tensor | None,
    alpha: float,
    intercept: bool,
    scale: float,
    pulled: bool,
) -> tuple[tuple[Tensor, Tensor], bool]:
    found = _answer(query, key, value, keep, alpha, False, intercept, scale, pulled)
    if found is not None:
        return (found.out, found.kept), found.plain
    problem, plan = _long(query, key, value, keep, alpha, intercept, scale)
    (out, *kept), served = solve_batch(problem, plan, "auto", pulled)
    return (out, torch.cat([x.flatten() for x in (kept[-1], *kept[:-1])])), served


def _long(*args: Any) -> tuple[Problem, Plan]:
    """What `ridge` makes of it; the kernels fill in zeros for masked points by themselves."""
    query, key, value, keep, alpha, intercept, scale = args
    key, value = _zeroed(keep, key, value)
    number = key.new_full((math.prod(query.shape[:-2]),), alpha)
    return Problem(query, key, value, None, number, None), Plan(key.shape[-2] < key.shape[-1], intercept, scale)


def _zeroed(keep: Tensor | None, *points: Tensor | None) -> list[Any]:
    return [x if x is None or keep is None else torch.where(keep.unsqueeze(-1), x, 0.0) for x in points]


def _shapes(query: Tensor, key: Tensor, value: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    (points, features), columns = key.shape[-2:], value.shape[-1]
    size = points if points < features else features
    kept = math.prod(query.shape[:-2]) * (3 + size * columns + size * size)
    return query.new_empty(*query.shape[:-1], columns), query.new_empty(kept)


def _pull(grads: Sequence[Tensor], saved: Any, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    """By the compiled kernel, or where memory cannot be read as it is by the way of `ridge`."""
    (grad,), (query, key, value, keep), (alpha, intercept, scale), (kept,), _ = grads, *saved
    function, layout = kernel("intention_ridge_backward"), _looked_at(query, key, value, intercept, scale, alpha)
    if function is None or layout is None or not (readable(grad, query.dtype) and readable(kept, query.dtype)):
        return _pulled_by_ridge(grad, saved, needs)
    if keep is not None and (keep := _kept(keep, key)) is None:
        return _pulled_by_ridge(grad, saved, needs)
    try:
        grad, g = described(grad)
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a tensor without memory of its own
        return _pulled_by_ridge(grad, saved, needs)
    block = _block(layout, query, key, value, keep)
    found: list[Tensor | None] = [None] * 4
    for i, x in enumerate((query, key, value)):
        if needs[i]:
            found[i] = to = torch.empty_like(x) if layout.dense else x.new_empty(x.shape)
            block[_TO + i] = to.data_ptr()
    at, (coef, matrix) = kept.data_ptr(), layout.ends
    block[_COEF], block[_MATRIX] = at + coef, at + matrix
    if not saved.seen:
        block[_ROUTE], block[_ROUTE + 1] = at, 3
    block[_GRAD], block[_GRAD + 1], block[_GRAD + 2], block[_GRAD + 3] = g
    status = function(block.tobytes())
    return found if status != SOME_LEFT else _pulled_by_ridge(grad, saved, needs)


@no_autocast
def _pulled_by_ridge(grad: Tensor, saved: Saved, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    problem, plan = _long(*saved.tensors, *saved.options)
    batch, columns = problem.alpha.shape[0], problem.value.shape[-1]
    size = problem.key.shape[-2 if plan.dual else -1]
    packed, coef, matrix = saved.outputs[0].split([3 * batch, batch * size * columns, batch * size * size])
    coef, matrix, packed = coef.view(batch, size, columns), matrix.view(batch, size, size), packed.view(batch, 3)
    known, asked = Known(problem, plan, coef, matrix, packed, saved.seen), Needs._make((*needs, False, False))
    return _masked(backward_batch(grad, known, "auto", asked), saved)


def _differentiable(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> Sequence[Tensor | None]:
    problem, plan = _long(*saved.tensors, *saved.options)
    asked = Needs._make((*needs, False, False))
    return _masked(differentiable(grads[0], problem, bool(saved.seen), plan, "auto", asked), saved)


def _masked(grads: Grads, saved: Saved) -> Sequence[Tensor | None]:
    """Those of the operator's tensors: its mask, which has none, stands where a problem has weights."""
    query, key, value, none = grads[:4]
    return query, *_zeroed(saved.tensors[3], key, value), none


ANSWERED = Operator(
    "plain",
    tensors="query key value mask?",
    options="float alpha, bool intercept, float scale",
    answers=1,
    outputs=2,  # out; report, coefficients and factor in one buffer
    solve=_solve,
    shapes=_shapes,
    pull=_pull,
    differentiable=_differentiable,
    saves_answers=False,
    whole=True,
)
