"""Causal least squares, each sequence by the route it needs, and the eager door (`compiled` has the other).

chunks           `causal`, or `decay` where tokens are forgotten
token by token   decays too strong for chunks, and derivatives beyond the first
query by query   sequences whose condition is beyond float64: alpha = 0, keys that are not finite; by the ladder
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention import checks
from intention.solve.causal import Tokens
from intention.solve.causal_batch import pull_causal, solve_causal
from intention.solve.decay import length, pull_fading, solve_fading
from intention.solve.doors import (
    Door,
    compiling,
    forward_mode,
    gather_batch,
    gradient_free,
    no_autocast,
    scatter_batch,
)
from intention.solve.each import each_query, triangle
from intention.solve.ladder import FLOAT64, SEQUENCE_ERROR, SEQUENCE_RATIO, Report, pack, screen, unpack
from intention.solve.problem import Plan, Problem
from intention.solve.ridge import ridge
from intention.solve.rows import Points
from intention.solve.tokenwise import tokenwise
from intention.solve.transform import transform

Nine = tuple[Tensor | None, ...]  # Tokens and the logarithm of the decay


def causal(tokens: Tokens, log_decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Answers (B, N, k), or (B, N, d) without values, and a packed report (B, 3): the worst token of each sequence."""
    if compiling():
        out, packed, _ = torch.ops.intention.causal(*tokens, log_decay)
    elif gradient_free(*tokens, log_decay):
        out, packed, _ = causal_batch(*tokens, log_decay)
    else:
        out, packed, _ = Causal.apply(*tokens, log_decay)
    return out, packed


@no_autocast
def causal_batch(*nine: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(answers, packed report, which sequences went query by query)"""
    tokens, log_decay = Tokens(*nine[:8]), nine[8]
    if log_decay is None:
        out, packed, settled = solve_causal(tokens)
        if settled:
            return out, packed, out.new_zeros(out.shape[0], dtype=torch.bool)
    else:
        out, report = _with_decay(tokens, log_decay)
        packed = pack(Report(*(x.to(out.dtype) for x in report)))
    _, condition, error = packed.unbind(1)
    ratio = screen(condition, tokens.weight, tokens.alpha, tokens.gain)
    lost = ~(ratio < SEQUENCE_RATIO) | ~(error < SEQUENCE_ERROR)
    if bool(lost.any()):
        finite = torch.isfinite(tokens.key).flatten(1).all(-1)
        out, packed = (torch.where(finite.view(-1, *[1] * (x.dim() - 1)), x, torch.nan) for x in (out, packed))
        lost = lost & finite
        index = lost.nonzero()[:, 0]
        if index.numel():
            again, report = _query_by_query(_take(nine, index))
            out, packed = out.index_copy(0, index, again), packed.index_copy(0, index, pack(report))
    return out.contiguous(), packed, lost


def _with_decay(tokens: Tokens, log_decay: Tensor) -> tuple[Tensor, Report]:
    if size := length(log_decay, tokens.key.shape[1]):
        return solve_fading(tokens, log_decay, size)
    out, ratio = tokenwise(tokens, log_decay)
    error = ratio * torch.finfo(torch.float64).eps + torch.finfo(tokens.key.dtype).eps
    return out.to(tokens.key.dtype), Report(torch.full_like(ratio, FLOAT64), ratio, error)


def _query_by_query(nine: Nine) -> tuple[Tensor, Report]:
    """Every token's fit by the accuracy ladder, from the keys themselves; differentiable to any order."""
    tokens, log_decay = Tokens(*nine[:8]), nine[8]  # type: ignore[arg-type]
    if tokens.gram is not None:
        checks.require_values(tokens.weight, tokens.alpha, tokens.gain)
        raise ValueError(
            f"alpha from {float(tokens.alpha.min()):.1e} is too small beside this state and these keys, or they are "
            f"not finite: the condition is above {SEQUENCE_RATIO:.0e}, and of the tokens in a state only sums are "
            "known; use a larger alpha, or give all tokens in one call"
        )
    dual = tokens.key.shape[1] < tokens.key.shape[2]
    value = tokens.key[..., :1] if tokens.value is None else tokens.value
    base = Problem(tokens.query, tokens.key, value, tokens.weight, tokens.alpha, tokens.gain)
    total = None if log_decay is None else log_decay.cumsum(1)

    def taken(start: int, rows: int, seen: int) -> Tensor:
        shown = triangle(rows, seen, base.key.device, start)
        if total is None:
            return shown.to(base.key.dtype).expand(base.key.shape[0], rows, seen)
        gap = total[:, start : start + rows].unsqueeze(-1) - total[:, :seen].unsqueeze(-2)
        return torch.where(shown, gap, -torch.inf).exp().to(base.key.dtype)

    def solve(part: Problem, trusted: bool) -> tuple[Tensor, Report]:
        if tokens.value is None:
            points = Points(part.query, part.expanded().key, part.weight, part.alpha, part.gain)
            out, packed = transform(points, "auto", trusted)
            return out, unpack(packed, False, out.dtype)
        out, packed = ridge(part, Plan(dual, False, 1.0), "auto", trusted)
        return out, unpack(packed, dual, out.dtype)

    return each_query(base, taken, True, solve)


@no_autocast
def causal_pull(grad: Tensor, *saved: Any) -> Nine:
    """First-order gradients of all nine; `saved` are these and which went query by query."""
    nine, lost = saved[:9], saved[9]
    if bool(lost.any()):
        return differentiate(grad, saved, False)
    tokens, log_decay = Tokens(*nine[:8]), nine[8]
    if log_decay is None:
        return *pull_causal(grad, tokens), None
    if size := length(log_decay, tokens.key.shape[1]):
        pulled, slope = pull_fading(grad, tokens, log_decay, size)
        return *pulled, slope
    return differentiate(grad, saved, False)


@no_autocast
def differentiate(grad: Tensor, saved: Any, again: bool) -> Nine:
    """Gradients by autograd; with `again` they can be differentiated themselves."""
    nine, lost = saved[:9], saved[9]
    with torch.enable_grad():
        own = list(nine) if again else [None if x is None else x.detach().requires_grad_() for x in nine]
        wanted = [x for x in own if x is not None and x.requires_grad]
        out = _formula(tuple(own), lost)
        slopes = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), create_graph=again, allow_unused=True))
    return tuple(next(slopes) if x is not None and x.requires_grad else None for x in own)


def _formula(nine: Nine, lost: Tensor) -> Tensor:
    """The answers as a function that autograd can differentiate to any order."""
    tokens = Tokens(*nine[:8])  # type: ignore[arg-type]
    if not bool(lost.any()):
        return tokenwise(tokens, nine[8])[0]
    index, rest = lost.nonzero()[:, 0], (~lost).nonzero()[:, 0]
    parts = [_query_by_query(_take(nine, index))[0].double()]
    if rest.numel():
        kept = _take(nine, rest)
        parts.append(tokenwise(Tokens(*kept[:8]), kept[8])[0])  # type: ignore[arg-type]
    return torch.cat(parts)[torch.cat([index, rest]).argsort()]


@no_autocast
def _tangent(saved: Any, tangents: Any) -> Tensor:
    """J t as the derivative of u -> (J'u) t: torch has no forward-mode AD inside itself."""
    with torch.enable_grad():
        own = [None if x is None else x.detach().requires_grad_() for x in saved[:9]]
        out = _formula(tuple(own), saved[9])
        u = torch.zeros_like(out, requires_grad=True)
        moving = [(x, t) for x, t in zip(own, tangents, strict=True) if x is not None and t is not None]
        slopes = torch.autograd.grad(out, [x for x, _ in moving], u, create_graph=True)
        along = torch.stack([(slope * t).sum() for slope, (_, t) in zip(slopes, moving, strict=True)]).sum()
        (found,) = torch.autograd.grad(along, u)
    return found.to(saved[1].dtype)


def _take(nine: Nine, index: Tensor) -> Nine:
    return tuple(None if x is None else x[index] for x in nine)


class Causal(Door):
    """A second derivative is taken token by token, so any order works."""

    @staticmethod
    def forward(*nine: Any) -> Any:
        return causal_batch(*nine)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs, output[2])
        if forward_mode():
            ctx.save_for_forward(*inputs, output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if (grad := grads[0]) is None:
            return (None,) * 9
        if torch.is_grad_enabled():
            return differentiate(grad, ctx.saved_tensors, True)
        return causal_pull(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent(ctx.saved_tensors, tangents), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *nine: Any) -> Any:
        size = info.batch_size
        out = Causal.apply(*(gather_batch(a, d, size) for a, d in zip(nine, in_dims, strict=True)))
        return tuple(scatter_batch(x, size) for x in out), (0, 0, 0)
