"""A batch of least-squares problems, and the two ways to write its solution.

    W   = (c K'WK + alpha I)^-1 K'WV          primal: the d x d Gram, coefficients are W itself          (d x k)
    W   = K~' P,  P = (c K~K~' + alpha I)^-1 V~   dual: the N x N Gram, coefficients are P                 (N x k)

with K~ = sqrt(w) K and V~ = sqrt(w) V. c is 1 for the ridge covariance and 1 - lambda for the convex one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.centring import without_rounding
from intention.solve.factor import Factor, by_gain, factored, mm, solve, wants_inverse
from intention.solve.operator import MaybeTensor

Invert = Callable[[Tensor], Tensor]  # b -> Sigma^-1 b


class Plan(NamedTuple):
    """What is fixed by shapes and options, so that forward and backward agree on it."""

    dual: bool
    intercept: bool
    scale: float


class Problem(NamedTuple):
    """One batch. `key` and `value` may have fewer elements than the rest: each then serves B / B' neighbours.

    query, key and value may come with B written as several dimensions; `expanded` makes the batch flat. What is traced
    changes it by the constructor: torch.compile of torch 2.5 and 2.6 refuses `_replace`.
    """

    query: Tensor  # (B, M, d)
    key: Tensor  # (B', N, d)
    value: Tensor  # (B', N, k)
    weight: Tensor | None  # (B, N)
    alpha: Tensor  # (B,)
    gain: Tensor | None  # (B,)

    @staticmethod
    def of_points(rows: Tensor, key: Tensor, weight: Tensor | None, alpha: Tensor, gain: Tensor | None) -> Problem:
        """Without values: rows Sigma^-1 is asked for, not a fit."""
        return Problem(rows, key, key.narrow(-1, 0, 0), weight, alpha, gain)

    def points(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor | None]:
        """All but the values."""
        return self.query, self.key, self.weight, self.alpha, self.gain

    def expanded(self) -> Problem:
        """One flat batch in which every element has its own keys and values."""
        query, key, value, weight, alpha, gain = self
        if query.dim() > 3:
            return Problem(query.flatten(0, -3), key.flatten(0, -3), value.flatten(0, -3), weight, alpha, gain)
        times = self.query.shape[0] // max(self.key.shape[0], 1)
        if times <= 1:
            return self
        key, value = key.repeat_interleave(times, 0), value.repeat_interleave(times, 0)
        return Problem(query, key, value, weight, alpha, gain)

    def take(self, index: Tensor | None, dtype: torch.dtype) -> Problem:
        """The elements `index` (None: all of them) in another precision."""
        return Problem._make(pick(x, index, dtype) for x in self)

    def centred(self) -> tuple[Problem, Tensor, Tensor, Tensor]:
        """Subtract the weighted means: (centred problem, mean of values, each point's share, total weight).

        Centred twice: after the first pass the numbers are small and the second removes the rounding of the first mean.
        """
        query, key, value = self.query, self.key, self.value
        n = key.shape[1]
        if self.weight is None:
            share = key.new_full((key.shape[0], n), 1 / n)
            total = key.new_full((key.shape[0],), n)
        else:
            total = self.weight.sum(-1)
            total = torch.where(total > 0, total, 1.0)
            share = self.weight / total.unsqueeze(1)
        mean_value = value.new_zeros(())
        for _ in range(2):
            mean_key = torch.bmm(share.unsqueeze(1), key)  # (B, 1, d)
            shift = torch.bmm(share.unsqueeze(1), value)  # (B, 1, k)
            query, key, value = query - mean_key, key - mean_key, value - shift
            mean_value = mean_value + shift
        key = without_rounding(key, self.key, None if self.weight is None else self.weight > 0)
        return Problem(query, key, value, self.weight, self.alpha, self.gain), mean_value, share, total

    def weighted(self) -> tuple[Tensor, Tensor]:
        """K~ and V~. Never differentiate this: sqrt has no derivative at a weight of 0."""
        if self.weight is None:
            return self.key, self.value
        root = self.weight.sqrt().unsqueeze(-1)
        return self.key * root, self.value * root


class Tokens(NamedTuple):
    """Sequences of one flat batch: the fit of token t sees tokens <= t."""

    query: Tensor  # (B, N, d)
    key: Tensor  # (B, N, d)
    value: Tensor | None  # (B, N, k)
    weight: Tensor | None  # (B, N)
    alpha: Tensor  # (B,), or (B, N) where tokens are forgotten
    gain: Tensor | None  # (B,)
    gram: Tensor | None  # (B, d, d): sums over the tokens before, of keys
    cross: Tensor | None  # (B, d, k): and of keys and values
    decay: Tensor | None = None  # (B, N): what is left at t of all before

    def each(self, change: Callable[[Tensor], Tensor]) -> Tokens:
        """Every tensor changed."""
        return Tokens._make(None if x is None else change(x) for x in self)

    def take(self, which: Tensor | slice) -> Tokens:
        """Some of the sequences."""
        return self.each(lambda x: x[which])


class Grads(NamedTuple):
    """Gradients of the tensors of a problem; None where none was asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    weight: Tensor | None
    alpha: Tensor | None
    gain: Tensor | None
    alpha_terms: Tensor | None = None  # root sum of squares of the terms that alpha's gradient adds up


class Needs(NamedTuple):
    """Which of them are asked for."""

    query: bool = True
    key: bool = True
    value: bool = True
    weight: bool = True
    alpha: bool = True
    gain: bool = True


class Fit(NamedTuple):
    """A solved problem: coefficients and the factor they came from; `x` is what the Gram was made of."""

    problem: Problem  # centred where the plan asks for an intercept
    mean_value: Tensor | None
    x: Tensor  # K~ (primal) or K~' (dual)
    target: Tensor  # V~
    coef: Tensor  # W (primal) or P (dual)
    factor: Factor

    def take(self, index: Tensor) -> Fit:
        problem, mean, x, target, coef, factor = self
        problem, mean = problem.take(index, x.dtype), None if mean is None else mean[index]
        factor = factor._replace(matrix=factor.matrix[index], ratio=factor.ratio[index])
        return Fit(problem, mean, x[index], target[index], coef[index], factor)


def pick(x: MaybeTensor, index: Tensor | None, dtype: torch.dtype) -> MaybeTensor:
    """The elements `index` (None: all of them) in another precision."""
    return x if x is None else (x if index is None else x[index]).to(dtype)


def fit(problem: Problem, plan: Plan, method: str) -> Fit:
    """Solve by "qr", "pinv" or Cholesky, as `factored` does."""
    mean_value = None
    if plan.intercept:
        problem, mean_value, _, _ = problem.centred()
    key, target = problem.weighted()
    x = key.mT if plan.dual else key
    rhs = target if plan.dual else mm(x.mT, target)
    factor = factored(method, x, problem.alpha, problem.gain, wants_inverse(x.shape[-1], rhs.shape[-1]))
    return Fit(problem, mean_value, x, target, solve(factor, rhs), factor)


def project(fitted: Fit, plan: Plan, coef: Tensor) -> Tensor:
    """Q W for coefficients `coef`, without intercept and scale. In the primal no M x N matrix is ever made."""
    query, x = fitted.problem.query, fitted.x
    if not plan.dual:
        return mm(query, coef)
    m, (d, n), k = query.shape[1], x.shape[1:], coef.shape[-1]
    if (n + m) * d * k <= m * n * (d + k):
        return mm(query, mm(x, coef))
    return mm(torch.bmm(query, x), coef)


def predict(fitted: Fit, plan: Plan) -> Tensor:
    out = project(fitted, plan, fitted.coef)
    if plan.scale != 1:
        out = out * plan.scale
    if fitted.mean_value is not None:
        out = out + fitted.mean_value
    return out


def refine(fitted: Fit, plan: Plan) -> tuple[Fit, Tensor]:
    """One step of iterative refinement with the residual taken from K and V, and its size relative to the prediction.

    That size is a reliable estimate of the error before the step.
    """
    problem, x, coef = fitted.problem, fitted.x, fitted.coef
    # V~ - c K~K~'P, or K~'(V~ - c K~W)
    fits = by_gain(problem.gain, mm(x.mT, mm(x, coef)) if plan.dual else mm(x, coef))
    rest = fitted.target - fits if plan.dual else mm(x.mT, fitted.target - fits)
    step = solve(fitted.factor, rest - problem.alpha.view(-1, 1, 1) * coef)
    return fitted._replace(coef=coef + step), relative_size(project(fitted, plan, step), project(fitted, plan, coef))


def relative_size(step: Tensor, whole: Tensor) -> Tensor:
    """|step| / |whole| per element, over the entries that are finite: a NaN query must not hide the others."""
    finite = torch.isfinite(step) & torch.isfinite(whole)
    step, whole = (torch.linalg.vector_norm(torch.where(finite, x, 0.0), dim=(-2, -1)) for x in (step, whole))
    return step / whole.clamp_min(torch.finfo(whole.dtype).tiny)
