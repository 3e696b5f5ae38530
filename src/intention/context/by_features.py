"""A fit as a d x d linear system in float64, from sums.

With an intercept r = q - mean and everything is said of r: an unregularised constant is fitted by the means.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention._cached import lazy
from intention._covariance import Rule
from intention.context import leave_one_out
from intention.context.sums import Sums
from intention.solve.doors import eager
from intention.solve.ladder import PINV, Report, warn_inaccurate
from intention.solve.matrix.inverse import EPS, inverse


class ByFeatures:
    """Sigma W = K'WV with the d x d Sigma of sums; `matrix` takes the place of the scatter (a callable's)."""

    def __init__(self, stats: Sums, rule: Rule, matrix: Tensor | None = None) -> None:
        self.stats, self.rule = stats, rule
        self.matrix, self.rhs = stats.around_means() if rule.intercept else stats.raw()
        self.noise = stats.noise
        if matrix is not None:
            self.matrix, self.noise = matrix, torch.zeros_like(stats.noise)
        elif rule.covariance == "within":  # the difference of two scatters keeps the rounding of the larger one
            self.matrix = stats.within()
            self.noise = stats.noise + EPS * stats.scatter.detach().diagonal(0, -2, -1)
        self.mean_key = stats.mean_key.unsqueeze(-2) if rule.intercept else None
        self.mean_value = stats.mean_value.unsqueeze(-2) if rule.intercept else None

    @lazy
    def _solved(self) -> tuple[Tensor, Tensor, Report]:
        out, logdet, report = inverse(
            self.matrix, self.rule.alpha, self.rule.gain, quiet=True, rounding=self.rule.rounding
        )
        # noise E moves the answer by A E
        moved = (self.noise * out.detach().diagonal(0, -2, -1)).amax(-1)
        report = report._replace(error=report.error + moved)
        if eager() and not self.rule.quiet:
            warn_inaccurate(report)
        return out, logdet, report

    @property
    def report(self) -> Report:
        return self._solved[2]

    @property
    def singular(self) -> Tensor:
        """(...): where Sigma has no inverse"""
        return (self.report.route == PINV) & (self.rule.alpha == 0)

    def solve(self, b: Tensor) -> Tensor:
        """Sigma^-1 b"""
        return self._solved[0] @ b

    @lazy
    def w(self) -> Tensor:
        w = self.solve(self.rhs)
        scaled = self.matrix if self.rule.gain is None else self.rule.gain[..., None, None] * self.matrix
        # one refinement step: an explicit inverse is a little less exact than two triangular solves
        return w + self.solve(self.rhs - scaled @ w - self.rule.alpha[..., None, None] * w)

    def predict(self, query: Tensor) -> Tensor:
        if self.mean_key is None or self.mean_value is None:
            return query @ self.w
        return (query - self.mean_key) @ self.w + self.mean_value

    @property
    def logdet(self) -> Tensor:
        """log det Sigma (...)"""
        return self._solved[1]

    def square(self, query: Tensor) -> Tensor:
        """r Sigma^-1 r' (..., M)"""
        r = query if self.mean_key is None else query - self.mean_key
        return ((r @ self._solved[0]) * r).sum(-1)

    def spread(self, query: Tensor) -> Tensor:
        """alpha r Sigma^-1 r'; where Sigma is singular its limit, the part of r that no point reaches"""
        out = self.rule.alpha[..., None] * self.square(query)
        if not eager() or bool(self.singular.any()):
            r = query if self.mean_key is None else query - self.mean_key
            outside = (r - r @ self._solved[0] @ self.matrix).square().sum(-1)
            out = torch.where(self.singular[..., None], outside, out)
        return out

    def hat(self, key: Tensor, weight: Tensor | None) -> Tensor:
        """w u with u = r Sigma^-1 r' for the points themselves (..., N)"""
        u = self.square(key)
        return u if weight is None else weight * u

    def leverage(self, hat: Tensor, weight: Tensor | None) -> Tensor:
        """df_i / dv_i (..., N): w u, and w / n for the intercept"""
        if not self.rule.intercept:
            return hat
        total = torch.where(self.stats.total > 0, self.stats.total, 1.0)[..., None]
        return hat + (1.0 if weight is None else weight) / total

    def leave_one_out(
        self, hat: Tensor, w: Tensor, error: Tensor, key: Tensor, value: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Errors (..., N, k), and (..., N) the points whose closed form is not exact: leverages near 1."""
        r = key if self.mean_key is None else key - self.mean_key
        target = value if self.mean_value is None else value - self.mean_value
        count, gain = self.stats.total if self.rule.intercept else None, self.rule.gain
        return leave_one_out.closed_form(hat, r @ w, target, weight, count, gain, error)

    def spectral(self, key: Tensor, value: Tensor, weight: Tensor | None) -> leave_one_out.Spectral:
        r = key if self.mean_key is None else key - self.mean_key
        target = value if self.mean_value is None else value - self.mean_value
        return leave_one_out.spectral_primal(self.matrix, r, self.rhs, target, weight)
