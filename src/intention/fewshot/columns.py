"""Contexts of +1 and -1 labels as classes come: a new class is a new column, and w follows without a new factor."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from intention.context import Context
from intention.context.by_features import ByFeatures

__all__ = ["Linear", "with_columns"]

EXACT = 1e-10  # relative residual at which w counts as solved
FEW = 8  # updates are used where so many times the new points are still fewer than features


def with_columns(context: Context, more: int) -> Context:
    """The same points with `more` classes that none of them has: columns of -1.

    A constant is its own mean, so the sums K'V around the means get columns of 0, and nothing else changes.
    """
    if not more:
        return context
    assert context.value is not None

    def widened(x: Tensor, fill: float) -> Tensor:
        return torch.cat([x, x.new_full((*x.shape[:-1], more), fill)], -1)

    by_features = isinstance(context._solved.system, ByFeatures)
    stats = context._solved.sums if by_features else context.stats  # those that the fit has made
    if stats is not None:
        stats = stats._replace(mean_value=widened(stats.mean_value, -1.0), cross=widened(stats.cross, 0.0))
    return dataclasses.replace(context, value=widened(context.value, -1.0), stats=stats)


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """w of a linear context with Sigma^-1 beside it: enough to follow when some points come."""

    inverse: Tensor  # (d, d) float64
    w: Tensor  # (d, k) float64

    @staticmethod
    def of(context: Context) -> Linear | None:
        """None where the fit is not by features (kernels, fewer points than features): those are cheap to refit."""
        system = context._solved.system
        if not isinstance(system, ByFeatures):
            return None
        return Linear(system.solution.inverse, context._solved.linear[0])

    def after(self, before: Context, now: Context) -> Linear | None:
        """That of `now`, which is `before` (perhaps with new columns) and a few points more; None: not exact so.

        The scatter around the mean grows by U U', U the new points around the old mean, less what the mean moves:
            S' = S + U'U - s s' / n,   s = sum of U,   n points in all
        so with A = Sigma^-1 and B = [U; i s / sqrt n]   A' = A - A B' (I + B A B')^-1 B A
        and one step of refinement of w, with A' and the sums of `now`, whose residual is looked at.
        """
        assert before.key is not None
        assert now.key is not None
        old, new = before.key.shape[-2], now.key.shape[-2] - before.key.shape[-2]
        d = self.w.shape[-2]
        system = now._solved.system
        if not isinstance(system, ByFeatures) or not 0 < FEW * new <= d or system.mean_key is None:
            return None
        mean = before._solved.sums.mean_key.unsqueeze(-2)
        added = now.key[old:].double() - mean  # (m, d)
        moved = added.sum(-2, keepdim=True) / (old + new) ** 0.5
        b = torch.cat([added, moved])
        sign = torch.ones(new + 1, 1, dtype=b.dtype)
        sign[-1] = -1.0  # of what the mean moves
        ab = b @ self.inverse  # (m + 1, d)
        core = torch.diag_embed(sign.squeeze(-1)) + ab @ b.mT  # D + B A B', D its own inverse
        inverse = torch.addmm(self.inverse, ab.mT, torch.linalg.solve(core, ab), alpha=-1)
        w = torch.cat([self.w, self.w.new_zeros(d, system.rhs.shape[-1] - self.w.shape[-1])], -1)
        alpha = system.rule.alpha

        def rest(w: Tensor) -> Tensor:
            return system.rhs - system.matrix @ w - alpha * w

        w = w + inverse @ rest(w)
        # the residual of some columns tells whether the inverse is still one: those of the new classes and the first
        some = torch.cat([w[:, :1], w[:, -4:]], -1)
        target = torch.cat([system.rhs[:, :1], system.rhs[:, -4:]], -1)
        left = target - system.matrix @ some - alpha * some
        exact = bool(left.norm() <= EXACT * target.norm())
        return Linear(inverse, w) if exact else None
