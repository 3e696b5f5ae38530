"""Gradients of Q W by hand: they reuse the factor, and hold at weights of 0.

Everything is out of place and differentiable, so the same lines serve the first backward (with the saved factor) and every
higher order (with an `invert` that autograd can follow).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import mm
from intention.solve.problem import Plan, Problem

Invert = Callable[[Tensor], Tensor]


class Mode(NamedTuple):
    """`refined`: one refinement step, its residual taken from K; `deficient`: the pseudo-inverse's terms at alpha = 0."""

    refined: bool
    deficient: bool


PLAIN = Mode(refined=False, deficient=False)


class Grads(NamedTuple):
    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    weight: Tensor | None
    alpha: Tensor | None
    gain: Tensor | None
    alpha_terms: Tensor | None = None  # root sum of squares of the terms that alpha's gradient adds up


class Needs(NamedTuple):
    query: bool = True
    key: bool = True
    value: bool = True
    weight: bool = True
    alpha: bool = True
    gain: bool = True


def pullback(
    problem: Problem, plan: Plan, grad: Tensor, invert: Invert, coef: Tensor, needs: Needs, mode: Mode = PLAIN
) -> Grads:
    """Gradients for an incoming `grad` (B, M, k)."""
    if not plan.intercept:
        inner = _dual if plan.dual else _primal
        return inner(problem, grad * plan.scale if plan.scale != 1 else grad, invert, coef, needs, mode)
    return _with_intercept(problem, plan, grad, invert, coef, needs, mode)


def _with_intercept(
    problem: Problem, plan: Plan, grad: Tensor, invert: Invert, coef: Tensor, needs: Needs, mode: Mode
) -> Grads:
    # out = (Q - mu_K) W + mu_V with mu = sum_i w_i x_i / sum_i w_i
    centred, _, share, total = problem.centred()
    below = plan._replace(intercept=False)
    all_three = needs._replace(query=True, key=True, value=True)
    g = pullback(centred, below, grad, invert, coef, all_three, mode)
    assert g.query is not None and g.key is not None and g.value is not None
    mean_key = -g.query.sum(1, keepdim=True) - g.key.sum(1, keepdim=True)  # (B, 1, d)
    mean_value = grad.sum(1, keepdim=True) - g.value.sum(1, keepdim=True)  # (B, 1, k)
    key, value, weight = g.key + share[..., None] * mean_key, g.value + share[..., None] * mean_value, g.weight
    if needs.weight and weight is not None:
        pull = (centred.key * mean_key).sum(-1) + (centred.value * mean_value).sum(-1)
        weight = weight + pull / total[:, None]
    return g._replace(key=key, value=value, weight=weight)


def _primal(p: Problem, grad: Tensor, invert: Invert, w: Tensor, needs: Needs, mode: Mode) -> Grads:
    gain = 1 if p.gain is None else p.gain[:, None, None]
    point = 1 if p.weight is None else p.weight[..., None]
    d, k = w.shape[1:]
    y = mm(p.query.mT, grad)
    z = invert(y)  # Z = Sigma^-1 Q'g
    if mode.refined:
        z = z + invert(y - gain * mm(p.key.mT, point * mm(p.key, z)) - p.alpha[:, None, None] * z)
    s = mm(p.key, z)  # S = K Z
    by_residual = 2 * k < d or (needs.weight and p.weight is not None) or (needs.gain and p.gain is not None)
    rest = fitted = None
    if by_residual or mode.deficient:
        fitted = mm(p.key, w)
        rest = p.value - gain * fitted  # R = V - c K W
    key = None
    if needs.key:
        if rest is not None:
            key = torch.bmm(rest, z.mT) - gain * torch.bmm(s, w.mT)
        else:
            zw = torch.bmm(z, w.mT)
            key = torch.bmm(p.value, z.mT) - gain * torch.bmm(p.key, zw + zw.mT)
        if mode.deficient:
            outside = y - mm(p.key.mT, point * s)  # what of Q'g no key reaches
            key = key + _at_zero(p.alpha, torch.bmm(mm(p.key, invert(w)), outside.mT))
        key = point * key
    weight = gain_grad = None
    if needs.weight and p.weight is not None and rest is not None:
        weight = (s * rest).sum(-1)
    if needs.gain and p.gain is not None and fitted is not None:
        gain_grad = -(point * s * fitted).sum((-2, -1))
    return Grads(
        query=torch.bmm(grad, w.mT) if needs.query else None,
        key=key,
        value=point * s if needs.value else None,
        weight=weight,
        alpha=-(z * w).sum((-2, -1)) if needs.alpha else None,
        gain=gain_grad,
        alpha_terms=torch.linalg.vector_norm(z * w, dim=(-2, -1)) if needs.alpha else None,
    )


def _dual(p: Problem, grad: Tensor, invert: Invert, coef: Tensor, needs: Needs, mode: Mode) -> Grads:
    gain = 1 if p.gain is None else p.gain[:, None, None]
    root = 1 if p.weight is None else p.weight.sqrt()[..., None]
    key, value = p.weighted()
    w = mm(key.mT, coef)  # W = K~'P
    y = mm(p.query.mT, grad)
    s = invert(mm(key, y))  # S = (c K~K~' + alpha I)^-1 K~ Q'g = K~ Z
    if mode.refined:
        s = s + invert(mm(key, y - gain * mm(key.mT, s)) - p.alpha[:, None, None] * s)
    key_grad = weight = None
    if needs.key:
        both = torch.bmm(coef, s.mT)
        key_grad = torch.bmm(coef, y.mT) - gain * torch.bmm(both + both.mT, key)
        if mode.deficient:
            rest = value - gain * mm(key, w)
            key_grad = key_grad + _at_zero(p.alpha, torch.bmm(rest, mm(key.mT, invert(s)).mT))
        key_grad = root * key_grad
    if needs.weight and p.weight is not None:
        # dw_i = (k_i Z) (v_i - c k_i W); Z = (Q'g - c K~'S) / alpha, or K~'(K~K~')^-1 S where alpha = 0
        alpha = p.alpha[:, None, None]
        z = torch.where(alpha > 0, (y - gain * mm(key.mT, s)) / alpha, mm(key.mT, invert(s)))
        weight = (mm(p.key, z) * (p.value - gain * mm(p.key, w))).sum(-1)
    return Grads(
        query=torch.bmm(grad, w.mT) if needs.query else None,
        key=key_grad,
        value=root * s if needs.value else None,
        weight=weight,
        alpha=-(s * coef).sum((-2, -1)) if needs.alpha else None,
        alpha_terms=torch.linalg.vector_norm(s * coef, dim=(-2, -1)) if needs.alpha else None,
        gain=-(mm(key.mT, s) * w).sum((-2, -1)) if needs.gain and p.gain is not None else None,
    )


def pushforward(
    problem: Problem, tangent: Problem, plan: Plan, invert: Invert
) -> Tensor:
    """The tangent of Q W for tangents of every input (forward-mode AD); `tangent` has zeros where nothing moves."""
    if plan.intercept:
        problem, tangent, mean_tangent = _centred_tangents(problem, tangent)
        return pushforward(problem, tangent, plan._replace(intercept=False), invert) + mean_tangent
    p, t = problem, tangent
    gain = 1 if p.gain is None else p.gain[:, None, None]
    alpha = t.alpha[:, None, None]
    if plan.dual:
        key, value = p.weighted()
        root = 1 if p.weight is None else p.weight.sqrt()[..., None]
        key_t, value_t = root * t.key, root * t.value
        coef = invert(value)
        w = mm(key.mT, coef)
        moved = gain * (mm(key_t, w) + mm(key, mm(key_t.mT, coef))) + alpha * coef
        if t.gain is not None:
            moved = moved + t.gain[:, None, None] * mm(key, w)
        w_t = mm(key_t.mT, coef) + mm(key.mT, invert(value_t - moved))
    else:
        point = 1 if p.weight is None else p.weight[..., None]
        w = invert(mm(p.key.mT, point * p.value))
        fitted = mm(p.key, w)
        rest = p.value - gain * fitted
        inner = point * (t.value - gain * mm(t.key, w))
        if t.weight is not None:
            inner = inner + t.weight[..., None] * rest
        if t.gain is not None:
            inner = inner - t.gain[:, None, None] * point * fitted
        w_t = invert(mm(t.key.mT, point * rest) + mm(p.key.mT, inner) - alpha * w)
    return (mm(t.query, w) + mm(p.query, w_t)) * plan.scale


def _centred_tangents(problem: Problem, tangent: Problem) -> tuple[Problem, Problem, Tensor]:
    p, _, share, total = problem.centred()
    mean_key = torch.bmm(share[:, None], tangent.key)
    mean_value = torch.bmm(share[:, None], tangent.value)
    if tangent.weight is not None:
        move = tangent.weight[:, None] / total[:, None, None]
        mean_key = mean_key + torch.bmm(move, p.key)
        mean_value = mean_value + torch.bmm(move, p.value)
    t = tangent._replace(
        query=tangent.query - mean_key, key=tangent.key - mean_key, value=tangent.value - mean_value
    )
    return p, t, mean_value


def _at_zero(alpha: Tensor, term: Tensor) -> Tensor:
    return torch.where(alpha[:, None, None] == 0, term, 0.0)
