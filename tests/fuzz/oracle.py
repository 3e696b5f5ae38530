"""What the answers should be: one formula per operation, in float64, from an SVD of the points. Nothing of ours.

Leading dimensions are equal everywhere (`Call.expand` makes them so); `count` (..., N) says how much a point counts.
Gradients come from autograd around two nodes, `Ridge` and `Solve`, whose own are written out: no condition is squared.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

RANK = 1e-13  # singular values below this share of the largest are 0 where alpha is
_mirrored = False
_uncancelled = False


class UndecidedError(Exception):
    """A derivative that does not exist: alpha = 0 and dependent keys, or a class in which nothing counts."""


@contextmanager
def mirrored() -> Iterator[None]:
    """The same formulas with other rounding: every SVD is that of the mirror image, transposed."""
    global _mirrored
    _mirrored = True
    try:
        yield
    finally:
        _mirrored = False


@contextmanager
def uncancelled() -> Iterator[None]:
    """Every softmax gives its size instead, sum_j p_j |v_j|, and slopes in the scores that do not cancel.

    A softmax of one key, or of equal values, has a slope near 0 that is a difference of numbers of this size: their
    rounding is what any implementation has.
    """
    global _uncancelled
    _uncancelled = True
    try:
        yield
    finally:
        _uncancelled = False


def cancels(exact: Tensor, size: Tensor) -> Tensor:
    """`exact`, or under `uncancelled` its size."""
    return size if _uncancelled else exact


def svd(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U (..., N, r), s (..., r), V' (..., d, d): all of V, with the directions that no point has last."""
    tall = x.shape[-2] >= x.shape[-1]
    if _mirrored:
        v, s, ut = torch.linalg.svd(x.flip(-2, -1).mT, full_matrices=not tall)
        return ut.mT.flip(-2)[..., : s.shape[-1]], s, v.mT.flip(-1)
    u, s, vt = torch.linalg.svd(x, full_matrices=not tall)
    return u[..., : s.shape[-1]], s, vt


def spectrum(s: Tensor, d: int) -> Tensor:
    """s^2 of all d directions."""
    return torch.nn.functional.pad(s.square(), (0, d - s.shape[-1]))


def inverse(square: Tensor, alpha: Tensor) -> Tensor:
    """1 / (s^2 + alpha), and 0 where the pseudo-inverse has none."""
    top = square.amax(-1, keepdim=True)
    there = (square > RANK**2 * top) | (alpha[..., None] > 0)
    return torch.where(there, 1 / torch.where(there, square + alpha[..., None], 1.0), 0.0)


class Ridge(torch.autograd.Function):
    """Q (K'CK + alpha I)^-1 K'CV: query (..., M, d), key (..., N, d), value (..., N, k), count (..., N), alpha (...)"""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, count: Tensor, alpha: Tensor) -> Tensor:
        root = count.sqrt()[..., None]
        u, s, vt = svd(root * key)
        r, d = s.shape[-1], key.shape[-1]
        inv = inverse(spectrum(s, d), alpha)
        w_along = (s * inv[..., :r])[..., None] * (u.mT @ (root * value))
        w = vt[..., :r, :].mT @ w_along
        ctx.save_for_backward(query, key, value, count, alpha, u, s, vt, inv, w_along, w)
        return query @ w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        query, key, value, count, alpha, u, s, vt, inv, w_along, w = ctx.saved_tensors
        if bool(((inv == 0) & (alpha[..., None] == 0)).any()):
            raise UndecidedError
        (grad,) = grads
        r, root = s.shape[-1], count.sqrt()[..., None]
        z_along = inv[..., None] * (vt @ (query.mT @ grad))
        z = vt.mT @ z_along
        # V - KW and KZ cancel where the fit is close: where the count is not 0 they come from the weighted ones
        along = u.mT @ (root * value)
        kept = (alpha[..., None] * inv[..., :r])[..., None] * along
        left = u @ kept
        if u.shape[-2] > r:  # what no combination of the keys reaches
            left = left + root * value - u @ along
        there, safe = root > 0, torch.where(root > 0, root, 1.0)
        rest = torch.where(there, left / safe, value - key @ w)
        reach = torch.where(there, u @ (s[..., None] * z_along[..., :r, :]) / safe, key @ z)
        point = count[..., None]
        return (
            grad @ w.mT,
            point * (rest @ z.mT - reach @ w.mT),
            point * reach,
            (reach * rest).sum(-1),
            -(z_along[..., :r, :] * w_along).sum((-2, -1)),
        )


class Solve(torch.autograd.Function):
    """(X'CX + alpha I)^-1 R: x (..., N, d), count (..., N), alpha (...), right side R (..., d, p)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: Tensor, alpha: Tensor, right: Tensor) -> Tensor:
        u, s, vt = svd(count.sqrt()[..., None] * x)
        inv = inverse(spectrum(s, x.shape[-1]), alpha)
        y_along = inv[..., None] * (vt @ right)
        ctx.save_for_backward(x, count, alpha, u, s, vt, inv, y_along)
        return vt.mT @ y_along

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, count, alpha, u, s, vt, inv, y_along = ctx.saved_tensors
        if bool(((inv == 0) & (alpha[..., None] == 0)).any()):
            raise UndecidedError
        r, root = s.shape[-1], count.sqrt()[..., None]
        z_along = inv[..., None] * (vt @ grads[0])
        y, z = vt.mT @ y_along, vt.mT @ z_along
        there, safe = root > 0, torch.where(root > 0, root, 1.0)
        xy, xz = (
            torch.where(there, u @ (s[..., None] * along[..., :r, :]) / safe, x @ whole)
            for along, whole in ((y_along, y), (z_along, z))
        )
        return (
            -count[..., None] * (xy @ z.mT + xz @ y.mT),
            -(xy * xz).sum(-1),
            -(y_along * z_along).sum((-2, -1)),
            z,
        )


def ridge(query: Tensor, key: Tensor, value: Tensor, count: Tensor, alpha: Tensor) -> Tensor:
    return Ridge.apply(query, key, value, count, alpha)  # type: ignore[return-value]


def solve(x: Tensor, count: Tensor, alpha: Tensor, right: Tensor) -> Tensor:
    return Solve.apply(x, count, alpha, right)  # type: ignore[return-value]


def mean(x: Tensor, count: Tensor) -> Tensor:
    """The weighted mean (..., 1, f) of rows; of none 0. Twice: the second removes the rounding of the first."""
    total = count.sum(-1)[..., None, None]
    share = count[..., None, :] / torch.where(total > 0, total, 1.0)
    first = share @ x
    # of no points it is 0, and jumps to the first that counts: a slope that no dtype holds
    jump = 1e30 * (count - count.detach()).sum(-1)[..., None, None] * (total == 0)
    return first + share @ (x - first) * (total > 0) + jump


def deviations(key: Tensor, value: Tensor, count: Tensor) -> Tensor:
    """Keys minus the mean of their class; the values are one-hot. A class of one point has none, whatever it counts."""
    mass = value.mT * count[..., None, :]
    gone = mass.sum(-1, keepdim=True) == 0
    if count.requires_grad and bool((gone & (value.sum(-2)[..., None] > 1)).any()):
        raise UndecidedError  # which of its points comes back first decides
    mass = torch.where(gone, value.mT, mass)
    total = mass.sum(-1, keepdim=True)
    for _ in range(2):
        key = key - value @ (mass / torch.where(total > 0, total, 1.0) @ key)
    return key


def solve_sigma(key: Tensor, value: Tensor, count: Tensor, alpha: Tensor, covariance: str, right: Tensor) -> Tensor:
    """Sigma^-1 R"""
    if covariance == "within":
        return solve(deviations(key, value, count), count, alpha, right)
    if covariance == "diagonal":  # the callable of the cases
        return right / ((count[..., None] * key.square()).sum(-2)[..., None] + alpha[..., None, None])
    if covariance == "convex":
        count = count * (1 - alpha)[..., None]
    return solve(key, count, alpha, right)


def intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: Tensor,
    alpha: Tensor,
    intercept: bool = False,
    covariance: str = "ridge",
    scale: float = 1.0,
) -> Tensor:
    """Q Sigma^-1 K'CV, around the means where there is an intercept"""
    offset: Any = 0.0
    labels = value
    if intercept:
        centre, offset = mean(key, count), mean(value, count)
        query, key, value = query - centre, key - centre, value - offset
    if covariance == "ridge":
        out = ridge(query, key, value, count, alpha)
    elif covariance == "convex" and bool((alpha < 1).all()):
        gain = (1 - alpha)[..., None]
        out = ridge(query, key, value, count * gain, alpha) / gain[..., None]
    else:
        right = key.mT @ (count[..., None] * value)
        out = query @ solve_sigma(key, labels, count, alpha, covariance, right)
    return scale * out + offset


def softmax(scores: Tensor, count: Tensor, value: Tensor) -> Tensor:
    """Rows of exp(scores), each point counted, of sum 1, times the values; 0 where nothing counts."""
    seen = count.detach() > 0
    top = torch.where(seen, scores.detach(), -torch.inf).amax(-1, keepdim=True)
    top = torch.where(top > -torch.inf, top, 0.0)
    chances = (scores - top).clamp_max(300.0).exp()
    odds = chances * count
    total = odds.sum(-1, keepdim=True)
    if _uncancelled:
        return _size(scores, chances.detach(), count, total.detach(), value)
    near = (odds.detach() @ value.detach()) / torch.where(total > 0, total, 1.0).detach()
    # around the answer: where one point has all the odds, the slope of a quotient would be rounding
    gap = value[..., None, :, :] - near[..., :, None, :]  # (..., M, N, k)
    share = odds / torch.where(total > 0, total, 1.0)
    return torch.where(seen.any(-1, keepdim=True), (share[..., None] * gap).sum(-2) + near, 0.0)


def _size(scores: Tensor, chances: Tensor, count: Tensor, total: Tensor, value: Tensor) -> Tensor:
    sign = torch.randn(scores.shape, generator=torch.Generator().manual_seed(0), dtype=scores.dtype).sign()
    safe, seen = torch.where(total > 0, total, 1.0), value.detach().abs()
    slopes = (chances * count).detach() * (scores - scores.detach()) + chances * (count - count.detach())
    return chances * count.detach() / safe @ value.abs() + sign * slopes / safe @ seen


def sigma_intention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    count: Tensor,
    alpha: Tensor,
    intercept: bool = False,
    covariance: str = "ridge",
    scale: float = 1.0,
) -> Tensor:
    """softmax(Q Sigma^-1 K' scale) V, with Sigma of the centred keys where there is an intercept"""
    centred = key - mean(key, count) if intercept else key
    moved = solve_sigma(centred, value, count, alpha, covariance, query.mT).mT
    return softmax(scale * moved @ centred.mT, count[..., None, :], value)


def linear_attention(query: Tensor, key: Tensor, value: Tensor, count: Tensor, scale: float = 1.0) -> Tensor:
    """(Q K') V, with counts (..., M, N)"""
    return scale * ((query @ key.mT) * count) @ value


def attention(query: Tensor, key: Tensor, value: Tensor, count: Tensor, scale: float | None = None) -> Tensor:
    """softmax(Q K' scale) V, with counts (..., M, N)"""
    return softmax((query.shape[-1] ** -0.5 if scale is None else scale) * query @ key.mT, count, value)


def each(
    operation: Any, query: Tensor, key: Tensor, value: Tensor, count: Tensor, alpha: Tensor, **rest: Any
) -> Tensor:
    """One fit per query, for counts (..., M, N)."""
    many = (*query.shape[:-1],)
    out = operation(
        query[..., None, :],
        key[..., None, :, :].expand(*many, *key.shape[-2:]),
        value[..., None, :, :].expand(*many, *value.shape[-2:]),
        count,
        alpha[..., None].expand(many),
        **rest,
    )
    return out[..., 0, :]


def decayed(count: Tensor, decay: Tensor | None, first: list[int] | None = None) -> Tensor:
    """(..., N, N): what token s counts at token t; packed sequences begin at `first`."""
    n = count.shape[-1]
    table = count[..., None, :].expand(*count.shape[:-1], n, n).tril()
    if decay is not None:
        total = decay.log().cumsum(-1)
        table = table * torch.where(torch.ones(n, n).tril() > 0, total[..., :, None] - total[..., None, :], 0.0).exp()
    if first is not None:
        own = torch.bucketize(torch.arange(n), torch.tensor(first), right=True)
        table = table * (own[:, None] == own)
    return table
