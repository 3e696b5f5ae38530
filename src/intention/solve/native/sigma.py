"""The compiled sigma-Intention: scores, softmax and values in one pass over the keys, for CPU tensors."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import wants_inverse
from intention.solve.native.call import BACKWARD, FORWARD, LARGEST, SOME_LEFT, Call, call, incoming, pointer, room
from intention.solve.native.library import available, kernel
from intention.solve.problem import Grads, Needs, Plan, Problem
from intention.solve.torch_state import sum_neighbours

_PLANS = [Plan(dual, intercept=False, scale=1.0) for dual in (False, True)]
_ROWS = 64  # queries that are worth a part of their own: a block of the kernel


class Attended(NamedTuple):
    out: Tensor  # (B, M, k), or with as many dimensions as the problem has
    packed: Tensor  # (B, 3), as in `ladder`
    parts: int  # into which the queries of an element were split; each counts as an element below
    kept: Tensor  # (B * parts, 2, M / parts): largest score and 1 / the sum of exponentials of each query
    matrix: Tensor  # (B * parts, n, n): Sigma^-1 or L, n the smaller of N and d


def forward(problem: Problem, keep: bool) -> Attended | None:
    """softmax(Q Sigma^-1 K') V. None where the kernel does not apply, or an element is beyond double precision.

    `kept` and `matrix` are what a backward needs; without `keep` they are anything.
    """
    function = kernel("intention_sigma_forward")
    query, key, value = problem[:3]
    batch, m, n = problem.alpha.shape[0], query.shape[-2], min(key.shape[-2:])
    if function is None or problem.weight is not None or (parts := parts_of(batch, m)) is None:
        return None
    if (block := _call(problem, parts)) is None:
        return None
    out, packed = query.new_empty((*query.shape[:-1], value.shape[-1])), query.new_empty((batch * parts, 3))
    kept = matrix = packed  # without `keep` nobody looks at them
    if keep:
        kept, matrix = query.new_empty((batch * parts, 2, m // parts)), query.new_empty((batch * parts, n, n))
    ends = kept.data_ptr() if keep else 0, matrix.data_ptr() if keep else 0, out.data_ptr(), packed.data_ptr()
    if function(FORWARD.pack(*block.numbers, *ends)) == SOME_LEFT:
        return None
    packed = packed.view(batch, parts, 3).amax(1) if parts > 1 else packed  # in double if one part is
    return Attended(out, packed, parts, kept, matrix)


def backward(problem: Problem, found: Attended, grad: Tensor, needs: Needs) -> Grads | None:
    """First-order gradients; None where the gradient has no memory that could be read."""
    function = kernel("intention_sigma_backward")
    if function is None or (block := _call(problem, found.parts)) is None:
        return None
    query, key, value, _, alpha, gain = problem
    split = found.kept.shape[0]
    if (read := incoming(grad.reshape(split, -1, grad.shape[-1]), found.out.dtype)) is None:
        return None
    grads = Grads(
        room(query, query.shape) if needs.query else None,
        room(key, (split, *key.shape[1:])) if needs.key else None,
        room(value, (split, *value.shape[1:])) if needs.value else None,
        None,
        alpha.new_empty(split) if needs.alpha else None,
        alpha.new_empty(split) if needs.gain and gain is not None else None,
        None,
    )
    kept, matrix, out = found.kept.contiguous(), found.matrix.contiguous(), found.out.contiguous()
    route = found.packed.repeat_interleave(found.parts, 0) if found.parts > 1 else found.packed
    ends = kept.data_ptr(), matrix.data_ptr(), route.data_ptr(), route.stride(0), out.data_ptr(), *read[1]
    d_query, d_key, d_value, _, d_alpha, d_gain, _ = map(pointer, grads)
    function(BACKWARD.pack(*block.numbers, *ends, d_query, d_key, d_value, 0, d_alpha, 0, d_gain))
    return Grads(grads.query, *(sum_neighbours(x, found.parts) for x in grads[1:]))


def serves(key: Tensor) -> bool:
    """Whether there is a kernel for such keys, which torch.compile must know before there are values."""
    return key.is_cpu and min(key.shape[-2:]) <= LARGEST and available()


def _call(problem: Problem, parts: int) -> Call | None:
    query, key, value, _, alpha, gain = problem
    n, d = key.shape[-2:]
    inverse = wants_inverse(min(n, d), query.shape[-2])
    if parts > 1:  # as neighbours that share their keys
        query = query.reshape(-1, query.shape[-2] // parts, d)
        key, value = key.reshape(-1, n, d), value.reshape(-1, n, value.shape[-1])
        alpha, gain = alpha.repeat_interleave(parts), None if gain is None else gain.repeat_interleave(parts)
    return call((query, key, value, None, alpha, gain), _PLANS[n < d], inverse)


def parts_of(batch: int, queries: int) -> int | None:
    """Into how many the queries of an element are split so that all threads have work; None if torch does it better."""
    threads = torch.get_num_threads()
    if batch >= 4 * threads or queries < 2 * _ROWS:
        return 1
    parts = threads // math.gcd(batch, threads)
    if queries % parts == 0 and queries // parts >= _ROWS:
        return parts
    return 1 if batch >= threads else None
