"""Products and distances of all pairs of points: exact where it shows, differentiable, and never (M, N, d) in memory.

x (..., M, d), y (..., N, d) -> (..., M, N), in float32 at least and with autocast off
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.operator import no_autocast
from intention.solve.torch_state import eager

LOOKED_AT = 1000  # points of the context that the median heuristic compares; more hardly move a median
NEAR = {torch.float32: 1e-2, torch.float64: 1e-4}  # squared distances below this share of |x|^2 + |y|^2 are redone
HELD = 2**24  # entries of (..., M, N, features) held at once


@no_autocast
def inner(x: Tensor, y: Tensor) -> Tensor:
    """x'y for all pairs, (..., M, N), in float32 at least."""
    return torch.matmul(wide(x), wide(y).mT)


@no_autocast
def squared_distance(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|^2 = |x|^2 + |y|^2 - 2 x'y, (..., M, N), in float32 at least.

    With x and y the same object the result is exactly symmetric, with zeros on the diagonal.
    """
    same = x is y
    x, y = wide(x), wide(y)
    given = x.detach(), y.detach()
    # Distances do not move with the origin, numbers far from it cancel. A point that is not finite stays alone.
    centre = y.detach().mean(-2, keepdim=True).nan_to_num(0.0, 0.0, 0.0)
    x, y = x - centre, y - centre
    squares = x.square().sum(-1).unsqueeze(-1) + y.square().sum(-1).unsqueeze(-2)
    out = squares - 2 * torch.matmul(x, y.mT)
    if eager():
        out = out + _lost_digits(*given, squares.detach(), out.detach(), same)
    out = out - out.detach().clamp_max(0.0)  # negative by rounding; unlike a clamp, all derivatives stay
    return with_diagonal(out, out.new_zeros(())) if same else out


def _lost_digits(x: Tensor, y: Tensor, squares: Tensor, out: Tensor, same: bool) -> Tensor | float:
    """What the distances of points that are close, beside their distance from the centre, lost to rounding."""
    near = out < NEAR[out.dtype] * squares
    if same:
        near = near & ~torch.eye(near.shape[-1], dtype=torch.bool, device=near.device)
    if not bool(near.any()):
        return 0.0
    exact = torch.cdist(x, y, compute_mode="donot_use_mm_for_euclid_dist").square()
    return torch.where(near, exact - out, 0.0)


def absolute_distance(x: Tensor, y: Tensor) -> Tensor:
    """|x - y|_1, (..., M, N), in float32 at least."""
    x, y = wide(x), wide(y)
    lead = checks.leading(query=x.shape[:-2], key=y.shape[:-2])
    return Absolute.apply(x.expand(*lead, *x.shape[-2:]), y.expand(*lead, *y.shape[-2:]))  # type: ignore[no-any-return]


class Absolute(torch.autograd.Function):
    """|x - y|_1. torch.cdist has no second derivative and no forward mode; recorded differences would fill memory."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, y: Tensor) -> Tensor:
        return torch.cdist(x, y, p=1.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _pull_signs(grads[0], *ctx.saved_tensors)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _push_signs(*tangents, *ctx.saved_tensors)


@no_autocast
def _pull_signs(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """dx_i = sum_j g_ij sign(x_i - y_j), dy_j = -sum_i g_ij sign(x_i - y_j)"""
    to_x, to_y = [], []
    for sign, _ in _signs(x, y):
        to_x.append((grad.unsqueeze(-2) @ sign).squeeze(-2))
        to_y.append((grad.mT.unsqueeze(-2) @ sign.transpose(-3, -2)).squeeze(-2))
    return torch.cat(to_x, -1), -torch.cat(to_y, -1)


@no_autocast
def _push_signs(x_t: Tensor | None, y_t: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """sum over features of sign(x_i - y_j) (dx_i - dy_j)"""
    out = x.new_zeros(())
    for sign, part in _signs(x, y):
        if x_t is not None:
            out = out + (sign @ x_t[..., part].unsqueeze(-1)).squeeze(-1)
        if y_t is not None:
            out = out - (sign.transpose(-3, -2) @ y_t[..., part].unsqueeze(-1)).squeeze(-1).mT
    return out


def _signs(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, slice]]:
    """sign(x_i - y_j), (..., M, N, c), and the c features it is of: as many at a time as may be held."""
    d = x.shape[-1]
    size = max(1, HELD // max(1, x[..., 0].numel() * y.shape[-2]))
    for start in range(0, d, size):
        part = slice(start, min(start + size, d))
        yield torch.sign(x.detach()[..., :, None, part] - y.detach()[..., None, :, part]), part


@torch.no_grad()
def median_distance(key: Tensor, weight: Tensor | None, p: float) -> Tensor:
    """The lower median of |x_i - x_j|_p over pairs of different points, per leading element; NaN for no pair.

    A pair counts w_i w_j, and equal points are no pair, so that a point of weight 2 is a point that comes twice.
    """
    points, mass = _some(key, weight)
    if points.shape[-2] == 0:
        return key.new_full(points.shape[:-2], torch.nan)
    distance = torch.cdist(points, points, p=p, compute_mode="donot_use_mm_for_euclid_dist")  # exact 0 for equal points
    pair = torch.ones_like(distance, dtype=torch.bool).triu(1) & (distance > 0)
    if mass is None:
        return torch.where(pair, distance, torch.nan).flatten(-2).nanmedian(-1).values
    sizes = torch.where(pair, mass.unsqueeze(-1) * mass.unsqueeze(-2), 0.0).flatten(-2)
    distance, order = torch.where(sizes > 0, distance.flatten(-2), torch.nan).sort(-1)  # NaN last
    so_far = sizes.gather(-1, order).cumsum(-1)
    at = (so_far < so_far[..., -1:] / 2).sum(-1, keepdim=True)  # the first to reach half of the whole
    return distance.gather(-1, at.clamp_max(distance.shape[-1] - 1)).squeeze(-1)


def _some(key: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """At most LOOKED_AT points, evenly spaced among those that count, and how much each counts."""
    *lead, n, d = key.shape
    m = min(n, LOOKED_AT)
    at = torch.arange(m, device=key.device)
    if weight is None:
        return key[..., at * n // max(m, 1), :], None
    lead = checks.leading(key=tuple(lead), weight=weight.shape[:-1])
    weight = weight.to(key.dtype).expand(*lead, n)
    keep = weight > 0
    number = keep.sum(-1, keepdim=True)
    order = torch.argsort(keep.to(torch.int8), dim=-1, descending=True, stable=True)  # those that count, first
    order = order.gather(-1, at * number.clamp_min(m) // max(m, 1))
    return key.expand(*lead, n, d).gather(-2, order.unsqueeze(-1).expand(*lead, m, d)), weight.gather(-1, order)


def with_diagonal(matrix: Tensor, diagonal: Tensor) -> Tensor:
    """Symmetric to the last bit, with a constant diagonal."""
    eye = torch.eye(matrix.shape[-1], dtype=torch.bool, device=matrix.device)
    return torch.where(eye, diagonal.unsqueeze(-1), (matrix + matrix.mT) / 2)


def wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
