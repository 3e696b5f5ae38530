"""A small language model of gated layers, and the same one with conjugate gradients in the place of the solve."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from intention.nn import GatedIntention, InformerLM
from intention.nn.gated_mixers import Gated, Memory

__all__ = ["CHUNK", "Iterated", "Solve", "Sums", "Watched", "build"]

CHUNK = 64  # tokens
SAFE = 1e-5  # added to what is divided by, as published layers do


def build(name: str, *, vocabulary: int, width: int, heads: int, layers: int, alpha: float, steps: int) -> InformerLM:
    """The model, and with the name "conjugate_gradients" its layers with so many steps of them."""
    model = InformerLM(vocabulary, width, heads, layers, layer="gated", alpha=alpha)
    if name == "conjugate_gradients":
        weights = model.state_dict()
        for layer in model.layers:
            layer.mixer = Iterated(width, heads, alpha=alpha, steps=steps)
        model.load_state_dict(weights)
    return model


class Iterated(GatedIntention):
    """Gated Intention by a fixed number of steps of conjugate gradients, in half precision."""

    def __init__(self, d_model: int, heads: int, *, alpha: float, steps: int) -> None:
        super().__init__(d_model, heads, alpha=alpha)
        self.steps = steps

    def _mix(self, tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        assert memory is None, "for training alone"
        weight, decay, alpha = tokens.weight, tokens.decay, tokens.alpha
        assert weight is not None
        assert decay is not None
        assert alpha is not None
        query, key, value = (x.float() for x in (tokens.query, tokens.key, tokens.value))
        with torch.autocast(query.device.type, enabled=False):
            solved = Solve.apply(query, key, weight, decay, alpha.unsqueeze(-2), self.steps)
            return Sums.of(key, value, weight, decay).read(solved), None


def half(x: Tensor) -> Tensor:
    """What bfloat16 leaves of a factor of a product, whose sums are in float32."""
    return x.bfloat16().float()


def cut(x: Tensor) -> Tensor:
    """(..., N, features) -> (..., chunks, n, features); N is a multiple of the chunk, or less than one."""
    return x.unflatten(-2, (-1, min(CHUNK, x.shape[-2])))


class Sums(NamedTuple):
    """sum_{s<=t} D_ts w_s k_s v_s' for every token, as chunked layers have it in half precision.

    The sums before each chunk and all factors of products are rounded to bfloat16; sums are made in float32.
    """

    key: Tensor  # (..., chunks, n, d)
    value: Tensor
    within: Tensor  # (..., chunks, n, n): D_ts w_s
    carried: Tensor  # (..., chunks, n, 1): what is left of the sums before the chunk
    before: Tensor  # (..., chunks, d, k)

    @staticmethod
    def of(key: Tensor, value: Tensor, weight: Tensor, decay: Tensor) -> Sums:
        k, v = cut(key), half(cut(value))
        w, total = cut(weight.unsqueeze(-1)), cut(decay.log().unsqueeze(-1)).cumsum(-2)
        within = ((total - total.mT).tril().exp() * w.mT).tril()
        written = half(k * (total[..., -1:, :] - total).exp() * w).mT @ v
        state, states = torch.zeros_like(written[..., 0, :, :]), []
        for part, left in zip(written.unbind(-3), total[..., -1:, :].exp().unbind(-3), strict=True):
            states.append(state)
            state = left * state + part
        return Sums(half(k), v, within, total.exp(), half(torch.stack(states, -3)))

    def read(self, query: Tensor) -> Tensor:
        """q_t times them."""
        q = cut(query)
        inside = half((half(q) @ self.key.mT) * self.within) @ self.value
        return (inside + half(q * self.carried) @ self.before).flatten(-3, -2)


class Solve(torch.autograd.Function):
    """(H_t + alpha)^-1 q_t for every token, by conjugate gradients; so is the solve of its derivative."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, weight: Tensor, decay: Tensor, alpha: Tensor, steps: int
    ) -> Tensor:
        solved = iterate(query, Sums.of(key, key, weight, decay), alpha, steps)
        ctx.save_for_backward(solved, key, weight, decay, alpha)
        ctx.steps = steps
        return solved

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """With r = (H_t + alpha)^-1 g the derivative of <g, z> is that of <r, q> - <r, (H_t + alpha) z>."""
        solved, *rest = ctx.saved_tensors
        with torch.enable_grad():
            key, weight, decay, alpha = leaves = [x.detach().requires_grad_() for x in rest]
            sums = Sums.of(key, key, weight, decay)
            back = iterate(grads[0], Sums(*(x.detach() for x in sums)), alpha.detach(), ctx.steps)
            slopes = torch.autograd.grad((back * (sums.read(solved) + alpha * solved)).sum(), leaves)
        return back, *(-slope for slope in slopes), None


def iterate(query: Tensor, sums: Sums, alpha: Tensor, steps: int) -> Tensor:
    """So many steps of conjugate gradients, whose vectors are in float32."""
    z, rest, direction = torch.zeros_like(query), query, query
    size = rest.square().sum(-1, keepdim=True)
    for _ in range(steps):
        moved = sums.read(direction) + alpha * direction
        step = size / ((direction * moved).sum(-1, keepdim=True) + SAFE)
        z, rest = z + step * direction, rest - step * moved
        before, size = size, rest.square().sum(-1, keepdim=True)
        direction = rest + size / (before + SAFE) * direction
    return z


class Watched(nn.Module):
    """A language model in bfloat16 autocast that notes the norm of its gradient at each step, before it is clipped."""

    squares: Tensor
    step: Tensor

    def __init__(self, model: InformerLM, steps: int) -> None:
        super().__init__()
        self.model = model
        self.register_buffer("squares", torch.zeros(steps))  # in checkpoints: a run that goes on has all of them
        self.register_buffer("step", torch.zeros((), dtype=torch.int64))
        for weight in model.parameters():
            weight.register_post_accumulate_grad_hook(self._note)

    def forward(self, tokens: Tensor) -> Tensor:
        self.step += self.training
        with torch.autocast(tokens.device.type, torch.bfloat16):
            logits, _ = self.model(tokens, need_streams=False)
        return logits.float()

    def norms(self) -> Tensor:
        return self.squares[: int(self.step)].sqrt()

    def _note(self, weight: Tensor) -> None:
        assert weight.grad is not None
        self.squares[int(self.step) - 1] += weight.grad.detach().float().square().sum()
