"""Sigma, the estimator at the heart of a fit: by name, or a function of the user's own.

    ridge     K'WK + alpha I
    convex    (1 - alpha) K'WK + alpha I, alpha in [0, 1]; at 1 it is linear attention
    within    X'WX + alpha I with X the keys minus the mean of their class (values are one-hot): the LDA of the paper
    callable  f(key, value, weight) + alpha I with f (..., d, d), symmetric and positive semidefinite

The named ones work on points, so that a fit may choose the d x d or the N x N form; a callable is a d x d matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.centring import EPS, FLAT, value_zero
from intention.solve.torch_state import eager

# trace(S) / alpha up to which the N x N form of "within" serves values and gradients; the d x d form serves any
DUAL_RATIO = 1e8
# covariances whose Sigma is made of the same keys as K'V: then the solver needs the keys alone
ON_KEYS = ("ridge", "convex")

Covariance = str | Callable[[Tensor, Tensor, Tensor | None], Tensor]


class Rule(NamedTuple):
    """How points become a fit: Sigma = c S + alpha I."""

    alpha: Tensor  # (...) float64
    gain: Tensor | None  # c, (...); None is 1
    intercept: bool
    covariance: Covariance
    quiet: bool = False  # the caller reads the report
    rounding: float = torch.finfo(torch.float64).eps  # of the entries of S, where a function of the user's made them


def is_named(covariance: Covariance) -> bool:
    """Whether this is one of the three names; anything but a name or a callable raises."""
    checks.covariance(covariance)
    return isinstance(covariance, str)


def default_alpha(covariance: Covariance) -> float:
    return 0.5 if covariance == "convex" else 1.0


def largest_alpha(covariance: Covariance) -> float:
    return 1.0 if covariance == "convex" else math.inf


def alpha_of(alpha: float | None, covariance: Covariance) -> float:
    """A number, checked; None is the default of the covariance."""
    if alpha is None:
        return default_alpha(covariance)
    checks.alpha_number(alpha, largest_alpha(covariance))
    return float(alpha)


def wide_alpha(
    alpha: float | Tensor | None, covariance: Covariance, device: torch.device, lead: tuple[int, ...]
) -> Tensor:
    """A number, or a tensor that broadcasts to the leading dimensions, checked: float64 (...)."""
    if not isinstance(alpha, Tensor):
        return torch.tensor(alpha_of(alpha, covariance), dtype=torch.float64, device=device)
    checks.alpha_tensor(alpha, device, lead)
    alpha = alpha.to(device, torch.float64)
    if eager():
        checks.require_values(None, alpha, gain_of(alpha, covariance))
    return alpha


def gain_of(alpha: Tensor, covariance: Covariance) -> Tensor | None:
    """c of Sigma = c S + alpha I; None is 1."""
    return 1 - alpha if covariance == "convex" else None


def class_shares(value: Tensor, weight: Tensor | None) -> Tensor:
    """(..., C, N): what each point contributes to the mean of each class; a class without points has none."""
    mass = value.mT if weight is None else value.mT * weight.unsqueeze(-2)
    total = mass.sum(-1, keepdim=True)
    return mass / torch.where(total > 0, total, 1.0)


def deviations(x: Tensor, value: Tensor, weight: Tensor | None) -> Tensor:
    """The rows of x (..., N, anything) minus the mean of their class; 0 in a class that has no weight.

    What is constant within a class deviates by exactly 0, with its derivative: alpha = 0 would divide by rounding.

    >>> x, labels = torch.tensor([[1.0], [3.0], [10.0]]), torch.tensor([[1.0, 0], [1, 0], [0, 1]])
    >>> deviations(x, labels, None).flatten().tolist()
    [-1.0, 1.0, 0.0]
    """
    size = x.detach().abs()
    for _ in range(2):  # the second pass removes the rounding of the first means
        x = x - value @ (class_shares(value, weight) @ x)
    x = value_zero(x, x.detach().abs() <= FLAT * EPS * size)
    return x if weight is None else torch.where(in_live_class(value, weight).unsqueeze(-1), x, 0.0)


def in_live_class(value: Tensor, weight: Tensor) -> Tensor:
    """(..., N): points whose class has weight. One that comes alone is the mean of its class, whatever it weighs."""
    live = (value * weight.unsqueeze(-1)).sum(-2, keepdim=True) > 0
    return (value * live).sum(-1) > 0


def dual_serves(key: Tensor, labels: Tensor, weight: Tensor | None, rule: Rule) -> bool:
    """Whether the N x N form around class means does for every problem: it takes the points out of 1 / alpha."""
    if not eager():
        return True
    square = deviations(key.detach(), labels, weight).square().sum(-1)
    trace = (square if weight is None else weight * square).sum(-1)
    trace = trace if rule.gain is None else rule.gain * trace
    return bool((rule.alpha > trace / DUAL_RATIO).all())


def within_scatter(key: Tensor, labels: Tensor, weight: Tensor | None) -> Tensor:
    """X'WX (..., d, d) of the keys around the means of their classes"""
    x = deviations(key, labels, weight)
    return x.mT @ (x if weight is None else weight.unsqueeze(-1) * x)


def matrix_of(covariance: Covariance, key: Tensor, value: Tensor, weight: Tensor | None) -> Tensor:
    """What a callable estimates, checked, in float64."""
    assert callable(covariance)
    sigma = covariance(key, value, weight)
    checks.covariance_matrix(sigma, key, eager())
    sigma = sigma.double()
    return (sigma + sigma.mT) / 2
