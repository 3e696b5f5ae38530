"""What a context keeps, points or sums, and the linear system it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention._cached import lazy
from intention._covariance import (
    Covariance,
    Rule,
    dual_serves,
    gain_of,
    in_live_class,
    is_named,
    matrix_of,
    on_keys,
    within_scatter,
)
from intention.context.by_features import ByFeatures
from intention.context.by_points import ByPoints, Inner
from intention.context.sums import Sums
from intention.features import Features
from intention.kernels import BoundKernel, Custom
from intention.solve.centring import centred
from intention.solve.constraints.constrained import Constraint, constrained
from intention.solve.doors import eager, gradient_free
from intention.solve.ladder import TOLERATED, Report, warn_inaccurate
from intention.solve.problem import relative_size
from intention.solve.ridge.ridge import hat_of_points, solve_points

# An estimated error above this is worth another look at the points themselves, whose condition is not squared. The
# second: in float64, and where derivatives are asked, which hold residuals far smaller than the values.
DOUBTFUL, DOUBTFUL_FLOAT64 = 1e-6, 1e-9
DOUBTFUL_SLOPE = 1e-8  # of sums alone, beyond which their derivatives were seen to be wrong


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Kept:
    """The fields of a Context. Nothing is changed in place."""

    key: Tensor | None  # (..., N, d) the points, in the dtype they came in; None where only sums are kept
    value: Tensor | None  # (..., N, k)
    weight: Tensor | None  # (..., N)
    stats: Sums | None  # the sums, where points came or went, or are not kept
    alpha: Tensor  # (...) float64
    fits_intercept: bool
    covariance: Covariance
    kernel: BoundKernel | None
    features: Features | Callable[[Tensor], Tensor] | None
    dtype: torch.dtype
    matrix: Tensor | None = None  # what a callable covariance estimated, where the points are not kept
    constraints: tuple[Constraint, ...] = ()

    @property
    def device(self) -> torch.device:
        return self.alpha.device if self.key is None else self.key.device

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of the fit, those of alpha aside."""
        if self.key is None or self.value is None:
            assert self.stats is not None
            return checks.leading(key=self.stats.scatter.shape[:-2], value=self.stats.cross.shape[:-2])
        weight = () if self.weight is None else self.weight.shape[:-1]
        gamma = () if self.kernel is None or self.kernel.gamma is None else self.kernel.gamma.shape
        return checks.leading(key=self.key.shape[:-2], value=self.value.shape[:-2], weight=weight, gamma=gamma)

    @property
    def sizes(self) -> tuple[int, int]:
        """(d, k): of the points, or of their features where only sums are kept"""
        if self.key is not None and self.value is not None:
            return self.key.shape[-1], self.value.shape[-1]
        assert self.stats is not None
        return self.stats.mean_key.shape[-1], self.stats.mean_value.shape[-1]

    @property
    def _gain(self) -> Tensor | None:
        return gain_of(self.alpha, self.covariance)

    @property
    def _points(self) -> tuple[Tensor, Tensor, Tensor | None]:
        assert self.key is not None
        assert self.value is not None
        return self.key, self.value, self.weight

    def _mapped(self, x: Tensor) -> Tensor:
        """Points in the space of the fit, in float64. A map of the user's own is called in the dtype that came."""
        if self.features is None:
            return x.double()
        return self.features(x.double() if isinstance(self.features, Features) else x).double()

    def _stats_of(self, key: Tensor, value: Tensor, weight: Tensor | None) -> Sums:
        return Sums.of(self._mapped(key), value, weight)

    @lazy
    def _wide(self) -> tuple[Tensor, Tensor, Tensor | None]:
        key, value, weight = self._points
        return self._mapped(key), value.double(), None if weight is None else weight.double()

    @lazy
    def _sums(self) -> Sums:
        if self.stats is not None:
            return self.stats
        key, value, weight = self._wide
        sums = Sums.of(key, value, weight)
        if self.covariance != "within" or weight is None or gradient_free(weight):
            return sums
        # a point that comes alone into its class is its mean, whatever it weighs: no slope of the scatter within
        still = torch.where(in_live_class(value, weight), weight, weight.detach())
        return sums._replace(scatter=Sums.of(key, value, still).scatter)

    @property
    def _count(self) -> Tensor:
        system = self._system
        return system.inner.count if isinstance(system, ByPoints) else system.stats.total

    @lazy
    def _system(self) -> ByFeatures | ByPoints:
        """The normal equations, in the smaller form. Which one depends on what is kept, so a saved context agrees."""
        rule = Rule(self.alpha, self._gain, self.fits_intercept, self.covariance, quiet=self._may_look_again)
        if self.key is not None and self._made_by_user:
            rule = rule._replace(rounding=torch.finfo(self.key.dtype).eps)
        if self.kernel is not None:
            return self._kernel_system(rule)
        if self.key is not None and self.stats is None and is_named(self.covariance):
            key, value, weight = self._wide
            regular = on_keys(self.covariance) or dual_serves(key, value, weight, rule)
            if key.shape[-2] <= key.shape[-1] and regular:
                return ByPoints(Inner(key, weight, rule.intercept, None), value, weight, rule)
            if self.covariance == "within":
                return ByFeatures(self._sums, rule, within_scatter(key, value, weight))
        matrix = self.matrix
        if not is_named(self.covariance) and matrix is None:
            key, value, weight = self._points
            seen = self._mapped(key).to(key.dtype)
            if self.fits_intercept:
                seen = (seen.double() - self._sums.mean_key.unsqueeze(-2)).to(key.dtype)
            matrix = matrix_of(self.covariance, seen, value, weight)
        return ByFeatures(self._sums, rule, matrix)

    def _kernel_system(self, rule: Rule) -> ByPoints:
        assert self.kernel is not None
        if self.covariance == "within" and eager() and not bool((self.alpha > 0).all()):
            raise ValueError("a kernel with covariance='within' needs alpha > 0: its Sigma is never of full rank")
        key, value, weight = self._wide
        kernel = _Cast(self.kernel, self._points[0].dtype) if self._made_by_user else self.kernel
        return ByPoints(Inner(key, weight, rule.intercept, kernel), value, weight, rule)

    @property
    def _made_by_user(self) -> bool:
        """Whether the matrix of the system comes from a function of the user's, in the dtype of the points."""
        custom = self.kernel is not None and isinstance(self.kernel.kernel, Custom)
        return custom or not is_named(self.covariance)

    @property
    def _may_look_again(self) -> bool:
        return self.key is not None and self.kernel is None and on_keys(self.covariance) and eager()

    @property
    def _certified(self) -> ByFeatures | ByPoints:
        """The system, for answers that have nothing but it: a doubtful one is warned of."""
        if self._may_look_again:
            warn_inaccurate(self._system.report)
        return self._system

    @property
    def _doubted(self) -> bool:
        """Whether the points themselves are to be asked."""
        if not self._may_look_again:
            return False
        fine = self.dtype == torch.float64 or not gradient_free(*self._points, self.alpha)
        system, limit = self._system, DOUBTFUL_FLOAT64 if fine else DOUBTFUL
        return not bool(((system.report.error < limit) & ~system.singular).all())

    @lazy
    def _hat(self) -> Tensor:
        """w k Sigma^-1 k' (..., N) of the points themselves"""
        key, _, weight = self._wide
        system = self._system
        hat = system.hat() if isinstance(system, ByPoints) else system.hat(key, weight)
        if not self._doubted:
            return hat
        size = key.detach().abs()
        around = centred(key, weight)[0] if self.fits_intercept else key
        exact = hat_of_points(around.detach(), weight, self.alpha, self._gain, size)
        if not gradient_free(key, weight, self.alpha):  # the slopes are those of the sums
            error = relative_size((hat.detach() - exact).unsqueeze(-1), exact.unsqueeze(-1))
            warn_inaccurate(system.report._replace(error=error), "derivatives of leverages")
        return hat + (exact - hat).detach()

    def _warn_of_slopes(self, report: Report) -> None:
        """Sums hold no residuals V - KW, which derivatives are made of: at large conditions those are rounding."""
        if gradient_free(*self._sums, self.alpha):
            return
        error = TOLERATED / DOUBTFUL_SLOPE * report.error
        if self.alpha.requires_grad:
            # -<Sigma^-1 Q'g, W>: in a direction that alpha alone holds both are large, and of W that is rounding
            held = self._system.solve(torch.eye(self.sizes[0], dtype=error.dtype, device=error.device))
            alone = self.alpha * held.diagonal(0, -2, -1).sum(-1) > 0.5
            error = torch.where(alone, self.sizes[0] * report.error * report.condition, 0.0).maximum(error)
        warn_inaccurate(report._replace(error=error), "derivatives of sums alone", "keep_points=True")

    @lazy
    def _linear(self) -> tuple[Tensor, Tensor | None, Tensor | None, Report]:
        """(w, mean of keys, mean of values, report), float64."""
        system = self._system
        mean_key = system.inner.mean if isinstance(system, ByPoints) else system.mean_key
        w, report = system.w, system.report
        if self.key is None and on_keys(self.covariance) and eager():
            self._warn_of_slopes(report)
        if self._doubted:
            key, value, weight = self._wide
            size = key.detach().abs()
            if mean_key is not None:
                key, value = centred(key, weight)[0], centred(value, weight)[0]
            w, report = solve_points(key, value, weight, self.alpha, self._gain, size)
        w = self._under_constraints(w)
        return w, mean_key, system.mean_value, report

    def _under_constraints(self, w: Tensor) -> Tensor:
        if not self.constraints:
            return w
        system = self._system
        singular = system.singular if isinstance(system, ByFeatures) else self.alpha == 0
        if eager() and bool((singular | (system.report.error > TOLERATED)).any()):
            raise ValueError(
                "constraints need a Sigma that can be inverted, got one that is singular (condition up to "
                f"{system.report.condition.nan_to_num(0.0).amax().item():.1e}); use alpha > 0, or a larger one"
            )
        return constrained(w, system.solve, self.constraints)

    def _check_same(self, other: Kept) -> None:
        """Contexts that are fitted the same way can be merged."""
        if not isinstance(other, Kept):
            raise TypeError(f"merge takes another Context, got {type(other).__name__}; use add(key, value) for points")
        if self.device != other.device:
            raise ValueError(f"the contexts are on {self.device} and {other.device}; fit them on one device")
        if self._sums_or_points_differ(other):
            raise ValueError(f"contexts of different (d, k) cannot be merged: {self.sizes} and {other.sizes}")
        if self.constraints or other.constraints:
            raise ValueError("merge the contexts first, then constrain the one that comes of it")
        for name in ("covariance", "fits_intercept"):
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ValueError(
                    f"contexts of different {name.removeprefix('fits_')} cannot be merged: {mine}, {theirs}"
                )
        if self.alpha.shape != other.alpha.shape or not torch.equal(self.alpha, other.alpha):
            raise ValueError(
                "contexts of different alpha cannot be merged; fit both with the same, e.g. alpha=other.alpha"
            )
        for name in ("kernel", "features"):
            if not _equal(getattr(self, name), getattr(other, name)):
                raise ValueError(
                    f"contexts of different {name} cannot be merged; pass the bound one: fit(..., {name}=first.{name})"
                )

    def _sums_or_points_differ(self, other: Kept) -> bool:
        if self.features is not None and (self.key is None) != (other.key is None):
            return self.sizes[1] != other.sizes[1]  # one tells d, the other the number of features
        return self.sizes != other.sizes


class _Cast:
    """A kernel of the user's own, called in the dtype the points came in."""

    def __init__(self, kernel: BoundKernel, dtype: torch.dtype) -> None:
        self.kernel, self.dtype = kernel, dtype

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        return self.kernel(x.to(self.dtype), y.to(self.dtype)).double()

    def diagonal(self, x: Tensor) -> Tensor:
        return self.kernel.diagonal(x.to(self.dtype)).double()


def _equal(a: Any, b: Any) -> bool:
    """Whether two bound kernels, or two feature maps, are the same function."""
    if a is b or a is None or b is None:
        return a is b
    stored = isinstance(a, (BoundKernel, Features)) and type(a) is type(b) and a.name == b.name
    if not stored or getattr(getattr(a, "kernel", None), "name", "") == Custom.name or a.settings() != b.settings():
        return False
    mine, theirs = a.state(), b.state()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())
