"""A fit as a d x d linear system in float64, from sums.

With an intercept r = q - mean and everything is said of r: an unregularised constant is fitted by the means.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention._covariance import Rule
from intention.context.points import Sums
from intention.solve.centring import EPS
from intention.solve.ladder import PINV, Report, warn_inaccurate
from intention.solve.matrix.inverse import inverse
from intention.solve.torch_state import eager, lazy

__all__ = ["ByFeatures", "Solution"]


class Solution(NamedTuple):
    """Of a system by features or by points."""

    inverse: Tensor  # Sigma^-1 (..., d, d); by points A (..., N, N)
    logdet: Tensor  # log det Sigma (...); by points without the directions that no point has: they add log alpha each
    report: Report
    singular: Tensor  # (...): where the inverse is a pseudo-inverse


class ByFeatures:
    """Sigma W = K'WV with the d x d Sigma of sums; `matrix` takes the place of the scatter (a callable's)."""

    def __init__(self, sums: Sums, rule: Rule, matrix: Tensor | None = None) -> None:
        self.rule, self.count = rule, sums.total
        self.matrix, self.rhs, self.noise = sums.scatter, sums.cross, sums.noise
        self.mean_key = self.mean_value = None
        if rule.intercept:
            self.mean_key, self.mean_value = sums.mean_key.unsqueeze(-2), sums.mean_value.unsqueeze(-2)
        else:  # sums are kept around the means: of the points themselves they are n m m' more
            lifted = (sums.total[..., None] * sums.mean_key).unsqueeze(-1)
            self.matrix = self.matrix + lifted * sums.mean_key.unsqueeze(-2)
            self.rhs = self.rhs + lifted * sums.mean_value.unsqueeze(-2)
        if matrix is not None:
            self.matrix, self.noise = matrix, torch.zeros_like(sums.noise)
        elif rule.covariance == "within":  # the difference of two scatters keeps the rounding of the larger one
            self.matrix = sums.within()
            self.noise = sums.noise + EPS * sums.scatter.detach().diagonal(0, -2, -1)

    @lazy
    def solution(self) -> Solution:
        rule = self.rule
        out, logdet, report = inverse(self.matrix, rule.alpha, rule.gain, quiet=True, rounding=rule.rounding)
        # noise E moves the answer by A E
        moved = (self.noise * out.detach().diagonal(0, -2, -1)).amax(-1)
        report = report._replace(error=report.error + moved)
        if not rule.quiet and eager():
            warn_inaccurate(report)
        return Solution(out, logdet, report, (report.route == PINV) & (rule.alpha == 0))

    def solve(self, b: Tensor) -> Tensor:
        """Sigma^-1 b"""
        return self.solution.inverse @ b

    @property
    def w(self) -> Tensor:
        """(..., d, k)"""
        w = self.solve(self.rhs)
        scaled = self.matrix if self.rule.gain is None else self.rule.gain[..., None, None] * self.matrix
        # one refinement step: an explicit inverse is a little less exact than two triangular solves
        return w + self.solve(self.rhs - scaled @ w - self.rule.alpha[..., None, None] * w)

    def predict(self, query: Tensor) -> Tensor:
        out = (query if self.mean_key is None else query - self.mean_key) @ self.w
        return out if self.mean_value is None else out + self.mean_value

    def square(self, query: Tensor) -> Tensor:
        """r Sigma^-1 r' (..., M)"""
        r = query if self.mean_key is None else query - self.mean_key
        return ((r @ self.solution.inverse) * r).sum(-1)

    def spread(self, query: Tensor) -> Tensor:
        """alpha r Sigma^-1 r'; where Sigma is singular its limit, the part of r that no point reaches"""
        out = self.rule.alpha[..., None] * self.square(query)
        if not eager() or bool(self.solution.singular.any()):
            r = query if self.mean_key is None else query - self.mean_key
            outside = (r - r @ self.solution.inverse @ self.matrix).square().sum(-1)
            out = torch.where(self.solution.singular[..., None], outside, out)
        return out

    def hat(self, key: Tensor, weight: Tensor | None) -> Tensor:
        """w u with u = r Sigma^-1 r' for the points themselves (..., N)"""
        u = self.square(key)
        return u if weight is None else weight * u
