"""softmax(Q Sigma^-1 K') V as one compiled operation; where it does not apply there are `transform` and SDPA."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention.solve.doors import Door, eager, forward_mode, gradient_free, no_autocast, unobserved
from intention.solve.ladder import FLOAT64
from intention.solve.native import sigma as native
from intention.solve.problem import Problem
from intention.solve.pullback import Needs
from intention.solve.rows import Points
from intention.solve.transform import transform


def sigma(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The answer (B, M, k) and a packed report; None: no kernel, or an element is beyond double precision."""
    if gradient_free(*problem):
        found = native.forward(problem, keep=False)
        return None if found is None else (found.out, found.packed)
    if not eager() or forward_mode():
        return None
    found = native.forward(problem, keep=True)  # before the door: it may have no answer
    return None if found is None else (Sigma.apply(*problem, found), found.packed)


class Sigma(Door):
    """The door for calls that nothing transforms: reverse derivatives of any order, those beyond the first in torch."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return args[6].out

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        found = inputs[6]
        ctx.parts = found.parts
        ctx.save_for_backward(*inputs[:6], output, found.packed, found.kept, found.matrix)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        *tensors, out, packed, kept, matrix = ctx.saved_tensors
        problem, needs = Problem(*tensors), Needs(*ctx.needs_input_grad[:6])
        found = native.Found(out, packed, ctx.parts, kept, matrix)
        pulled = native.backward(problem, found, grads[0], needs) if unobserved() else None
        return *(_written_out(grads[0], problem, needs, packed) if pulled is None else pulled[:6]), None


@no_autocast
def _written_out(grad: Tensor, problem: Problem, needs: Needs, packed: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by operations of which torch knows every derivative: its fused attention has but one."""
    again = torch.is_grad_enabled()
    wide = torch.float64 if bool((packed[:, 0] == FLOAT64).any()) else grad.dtype
    with torch.enable_grad():
        query, key, value, _, alpha, gain = (None if x is None else x.to(wide) for x in problem)
        if key.shape[-2] < key.shape[-1]:
            moved, _ = transform(Points(key.mT, key.mT, None, alpha, gain), "auto", True)
            scores = torch.bmm(query, moved)
        else:
            moved, _ = transform(Points(query, key, None, alpha, gain), "auto", True)
            scores = torch.bmm(moved, key.mT)
        out = torch.bmm(torch.softmax(scores, -1), value)
        wanted = [x for x, need in zip(problem, needs, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad.to(wide), create_graph=again))
    return tuple(next(found) if need and x is not None else None for x, need in zip(problem, needs, strict=True))
