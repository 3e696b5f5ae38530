"""The inverse square root of a kernel matrix: what turns k(x, Z) into explicit features.

K = U diag(l) U',  K^(-1/2) = U diag(f) U',  f = l^(-1/2), or 0 where l counts as zero
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from intention.solve.torch_state import Ctx


def inverse_root(matrix: Tensor, rtol: float | None = None) -> Tensor:
    """R = matrix^(-1/2), symmetric: R matrix R is the identity on the range of `matrix`.

    >>> inverse_root(torch.diag(torch.tensor([4.0, 0.0], dtype=torch.float64)))
    tensor([[0.5000, 0.0000],
            [0.0000, 0.0000]], dtype=torch.float64)

    `matrix` is (..., n, n), positive semi-definite, best in float64; its symmetric part is taken. Eigenvalues up to
    `rtol` (n eps unless given) of the largest are dropped; pass a larger one for entries of lower precision. A matrix
    that is not finite gives NaN for its own element only.

    First order only: the gradient is exact and has no NaN at repeated eigenvalues (where eigenvalues were dropped it
    holds along changes that keep the rank), but asking for a gradient of the gradient raises.
    """
    rtol = matrix.shape[-1] * torch.finfo(matrix.dtype).eps if rtol is None else rtol
    return InverseRoot.apply(matrix, rtol)[0]


class InverseRoot(torch.autograd.Function):
    """R, and what its derivative is made of: f and U."""

    generate_vmap_rule = True

    @staticmethod
    def forward(matrix: Tensor, rtol: float) -> tuple[Tensor, Tensor, Tensor]:
        finite = torch.isfinite(matrix).all(-1).all(-1)[..., None, None]
        # LAPACK would raise for the whole batch
        values, vectors = torch.linalg.eigh(torch.where(finite, (matrix + matrix.mT) / 2, 0.0))
        kept = (values > rtol * values[..., -1:]) & (values > 0)
        power = torch.where(kept, torch.where(kept, values, 1.0).rsqrt(), 0.0)
        root = (vectors * power.unsqueeze(-2)) @ vectors.mT
        return torch.where(finite, root, torch.nan), power, vectors

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Tensor, float], output: tuple[Tensor, Tensor, Tensor]) -> None:
        ctx.mark_non_differentiable(*output[1:])
        ctx.save_for_backward(inputs[0], *output[1:])
        ctx.save_for_forward(inputs[0], *output[1:])

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> tuple[Tensor, None]:
        matrix, power, vectors = ctx.saved_tensors
        # F is symmetric, so the map is its own transpose
        return Once.apply(_differential(grads[0], power, vectors), matrix), None

    @staticmethod
    def jvp(ctx: Ctx, *tangents: Tensor) -> tuple[Tensor, None, None]:
        matrix, power, vectors = ctx.saved_tensors
        return Once.apply(_differential(tangents[0], power, vectors), matrix), None, None


class Once(torch.autograd.Function):
    """The derivative, tied to the matrix it was taken at. torch's `once_differentiable` says nothing, and the second
    derivative would be a silent zero, where the incoming gradient is a constant or torch.func asks."""

    generate_vmap_rule = True

    @staticmethod
    def forward(derivative: Tensor, matrix: Tensor) -> Tensor:
        return derivative.clone()

    @staticmethod
    def setup_context(ctx: Ctx, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
        pass

    @staticmethod
    def backward(ctx: Ctx, *grads: Tensor) -> NoReturn:
        raise RuntimeError(
            "inverse_root can be differentiated once, got a request for a second derivative; detach the landmarks and "
            "gamma, or use the kernel itself in place of its features"
        )

    @staticmethod
    def jvp(ctx: Ctx, *tangents: Tensor) -> NoReturn:
        return Once.backward(ctx)


def _differential(change: Tensor, power: Tensor, vectors: Tensor) -> Tensor:
    """dR = U (F o U' dK U) U', F_ij = (f_i - f_j) / (l_i - l_j), written so that equal eigenvalues do not divide by 0.

    Both kept:  F_ij = -f_i^2 f_j^2 / (f_i + f_j).  Only i kept (l_j = 0):  F_ij = f_i^3.  None kept:  0.
    """
    a, b = power.unsqueeze(-1), power.unsqueeze(-2)
    both = (a > 0) & (b > 0)
    rate = torch.where(both, -(a * b).square() / torch.where(both, a + b, 1.0), a**3 + b**3)
    change = (change + change.mT) / 2
    return vectors @ (rate * (vectors.mT @ change @ vectors)) @ vectors.mT
