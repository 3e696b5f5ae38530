"""Gradient descent on least squares as a stack of linear-attention layers, and the step sizes it can have."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from intention import functional as F
from intention.lab.tasks import Problem

__all__ = ["Steps", "chebyshev", "constant", "left", "padded", "stack", "unit_queries", "worst_case"]


def layer(prediction: Tensor, residual: Tensor, both: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, Tensor]:
    """One layer of linear attention over values that are what is still to be explained.

    prediction (..., M, k), residual (..., N, k), both: queries and keys (..., M + N, d), key (..., N, d), step: a
    number, or k of them.
    """
    m = prediction.shape[-2]
    update = step * F.linear_attention(both, key, residual)  # eta [Q; K] K'v
    return prediction + update[..., :m, :], residual - update[..., m:, :]


def stack(steps: Tensor, query: Tensor, problem: Problem) -> Iterator[Tensor]:
    """Predictions (..., M, S) after each layer, of S stacks with steps (S, layers): each is a column of the values."""
    key, residual = problem.key, problem.value.expand(*problem.value.shape[:-1], len(steps))
    query = query.expand(*key.shape[:-2], *query.shape[-2:])
    both, prediction = torch.cat([query, key], -2), residual.new_zeros(*query.shape[:-1], len(steps))
    for step in steps.unbind(-1):
        prediction, residual = layer(prediction, residual, both, key, step)
        yield prediction


def left(prediction: Tensor, w: Tensor) -> Tensor:
    """What is left of the gap, over the problems, for each column: predictions at the unit vectors are w itself."""
    return (prediction - w).square().sum((0, 1)) / w.square().sum()


def unit_queries(problem: Problem) -> Tensor:
    return torch.eye(problem.key.shape[-1], dtype=problem.key.dtype, device=problem.key.device)


def constant(model: str, kappa: float) -> float:
    """With mu = 1 and L = kappa: 1/L or 2/(L + mu)."""
    return 1 / kappa if model == "step_l" else 2 / (kappa + 1)


def worst_case(model: str, kappa: float, ratio: float) -> float:
    """Layers until the gap is `ratio` of what it was, if all of it lies along the slowest direction; a real number.

    A constant step multiplies the gap by rho^2 each time, rho = 1 - 1/kappa or (kappa - 1)/(kappa + 1). L layers of
    Chebyshev's steps multiply it by T_L((kappa + 1)/(kappa - 1))^-2, and T_L(x) = cosh(L arcosh x).
    """
    if model == "intention":
        return 1.0
    if model in ("chebyshev", "learned"):
        return math.acosh(ratio**-0.5) / math.acosh((kappa + 1) / (kappa - 1))
    rho = 1 - 1 / kappa if model == "step_l" else (kappa - 1) / (kappa + 1)
    return math.log(ratio) / (2 * math.log(rho))


def alternate(values: Tensor) -> Tensor:
    """First, last, second, last but one ...: large and small steps take turns, so that nothing grows between."""
    size = len(values)
    order = [index // 2 if index % 2 == 0 else size - 1 - index // 2 for index in range(size)]
    return values[order]


def chebyshev(depth: int, kappa: float) -> Tensor:
    """One over the roots of the Chebyshev polynomial on [1, kappa]."""
    angles = math.pi * (torch.arange(depth, dtype=torch.float64) + 0.5) / depth
    return alternate(1 / ((kappa + 1) / 2 + (kappa - 1) / 2 * angles.cos()))


def spread(depth: int, kappa: float) -> Tensor:
    """Where learning starts: evenly spread in log between 1/kappa and 1. Equal steps would stay equal."""
    return alternate((-math.log(kappa) * (torch.arange(depth, dtype=torch.float64) + 0.5) / depth).exp())


def padded(kappa: float, tried: Sequence[int], steps: Callable[[int, float], Tensor]) -> Tensor:
    """Step sizes of stacks of several depths, (depths, deepest): a layer of step 0 changes nothing."""
    rows = [torch.cat([steps(depth, kappa), torch.zeros(max(tried) - depth, dtype=torch.float64)]) for depth in tried]
    return torch.stack(rows)


class Steps(nn.Module):
    """Step sizes of stacks of several depths, learned as logarithms; what is left of the gap after each stack."""

    used: Tensor

    def __init__(self, kappa: float, tried: Sequence[int]) -> None:
        super().__init__()
        start = padded(kappa, tried, spread)
        self.log_steps = nn.Parameter(start.clamp_min(1e-300).log() * (start > 0))
        self.register_buffer("used", (start > 0).double())

    def forward(self, problem: Problem) -> Tensor:
        steps = self.log_steps.exp() * self.used
        *_, last = stack(steps, unit_queries(problem), problem)
        return left(last, problem.w)  # (depths,)
