"""The eager door of causal least squares; `compiled` has the other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention.solve.causal import Tokens
from intention.solve.causal_batch import pull_causal, solve_causal
from intention.solve.decay import length, pull_fading, solve_fading
from intention.solve.doors import (
    accept_any_arguments,
    compiling,
    gather_batch,
    gradient_free,
    no_autocast,
    scatter_batch,
)
from intention.solve.ladder import FLOAT64, Report, pack
from intention.solve.tokenwise import tokenwise

Grads = tuple[Tensor | None, ...]


def causal(tokens: Tokens, log_decay: Tensor | None) -> tuple[Tensor, Tensor]:
    """Answers (B, N, k), or (B, N, d) without values, and a packed report (B, 3)."""
    if compiling():
        return torch.ops.intention.causal(*tokens, log_decay)  # type: ignore[no-any-return]
    if gradient_free(*tokens, log_decay):
        return causal_batch(*tokens, log_decay)
    return Causal.apply(*tokens, log_decay)  # type: ignore[no-any-return]


@no_autocast
def causal_batch(*tensors: Any) -> tuple[Tensor, Tensor]:
    tokens, log_decay = Tokens(*tensors[:8]), tensors[8]
    if log_decay is None:
        out, report = solve_causal(tokens)
    elif size := length(log_decay, tokens.key.shape[1]):
        out, report = solve_fading(tokens, log_decay, size)
    else:
        dtype = tokens.key.dtype
        out, ratio = tokenwise(tokens, log_decay)
        error = ratio * torch.finfo(torch.float64).eps + torch.finfo(dtype).eps
        out, report = out.to(dtype), Report(torch.full_like(ratio, FLOAT64), ratio, error)
    return out.contiguous(), pack(Report(*(x.to(out.dtype) for x in report)))


@no_autocast
def causal_pull(grad: Tensor, *tensors: Any) -> Grads:
    """First-order gradients of all nine."""
    tokens, log_decay = Tokens(*tensors[:8]), tensors[8]
    if log_decay is None:
        return *pull_causal(grad, tokens), None
    if size := length(log_decay, tokens.key.shape[1]):
        pulled, slope = pull_fading(grad, tokens, log_decay, size)
        return *pulled, slope
    return _differentiable(grad, [None if x is None else x.detach().requires_grad_() for x in tensors], False)


@no_autocast
def _differentiable(grad: Tensor, tensors: list[Tensor | None], again: bool) -> Grads:
    """The pullback as a differentiable function of everything it is made of."""
    with torch.enable_grad():
        out, _ = tokenwise(Tokens(*tensors[:8]), tensors[8])  # type: ignore[arg-type]
        wanted = [x for x in tensors if x is not None and x.requires_grad]
        slopes = iter(torch.autograd.grad(out, wanted, grad.to(out.dtype), create_graph=again, allow_unused=True))
    return tuple(next(slopes) if x is not None and x.requires_grad else None for x in tensors)


@no_autocast
def _tangent(tensors: tuple[Tensor | None, ...], tangents: tuple[Tensor | None, ...]) -> Tensor:
    """J t as the derivative of u -> (J'u) t: torch has no forward-mode AD inside itself."""
    with torch.enable_grad():
        own = [None if x is None else x.detach().requires_grad_() for x in tensors]
        out, _ = tokenwise(Tokens(*own[:8]), own[8])  # type: ignore[arg-type]
        u = torch.zeros_like(out, requires_grad=True)
        moving = [(x, t) for x, t in zip(own, tangents, strict=True) if x is not None and t is not None]
        slopes = torch.autograd.grad(out, [x for x, _ in moving], u, create_graph=True)
        along = torch.stack([(slope * t).sum() for slope, (_, t) in zip(slopes, moving, strict=True)]).sum()
        (found,) = torch.autograd.grad(along, u)
    return found.to(tensors[1].dtype)  # type: ignore[union-attr]


class Causal(torch.autograd.Function):
    """A second derivative is taken token by token, so any order works."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return causal_batch(*args)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if (grad := grads[0]) is None:
            return (None,) * 9
        if torch.is_grad_enabled():
            return _differentiable(grad, list(ctx.saved_tensors), True)
        return causal_pull(grad, *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _tangent(ctx.saved_tensors, tangents), None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        out = Causal.apply(*(gather_batch(a, d, size) for a, d in zip(args, in_dims, strict=True)))
        return tuple(scatter_batch(x, size) for x in out), (0, 0)


accept_any_arguments(Causal)
