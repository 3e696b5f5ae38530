"""The paper's formulas as printed, after our readings; slow, float64-friendly, and differentiable by autograd alone.

Row convention: query (..., M, d), key (..., N, d), value (..., N, k). This is the oracle of the tests, not for use.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = [
    "attention",
    "convex",
    "dual",
    "erf",
    "intention",
    "linear_attention",
    "ls_svm",
    "neural_process",
    "pseudo",
    "sigma",
    "sigma_intention",
    "with_ones",
]

Embed = Callable[[Tensor], Tensor]


def attention(query: Tensor, key: Tensor, value: Tensor, scale: float = 1.0) -> Tensor:
    """softmax(Q K') V"""
    return torch.softmax(query @ key.mT * scale, -1) @ value


def linear_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[Q K'] V"""
    return (query @ key.mT) @ value


def erf(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """erf(Q K') V"""
    return torch.erf(query @ key.mT) @ value


def sigma(key: Tensor, alpha: Tensor | float, weight: Tensor | float = 1.0) -> Tensor:
    """K'WK + alpha I"""
    eye = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    return key.mT @ (_column(weight) * key) + _matrix(alpha) * eye


def convex(key: Tensor, lam: Tensor | float, weight: Tensor | float = 1.0) -> Tensor:
    """(1 - lambda) K'WK + lambda I"""
    eye = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
    return (1 - _matrix(lam)) * (key.mT @ (_column(weight) * key)) + _matrix(lam) * eye


def intention(query: Tensor, key: Tensor, value: Tensor, cov: Tensor, weight: Tensor | float = 1.0) -> Tensor:
    """Q Sigma^-1 K'WV"""
    return query @ torch.linalg.inv(cov) @ key.mT @ (_column(weight) * value)


def dual(query: Tensor, key: Tensor, value: Tensor, alpha: float) -> Tensor:
    """Q K' (KK' + alpha I)^-1 V"""
    eye = torch.eye(key.shape[-2], dtype=key.dtype, device=key.device)
    return query @ key.mT @ torch.linalg.inv(key @ key.mT + alpha * eye) @ value


def pseudo(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Q K^+ V"""
    return query @ torch.linalg.pinv(key) @ value


def sigma_intention(
    query: Tensor, key: Tensor, value: Tensor, cov: Tensor, weight: Tensor | float = 1.0, scale: float = 1.0
) -> Tensor:
    """softmax(Q Sigma^-1 K') V, each point counted with its weight"""
    scores = query @ torch.linalg.inv(cov) @ key.mT * scale
    odds = (scores - scores.amax(-1, keepdim=True)).exp()
    odds = odds * weight.unsqueeze(-2) if isinstance(weight, Tensor) else odds * weight
    return odds / odds.sum(-1, keepdim=True) @ value


def with_ones(key: Tensor) -> Tensor:
    """[K, 1]: the constant feature that an intercept adds"""
    return torch.cat([key, torch.ones_like(key[..., :1])], -1)


def ls_svm(query: Tensor, key: Tensor, value: Tensor, alpha: float, weight: Tensor | float = 1.0) -> Tensor:
    """[Q, 1] ([K, 1]'W[K, 1] + alpha I_{d-1})^-1 [K, 1]'WV: the constant is not regularised"""
    wide, size = with_ones(key), key.shape[-1] + 1
    free = torch.ones(size, dtype=key.dtype, device=key.device)
    free[-1] = 0
    return intention(with_ones(query), wide, value, wide.mT @ (_column(weight) * wide) + alpha * free.diag(), weight)


def neural_process(query: Tensor, key: Tensor, value: Tensor, inner: Embed, outer: Embed) -> Tensor:
    """e_o(Q, mean_i e_c([K_i; V_i]))"""
    mean = inner(torch.cat([key, value], -1)).mean(-2, keepdim=True)
    return outer(torch.cat([query, mean.expand(*query.shape[:-1], -1)], -1))


def _column(weight: Tensor | float) -> Tensor | float:
    return weight[..., None] if isinstance(weight, Tensor) else weight


def _matrix(alpha: Tensor | float) -> Tensor | float:
    return alpha[..., None, None] if isinstance(alpha, Tensor) else alpha
