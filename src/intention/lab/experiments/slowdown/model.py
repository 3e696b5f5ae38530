"""What is timed: attention and Intention, written out and as libraries have them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from intention import functional as F
from intention.lab.models import output

__all__ = ["CODES", "JAX", "PAIRS", "attention", "cholesky", "fused", "inverse", "ours"]

Code = Callable[[Tensor, Tensor, Tensor], Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K' / sqrt(d)) V, written out."""
    return torch.softmax((query * key.shape[-1] ** -0.5) @ key.mT, -1) @ value


def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value)


def inverse(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Q (K'K)^-1 K'V, or Q K' (KK')^-1 V where N <= d. As Jax, it does not stop at a singular matrix."""
    if key.shape[-1] < key.shape[-2]:
        return query @ (torch.linalg.inv_ex(key.mT @ key).inverse @ (key.mT @ value))
    return (query @ key.mT) @ (torch.linalg.inv_ex(key @ key.mT).inverse @ value)


def cholesky(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Q (K'K + I)^-1 K'V, or Q K' (KK' + I)^-1 V where N <= d."""
    primal = key.shape[-1] < key.shape[-2]
    gram = key.mT @ key if primal else key @ key.mT
    gram.diagonal(dim1=-2, dim2=-1).add_(1.0)
    factor = torch.linalg.cholesky(gram)
    if primal:
        return query @ torch.cholesky_solve(key.mT @ value, factor)
    return (query @ key.mT) @ torch.cholesky_solve(value, factor)


def ours(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return output(F.intention(query, key, value, alpha=1))


CODES: dict[str, Code] = {
    "attention": attention,
    "fused": fused,
    "inverse": inverse,
    "cholesky": cholesky,
    "intention": ours,
}
# what is divided by what
JAX = ("jax_inverse", "jax_attention")
PAIRS = (("inverse", "attention"), ("cholesky", "attention"), ("intention", "attention"), ("intention", "fused"))
