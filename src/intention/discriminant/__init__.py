"""Classifiers that are one linear solve: LS-SVM, linear and quadratic discriminant analysis. Batched, differentiable.

Each takes keys and one-hot values (..., N, C), or integer labels (..., N), and returns a `Classifier`: called on
queries (..., M, d) it gives logits (..., M, C). Computed in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import Rule, class_shares, dual_serves, within_scatter
from intention.context.by_features import ByFeatures
from intention.context.by_points import ByPoints, Inner
from intention.context.fit import bind_kernel, fit
from intention.context.points import Sums
from intention.discriminant.labels import balanced, check_ddof, labelled, mean_square, rule_of, threshold_of
from intention.kernels import Function, Kernel
from intention.solve.ladder import PINV, Report
from intention.solve.matrix.inverse import inverse
from intention.solve.torch_state import eager, gradient_free

__all__ = ["Classifier", "lda", "ls_svm", "qda"]


class Classifier:
    """Logits of queries: `classifier(query)` (..., M, C), and `classifier.predict(query)`, the class (..., M)."""

    def __init__(
        self, score: Callable[[Tensor], Tensor], report: Report, threshold: float | Tensor | None, like: Tensor, c: int
    ) -> None:
        self._score, self._report, self._like = score, report, like
        self._threshold = threshold_of(threshold, c, like.device)

    def __call__(self, query: Tensor) -> Tensor:
        """Logits (..., M, C) of query (..., M, d)."""
        checks.query(query, self._like, False)
        logits = self._score(query)
        if self._threshold is not None:
            logits = logits - self._threshold
        return logits.to(torch.promote_types(query.dtype, self._like.dtype))

    def predict(self, query: Tensor) -> Tensor:
        """The class (..., M) with the largest logit, of query (..., M, d)."""
        return self(query).argmax(-1)

    def describe(self) -> Report:
        """Route, condition and estimated relative error of the solve, as `Context.describe`."""
        return self._report.told()


def ls_svm(
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor | str | list | tuple = 1.0,
    weight: Tensor | None = None,
    priors: Tensor | None = None,
    threshold: float | Tensor | None = None,
    kernel: str | Kernel | Function | None = None,
) -> Classifier:
    """Least-squares support vector machine: one ridge with intercept per class, on targets +1 and -1.

    >>> key, labels = torch.randn(2, 11, 3), torch.arange(11) % 5
    >>> ls_svm(key, labels)(torch.randn(2, 7, 3)).shape
    torch.Size([2, 7, 5])

    key (..., N, d), value (..., N, C) one-hot or labels (..., N), weight (..., N).

    alpha is the 1 / gamma of Suykens' KKT system; "loo" or a list chooses it as in `fit`. priors (..., C) reweigh the
    points so that the classes have these masses (None: as they come). threshold: subtracted from the logits, (..., C);
    a number for two classes is how far class 1 must lead.
    """
    key, value, _ = labelled(key, value, weight)
    if priors is not None:
        weight, _ = balanced(value, weight, priors)
    context = fit(key, 2 * value - 1, alpha, weight, intercept=True, kernel=kernel)
    return Classifier(context, context.describe(), threshold, key, value.shape[-1])


def lda(
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor = 0.0,
    shrinkage: float | Tensor = 0.0,
    weight: Tensor | None = None,
    priors: Tensor | None = None,
    threshold: float | Tensor | None = None,
    ddof: float = 0,
    route: str = "within",
    kernel: str | Kernel | Function | None = None,
) -> Classifier:
    """Linear discriminant analysis: r S^-1 m_c - m_c S^-1 m_c / 2 + log prior_c, one covariance S for all classes.

    >>> key, labels = torch.randn(2, 11, 3), torch.arange(11) % 2
    >>> lda(key, labels, shrinkage=0.1)(torch.randn(2, 7, 3)).shape
    torch.Size([2, 7, 2])

    key (..., N, d), value (..., N, C) one-hot or labels (..., N), weight (..., N).

    r and the class means m_c are taken around the mean of all points (with a kernel around 0): another origin adds a
    number to all logits of a query.

    S is the mean over classes, each counted as its prior, of the covariance within the class, times N / (N - ddof);
    shrinkage s makes it (1 - s) S + s trace(S) / d I, and alpha I is added. Where S is singular: its pseudo-inverse.
    priors (..., C) sum to 1; None: the masses of the classes. threshold as in `ls_svm`. With a kernel alpha > 0 is
    needed, and shrinkage has no meaning.

    route="total" is for comparison with the paper's text; use "within", which solves with S, instead. "total" solves
    with the covariance of all points, as least squares on y - mean(y) does, and takes the spread of the means out
    again: equal answers, and a ValueError where the classes lie too far apart for them, or where no class varies
    between the means.
    """
    checks.choice("route", route, ("within", "total"))
    key, value, mass = labelled(key, value, weight)
    mass, prior = balanced(value, mass, priors)
    size = mass.sum(-1)
    check_ddof(ddof, size)
    mass = mass / (size - ddof)[..., None]  # a total of N / (N - ddof)
    labels = value if route == "within" else torch.ones_like(value[..., :1])
    rule = rule_of(None if kernel is not None else mean_square(key, value, mass), alpha, shrinkage, key.device)
    bound = None if kernel is None else bind_kernel(kernel, key, weight)
    n, d = key.shape[-2:]
    # around the mean of the points: only what is the same for all classes changes, and nothing cancels
    centre = torch.zeros_like(key[..., :1, :], dtype=torch.float64)
    if kernel is None:
        centre = (mass / mass.sum(-1, keepdim=True)).unsqueeze(-2) @ key.double()
    wide = key.double() - centre
    if kernel is not None or (n < d and dual_serves(wide, labels, mass, rule)):
        system: ByFeatures | ByPoints = ByPoints(Inner(wide, mass, False, bound), labels, mass, rule)
    else:
        system = _by_deviations(wide, labels, mass, rule)
    score = _linear_scores(system, wide, value, mass, route)
    constant = _of_priors(prior, 0.0)
    return Classifier(
        lambda q: score(q.double() - centre) + constant, system.solution.report, threshold, key, value.shape[-1]
    )


def qda(
    key: Tensor,
    value: Tensor,
    *,
    alpha: float | Tensor = 0.0,
    shrinkage: float | Tensor = 0.0,
    weight: Tensor | None = None,
    priors: Tensor | None = None,
    threshold: float | Tensor | None = None,
    ddof: float = 0,
    kernel: str | Kernel | Function | None = None,
) -> Classifier:
    """Quadratic discriminant analysis: -((q - m_c) S_c^-1 (q - m_c)' + log det S_c) / 2 + log prior_c.

    >>> key, labels = torch.randn(2, 11, 3), torch.arange(11) % 2
    >>> qda(key, labels, alpha=0.1)(torch.randn(2, 7, 3)).shape
    torch.Size([2, 7, 2])

    key (..., N, d), value (..., N, C) one-hot or labels (..., N), weight (..., N).

    Each class has its own covariance S_c with divisor N_c - ddof; shrinkage, alpha, priors, threshold as in `lda`. A
    class with too few points for its S_c to be invertible needs alpha or shrinkage.
    """
    key, value, mass = labelled(key, value, weight)
    n, d = key.shape[-2:]
    sizes = (value * mass.unsqueeze(-1)).sum(-2)  # (..., C)
    prior = sizes / sizes.sum(-1, keepdim=True) if priors is None else checks.priors(priors, sizes)
    check_ddof(ddof, sizes)
    own = (value * mass.unsqueeze(-1)).mT / torch.where(sizes > 0, sizes - ddof, 1.0).unsqueeze(-1)  # (..., C, N)
    wide = key.double().unsqueeze(-3)
    if kernel is not None:
        kernel = bind_kernel(kernel, key.unsqueeze(-3), None if weight is None else mass.unsqueeze(-2))
    alpha, shrinkage = (x[..., None] if isinstance(x, Tensor) else x for x in (alpha, shrinkage))  # beside classes
    labels = torch.ones_like(wide[..., :1])
    rule = rule_of(None if kernel is not None else mean_square(wide, labels, own), alpha, shrinkage, key.device)
    # the N x N form exists where every problem is regularised: shrinkage of an S that is 0 adds nothing
    if kernel is not None or (n < d and (not eager() or bool((rule.alpha > 0).all()))):
        system: ByFeatures | ByPoints = ByPoints(
            Inner(wide, own, True, kernel), wide[..., :0], own, rule._replace(covariance="ridge")
        )
    else:
        system = _by_deviations(wide, labels, own, rule._replace(intercept=True))
    if eager() and bool((system.solution.report.route == PINV).any()):
        raise ValueError(
            "the covariance of a class is singular (fewer points than features, or features that depend on each "
            "other); use alpha > 0 or shrinkage > 0, or lda, which pools the classes"
        )
    logdet = system.solution.logdet
    if isinstance(system, ByPoints) and kernel is None:
        logdet = logdet + d * system.rule.alpha.log()
    constant = _of_priors(prior, logdet / 2)

    def score(query: Tensor) -> Tensor:
        return constant - system.square(query.double().unsqueeze(-3)).mT / 2

    return Classifier(score, system.solution.report, threshold, key, value.shape[-1])


def _of_priors(prior: Tensor, less: Tensor | float) -> Tensor:
    """log prior - less (..., 1, C); -inf, without a slope, where the prior is 0."""
    there = prior > 0
    return torch.where(there, torch.where(there, prior, 1.0).log() - less, -torch.inf).unsqueeze(-2)


def _by_deviations(key: Tensor, labels: Tensor, mass: Tensor, rule: Rule) -> ByFeatures:
    """The d x d system around the means of classes."""
    return ByFeatures(Sums.of(key, key[..., :0], mass), rule, within_scatter(key, labels, mass))


def _linear_scores(
    system: ByFeatures | ByPoints, key: Tensor, value: Tensor, mass: Tensor, route: str
) -> Callable[[Tensor], Tensor]:
    """q S^-1 m_c - m_c S^-1 m_c / 2. Vectors are columns: of d numbers, or of N coefficients of the points."""
    shares = class_shares(value, mass)  # (..., C, N)
    if isinstance(system, ByPoints):
        means, solve, gram = shares.mT, system.solve_coef, system.inner.gram
    else:
        means, solve, gram = (shares @ key).mT, system.solve, None

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return a.mT @ (b if gram is None else gram @ b)

    w = solve(means)
    if route == "total":
        # S_W = S_T - c U D U' with U the means around their mean and D their masses, so with E = D^1/2 U'S_T^-1 U D^1/2
        # S_W^-1 = S_T^-1 + c S_T^-1 U D^1/2 (I - c E)^-1 D^1/2 U'S_T^-1
        size = (value * mass.unsqueeze(-1)).sum(-2)
        around = (means - (means * (size / size.sum(-1, keepdim=True)).unsqueeze(-2)).sum(-1, keepdim=True)) * (
            size.sqrt().unsqueeze(-2)
        )
        back = solve(around)
        gain = 1.0 if system.rule.gain is None else system.rule.gain[..., None, None]
        eye = torch.eye(value.shape[-1], dtype=key.dtype, device=key.device)
        core = _certified_core(eye - gain * inner(around, back), system.solution.report)
        w = w + gain * back @ (core @ inner(back, means))
    offset = inner(means, w).diagonal(0, -2, -1).unsqueeze(-2) / 2
    if isinstance(system, ByPoints):
        return lambda query: system.inner.cross(query) @ w - offset
    return lambda query: query @ w - offset


def _certified_core(matrix: Tensor, report: Report) -> Tensor:
    """(I - c E)^-1. Classes far apart bring it near to singular, by less than the rounding of E."""
    floor = 1e3 * torch.finfo(torch.float64).eps
    try:
        core, _, own = inverse(matrix, torch.zeros_like(matrix[..., 0, 0]), quiet=True)
    except ValueError:
        raise ValueError(_TOTAL) from None
    if eager():
        size = core.detach().diagonal(0, -2, -1).amax(-1)
        error = (report.error + floor) * (size if gradient_free(matrix) else size.square())  # slopes hold it twice
        # a pseudo-inverse is small, whatever it left out
        if bool(((error > 1e-3) | (own.route == PINV)).any()):
            raise ValueError(_TOTAL)
    return core


_TOTAL = (
    "the classes lie so far apart, or differ in directions in which none of them varies (as with fewer points than "
    "features), that the covariance of all points has lost the one within them; use route='within', or alpha > 0"
)
