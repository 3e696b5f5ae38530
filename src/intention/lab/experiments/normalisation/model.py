"""The maps, and the variance of their entries."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intention.nn.scaling import variance_scale

__all__ = ["FAR", "MODELS", "PRINTED", "exact", "of_inverse", "variances"]

MODELS = ("unscaled", "scaled", "regularised", "variance")
PRINTED = "inverse"  # the unscaled map with an ordinary inverse in float32
FAR = 8  # |d - N| from which the mean over draws is compared with the exact value


def exact(n: int, d: int) -> float:
    """The variance of an entry of Q K^+ for standard normal queries and keys."""
    if d > n + 1:
        return 1 / (d - n - 1)
    return d / (n * (n - d - 1)) if n > d + 1 else math.inf


def variances(key: Tensor) -> dict[str, Tensor]:
    """The variance of an entry of each map over queries, given the keys (B, N, d): one number per draw.

    With K = U S W' the columns of Z/Q are those of W S^-1 U' (of W S/(S^2 + 1) U'), and the mean of their squared
    lengths over the N columns is sum(1/s^2) / N (sum(s^2/(s^2 + 1)^2) / N).
    """
    n, d = key.shape[-2:]
    gram = key @ key.mT if n <= d else key.mT @ key
    squares = torch.linalg.eigvalsh(gram)  # s^2, (B, min(N, d))
    plain = squares.reciprocal().sum(-1) / n
    ridge = (squares / (squares + 1).square()).sum(-1) / n
    return {
        "unscaled": plain,
        "scaled": d * plain,
        "regularised": d * ridge,
        "variance": variance_scale(n, d) ** 2 * ridge,
    }


def of_inverse(key: Tensor) -> Tensor:
    """The same of the map as it is printed, Q K' (KK')^-1 with an ordinary inverse in float32: one number per draw.

    For d < N the matrix KK' is singular, and what is inverted is its rounding errors. Not finite is infinite.
    """
    key = key.float()
    columns = key.mT @ torch.linalg.inv_ex(key @ key.mT).inverse  # (B, d, N)
    found = columns.double().square().sum(-2).mean(-1)
    return torch.where(found.isfinite(), found, math.inf)
