"""alpha by leave-one-out: closed form, one spectrum for the whole grid, each batch element its own choice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import alpha_of, gain_of, on_keys
from intention.context import leave_one_out
from intention.context.by_points import ByPoints

# alpha="loo" looks from 1e-6 to 1e3 of the mean eigenvalue, three values a decade
GRID = torch.logspace(-6, 3, 28, dtype=torch.float64)


def choose_alpha(context: Any, grid: Sequence[float | Tensor] | None) -> Tensor:
    """The member of `grid` (None: `GRID`) with the smallest weighted mean of squared leave-one-out errors (...).

    Gradients flow to the member chosen, where it is a tensor. Of equal ones the first is taken. A member whose errors
    cannot be known (alpha = 0 or alpha = 1 of the convex covariance with fewer points than features) is not.
    """
    if not on_keys(context.covariance):
        raise ValueError("alpha by leave-one-out needs covariance 'ridge' or 'convex'; give a number")
    given = None if grid is None else _grid(grid, context)
    with torch.no_grad():
        system = context._system
        spectral = system.spectral() if isinstance(system, ByPoints) else system.spectral(*context._wide)
        alphas = _default_grid(spectral.values, spectral.rows.shape[-2], context.covariance) if given is None else given
        weight = None if context.weight is None else context.weight.double()
        count = context._count if context.fits_intercept else None
        errors = leave_one_out.grid_errors(spectral, weight, count, alphas, gain_of(alphas, context.covariance))
        best = errors.nan_to_num(nan=torch.inf).argmin(-1, keepdim=True)
    candidates = alphas.expand(*best.shape[:-1], alphas.shape[-1])
    return candidates.gather(-1, best).squeeze(-1)


def _grid(grid: Sequence[float | Tensor], context: Any) -> Tensor:
    """(..., G)"""
    if not grid:
        raise ValueError("alpha is an empty grid; give at least one value, or 'loo'")
    members = []
    for alpha in grid:
        if isinstance(alpha, Tensor):
            checks.alpha_tensor(alpha, context.device, context.lead)
            alpha = alpha.to(context.device, torch.float64)
            checks.require_values(None, alpha, gain_of(alpha, context.covariance))
        else:
            alpha = torch.tensor(alpha_of(alpha, context.covariance), dtype=torch.float64, device=context.device)
        members.append(alpha)
    return torch.stack(torch.broadcast_tensors(*members), -1)


def _default_grid(values: Tensor, n: int, covariance: Any) -> Tensor:
    rank = max(1, min(n, values.shape[-1]))
    mean = values.sum(-1, keepdim=True) / rank
    alphas = torch.where(mean > 0, mean, 1.0) * GRID.to(values.device)
    return alphas / (1 + alphas) if covariance == "convex" else alphas
