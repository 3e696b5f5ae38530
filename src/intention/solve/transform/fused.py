"""softmax(Q Sigma^-1 K') V as one compiled operation; where it does not apply there are `transform` and SDPA."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.solve.doors import Door, asked, compiling, eager, forward_mode, gradient_free, no_autocast, unobserved
from intention.solve.ladder import FLOAT64, Report, has_float64, pack, unpack, warn_inaccurate
from intention.solve.native import sigma as native
from intention.solve.problem import Needs, Problem
from intention.solve.transform.rows import Points
from intention.solve.transform.transform import transform

# The rounding of a score up to which float32 serves: measured on 3,000 calls, answers then err by 5e-6 at most.
SMALL_ROUNDING = 1e-5


def rounding(moved: Tensor, key: Tensor) -> Tensor:
    """How far the rounding of X = Q Sigma^-1 moves a score x.k: up to eps |x| |k|. Infinity shows by itself."""
    reach = torch.linalg.vector_norm(moved, dim=-1).amax(-1) * torch.linalg.vector_norm(key, dim=-1).amax(-1)
    return reach.masked_fill(reach.isinf(), 0.0) * torch.finfo(moved.dtype).eps


def sigma(problem: Problem, trusted: bool) -> tuple[Tensor, Tensor] | None:
    """The answer (B, M, k) and a packed report; None: no kernel, or an element is beyond double precision."""
    if compiling():
        if not native.serves(problem.key):
            return None
        query, key, value, _, alpha, gain = problem
        out, _, _, packed = torch.ops.intention.sigma(query, key, value, alpha, gain, trusted, asked(*problem))
        return out, packed
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
def answer(problem: Problem, trusted: bool, keep: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """For the compiled door, which must have an answer: by the kernel, else by `transform` and attention.

    Returns (answer, what is kept of the softmax, Sigma^-1 or L, packed report). Of the sums (B, 1 / sum per query) that
    are kept, 0 says that no kernel has served; without `keep` both are empty.
    """
    query, key = problem.query, problem.key
    (batch, m), n = query.shape[:2], min(key.shape[1:])
    found = native.forward(problem, keep)
    kept, matrix = query.new_empty(0), query.new_empty(0)  # outputs of an operator must not be one tensor
    if found is not None:
        if keep:
            kept, matrix = _joined(found.kept, found.parts), found.matrix[:: found.parts]
        return found.out, kept, matrix, found.packed
    if keep:
        kept, matrix = query.new_zeros(batch, 2, m), query.new_zeros(batch, n, n)
    out, packed = _in_torch(problem, trusted)
    return out, kept, matrix, packed


def pull(
    grad: Tensor, problem: Problem, out: Tensor, kept: Tensor, matrix: Tensor, packed: Tensor, needs: Needs
) -> tuple[Tensor | None, ...]:
    """The gradients of `answer`."""
    if kept.numel() and kept[0, 1, 0].item() != 0:
        parts = native.parts_of(*out.shape[:2]) or 1
        split = kept.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1)
        matrix = matrix.repeat_interleave(parts, 0) if parts > 1 else matrix
        pulled = native.backward(problem, native.Found(out, packed, parts, split, matrix), grad, needs)
        if pulled is not None:
            return pulled[:6]
    pairs = zip(problem, needs, strict=True)
    watched: Any = [None if x is None else x.detach().requires_grad_(need) for x, need in pairs]
    return _written_out(grad, Problem(*watched), needs, packed)


def _joined(kept: Tensor, parts: int) -> Tensor:
    """(B * parts, 2, M / parts) -> (B, 2, M)"""
    return kept if parts == 1 else kept.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2)


def _in_torch(problem: Problem, trusted: bool) -> tuple[Tensor, Tensor]:
    """Without the kernel: the answer and a packed report, in float64 where the rounding of scores asks for it."""
    dtype = problem.query.dtype
    wide = dtype == torch.float64 or not has_float64(problem.query.device)
    moved, key, packed = _transformed(problem, trusted)
    error = rounding(moved, key)
    if not wide and error.amax().item() > SMALL_ROUNDING:
        problem = problem.take(None, torch.float64)
        moved, key, packed = _transformed(problem, trusted)
        error, wide = rounding(moved, key), True
    route, condition, own = unpack(packed, False, moved.dtype)
    if moved.dtype != dtype:
        route = route.clamp_min(FLOAT64)
    report = Report(*(x.to(dtype) for x in (route, condition, torch.fmax(own, error) + torch.finfo(dtype).eps)))
    warn_inaccurate(report)
    return _attended(moved, key, problem.value).to(dtype), pack(report)


def _transformed(problem: Problem, trusted: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, packed report) whose products are the scores: Q Sigma^-1 and K, or Q and G^-1 K if N < d."""
    query, key, _, _, alpha, gain = problem
    if key.shape[-2] < key.shape[-1]:
        moved, packed = transform(Points(key.mT, key.mT, None, alpha, gain), "auto", trusted)
        return query, moved.mT, packed
    moved, packed = transform(Points(query, key, None, alpha, gain), "auto", trusted)
    return moved, key, packed


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K') V, fused: torch does that for 4-D tensors."""
    out = TF.scaled_dot_product_attention(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), scale=1.0)
    return out.squeeze(0)


def _softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """The same, written out."""
    return torch.bmm(torch.softmax(torch.bmm(query, key.mT), -1), value)


@no_autocast
def _written_out(grad: Tensor, problem: Problem, needs: Needs, packed: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by operations of which torch knows every derivative: its fused attention has but one."""
    again, once = torch.is_grad_enabled(), unobserved()
    wide = torch.float64 if bool((packed[:, 0] >= FLOAT64).any()) else grad.dtype
    with torch.enable_grad():
        # aliases: alpha and gain may be made of each other, and each has a slope of its own
        own = Problem(*(None if x is None else x.view_as(x) for x in problem))  # type: ignore[arg-type]
        same = own.take(None, wide)
        moved, key, _ = _transformed(same, True)
        out = (_attended if once else _softmax)(moved, key, same.value)
        wanted = [x for x, need in zip(own, needs, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad.to(wide), create_graph=again))
    return tuple(next(found) if need and x is not None else None for x, need in zip(problem, needs, strict=True))
