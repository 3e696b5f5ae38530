"""Gradients of Q W by hand: they reuse the factor, and hold at weights of 0.

Everything is out of place and differentiable, so the same lines serve the first backward (with the saved factor) and
every higher order (with an `invert` that autograd can follow).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import by_gain, mm
from intention.solve.problem import Grads, Invert, Needs, Plan, Problem
from intention.solve.torch_state import unobserved


class Mode(NamedTuple):
    """`refined`: one refinement step, its residual taken from K; `deficient`: the terms of Sigma^+ at alpha = 0."""

    refined: bool
    deficient: bool


def pullback(
    problem: Problem, plan: Plan, grad: Tensor, invert: Invert, coef: Tensor, needs: Needs, mode: Mode
) -> Grads:
    """Gradients for an incoming `grad` (B, M, k)."""
    if not plan.intercept:
        inner = _dual if plan.dual else _primal
        return inner(problem, grad * plan.scale if plan.scale != 1 else grad, invert, coef, needs, mode)
    # out = (Q - mu_K) W + mu_V with mu = sum_i w_i x_i / sum_i w_i
    centred, _, share, total = problem.centred()
    below = plan._replace(intercept=False)
    all_three = needs._replace(query=True, key=True, value=True)
    g: Any = pullback(centred, below, grad, invert, coef, all_three, mode)
    mean_key = -g.query.sum(1, keepdim=True) - g.key.sum(1, keepdim=True)  # (B, 1, d)
    mean_value = grad.sum(1, keepdim=True) - g.value.sum(1, keepdim=True)  # (B, 1, k)
    key, value, weight = g.key + share.unsqueeze(-1) * mean_key, g.value + share.unsqueeze(-1) * mean_value, g.weight
    if needs.weight and weight is not None:
        pull = (centred.key * mean_key).sum(-1) + (centred.value * mean_value).sum(-1)
        weight = weight + pull / total.unsqueeze(1)
    return g._replace(key=key, value=value, weight=weight)


def _primal(p: Problem, grad: Tensor, invert: Invert, w: Tensor, needs: Needs, mode: Mode) -> Grads:
    d, k = w.shape[1:]
    y = mm(p.query.mT, grad)
    z = invert(y)  # Z = Sigma^-1 Q'g
    if mode.refined:
        inside = mm(p.key.mT, _per_point(p.weight, mm(p.key, z)))
        z = z + invert(y - by_gain(p.gain, inside) - p.alpha.view(-1, 1, 1) * z)
    whole = y if mode.deficient else None
    del y  # its memory serves again below
    s = mm(p.key, z)  # S = K Z
    needs_weight, needs_gain = needs.weight and p.weight is not None, needs.gain and p.gain is not None
    key = weight = gain = rest = fitted = None
    if 2 * k < d or needs_weight or needs_gain or mode.deficient:
        fitted = mm(p.key, w)
        rest = p.value - by_gain(p.gain, fitted)  # R = V - c K W
    if needs.key:
        if rest is not None:
            key = _minus(_outer(rest, z), p.gain, s, w.mT)
        else:
            zw = _outer(z, w)
            both = zw + zw.mT
            del zw
            key = _minus(_outer(p.value, z), p.gain, p.key, both)
        if whole is not None:
            outside = whole - mm(p.key.mT, _per_point(p.weight, s))  # what of Q'g no key reaches
            key = key + _at_zero(p.alpha, _outer(mm(p.key, invert(w)), outside))
        key = _per_point(p.weight, key)
    if needs_weight and rest is not None:
        weight = (s * rest).sum(-1)
    value = _per_point(p.weight, s)
    if needs_gain and fitted is not None:
        gain = -(value * fitted).sum((-2, -1))
    return Grads(
        query=_outer(grad, w) if needs.query else None,
        key=key,
        value=value if needs.value else None,
        weight=weight,
        alpha=-(z * w).sum((-2, -1)) if needs.alpha else None,
        gain=gain,
        alpha_terms=torch.linalg.vector_norm(z * w, dim=(-2, -1)) if needs.alpha else None,
    )


def _dual(p: Problem, grad: Tensor, invert: Invert, coef: Tensor, needs: Needs, mode: Mode) -> Grads:
    root = None if p.weight is None else p.weight.sqrt()
    key, value = p.weighted()
    w = mm(key.mT, coef)  # W = K~'P
    y = mm(p.query.mT, grad)
    s = invert(mm(key, y))  # S = (c K~K~' + alpha I)^-1 K~ Q'g = K~ Z
    if mode.refined:
        outside = y - by_gain(p.gain, mm(key.mT, s))
        s = s + invert(mm(key, outside) - p.alpha.view(-1, 1, 1) * s)
    key_grad = weight = None
    if needs.key:
        both = _outer(coef, s)
        key_grad = _minus(_outer(coef, y), p.gain, both + both.mT, key)
        if mode.deficient:
            rest = value - by_gain(p.gain, mm(key, w))
            key_grad = key_grad + _at_zero(p.alpha, _outer(rest, mm(key.mT, invert(s))))
        key_grad = _per_point(root, key_grad)
    if needs.weight and p.weight is not None:
        weight = _dual_weight(p, coef, s, w, y, key, invert)
    return Grads(
        query=_outer(grad, w) if needs.query else None,
        key=key_grad,
        value=_per_point(root, s) if needs.value else None,
        weight=weight,
        alpha=-(s * coef).sum((-2, -1)) if needs.alpha else None,
        gain=-(mm(key.mT, s) * w).sum((-2, -1)) if needs.gain and p.gain is not None else None,
        alpha_terms=torch.linalg.vector_norm(s * coef, dim=(-2, -1)) if needs.alpha else None,
    )


def _dual_weight(p: Problem, coef: Tensor, s: Tensor, w: Tensor, y: Tensor, key: Tensor, invert: Invert) -> Tensor:
    """dw_i = (k_i Z) (v_i - c k_i W). K~Z = S and V~ - c K~W = alpha P: so alpha S_i P_i / w_i where w_i > 0."""
    assert p.weight is not None
    alpha = p.alpha.view(-1, 1, 1)
    present = p.weight > 1e-20 * p.weight.amax(-1, keepdim=True)
    there = p.alpha.unsqueeze(1) * (s * coef).sum(-1) / torch.where(present, p.weight, 1.0)
    # elsewhere Z itself: (Q'g - c K~'S) / alpha, or K~'(K~K~')^-1 S where alpha = 0
    outside = y - by_gain(p.gain, mm(key.mT, s))
    z = torch.where(alpha > 0, outside / alpha, mm(key.mT, invert(s)))
    absent = (mm(p.key, z) * (p.value - by_gain(p.gain, mm(p.key, w)))).sum(-1)
    return torch.where(present, there, absent)


def _at_zero(alpha: Tensor, term: Tensor) -> Tensor:
    return torch.where(alpha.view(-1, 1, 1) == 0, term, 0.0)


def _per_point(weight: Tensor | None, x: Tensor) -> Tensor:
    """diag(w) x"""
    return x if weight is None else weight.unsqueeze(-1) * x


def _minus(start: Tensor, gain: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    """start - c a b, where possible in the memory of `start`, which is ours"""
    a = by_gain(gain, a)
    if a.shape[-1] == 1:
        return torch.addcmul(start, a, b, value=-1)
    if unobserved():
        return start.baddbmm_(a, b, alpha=-1)
    return torch.baddbmm(start, a, b, alpha=-1)


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a b'. With one column a product of broadcasts is several times faster than BLAS on small problems."""
    return a * b.mT if a.shape[-1] == 1 else torch.bmm(a, b.mT)
