"""Intention with a Sigma that is not made of the keys themselves: within-class, or a callable. Computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import _checks as checks
from intention._call.arguments import context_lead
from intention._covariance import Covariance, Rule, deviations, dual_serves, is_named, matrix_of, within_scatter
from intention.context.by_features import ByFeatures
from intention.context.by_points import ByPoints, Inner
from intention.context.points import Sums
from intention.solve.centring import centred
from intention.solve.ladder import Report
from intention.solve.operator import flat
from intention.solve.problem import Problem
from intention.solve.ridge.by_route import is_dual
from intention.solve.ridge.ridge import LARGE
from intention.solve.torch_state import eager, gradient_free
from intention.solve.transform.transform import transform as transform_points

SOLVERS = ("auto", "primal", "dual", "float64")


def check_estimated(
    covariance: Covariance, solver: str, queries_differ: bool, value: Tensor, keep: Tensor | None
) -> None:
    """What a covariance of its own cannot do."""
    if solver not in SOLVERS:
        raise ValueError(
            f"solver={solver!r} works on the keys alone, so on covariance 'ridge' and 'convex'; use one of {SOLVERS}"
        )
    if is_named(covariance):
        if eager():
            checks.one_hot(value, keep)
        return
    if solver == "dual":
        raise ValueError("a callable covariance is a d x d matrix, which has no dual form; use solver='auto'")
    if queries_differ:
        raise ValueError(
            "a callable covariance is estimated once for all queries, so it cannot be causal or masked query by query; "
            "use 'ridge', 'convex' or 'within'"
        )


def system_of(inputs: Problem, covariance: Covariance, intercept: bool, solver: str) -> ByFeatures | ByPoints:
    """The linear system of a call, with the leading dimensions of its context."""
    checks.float64(inputs.key.device)
    _, key, value, weight, alpha, gain = inputs.take(None, torch.float64)
    rule = Rule(alpha, gain, intercept, covariance)
    if is_named(covariance):
        if is_dual(solver, key) and dual_serves(key, value, weight, rule):
            return ByPoints(Inner(key, weight, intercept, None), value, weight, rule)
        return ByFeatures(Sums.of(key, value, weight), rule, within_scatter(key, value, weight))
    sums = Sums.of(key, value, weight)
    seen = key - sums.mean_key.unsqueeze(-2) if intercept else key
    return ByFeatures(sums, rule, matrix_of(covariance, seen, value, weight))


def predict(
    inputs: Problem, covariance: Covariance, intercept: bool, solver: str, scale: float
) -> tuple[Tensor, Report]:
    """Q Sigma^-1 K'WV"""
    system = system_of(inputs, covariance, intercept, solver)
    out = system.predict(inputs.query.double())
    watched = eager() and not gradient_free(*(x for x in inputs if isinstance(x, Tensor)))
    if isinstance(system, ByPoints) and watched and inputs.key.shape[-1] <= LARGE:
        moving = _by_deviations(inputs, intercept)  # differences that are divided by alpha have no slopes but rounding
        out = moving + (out - moving).detach()
    if scale != 1:
        mean = 0.0 if system.mean_value is None else system.mean_value
        out = mean + scale * (out - mean)
    lead = context_lead(inputs)
    return out, Report(*(x.to(inputs.key.dtype).expand(lead) for x in system.solution.report))


def _by_deviations(inputs: Problem, intercept: bool) -> Tensor:
    """The prediction of a within-class fit by the d x d Sigma of the deviations, whose slopes do not cancel."""
    query, key, value, weight, alpha, gain = inputs.take(None, torch.float64)
    lead, (n, d) = context_lead(inputs), key.shape[-2:]
    around, mean = deviations(key, value, weight), 0.0
    if intercept:
        (key, centre), (value, mean) = centred(key, weight), centred(value, weight)
        query = query - centre
    rhs = value.mT @ (key if weight is None else weight.unsqueeze(-1) * key)  # V'WK (..., k, d)
    rows, around = flat(rhs, lead, *rhs.shape[-2:]), flat(around, lead, n, d)
    points = Problem.of_points(rows, around, flat(weight, lead, n), flat(alpha, lead), flat(gain, lead))
    w = transform_points(points, "auto")[0]
    return query @ w.reshape(*lead, *rhs.shape[-2:]).mT + mean


def transform(inputs: Problem, covariance: Covariance, intercept: bool, solver: str) -> tuple[Tensor, Report]:
    """Q Sigma^-1"""
    system = system_of(inputs, covariance, intercept, solver)
    moved = system.solve(inputs.query.double().mT).mT.to(inputs.query.dtype)
    return moved, Report(*(x.to(inputs.key.dtype) for x in system.solution.report))
