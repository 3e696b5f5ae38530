"""softmax(Q Sigma^-1 K') V as one compiled operation; where it does not apply there are `transform` and SDPA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.solve.doors import (
    Door,
    asked,
    compiling,
    eager,
    forward_mode,
    gradient_free,
    no_autocast,
    unobserved,
)
from intention.solve.factor import wants_inverse
from intention.solve.ladder import base_report, pack, whole
from intention.solve.native import sigma as native
from intention.solve.problem import Problem
from intention.solve.pullback import Needs
from intention.solve.rows import Points, transform_rows
from intention.solve.transform import transform


def sigma(problem: Problem, trusted: bool) -> tuple[Tensor, Tensor] | None:
    """The answer (B, M, k) and a packed report; None: no kernel, or an element must climb the ladder."""
    if compiling():
        if not native.serves(problem.key):
            return None
        query, key, value, _, alpha, gain = problem
        out, _, _, packed = torch.ops.intention.sigma(query, key, value, alpha, gain, trusted, asked(*problem))
        return out, packed
    if gradient_free(*problem):
        found = native.forward(problem, keep=False)
        return None if found is None else (found.out, found.ratio)
    if not eager() or forward_mode():
        return None
    found = native.forward(problem, keep=True)  # before the door: it may have no answer
    return None if found is None else (Sigma.apply(*problem, found), found.ratio)


class Sigma(Door):
    """The door for calls that nothing transforms: reverse derivatives of any order, those beyond the first in torch."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return args[6].out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        found = inputs[6]
        ctx.parts = found.parts
        ctx.save_for_backward(*inputs[:6], output, found.kept, found.matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out, kept, matrix = ctx.saved_tensors
        problem, needs = Problem(*tensors), Needs(*ctx.needs_input_grad[:6])
        found = native.Found(out, kept, ctx.parts, kept, matrix)
        pulled = native.backward(problem, found, grads[0], needs) if unobserved() else None
        return *(_written_out(grads[0], problem, needs) if pulled is None else pulled[:6]), None


@no_autocast
def answer(problem: Problem, trusted: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the compiled door, which must have an answer: by the kernel, else by `transform` and attention.

    Returns (answer, what is kept of the softmax, Sigma^-1 or L, packed report). Of the sums (B, 1 / sum per query) that
    are kept, 0 says that no kernel has served; without `keep` both are empty.
    """
    query, key, value, _, alpha, gain = problem
    found = native.forward(problem, keep)
    if found is not None:
        out, packed = found.out, pack(base_report(False, found.ratio, query.dtype))
        kept, matrix = (_joined(found.kept, found.parts), found.matrix[:: found.parts]) if keep else (None, None)
    else:
        (batch, m, d), options = query.shape, ("auto", wants_inverse(key.shape[2], query.shape[1]), trusted)
        moved, _, packed = transform_rows(query, key, None, alpha, gain, *options, None, None, False)
        out, packed = _attended(moved, key, value), whole(packed, False, query.dtype)
        kept, matrix = (query.new_zeros(batch, 2, m), query.new_empty(batch, d, d)) if keep else (None, None)
    empty = [query.new_empty(0) if x is None else x for x in (kept, matrix)]
    return out, empty[0], empty[1], packed


def pull(grad: Tensor, problem: Problem, out: Tensor, kept: Tensor, matrix: Tensor, needs: Needs) -> Any:
    """The gradients of `answer`."""
    pulled = None
    if kept.numel() and kept[0, 1, 0].item() != 0:
        parts = native.parts_of(*out.shape[:2]) or 1
        split = kept.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
        matrix = matrix.repeat_interleave(parts, 0) if parts > 1 else matrix
        found = native.Found(out, kept, parts, split, matrix)
        pulled = native.backward(problem, found, grad, needs)
    if pulled is None:
        pairs = zip(problem, needs, strict=True)
        watched: Any = [None if x is None else x.detach().requires_grad_(need) for x, need in pairs]
        return _written_out(grad, Problem(*watched), needs)
    return pulled[:6]


def _joined(kept: Tensor, parts: int) -> Tensor:
    """(B * parts, 2, M / parts) -> (B, 2, M)"""
    return kept if parts == 1 else kept.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2)


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K') V, fused: torch does that for 4-D tensors."""
    out = TF.scaled_dot_product_attention(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), scale=1.0)
    return out.squeeze(0)


def _softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, written out."""
    return torch.bmm(torch.softmax(torch.bmm(query, key.mT), -1), value)


@no_autocast
def _written_out(grad: Tensor, problem: Problem, needs: Needs) -> tuple[Tensor | None, ...]:
    """The gradients by operations of which torch knows every derivative: its fused attention has but one."""
    again, once = torch.is_grad_enabled(), unobserved()
    with torch.enable_grad():
        query, key, value, _, alpha, gain = problem
        moved, _ = transform(Points(query, key, None, alpha, gain), "auto", True)
        out = _attended(moved, key, value) if once else _softmax(moved, key, value)
        wanted = [x for x, need in zip(problem, needs, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad, create_graph=again))
    return tuple(next(found) if need and x is not None else None for x, need in zip(problem, needs, strict=True))
