"""Intention with a Sigma that is not made of the keys themselves: within-class, or a callable. Computed in float64."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import checks, layout
from intention.covariance import Covariance, Rule, dual_serves, is_named, matrix_of, within_scatter
from intention.dual import Dual, Inner
from intention.layout import Inputs
from intention.prepare import is_dual
from intention.primal import Primal
from intention.solve.doors import eager
from intention.solve.ladder import Report
from intention.solve.problem import Problem
from intention.solve.stats import Stats

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


def system_of(inputs: Inputs | Problem, covariance: Covariance, intercept: bool, solver: str) -> Primal | Dual:
    """The linear system of a call, with the leading dimensions of its context."""
    checks.float64(inputs.key.device)
    _, key, value, weight, alpha, gain = inputs
    if not isinstance(alpha, Tensor):
        alpha = torch.tensor(alpha, dtype=torch.float64, device=key.device)
    key, value, weight = key.double(), value.double(), None if weight is None else weight.double()
    rule = Rule(alpha.double(), None if gain is None else gain.double(), intercept, covariance)
    dual = is_named(covariance) and is_dual(solver, key) and dual_serves(key, value, weight, rule)
    return _linear_system(key, value, weight, rule, dual)


def _linear_system(key: Tensor, value: Tensor, weight: Tensor | None, rule: Rule, dual: bool) -> Primal | Dual:
    """The system of points in float64, in the form asked for; `dual` needs alpha > 0 where Sigma is within-class."""
    if dual:
        return Dual(Inner(key, weight, rule.intercept, None), value, weight, rule)
    stats = Stats.of(key, value, weight)
    if rule.covariance == "within":
        return Primal(stats, rule, within_scatter(key, value, weight))
    seen = key - stats.mean_key.unsqueeze(-2) if rule.intercept else key
    return Primal(stats, rule, matrix_of(rule.covariance, seen, value, weight))


def predict_shared(
    inputs: Inputs, covariance: Covariance, intercept: bool, solver: str, scale: float
) -> tuple[Tensor, Report]:
    """Q Sigma^-1 K'WV"""
    system = system_of(inputs, covariance, intercept, solver)
    out = system.predict(inputs.query.double())
    if scale != 1:
        mean = 0.0 if system.mean_value is None else system.mean_value
        out = mean + scale * (out - mean)
    lead = layout.context_lead(inputs)
    return out, Report(*(x.to(inputs.key.dtype).expand(lead) for x in system.report))


def predict_each(
    part: Problem, covariance: Covariance, intercept: bool, solver: str, scale: float
) -> tuple[Tensor, Report]:
    """The same for a flat batch of problems of one query each."""
    part = part.expanded()
    inputs = Inputs(part.query, part.key, part.value, part.weight, part.alpha, part.gain)
    out, report = predict_shared(inputs, covariance, intercept, solver, scale)
    return out.to(part.query.dtype), report


def transform(inputs: Inputs | Problem, covariance: Covariance, intercept: bool, solver: str) -> tuple[Tensor, Report]:
    """Q Sigma^-1"""
    if isinstance(inputs, Problem):
        inputs = inputs.expanded()
    system = system_of(inputs, covariance, intercept, solver)
    moved = system.solve(inputs.query.double().mT).mT.to(inputs.query.dtype)
    return moved, Report(*(x.to(inputs.key.dtype) for x in system.report))
