"""Calls of the compiled ridge: one block of numbers per call, in the order of arguments.h."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import EASY, HARD, SMALL_CORRECTION, wants_inverse
from intention.solve.native.library import library
from intention.solve.problem import Plan, Problem
from intention.solve.pullback import Grads, Needs

_COMMON = "12q 4d 12q 6q 3q"
_FORWARD = struct.Struct(_COMMON + "2q")
_BACKWARD = struct.Struct(_COMMON + "2q 4q 7q")
_PLAIN = (Tensor, torch.nn.Parameter)
# Beyond this size of Sigma, products dominate and torch's run on every core.
_LARGEST = 512


class Found(NamedTuple):
    out: Tensor
    coef: Tensor  # (B, n, k)
    matrix: Tensor  # (B, n, n): Sigma^-1 or L, as `factor.Factor` has it
    report: Tensor  # (B, 3), packed as in `ladder`
    status: int


# `Found.status`, as in arguments.h
PLAIN, SOME_REFINED, SOME_LEFT = range(3)


@functools.cache
def _function(name: str) -> Callable[[bytes], int] | None:
    found = library()
    if found is None:
        return None
    function = getattr(found, name)
    function.argtypes = [ctypes.c_char_p]
    return function


def _takes(x: Tensor) -> bool:
    """Memory that can be read as it is: no subclass with its own storage, no pending negation."""
    return type(x) in _PLAIN and x.device.type == "cpu" and not x.is_neg()


def _described(x: Tensor) -> tuple[Tensor, tuple[int, int, int, int]]:
    """(pointer, strides of an outer and an inner batch and of rows); columns lie side by side."""
    if x.dim() > 4:
        x = x.flatten(0, -3)
    strides = x.stride()
    if strides[-1] != 1 and x.shape[-1] != 1:
        x = x.contiguous()
        strides = x.stride()
    if len(strides) == 3:
        return x, (x.data_ptr(), strides[0], 0, strides[1])
    return x, (x.data_ptr(), strides[0], strides[1], strides[2])


def _per_element(x: Tensor | None) -> tuple[Tensor | None, tuple[int, int]]:
    if x is None:
        return None, (0, 0)
    if x.dim() == 2 and x.stride(1) != 1:
        x = x.contiguous()
    return x, (x.data_ptr(), x.stride(0))


class Call(NamedTuple):
    """The part of the block that forward and backward share, up to the coefficients."""

    numbers: tuple[float, ...]
    alive: tuple[Tensor | None, ...]  # copies that the pointers look at
    size: int  # n
    batch: int


def _call(problem: Problem, plan: Plan) -> Call | None:
    query, key, value, weight, alpha, gain = problem
    dtype = query.dtype
    if dtype != torch.float32 and dtype != torch.float64:
        return None
    if not (_takes(query) and _takes(key) and _takes(value) and _takes(alpha)):
        return None
    if not (key.dtype == value.dtype == alpha.dtype == dtype):
        return None
    for x in (weight, gain):
        if x is not None and not (_takes(x) and x.dtype == dtype):
            return None
    (points, features), (queries, columns) = key.shape[-2:], (query.shape[-2], value.shape[-1])
    batch, size = alpha.shape[0], points if plan.dual else features
    if size > _LARGEST or not (batch and points and features and queries and columns):
        return None
    dim = query.dim()
    times = batch // key.shape[0] if dim == 3 else 1
    inner = query.shape[1] if dim == 4 else 1
    query, q = _described(query)
    key, k = _described(key)
    value, v = _described(value)
    weight, w = _per_element(weight)
    alpha, a = _per_element(alpha)
    gain, g = _per_element(gain)
    numbers = (
        *(dtype == torch.float64, torch.get_num_threads(), batch, inner, times, points, queries, features, columns),
        *(plan.dual, plan.intercept, wants_inverse(size, columns), plan.scale),
        *(EASY[dtype], HARD[dtype], SMALL_CORRECTION[dtype]),
        *(*q, *k, *v, *w, *a, *g),
    )
    return Call(numbers, (query, key, value, weight, alpha, gain), size, batch)


def forward(problem: Problem, plan: Plan) -> Found | None:
    """Gram, factor, solution and prediction of every element; None where the kernels do not apply."""
    function = _function("intention_ridge_forward")
    if function is None or (call := _call(problem, plan)) is None:
        return None
    query, columns, size, batch = problem.query, problem.value.shape[-1], call.size, call.batch
    dtype = query.dtype
    out = query.new_empty((*query.shape[:-1], columns))
    coef = query.new_empty((batch, size, columns))
    matrix = query.new_empty((batch, size, size))
    report = query.new_empty((batch, 3))
    ends = coef.data_ptr(), matrix.data_ptr(), 1, out.data_ptr(), report.data_ptr()
    status = function(_FORWARD.pack(*call.numbers, *ends))
    return Found(out, coef, matrix if wants_inverse(size, columns) else matrix.mT, report, status)


def backward(
    problem: Problem, plan: Plan, grad: Tensor, coef: Tensor, matrix: Tensor, packed: Tensor, needs: Needs
) -> Grads | None:
    """Gradients of the elements solved by the plain factor or by one refinement step; other elements are left open."""
    function = _function("intention_ridge_backward")
    if function is None or not (_takes(grad) and coef.dtype == matrix.dtype == grad.dtype == problem.query.dtype):
        return None
    if (plan.dual and needs.weight and problem.weight is not None) or (call := _call(problem, plan)) is None:
        return None
    try:
        grad, g = _described(grad)
    except RuntimeError:  # torch.autograd.grad(is_grads_batched=True): a tensor without memory of its own
        return None
    coef = coef.contiguous()
    upper = matrix.mT.is_contiguous()
    matrix = matrix if upper else matrix.contiguous()
    route = (0, 0) if packed.dim() == 1 else (packed.data_ptr(), packed.stride(0))
    query, key, value, weight, alpha, gain = problem
    batch = call.batch
    shared = (batch,) if query.dim() == 3 else query.shape[:-2]

    def room(needed: bool, *shape: int) -> Tensor | None:
        return grad.new_empty(shape) if needed else None

    grads = Grads(
        room(needs.query, *query.shape),
        room(needs.key, *shared, *key.shape[-2:]),
        room(needs.value, *shared, *value.shape[-2:]),
        room(needs.weight and weight is not None, batch, key.shape[-2]),
        room(needs.alpha, batch),
        room(needs.gain and gain is not None, batch),
        room(needs.alpha, batch),
    )
    ends = coef.data_ptr(), matrix.data_ptr(), upper, *route, *g
    where = [0 if x is None else x.data_ptr() for x in grads]
    where[5], where[6] = where[6], where[5]
    function(_BACKWARD.pack(*call.numbers, *ends, *where))
    return grads
