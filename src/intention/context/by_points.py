"""A fit as an N x N linear system in float64, from inner products of the points; a kernel makes the points implicit.

It answers what `ByFeatures` answers, of r = q - mean where there is an intercept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention._covariance import Rule, class_shares, deviations, in_live_class
from intention.context.by_features import Solution
from intention.kernels import BoundKernel
from intention.solve.centring import EPS, centred
from intention.solve.ladder import DUAL, PINV, warn_inaccurate, warn_of_error
from intention.solve.matrix.inverse import inverse
from intention.solve.problem import relative_size
from intention.solve.torch_state import eager, lazy

__all__ = ["ByPoints", "Inner"]


class Inner:
    """Inner products of points, plain or through a kernel, around the weighted mean where `centre` is set."""

    def __init__(
        self,
        key: Tensor,
        weight: Tensor | None,
        centre: bool,
        kernel: BoundKernel | None,
        called: torch.dtype = torch.float64,  # in which the kernel gets its points
    ) -> None:
        n = key.shape[-2]
        mass = key.new_ones(n) if weight is None else weight
        self.count = mass.sum(-1)
        self.share = mass / torch.where(self.count > 0, self.count, 1.0)[..., None]  # (..., N)
        self.kernel, self.centre, self.called = kernel, centre, called
        self.mean = None
        if centre and kernel is None:
            key, self.mean = centred(key, weight)
        self.key = key

    def _of(self, x: Tensor) -> Tensor:
        """The kernel of x and the points."""
        assert self.kernel is not None
        return self.kernel(x.to(self.called), self.key.to(self.called)).double()

    @lazy
    def _raw(self) -> tuple[Tensor, Tensor, Tensor]:
        """The kernel of the points, its mean over one of them (..., N) and over both (...)."""
        gram = self._of(self.key)
        gram = (gram + gram.mT) / 2
        mean = (gram @ self.share.unsqueeze(-1)).squeeze(-1)
        return gram, mean, (mean * self.share).sum(-1)

    @lazy
    def gram(self) -> Tensor:
        """(..., N, N)"""
        if self.kernel is None:
            return self.key @ self.key.mT
        gram, mean, total = self._raw
        if not self.centre:
            return gram
        return gram - mean.unsqueeze(-1) - mean.unsqueeze(-2) + total[..., None, None]

    def cross(self, query: Tensor) -> Tensor:
        """(..., M, N)"""
        if self.kernel is None:
            return (query if self.mean is None else query - self.mean) @ self.key.mT
        cross = self._of(query)
        if not self.centre:
            return cross
        _, mean, total = self._raw
        return cross - cross @ self.share.unsqueeze(-1) - mean.unsqueeze(-2) + total[..., None, None]

    def square(self, query: Tensor) -> Tensor:
        """r r' (..., M)"""
        if self.kernel is None:
            return (query if self.mean is None else query - self.mean).square().sum(-1)
        square = self.kernel.diagonal(query.to(self.called)).double()
        if not self.centre:
            return square
        middle = (self._of(query) @ self.share.unsqueeze(-1)).squeeze(-1)
        return square - 2 * middle + self._raw[2][..., None]


class ByPoints:
    """W = K'a with a from the N x N system of inner products; a kernel makes K implicit."""

    def __init__(self, inner: Inner, value: Tensor, weight: Tensor | None, rule: Rule) -> None:
        self.inner, self.weight, self.rule = inner, weight, rule
        self.count, self.mean_key = inner.count, inner.mean
        self.labels = value if rule.covariance == "within" else None
        self.target, self.mean_value = centred(value, weight) if rule.intercept else (value, None)
        gram = self._within(inner.gram)
        self.lift = None
        if rule.intercept and self.labels is None:
            # Centred points leave the direction of the weights empty, where A is 1 / alpha. Filled with something of
            # the size of the rest it can be taken out again without cancelling; nothing that is asked lies along it.
            size = (gram.diagonal(0, -2, -1) * inner.share).sum(-1).detach()
            self.lift = torch.where(size > 0, size, 1.0)  # tau: A sees c tau uu', u the unit vector along w^1/2
            gram = gram + (self.lift / torch.where(inner.count > 0, inner.count, 1.0))[..., None, None]
        self.gram = gram

    def _within(self, gram: Tensor) -> Tensor:
        if self.labels is None:
            return gram
        if self.inner.kernel is None:  # of points far from 0 the Gram has lost what lies between those of a class
            return self._keys @ self._keys.mT
        return deviations(deviations(gram, self.labels, self.weight).mT, self.labels, self.weight)

    def _reached(self, z: Tensor) -> Tensor:
        """H K K'z, around the means of classes"""
        assert self.labels is not None
        if self.inner.kernel is None:
            return self._keys @ (self.inner.key.mT @ z)
        return deviations(self.inner.gram @ z, self.labels, self.weight)

    @lazy
    def solution(self) -> Solution:
        rule = self.rule
        a, logdet, report = inverse(self.gram, rule.alpha, rule.gain, self.weight, True, rule.rounding)
        route = torch.where(report.route == 0, float(DUAL), report.route)
        report = report._replace(route=route)
        if self.inner.kernel is not None and self.inner.centre:
            # a kernel is centred as a matrix: what is left keeps the rounding of what it was, and of the mean
            raw, _, total = self.inner._raw  # k(x_i, x_i) and the mean of all
            size = (raw.diagonal(0, -2, -1) + total.abs().unsqueeze(-1)).detach()
            noise = 8 * rule.rounding * (size * a.detach().diagonal(0, -2, -1)).amax(-1)
            report = report._replace(error=report.error + noise)
        if not rule.quiet and eager():
            warn_inaccurate(report)
        logdet = logdet - rule.alpha.log() * self.gram.shape[-1]
        return Solution(a, logdet, report, (report.route == PINV) & (rule.alpha == 0))

    def _times_gain(self, x: Tensor) -> Tensor:
        """c x"""
        return x if self.rule.gain is None else self.rule.gain[..., None, None] * x

    @lazy
    def coef(self) -> Tensor:
        """a (..., N, k)"""
        if self.labels is None:
            return self.solution.inverse @ self.target
        return self.solve_coef(self.target if self.weight is None else self.weight.unsqueeze(-1) * self.target)

    def _back(self, a: Tensor) -> Tensor:
        """H'a: coefficients of the deviations as coefficients of the points."""
        assert self.labels is not None
        own = a if self.weight is None else torch.where(in_live_class(self.labels, self.weight).unsqueeze(-1), a, 0.0)
        return own - class_shares(self.labels, self.weight).mT @ (self.labels.mT @ a)

    @property
    def w(self) -> Tensor:
        """(..., d, k), of a linear fit"""
        return self.inner.key.mT @ self.coef

    def predict(self, query: Tensor) -> Tensor:
        out = self.inner.cross(query) @ self.coef
        return out if self.mean_value is None else out + self.mean_value

    def spread(self, query: Tensor) -> Tensor:
        """alpha r Sigma^-1 r' = min over y of |r - X'y|^2 + alpha/c |y / w^1/2|^2.

        The minimum, y = c A X r', is a sum of squares: errors of y enter squared, where r r' - r X'y would cancel.
        """
        x = self.inner.cross(query)
        x = x if self.labels is None else deviations(x.mT, self.labels, self.weight).mT
        y = x @ self.solution.inverse
        alpha, gain = self.rule.alpha[..., None, None], self.rule.gain
        if gain is not None:
            y = gain[..., None, None] * y
            alpha = alpha / torch.where(gain > 0, gain, 1.0)[..., None, None]
        last = y
        if self.inner.kernel is None:
            y, last = self._refined(query, y, alpha)
        penalty = alpha * y if self.weight is None else self._penalty(alpha, y, x)
        penalty = (penalty * y).sum(-1)
        if self.inner.kernel is None:
            out = self._outside(query, y).square().sum(-1) + penalty
            if eager():
                _warn_cancelled(out, last.detach(), 1.0)
            return out
        whole = self.inner.square(query)
        out = (whole - 2 * (x * y).sum(-1) + ((y @ self.gram) * y).sum(-1) + penalty).clamp_min(0)
        if eager():
            terms = whole + ((y.abs() @ self.gram.abs()) * y.abs()).sum(-1)
            _warn_cancelled(out, terms, 8 * EPS + self.solution.report.error[..., None].square())
        return out

    def _refined(self, query: Tensor, y: Tensor, alpha: Tensor) -> tuple[Tensor, Tensor]:
        """y with residuals taken from the points, whose condition is not squared, and what the last step adds.

        y (G + alpha/c W^-1) = x
        """
        weight = 1.0 if self.weight is None else torch.where(self.weight > 0, self.weight, torch.inf).unsqueeze(-2)
        key, step = self._keys, y
        for _ in range(2):
            rest = self._outside(query, y) @ key.mT - alpha * y / weight
            if self.weight is not None:  # a point of weight 0 solves nothing: y has its slope, and has it once
                rest = torch.where(self.weight.unsqueeze(-2) > 0, rest, 0.0)
            step = self._times_gain(rest @ self.solution.inverse)
            y = y + step
        return y, (step @ key).square().sum(-1)

    @lazy
    def _keys(self) -> Tensor:
        """What Sigma is made of (..., N, d), of a linear fit"""
        return self.inner.key if self.labels is None else deviations(self.inner.key, self.labels, self.weight)

    def _outside(self, query: Tensor, y: Tensor) -> Tensor:
        """r - X'y (..., M, d) of a linear fit"""
        r = query if self.inner.mean is None else query - self.inner.mean
        return r - y @ self._keys

    def _penalty(self, alpha: Tensor, y: Tensor, x: Tensor) -> Tensor:
        """alpha/c y / w; where w = 0 its limit x - y G, which has the slope"""
        assert self.weight is not None
        weight = self.weight.unsqueeze(-2)
        there = weight > 0
        return torch.where(there, alpha * y / torch.where(there, weight, 1.0), x - y @ self.gram)

    def square(self, query: Tensor) -> Tensor:
        """r Sigma^-1 r' (..., M)"""
        return self.spread(query) / self.rule.alpha[..., None]

    def solve_coef(self, z: Tensor) -> Tensor:
        """Sigma^-1 K'z as coefficients of the points, (z - c H'A H K K'z) / alpha, around the means of classes."""
        gram, alpha = self.inner.gram, self.rule.alpha[..., None, None]

        def once(z: Tensor) -> Tensor:
            return (z - self._back(self._times_gain(self.solution.inverse @ self._reached(z)))) / alpha

        def times_sigma(a: Tensor) -> Tensor:  # (c H'W H K K' + alpha I) a
            seen = self._reached(a)
            seen = seen if self.weight is None else self.weight.unsqueeze(-1) * seen
            return self._back(self._times_gain(seen)) + alpha * a

        # Where the points span what z is made of, z and what is taken from it nearly cancel: refine, and measure
        a = once(z)
        a = a + once(z - times_sigma(a))
        step = once(z - times_sigma(a))
        if eager():
            warn_of_error(relative_size(gram @ step.detach(), gram @ a.detach()))
        return a + step

    def solve(self, b: Tensor) -> Tensor:
        """Sigma^-1 b for b (..., d, p), of a linear fit: (b - c X'A X b) / alpha"""
        key = self._keys
        inside = key.mT @ (self.solution.inverse @ (key @ b))
        out = (b - self._times_gain(inside)) / self.rule.alpha[..., None, None]
        if eager():  # b and what is taken from it may nearly cancel
            warn_of_error(relative_size(8 * EPS * b.detach() / self.rule.alpha[..., None, None], out.detach()))
        return out

    def hat(self) -> Tensor:
        """w u (..., N), u = (G - c G A G)_ii / alpha; at alpha = 0 w u = (G A)_ii"""
        gram, a, gain = self.inner.gram, self.solution.inverse, self.rule.gain
        seen = gram @ a
        taken = (seen * gram).sum(-1)
        taken = taken if gain is None else gain[..., None] * taken
        alpha = self.rule.alpha[..., None]
        square = gram.diagonal(0, -2, -1)
        u = (square - taken) / torch.where(alpha > 0, alpha, 1.0)
        u = u if self.weight is None else self.weight * u
        u = torch.where(alpha > 0, u, seen.diagonal(0, -2, -1))
        # that cancels where the square is large beside alpha; c w u = 1 - alpha A_ii / w (- w / n) does not
        own, there = self.own()
        mass = torch.ones_like(own) if self.weight is None else self.weight
        c = torch.ones_like(alpha) if gain is None else gain[..., None]
        large = (there & (c * mass * square > alpha) & (alpha > 0)).detach()
        near = 1 - alpha * own / torch.where(large, mass, 1.0)
        near = near - self.inner.share if self.rule.intercept else near
        return torch.where(large, near / torch.where(large, c, 1.0), u)

    def own(self) -> tuple[Tensor, Tensor]:
        """What of A_ii is the point's own, without the intercept's share (..., N), and which points have it."""
        own = self.solution.inverse.diagonal(0, -2, -1)
        if self.lift is not None:
            square = 1.0 if self.weight is None else self.weight.square()
            lifted = self.lift if self.rule.gain is None else self.rule.gain * self.lift
            own = own - (square / self.inner.count[..., None]) / (self.rule.alpha + lifted)[..., None]
        return own, torch.ones_like(own, dtype=torch.bool) if self.weight is None else self.weight > 0


def _warn_cancelled(spread: Tensor, whole: Tensor, share: Tensor | float) -> None:
    """A variance far below the prior one is a difference of numbers of that size; errors of y enter squared."""
    error = share * whole.detach() / spread.detach().clamp_min(torch.finfo(spread.dtype).tiny)
    warn_of_error(torch.where(whole > 0, error, 0.0))
