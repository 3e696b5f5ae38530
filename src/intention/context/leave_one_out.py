"""Leave-one-out errors in closed form, for one alpha or for a whole grid of them.

Leaving out a point k, v of weight w changes Sigma = c S + alpha I by a matrix of rank one, so with u = k Sigma^-1 k'
and the fitted value f = k W the error that the fit without it would make there is

    e = (v (1 + (1 - c) w u) - f) / (1 - c w u)

(c = 1: the residual over 1 - leverage). With an intercept k, v, f are taken around the means of all points, w counts
w n / (n - w), n the total weight, and e is n / (n - w) times that: the means move, too. In the dual the same number is
(A V)_i / A_ii, which does not cancel where the leverage is near 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Leverages closer to 1 than this are rounding: a grid does not choose an alpha whose errors it cannot know.
UNKNOWN = 1e-9


class Spectral(NamedTuple):
    """A weighted fit in the coordinates in which Sigma is diagonal, so that another alpha costs O(N r)."""

    values: Tensor  # (..., r): the spectrum of S
    rows: Tensor  # (..., N, r): w^1/2 k; in the dual the eigenvectors
    rhs: Tensor  # (..., r, k): K'WV; in the dual their product with the target
    target: Tensor  # (..., N, k): w^1/2 v
    dual: bool
    lift: Tensor | None = None  # dual: the eigenvalue of the direction of the weights (...), and what each point has
    share: Tensor | None = None  # of that direction, squared (..., N)


def residuals(
    hat: Tensor, fitted: Tensor, target: Tensor, weight: Tensor | None, count: Tensor | None, gain: Tensor | None
) -> Tensor:
    """e (..., N, k) of hat = w u (..., N). `count` is given where there is an intercept."""
    c = 1.0 if gain is None else gain[..., None]
    times = stretch(weight, count, target)
    hat = hat * times.squeeze(-1)
    return times * (target * (1 + (1 - c) * hat)[..., None] - fitted) / (1 - c * hat)[..., None]


def closed_form(
    hat: Tensor,
    fitted: Tensor,
    target: Tensor,
    weight: Tensor | None,
    count: Tensor | None,
    gain: Tensor | None,
    error: Tensor,
) -> tuple[Tensor, Tensor]:
    """Residuals, and (..., N) the points whose closed form is not exact: leverages near 1, to the `error` of hat."""
    shrunk = hat.detach() if gain is None else gain.detach()[..., None] * hat.detach()
    left = 1 - shrunk * stretch(weight, count, target).squeeze(-1)
    risky = ~(left > (1e5 * error).clamp(1e-6, 0.5)[..., None]) & torch.isfinite(shrunk)
    risky = risky if count is None else risky | lonely(weight, count)
    hat = torch.where(risky, 0.0, hat)  # a division by 0 that is not used would still reach the gradient
    return residuals(hat, fitted, target, weight, count, gain), risky


def stretch(weight: Tensor | None, count: Tensor | None, like: Tensor) -> Tensor:
    """n / (n - w) (..., N, 1), and 1 without an intercept, or where all the weight is that point's."""
    if count is None:
        return torch.ones_like(like[..., :1])
    mass = torch.ones_like(like[..., 0]) if weight is None else weight
    rest = count[..., None] - mass
    return (torch.where(rest > 0, count[..., None] / torch.where(rest > 0, rest, 1.0), 1.0))[..., None]


def lonely(weight: Tensor | None, count: Tensor) -> Tensor:
    """(..., N): points without which nothing is left"""
    rest = count[..., None] - (1.0 if weight is None else weight)
    return ~(rest > 1e-12 * count[..., None])


def spectral_primal(matrix: Tensor, key: Tensor, rhs: Tensor, value: Tensor, weight: Tensor | None) -> Spectral:
    """From S = K'WK (d x d)."""
    values, vectors = _spectrum(matrix)
    root = 1.0 if weight is None else weight.sqrt()[..., None]
    return Spectral(values, (root * key) @ vectors, vectors.mT @ rhs, root * value, False)


def spectral_dual(gram: Tensor, value: Tensor, weight: Tensor | None, lift: Tensor | None, count: Tensor) -> Spectral:
    """From G = KK' (N x N), lifted along the weights where there is an intercept."""
    root = torch.ones_like(gram[..., 0]) if weight is None else weight.sqrt()
    values, vectors = _spectrum(gram * root[..., None] * root[..., None, :])
    target = root[..., None] * value
    share = None if lift is None else root.square() / torch.where(count > 0, count, 1.0)[..., None]
    return Spectral(values, vectors, vectors.mT @ target, target, True, lift, share)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues >= 0 and eigenvectors; NaN for an element that is not finite, where LAPACK would stop for all."""
    finite = torch.isfinite(matrix).flatten(-2).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))
    return torch.where(finite[..., 0], values.clamp_min(0), torch.nan), vectors


def grid_errors(
    fit: Spectral, weight: Tensor | None, count: Tensor | None, alphas: Tensor, gains: Tensor | None
) -> Tensor:
    """(..., G): the sum over points and columns of w e^2 for each alpha of the grid (..., G); NaN where unknown."""
    scaled = fit.values[..., None, :] if gains is None else gains[..., None] * fit.values[..., None, :]
    sigma = scaled + alphas[..., None]
    floor = 8 * fit.values.shape[-1] * torch.finfo(torch.float64).eps * sigma.amax(-1, keepdim=True)
    powers = torch.where(sigma > floor, 1 / sigma, 0.0)  # (..., G, r)
    hats = fit.rows.square() @ powers.mT  # (..., N, G)
    errors = []
    for j in range(alphas.shape[-1]):
        part = fit.rows @ (powers[..., j, :, None] * fit.rhs)
        gain = None if gains is None else gains[..., j]
        if fit.dual:
            error = _dual_errors(fit, hats[..., j], part, alphas[..., j], gain, weight, count)
            whole = (sigma > floor)[..., j, :].all(-1)  # of a pseudo-inverse the formula does not hold
            error = torch.where(whole[..., None, None], error, torch.nan)
        else:
            error = residuals(hats[..., j], part, fit.target, weight, count, gain)
            c = 1.0 if gain is None else gain[..., None]
            known = 1 - c * hats[..., j] * stretch(weight, count, fit.target).squeeze(-1) > UNKNOWN
            error = torch.where(known[..., None], error, torch.nan)
        errors.append(error.square().sum((-2, -1)))
    return torch.stack(torch.broadcast_tensors(*errors), -1)


def _dual_errors(
    fit: Spectral,
    own: Tensor,
    coef: Tensor,
    alpha: Tensor,
    gain: Tensor | None,
    weight: Tensor | None,
    count: Tensor | None,
) -> Tensor:
    """w^1/2 e from the diagonal of the inverse and its product with the target."""
    if fit.lift is not None and fit.share is not None:
        lifted = fit.lift if gain is None else gain * fit.lift
        own = own - fit.share / (alpha + lifted)[..., None]
    error = coef / own[..., None]
    if gain is not None:
        c = gain[..., None, None]
        error = (error - (1 - c) * fit.target * stretch(weight, count, fit.target)) / c
    return error if weight is None else torch.where(weight[..., None] > 0, error, 0.0)
