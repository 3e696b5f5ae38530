"""Leave-one-out errors in closed form, for one alpha or for a whole grid of them.

Leaving out a point k, v of weight w changes Sigma = c S + alpha I by a matrix of rank one, so with u = k Sigma^-1 k'
and the fitted value f = k W the error that the fit without it would make there is

    e = (v (1 + (1 - c) w u) - f) / (1 - c w u)

(c = 1: the residual over 1 - leverage). With an intercept k, v, f are taken around the means of all points, w counts
w n / (n - w), n the total weight, and e is n / (n - w) times that: the means move, too.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Spectral(NamedTuple):
    """A weighted fit in the coordinates in which Sigma is diagonal, so that another alpha costs O(N r)."""

    values: Tensor  # (..., r): the spectrum of S
    rows: Tensor  # (..., N, r): w^1/2 k
    rhs: Tensor  # (..., r, k): K'WV
    target: Tensor  # (..., N, k): w^1/2 v


def residuals(
    hat: Tensor, fitted: Tensor, target: Tensor, weight: Tensor | None, count: Tensor | None, gain: Tensor | None
) -> Tensor:
    """e (..., N, k) of hat = w u (..., N). `count` is given where there is an intercept."""
    c = 1.0 if gain is None else gain[..., None]
    stretch = _stretch(weight, count)
    hat = hat * stretch
    error = (target * (1 + (1 - c) * hat)[..., None] - fitted) / (1 - c * hat)[..., None]
    return error if count is None else error * stretch[..., None]  # type: ignore[index]


def _stretch(weight: Tensor | None, count: Tensor | None) -> Tensor | float:
    """n / (n - w), and 1 without an intercept."""
    if count is None:
        return 1.0
    count = count[..., None]
    return count / (count - (1.0 if weight is None else weight))


def spectral_primal(matrix: Tensor, key: Tensor, rhs: Tensor, value: Tensor, weight: Tensor | None) -> Spectral:
    """From S = K'WK (d x d)."""
    values, vectors = torch.linalg.eigh(matrix)
    root = 1.0 if weight is None else weight.sqrt()[..., None]
    return Spectral(values.clamp_min(0), (root * key) @ vectors, vectors.mT @ rhs, root * value)


def spectral_dual(gram: Tensor, value: Tensor, weight: Tensor | None) -> Spectral:
    """From G = KK' (N x N)."""
    root = gram.new_ones(gram.shape[-1:]) if weight is None else weight.sqrt()
    values, vectors = torch.linalg.eigh(gram * root[..., None] * root[..., None, :])
    values, target = values.clamp_min(0), root[..., None] * value
    size = values.sqrt()
    return Spectral(values, vectors * size[..., None, :], size[..., None] * (vectors.mT @ target), target)


def grid_errors(
    fit: Spectral, weight: Tensor | None, count: Tensor | None, alphas: Tensor, gains: Tensor | None
) -> Tensor:
    """(..., G): the sum over points and columns of w e^2 for each alpha of the grid (..., G)."""
    scaled = fit.values[..., None, :] if gains is None else gains[..., None] * fit.values[..., None, :]
    sigma = scaled + alphas[..., None]
    powers = torch.where(sigma > 0, 1 / sigma, 0.0)  # (..., G, r)
    hats = fit.rows.square() @ powers.mT  # (..., N, G)
    errors = []
    for j in range(alphas.shape[-1]):
        fitted = fit.rows @ (powers[..., j, :, None] * fit.rhs)
        gain = None if gains is None else gains[..., j]
        errors.append(residuals(hats[..., j], fitted, fit.target, weight, count, gain).square().sum((-2, -1)))
    return torch.stack(torch.broadcast_tensors(*errors), -1)
