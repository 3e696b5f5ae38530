"""Logistic regression, the reference that heads are compared with: no closed form, so it takes Newton's steps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from intention.fewshot.heads import Head, one_hot

__all__ = ["Logistic"]

STEPS, TOLERANCE = 50, 1e-9  # Newton's steps at most; the gradient at which they stop
INNER = 300  # steps of conjugate gradients within one of them, at most


class Logistic(Head):
    """`q w + b` with the smallest cross-entropy of the support plus `alpha |w|^2 / 2`; b is free.

    >>> Logistic()(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    The same as scikit-learn's LogisticRegression(C=1 / alpha) for three classes or more (for two it has one w, where
    here are w and -w: C=2 / alpha). Solved in float64; gradients are those of the solution.
    """

    def __init__(self, alpha: float = 1.0) -> None:
        super().__init__()
        if not 0 < alpha < math.inf:
            raise ValueError(f"alpha must be > 0 and finite, got {alpha}; separable classes have no other solution")
        self.alpha = alpha

    def logits(self, support: Tensor, labels: Tensor, query: Tensor, weight: Tensor | None) -> Tensor:
        lead = torch.broadcast_shapes(support.shape[:-2], labels.shape[:-1])
        dtype = torch.promote_types(support.dtype, query.dtype)
        target = one_hot(labels, torch.float64).expand(*lead, -1, -1)
        mass = torch.ones_like(target[..., 0]) if weight is None else weight.double().expand(target.shape[:-1])
        x = _with_one(support.double()).expand(*lead, -1, -1)
        penalty = torch.full_like(x[..., :1, :], self.alpha).mT  # (..., d + 1, 1)
        penalty[..., -1, :] = 0.0
        w = _minimum(x.detach(), target, mass.detach(), penalty)
        # one more step of Newton, of which the gradient counts: dw = -H^-1 dg, as at the solution g = 0
        slope = _gradient(x, target, mass, penalty, w)
        w = w - _Solve.apply(slope, x.detach(), _softmax(x.detach(), w), mass.detach(), penalty)
        return (_with_one(query.double()) @ w).to(dtype)


def _with_one(x: Tensor) -> Tensor:
    return torch.cat([x, torch.ones_like(x[..., :1])], -1)


def _softmax(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).softmax(-1)


def _gradient(x: Tensor, target: Tensor, mass: Tensor, penalty: Tensor, w: Tensor) -> Tensor:
    # X' m (P - Y) + alpha W
    return x.mT @ (mass.unsqueeze(-1) * (_softmax(x, w) - target)) + penalty * w


def _loss(x: Tensor, target: Tensor, mass: Tensor, penalty: Tensor, w: Tensor) -> Tensor:
    entropy = -((x @ w).log_softmax(-1) * target).sum(-1)
    return (mass * entropy).sum(-1) + (penalty * w.square()).sum((-2, -1)) / 2


@torch.no_grad()
def _minimum(x: Tensor, target: Tensor, mass: Tensor, penalty: Tensor) -> Tensor:
    """w (..., d + 1, classes): Newton's steps, halved for the tasks whose loss they would raise."""
    w = x.new_zeros(*x.shape[:-2], x.shape[-1], target.shape[-1])
    for _ in range(STEPS):
        slope = _gradient(x, target, mass, penalty, w)
        if float(slope.abs().max()) < TOLERANCE:
            break
        step = _conjugate_gradients(slope, x, _softmax(x, w), mass, penalty)
        before, length = _loss(x, target, mass, penalty, w), torch.ones_like(mass[..., :1, None])
        for _ in range(20):
            worse = ~(_loss(x, target, mass, penalty, w - length * step) <= before + 1e-12 * before.abs())
            if not bool(worse.any()):
                break
            length = torch.where(worse[..., None, None], length / 2, length)
        w = w - length * step
    return w


def _conjugate_gradients(b: Tensor, x: Tensor, p: Tensor, mass: Tensor, penalty: Tensor) -> Tensor:
    """H^-1 b without H, all tasks at once. One constant for all classes changes nothing: the answer has none."""

    def times(v: Tensor) -> Tensor:  # H v = X' m (P * U - P sum(P * U)) + alpha v with U = X v
        pu = p * (x @ v)
        return x.mT @ (mass.unsqueeze(-1) * (pu - p * pu.sum(-1, keepdim=True))) + penalty * v

    def dot(a: Tensor, c: Tensor) -> Tensor:
        return (a * c).sum((-2, -1), keepdim=True)

    def free(v: Tensor) -> Tensor:
        return torch.cat([v[..., :-1, :], v[..., -1:, :] - v[..., -1:, :].mean(-1, keepdim=True)], -2)

    out, rest = torch.zeros_like(b), free(b)
    along, size = rest, dot(rest, rest)
    small = 1e-24 * size
    for _ in range(INNER):
        if bool((size <= small).all()):
            break
        image = times(along)
        curve = dot(along, image)
        step = torch.where((size > small) & (curve > 0), size / torch.where(curve > 0, curve, 1.0), 0.0)
        out, rest = out + step * along, free(rest - step * image)
        new = dot(rest, rest)
        along = rest + new / torch.where(size > 0, size, 1.0) * along
        size = new
    return out


class _Solve(torch.autograd.Function):
    """H^-1 b for a fixed symmetric H: its gradient is the same solve."""

    @staticmethod
    def forward(ctx: Any, b: Tensor, x: Tensor, p: Tensor, mass: Tensor, penalty: Tensor) -> Tensor:
        ctx.save_for_backward(x, p, mass, penalty)
        return _conjugate_gradients(b, x, p, mass, penalty)

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> tuple[Tensor | None, ...]:
        return _conjugate_gradients(slopes[0], *ctx.saved_tensors), None, None, None, None
