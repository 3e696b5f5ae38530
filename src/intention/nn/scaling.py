"""What multiplies the map Q Sigma^-1 K' so that a stack of layers starts with activations of an ordinary size.

For standard normal queries and keys the variance of an entry of Q (K'K)^+ K' is exactly

    1 / (d - N - 1)         for d > N + 1
    d / (N (N - d - 1))     for N > d + 1

and infinite between, where it is alpha that bounds it: with alpha = 1 it is 1 / (2 sqrt(N)) at N = d. `variance_scale`
is one over the root of the smallest of the three; measured with alpha = 1, an entry then has a variance between 0.5 and
1.0 at every N for d >= 16 (docs/nn.md). (1 - lambda) K'K + lambda I is 1 - lambda times a ridge, so the convex
covariance is multiplied by 1 - lambda.

Such scores are for a softmax. Without one the N entries of a row are summed over the values, and the output has N times
their variance: `output_scale` divides by sqrt(N) more. Where N > d it is at most 1: least squares predicts values of
their own size where keys tell about them, and should not return more. The third name, "attention", is alpha / sqrt(d):
alpha Sigma^-1 -> I as alpha grows.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import Covariance

SCALES = ("variance", "output", "attention")
Scale = float | str | None


def check_scale(scale: object, softmax: bool) -> None:
    if not isinstance(scale, str):
        checks.scale(scale)
        if scale is not None and not math.isfinite(scale):  # type: ignore[arg-type]
            raise ValueError(f"scale must be finite, got {scale}; use None for 1")
        return
    if scale not in SCALES:
        names = ", ".join(map(repr, SCALES))
        raise ValueError(f"scale must be a number, None, or one of {names} ('auto' in mixers), got {scale!r}")
    if scale == "output" and softmax:
        raise ValueError("scale='output' is for sums over values, and a softmax averages them; use scale='variance'")


def variance_scale(n: int | Tensor, d: int) -> float | Tensor:
    """The factor that gives the entries of an Intention map of N points in d dimensions a variance near 1.

    >>> round(variance_scale(10, 64) ** 2), round(variance_scale(1000, 64) ** 2)
    (53, 14609)
    >>> variance_scale(torch.tensor([10, 64]), 64).square()
    tensor([53., 16.])
    """
    if isinstance(n, Tensor):
        n = n if n.is_floating_point() else n.to(torch.get_default_dtype())
        closed = torch.where(n > d, n * (n - d - 1) / d, d - n - 1)
        return torch.maximum(closed, 2 * n.clamp(1, d).sqrt()).sqrt()
    closed = n * (n - d - 1) / d if n > d else d - n - 1
    return math.sqrt(max(closed, 2 * math.sqrt(min(max(n, 1), d))))


def output_scale(n: int | Tensor, d: int) -> float | Tensor:
    """The factor that gives the output of an Intention the variance of the values, and not more than least squares has.

    >>> [round(output_scale(n, 64), 2) for n in (1, 10, 64, 100, 1000)]
    [7.87, 2.3, 0.5, 0.74, 1.0]
    """
    if isinstance(n, Tensor):
        factor = variance_scale(n, d) / n.clamp_min(1).sqrt()
        return torch.where(n > d, factor.clamp_max(1.0), factor)
    factor = float(variance_scale(n, d)) / math.sqrt(max(n, 1))
    return min(factor, 1.0) if n > d else factor


def number(n: int | Tensor, query: Tensor) -> int | Tensor:
    """A count that can be calculated with, at the precision of the queries."""
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    if isinstance(n, Tensor):
        return n.to(dtype)
    # in a graph n may stand for any number, and math would make it the one at hand
    return torch.full((), n, dtype=dtype, device=query.device) if torch.compiler.is_compiling() else n


def factor_of(
    query: Tensor, scale: str, n: int | Tensor, alpha: float | Tensor, covariance: Covariance
) -> float | Tensor:
    """What multiplies the map, (..., M or 1, 1) or a number, whatever the points and alphas of each query are.

    `n` (..., M or 1, 1) or a number; alpha broadcasts to the leading dimensions.
    """
    d, n = query.shape[-1], number(n, query)
    size = alpha.unsqueeze(-1).unsqueeze(-1) if isinstance(alpha, Tensor) else alpha
    if scale == "attention":
        return size * d**-0.5
    factor = variance_scale(n, d) if scale == "variance" else output_scale(n, d)
    return (1 - size) * factor if covariance == "convex" else factor


def scale_queries(query: Tensor, scale: str, n: int | Tensor, alpha: float | Tensor, covariance: Covariance) -> Tensor:
    """The queries times the scale, in float32 or better."""
    # a scale can be beyond float16, and queries that are rounded once more move the scores of a softmax
    wide = query if query.dtype == torch.float64 else query.float()
    return (wide * factor_of(query, scale, n, alpha, covariance)).to(wide.dtype)
