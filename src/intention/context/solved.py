"""A fit, computed when it is first asked: points in its space, their sums, the linear system, the weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from intention._covariance import ON_KEYS, Covariance, Rule, dual_serves, in_live_class, matrix_of, within_scatter
from intention.context.by_features import ByFeatures, Solution
from intention.context.by_points import ByPoints, Inner
from intention.context.points import PointSet, Sums
from intention.features import Features, same_map
from intention.kernels import BoundKernel, Custom
from intention.solve.centring import centred
from intention.solve.constraints.constrained import Constraint, constrained
from intention.solve.ladder import TOLERATED, Report, warn_inaccurate
from intention.solve.problem import relative_size
from intention.solve.ridge.ridge import hat_of_points, solve_points
from intention.solve.torch_state import eager, gradient_free, lazy

__all__ = ["Solved"]

# An estimated error above this is worth another look at the points themselves, whose condition is not squared. The
# second: in float64, and where derivatives are asked, which hold residuals far smaller than the values.
DOUBTFUL, DOUBTFUL_FLOAT64 = 1e-6, 1e-9
DOUBTFUL_SLOPE = 1e-8  # of sums alone, beyond which their derivatives were seen to be wrong


@dataclass(frozen=True, eq=False)
class Solved:
    """The answers of a fit. Tensors that come and go are float64, queries in the space of the fit (`mapped`)."""

    points: PointSet | None  # as they came; None where only sums are kept
    stats: Sums | None  # the sums, where points came or went, or are not kept
    alpha: Tensor  # (...)
    intercept: bool
    covariance: Covariance
    kernel: BoundKernel | None
    features: Features | Callable[[Tensor], Tensor] | None
    matrix: Tensor | None  # what a callable covariance estimated, where the points are not kept
    constraints: tuple[Constraint, ...]
    dtype: torch.dtype  # of the points

    @property
    def gain(self) -> Tensor | None:
        """c of Sigma = c S + alpha I, made where it is used: alpha may be watched there, and not where it was given."""
        return 1 - self.alpha if self.covariance == "convex" else None

    def mapped(self, x: Tensor) -> Tensor:
        """Points in the space of the fit. A map of the user's own is called in the dtype that came."""
        if self.features is None:
            return x.double()
        return self.features(x.double() if isinstance(self.features, Features) else x).double()

    @lazy
    def wide(self) -> PointSet:
        """The points."""
        assert self.points is not None
        key, value, weight = self.points
        return self.mapped(key), value.double(), None if weight is None else weight.double()

    @lazy
    def sums(self) -> Sums:
        if self.stats is not None:
            return self.stats
        key, value, weight = self.wide
        sums = Sums.of(key, value, weight)
        if self.covariance != "within" or weight is None or gradient_free(weight):
            return sums
        # a point that comes alone into its class is its mean, whatever it weighs: no slope of the scatter within
        still = torch.where(in_live_class(value, weight), weight, weight.detach())
        return sums._replace(scatter=Sums.of(key, value, still).scatter)

    @lazy
    def system(self) -> ByFeatures | ByPoints:
        """The normal equations, in the smaller form. Which one depends on what is kept, so a saved context agrees."""
        rule = Rule(self.alpha, self.gain, self.intercept, self.covariance, quiet=self._asks_points())
        custom = self.kernel is not None and isinstance(self.kernel.kernel, Custom)
        if self.points is not None and (custom or callable(rule.covariance)):  # a user's function, in the dtype it got
            rule = rule._replace(rounding=torch.finfo(self.points[0].dtype).eps)
        if self.kernel is not None:
            assert self.points is not None
            if rule.covariance == "within" and eager() and not bool((rule.alpha > 0).all()):
                raise ValueError("a kernel with covariance='within' needs alpha > 0: its Sigma is never of full rank")
            key, value, weight = self.wide
            called = self.points[0].dtype if custom else torch.float64  # a kernel of the user's own: as the points came
            return ByPoints(Inner(key, weight, rule.intercept, self.kernel, called), value, weight, rule)
        if self.points is not None and self.stats is None and not callable(rule.covariance):
            key, value, weight = self.wide
            if key.shape[-2] <= key.shape[-1] and (rule.covariance in ON_KEYS or dual_serves(key, value, weight, rule)):
                return ByPoints(Inner(key, weight, rule.intercept, None), value, weight, rule)
            if rule.covariance == "within":
                return ByFeatures(self.sums, rule, within_scatter(key, value, weight))
        return ByFeatures(self.sums, rule, self.estimated if callable(rule.covariance) else None)

    @lazy
    def estimated(self) -> Tensor:
        """What a callable covariance makes of the points, (..., d, d)."""
        if self.matrix is not None:
            return self.matrix
        assert self.points is not None
        key, value, weight = self.points
        seen = self.mapped(key).to(key.dtype)
        if self.intercept:
            seen = (seen.double() - self.sums.mean_key.unsqueeze(-2)).to(key.dtype)
        return matrix_of(self.covariance, seen, value, weight)

    def _asks_points(self, found: Solution | None = None) -> bool:
        """Whether the points themselves can be asked; of a system that is solved, whether they are to be."""
        if self.points is None or self.kernel is not None or self.covariance not in ON_KEYS or not eager():
            return False
        if found is None:
            return True
        fine = self.dtype == torch.float64 or not gradient_free(*self.points, self.alpha)
        return not bool(((found.report.error < (DOUBTFUL_FLOAT64 if fine else DOUBTFUL)) & ~found.singular).all())

    @property
    def certified(self) -> ByFeatures | ByPoints:
        """The system, for answers that have nothing but it: a doubtful one is warned of."""
        if self._asks_points():
            warn_inaccurate(self.system.solution.report)
        return self.system

    @lazy
    def linear(self) -> tuple[Tensor, Tensor | None, Tensor | None, Report]:
        """(w, mean of keys, mean of values, report)."""
        system = self.system
        w, report = system.w, system.solution.report
        if self.points is None and self.covariance in ON_KEYS and eager():
            self._warn_of_slopes(report)
        if self._asks_points(system.solution):
            key, value, weight = self.wide
            size = key.detach().abs()
            if self.intercept:
                key, value = centred(key, weight)[0], centred(value, weight)[0]
            w, report = solve_points(key, value, weight, self.alpha, self.gain, size)
        if self.constraints:
            w = self._under_constraints(w)
        return w, system.mean_key, system.mean_value, report

    def predict(self, query: Tensor) -> Tensor:
        if self.kernel is not None:
            return self.system.predict(query)
        w, mean_key, mean_value, _ = self.linear
        if mean_key is None or mean_value is None:
            return query @ w
        return (query - mean_key) @ w + mean_value

    def variance(self, query: Tensor, noise: bool) -> Tensor:
        """alpha r Sigma^-1 r' (..., M), alpha / n more for the intercept and alpha more with the noise"""
        system = self.certified
        level = self.alpha if self.gain is None else self.alpha / self.gain
        out = system.spread(query)
        if self.intercept:
            out = out + (level / system.count)[..., None]
        return out + level[..., None] if noise else out

    @lazy
    def hat(self) -> Tensor:
        """w k Sigma^-1 k' (..., N) of the points themselves"""
        key, _, weight = self.wide
        system = self.system
        hat = system.hat() if isinstance(system, ByPoints) else system.hat(key, weight)
        if not self._asks_points(system.solution):
            return hat
        size = key.detach().abs()
        around = centred(key, weight)[0] if self.intercept else key
        exact = hat_of_points(around.detach(), weight, self.alpha, self.gain, size)
        if not gradient_free(key, weight, self.alpha):  # the slopes are those of the sums
            error = relative_size((hat.detach() - exact).unsqueeze(-1), exact.unsqueeze(-1))
            warn_inaccurate(system.solution.report._replace(error=error), "derivatives of leverages")
        return hat + (exact - hat).detach()

    def _warn_of_slopes(self, report: Report) -> None:
        """Sums hold no residuals V - KW, which derivatives are made of: at large conditions those are rounding."""
        alpha, d = self.alpha, self.sums.mean_key.shape[-1]
        if gradient_free(*self.sums, alpha):
            return
        error = TOLERATED / DOUBTFUL_SLOPE * report.error
        if alpha.requires_grad:
            # -<Sigma^-1 Q'g, W>: in a direction that alpha alone holds both are large, and of W that is rounding
            held = self.system.solve(torch.eye(d, dtype=error.dtype, device=error.device))
            alone = alpha * held.diagonal(0, -2, -1).sum(-1) > 0.5
            error = torch.where(alone, d * report.error * report.condition, 0.0).maximum(error)
        warn_inaccurate(report._replace(error=error), "derivatives of sums alone", "keep_points=True")

    def _under_constraints(self, w: Tensor) -> Tensor:
        system, found = self.system, self.system.solution
        singular = found.singular if isinstance(system, ByFeatures) else self.alpha == 0
        if eager() and bool((singular | (found.report.error > TOLERATED)).any()):
            raise ValueError(
                "constraints need a Sigma that can be inverted, got one that is singular (condition up to "
                f"{found.report.condition.nan_to_num(0.0).amax().item():.1e}); use alpha > 0, or a larger one"
            )
        return constrained(w, system.solve, self.constraints)

    def check_alike(self, other: Solved) -> None:
        """Fits that are made the same way can be merged."""
        if self.constraints or other.constraints:
            raise ValueError("merge the contexts first, then constrain the one that comes of it")
        for name in ("covariance", "intercept"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(f"contexts of different {name} cannot be merged: {mine}, {theirs}")
        if self.alpha.shape != other.alpha.shape or not torch.equal(self.alpha, other.alpha):
            raise ValueError(
                "contexts of different alpha cannot be merged; fit both with the same, e.g. alpha=other.alpha"
            )
        for name in ("kernel", "features"):
            if not same_map(getattr(self, name), getattr(other, name)):
                raise ValueError(
                    f"contexts of different {name} cannot be merged; pass the bound one: fit(..., {name}=first.{name})"
                )
