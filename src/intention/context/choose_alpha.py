"""alpha by leave-one-out: closed form, one spectrum for the whole grid, each batch element its own choice."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention._covariance import ON_KEYS, Covariance, gain_of
from intention.context.by_points import ByPoints
from intention.context.leave_one_out import residuals, stretch
from intention.context.solved import Solved

# alpha="loo" looks from 1e-6 to 1e3 of the mean eigenvalue, three values a decade
GRID = torch.logspace(-6, 3, 28, dtype=torch.float64)
# Leverages closer to 1 than this are rounding: a grid does not choose an alpha whose errors it cannot know.
UNKNOWN = 1e-9


def choose_alpha(fit: Solved, grid: Tensor | None) -> Tensor:
    """The member of `grid` (..., G) with the smallest weighted mean of squared leave-one-out errors; None is `GRID`.

    Gradients flow to the member chosen, where it is a tensor. Of equal ones the first is taken. A member whose errors
    cannot be known (alpha = 0 or alpha = 1 of the convex covariance with fewer points than features) is not.
    """
    if fit.covariance not in ON_KEYS:
        raise ValueError("alpha by leave-one-out needs covariance 'ridge' or 'convex'; give a number")
    with torch.no_grad():
        spectral = _spectral(fit)
        alphas = _default_grid(spectral.values, fit.wide[0].shape[-2], fit.covariance) if grid is None else grid
        count = fit.system.count if fit.intercept else None
        errors = _grid_errors(spectral, fit.wide[2], count, alphas, gain_of(alphas, fit.covariance))
        best = errors.nan_to_num(nan=torch.inf).argmin(-1, keepdim=True)
    candidates = alphas.expand(*best.shape[:-1], alphas.shape[-1])
    return candidates.gather(-1, best).squeeze(-1)


class Spectral(NamedTuple):
    """A weighted fit in the coordinates in which Sigma is diagonal, so that another alpha costs O(N r)."""

    values: Tensor  # (..., r): the spectrum of S
    rows: Tensor  # (..., N, r): w^1/2 k; by points the eigenvectors
    rhs: Tensor  # (..., r, k): K'WV; by points their product with the target
    target: Tensor  # (..., N, k): w^1/2 v
    by_points: bool
    lift: Tensor | None = (
        None  # by points: the eigenvalue of the direction of the weights (...), and what each point has
    )
    share: Tensor | None = None  # of that direction, squared (..., N)


def _spectral(fit: Solved) -> Spectral:
    system, (key, value, weight) = fit.system, fit.wide
    root = torch.ones_like(key[..., 0]) if weight is None else weight.sqrt()
    if isinstance(system, ByPoints):
        values, vectors = _spectrum(system.gram * root[..., None] * root[..., None, :])
        target = root[..., None] * system.target
        count = torch.where(system.count > 0, system.count, 1.0)[..., None]
        share = None if system.lift is None else root.square() / count
        return Spectral(values, vectors, vectors.mT @ target, target, True, system.lift, share)
    values, vectors = _spectrum(system.matrix)
    if system.mean_key is not None and system.mean_value is not None:
        key, value = key - system.mean_key, value - system.mean_value
    root = root[..., None]
    return Spectral(values, (root * key) @ vectors, vectors.mT @ system.rhs, root * value, False)


def _spectrum(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues >= 0 and eigenvectors; NaN for an element that is not finite, where LAPACK would stop for all."""
    finite = torch.isfinite(matrix).flatten(-2).all(-1)[..., None, None]
    values, vectors = torch.linalg.eigh(torch.where(finite, matrix, 0.0))
    return torch.where(finite[..., 0], values.clamp_min(0), torch.nan), vectors


def _default_grid(values: Tensor, n: int, covariance: Covariance) -> Tensor:
    rank = max(1, min(n, values.shape[-1]))
    mean = values.sum(-1, keepdim=True) / rank
    alphas = torch.where(mean > 0, mean, 1.0) * GRID.to(values.device)
    return alphas / (1 + alphas) if covariance == "convex" else alphas


def _grid_errors(
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
        if fit.by_points:
            error = _errors_by_points(fit, hats[..., j], part, alphas[..., j], gain, weight, count)
            whole = (sigma > floor)[..., j, :].all(-1)  # of a pseudo-inverse the formula does not hold
            error = torch.where(whole[..., None, None], error, torch.nan)
        else:
            error = residuals(hats[..., j], part, fit.target, weight, count, gain)
            c = 1.0 if gain is None else gain[..., None]
            known = 1 - c * hats[..., j] * stretch(weight, count, fit.target).squeeze(-1) > UNKNOWN
            error = torch.where(known[..., None], error, torch.nan)
        errors.append(error.square().sum((-2, -1)))
    return torch.stack(torch.broadcast_tensors(*errors), -1)


def _errors_by_points(
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
