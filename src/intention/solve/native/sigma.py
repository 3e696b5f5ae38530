"""The compiled sigma-Intention: scores, softmax and values in one pass over the keys, for CPU tensors.

It has no backward: calls of which a derivative can be asked go through `transform` and torch's attention.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intention.solve.factor import wants_inverse
from intention.solve.native.call import FORWARD, PLAIN, call
from intention.solve.native.library import kernel
from intention.solve.problem import Plan, Problem

_PLAN = Plan(dual=False, intercept=False, scale=1.0)
_ROWS = 64  # queries that are worth a part of their own: a block of the kernel


def forward(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """softmax(Q Sigma^-1 K') V (B, M, k) and the ratio of each element (B,).

    None where the kernel does not apply, or where an element must climb the accuracy ladder.
    """
    function = kernel("intention_sigma_forward")
    query, key, value, weight, alpha, gain = problem
    if function is None or weight is not None or (parts := _parts(*query.shape[:2])) is None:
        return None
    inverse = wants_inverse(key.shape[-1], query.shape[-2])
    shape = (*query.shape[:-1], value.shape[-1])
    if parts > 1:  # as neighbours that share their keys
        query = query.reshape(-1, query.shape[1] // parts, query.shape[2])
        alpha, gain = alpha.repeat_interleave(parts), None if gain is None else gain.repeat_interleave(parts)
    if (block := call(query, key, value, None, alpha, gain, _PLAN, inverse)) is None:
        return None
    out, ratio = query.new_empty(shape), query.new_empty(alpha.shape)
    status = function(FORWARD.pack(*block.numbers, 0, 0, out.data_ptr(), ratio.data_ptr()))
    return (out, ratio[::parts]) if status == PLAIN else None


def _parts(batch: int, queries: int) -> int | None:
    """Into how many the queries of an element are split so that all threads have work; None if torch does it better."""
    threads = torch.get_num_threads()
    if batch >= 4 * threads or queries < 2 * _ROWS:
        return 1
    parts = threads // math.gcd(batch, threads)
    if queries % parts == 0 and queries // parts >= _ROWS:
        return parts
    return 1 if batch >= threads else None
