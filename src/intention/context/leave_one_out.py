"""Leaving points out: leverages, and the errors that the fit without a point would make there.

Leaving out a point k, v of weight w changes Sigma = c S + alpha I by a matrix of rank one, so with u = k Sigma^-1 k'
and the fitted value f = k W the error that the fit without it would make there is

    e = (v (1 + (1 - c) w u) - f) / (1 - c w u)

(c = 1: the residual over 1 - leverage). With an intercept k, v, f are taken around the means of all points, w counts
w n / (n - w), n the total weight, and e is n / (n - w) times that: the means move, too. By points the same number is
(A V)_i / A_ii, which does not cancel where the leverage is near 1. The few points whose closed form has lost its digits
are left out one by one.

`choose_alpha` takes the alpha of a grid whose errors are smallest: one spectrum serves the whole grid.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import ON_KEYS, Covariance, gain_of
from intention.context.by_features import ByFeatures
from intention.context.by_points import ByPoints
from intention.context.solved import Solved
from intention.solve.operator import flat
from intention.solve.torch_state import eager

__all__ = ["choose_alpha", "leave_one_out", "leverage"]

HELD = 1 << 22  # entries of copied keys, or of the matrices made of them, held at once
# alpha="loo" looks from 1e-6 to 1e3 of the mean eigenvalue, three values a decade
GRID = torch.logspace(-6, 3, 28, dtype=torch.float64)
# Leverages closer to 1 than this are rounding: a grid does not choose an alpha whose errors it cannot know.
UNKNOWN = 1e-9


def leverage(fit: Solved) -> Tensor:
    """df_i / dv_i (..., N): w u, and w / n for the intercept"""
    if not fit.intercept:
        return fit.hat
    count, weight = fit.system.count, fit.wide[2]
    return fit.hat + (1.0 if weight is None else weight) / torch.where(count > 0, count, 1.0)[..., None]


def leave_one_out(fit: Solved) -> Tensor:
    """e (..., N, k)"""
    # by features the points themselves are asked where the system is doubtful
    system = fit.certified if isinstance(fit.system, ByPoints) else fit.system
    if isinstance(system, ByPoints):
        out, risky = _by_points(system)
    else:
        out, risky = _by_features(fit, system)
    return _refit(fit, out, risky) if eager() and bool(risky.any()) else out


def _by_features(fit: Solved, system: ByFeatures) -> tuple[Tensor, Tensor]:
    """e, and (..., N) the points whose closed form is not exact: leverages near 1, to the error of hat."""
    (key, target, weight), gain, hat = fit.wide, fit.gain, fit.hat
    w, mean_key, mean_value, report = fit.linear
    if mean_key is not None and mean_value is not None:
        key, target = key - mean_key, target - mean_value
    count = system.count if fit.intercept else None
    shrunk = hat.detach() if gain is None else gain.detach()[..., None] * hat.detach()
    left = 1 - shrunk * stretch(weight, count, target).squeeze(-1)
    risky = ~(left > (1e5 * report.error).clamp(1e-6, 0.5)[..., None]) & torch.isfinite(shrunk)
    risky = risky if count is None else risky | _lonely(weight, count)
    hat = torch.where(risky, 0.0, hat)  # a division by 0 that is not used would still reach the gradient
    return residuals(hat, key @ w, target, weight, count, gain), risky


def _by_points(system: ByPoints) -> tuple[Tensor, Tensor]:
    """e, and (..., N) the points of which the closed form does not hold."""
    target, weight, gain = system.target, system.weight, system.rule.gain
    count = system.count if system.rule.intercept else None
    own, there = system.own()  # e = a_i / A_ii does not cancel as alpha goes to 0; a point of weight 0 has neither
    usable = there if gain is None else there & (gain > 0.01)[..., None]
    # a division by 0 that is not used would still reach the gradient
    hat = torch.where(usable, 0.0, system.hat())
    plain = residuals(hat, system.inner.gram @ system.coef, target, weight, count, gain)
    exact = system.coef / torch.where(there & (own != 0), own, 1.0)[..., None]
    if gain is not None:
        exact = _of_gain(exact, torch.where(gain > 0.01, gain, 1.0), target, weight, count)
    risky = system.solution.singular[..., None] | torch.zeros_like(system.inner.share, dtype=torch.bool)
    if count is not None:  # a point with nearly all the weight is nearly the mean
        alone = own.detach() < 1e-6 * system.solution.inverse.detach().diagonal(0, -2, -1)
        risky = risky | _lonely(weight, count) | (there & alone)
    return torch.where(usable[..., None], exact, plain), risky


def _of_gain(error: Tensor, gain: Tensor, target: Tensor, weight: Tensor | None, count: Tensor | None) -> Tensor:
    """e from a_i / A_ii, the error of the ridge with alpha / c, whose fit around the mean is c times this one's."""
    c = gain[..., None, None]
    return (error - (1 - c) * target * stretch(weight, count, target)) / c


def residuals(
    hat: Tensor, fitted: Tensor, target: Tensor, weight: Tensor | None, count: Tensor | None, gain: Tensor | None
) -> Tensor:
    """e (..., N, k) of hat = w u (..., N). `count` is given where there is an intercept."""
    c = 1.0 if gain is None else gain[..., None]
    times = stretch(weight, count, target)
    hat = hat * times.squeeze(-1)
    return times * (target * (1 + (1 - c) * hat)[..., None] - fitted) / (1 - c * hat)[..., None]


def stretch(weight: Tensor | None, count: Tensor | None, like: Tensor) -> Tensor:
    """n / (n - w) (..., N, 1), and 1 without an intercept, or where all the weight is that point's."""
    if count is None:
        return torch.ones_like(like[..., :1])
    mass = torch.ones_like(like[..., 0]) if weight is None else weight
    rest = count[..., None] - mass
    return (torch.where(rest > 0, count[..., None] / torch.where(rest > 0, rest, 1.0), 1.0))[..., None]


def _lonely(weight: Tensor | None, count: Tensor) -> Tensor:
    """(..., N): points without which nothing is left"""
    rest = count[..., None] - (1.0 if weight is None else weight)
    return ~(rest > 1e-12 * count[..., None])


def _refit(fit: Solved, out: Tensor, risky: Tensor) -> Tensor:
    """The errors `out` (..., N, k), those of the points `risky` (..., N) from fits that count them 0."""
    assert fit.points is not None
    key, value, weight = fit.points
    if fit.features is not None:
        key = fit.wide[0]  # features belong to leading dimensions that are flattened here
    lead, n = checks.leading(fit=out.shape[:-2], alpha=fit.alpha.shape), key.shape[-2]
    key, value, out = (flat(x, lead, *x.shape[-2:]) for x in (key, value, out))
    weight = flat(torch.ones_like(key[0, :, 0]) if weight is None else weight, lead, n)
    alpha = flat(fit.alpha, lead)
    element, point = flat(risky, lead, n).nonzero(as_tuple=True)
    errors = []
    step = max(1, HELD // (n * max(n, key.shape[-1])))
    for start in range(0, len(element), step):
        at, i = element[start : start + step], point[start : start + step]
        others = torch.ones(len(at), n, dtype=weight.dtype, device=weight.device).scatter(1, i[:, None], 0.0)
        kernel = None if fit.kernel is None else fit.kernel.take(lead, at)
        own = {"points": (key[at], value[at], weight[at] * others), "alpha": alpha[at], "kernel": kernel}
        without = dataclasses.replace(fit, **own, stats=None, features=None, dtype=torch.float64)
        errors.append(value[at, i].double() - without.predict(key[at, i].unsqueeze(-2).double()).squeeze(-2))
    return out.index_put((element, point), torch.cat(errors)).reshape(*lead, *out.shape[-2:])


def choose_alpha(fit: Solved, grid: Tensor | None) -> Tensor:
    """The member of `grid` (..., G) with the smallest weighted mean of squared leave-one-out errors; None is `GRID`.

    Gradients flow to the member chosen, where it is a tensor. Of equal ones the first is taken. A member whose errors
    cannot be known (alpha = 0 or alpha = 1 of the convex covariance with fewer points than features) is not.
    """
    if fit.covariance not in ON_KEYS:
        raise ValueError("alpha by leave-one-out needs covariance 'ridge' or 'convex'; give a number")
    if not (n := fit.wide[0].shape[-2]):
        raise ValueError("alpha by leave-one-out needs at least one point to leave out, got N = 0; give a number")
    with torch.no_grad():
        spectral = _spectral(fit)
        alphas = _default_grid(spectral.values, n, fit.covariance) if grid is None else grid
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
    # by points: the eigenvalue of the direction of the weights (...), and what each point has of it, squared (..., N)
    lift: Tensor | None = None
    share: Tensor | None = None


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
            own = hats[..., j]  # w^1/2 e from the diagonal of the inverse and its product with the target
            if fit.lift is not None and fit.share is not None:
                own = own - fit.share / (alphas[..., j] + (fit.lift if gain is None else gain * fit.lift))[..., None]
            error = part / own[..., None]
            error = error if gain is None else _of_gain(error, gain, fit.target, weight, count)
            error = error if weight is None else torch.where(weight[..., None] > 0, error, 0.0)
            whole = (sigma > floor)[..., j, :].all(-1)  # of a pseudo-inverse the formula does not hold
            error = torch.where(whole[..., None, None], error, torch.nan)
        else:
            error = residuals(hats[..., j], part, fit.target, weight, count, gain)
            c = 1.0 if gain is None else gain[..., None]
            known = 1 - c * hats[..., j] * stretch(weight, count, fit.target).squeeze(-1) > UNKNOWN
            error = torch.where(known[..., None], error, torch.nan)
        errors.append(error.square().sum((-2, -1)))
    return torch.stack(torch.broadcast_tensors(*errors), -1)
