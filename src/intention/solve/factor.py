"""The one factor everything stands on: Sigma = c X'X + alpha I, batched, and how far it can be trusted.

X is (B, rows, n). The primal form of least squares passes X = K (n = d), the dual passes X = K' (n = N); the smaller
Gram is both faster and more accurate. Nothing outside `solve/` factors a matrix.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Limits(NamedTuple):
    """Below `easy` a factor is accepted as it is; below `hard` after a refinement step that is smaller than `step`."""

    easy: float
    hard: float
    step: float


# r estimates cond(Sigma) and is nearly free: Sigma's largest eigenvalue from above, by its trace and its norm, or by an
# estimate (`CLOSER`), times that of Sigma^-1 from below, by the largest entry of its diagonal where the inverse is made
# anyway or is small, else by 1 / min diag(L)^2 and |Sigma^-1 b| / |b|. (Pivots alone miss a short first key, and what
# grows along a triangular factor.) Measured on 5,000 float32 fuzz cases: the plain factor leaves .13 r eps in the
# median, .7 r eps in 95%, and 9e-6 at most below r = 80; a step of refinement below 5e-5 leaves less than 1e-5 up
# to r = 2000, but of keys that are noise a step at r = 500 is as large. Of the N x N systems it left more than 1e-5 in
# 22 of 220 with r in 200 .. 2000 (V - K K'P may round like the factor): they climb to float64 at once.
_WIDE = Limits(1e4, 1e12, 1e-8)
LIMITS = {  # of a dtype, and whether it is the dual
    (torch.float32, False): Limits(80.0, 1000.0, 5e-5),
    (torch.float32, True): Limits(80.0, 80.0, 5e-5),
    (torch.float64, False): _WIDE,
    (torch.float64, True): _WIDE,
}
EASY = {dtype: limits.easy for (dtype, dual), limits in LIMITS.items() if not dual}
# Steps that are accepted in float64, for an answer of this dtype. The size of a step estimates the error before it, and
# is an upper bound for what remains.
SMALL_CORRECTION = {torch.float32: 2e-5, torch.float64: 1e-8}
# From this ratio on the largest eigenvalue is estimated as well: of keys that are noise its bound is twice too large.
# The estimate is what the last of some products with Sigma stretches a vector by, .75 to 1 of it, times 1.25.
CLOSER, PRODUCTS, STRETCHED = 80.0, 3, 1.25
# Up to this size the diagonal of the inverse is always looked at.
SMALL = 16


class Factor(NamedTuple):
    """A factored Sigma: `matrix` is its Cholesky factor L, or Sigma^-1 itself if `inverse` (many right-hand sides)."""

    matrix: Tensor  # (B, n, n)
    inverse: bool
    ratio: Tensor  # (B,): r, inf where the factorisation failed
    spread: Tensor | None = None  # (B,): smallest kept to largest singular value of X, where an SVD knows it


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, batched. With few columns and many rows BLAS is 3-10 times faster on the transposed product."""
    if b.shape[-1] <= 8 and a.shape[-2] >= 32:
        return torch.bmm(b.mT, a.mT).mT
    return torch.bmm(a, b)


def by_gain(gain: Tensor | None, x: Tensor) -> Tensor:
    """c x"""
    return x if gain is None else gain.view(-1, 1, 1) * x


def wants_inverse(n: int, columns: int) -> bool:
    """LAPACK's triangular solves cost far more per column than one inverse and a product (measured crossover)."""
    return 4 * (columns - 16) >= n


def gram(x: Tensor, alpha: Tensor, gain: Tensor | None) -> tuple[Tensor, Tensor]:
    """Sigma = c X'X + alpha I, and which of its rows are not those of alpha I: points (or features) that are there."""
    sigma = by_gain(gain, torch.bmm(x.mT, x))
    diagonal = sigma.diagonal(0, -2, -1)
    counts = diagonal != 0
    diagonal.add_(alpha.unsqueeze(-1))
    return sigma, counts


def cholesky(x: Tensor, alpha: Tensor, gain: Tensor | None, inverse: bool) -> Factor:
    """Factor Sigma; a failed element shows as ratio = inf, it never raises and never reads the host."""
    sigma, counts = gram(x, alpha, gain)
    lower, info = torch.linalg.cholesky_ex(sigma)
    failed = info.bool()
    matrix = inverse_of_lower(lower, failed) if inverse else lower
    if inverse or lower.shape[-1] <= SMALL:
        found = matrix if inverse else inverse_of_lower(lower.clone(), failed)
        grown = torch.where(counts, found.diagonal(0, -2, -1), 0.0).amax(-1)
    else:
        pivots = torch.where(counts, lower.diagonal(0, -2, -1), torch.inf).amin(-1)
        grown = torch.maximum(1 / (pivots * pivots), _probe(lower, counts))
    bound, estimate = _largest_eigenvalue(sigma, counts)
    ratio = bound * grown
    ratio = torch.where(ratio < CLOSER, ratio, torch.minimum(bound, estimate) * grown).clamp_min(1)
    return Factor(matrix, inverse, ratio.masked_fill_(failed, torch.inf))


def orthogonal(x: Tensor, alpha: Tensor, gain: Tensor | None) -> Factor:
    """The same factor by QR of [sqrt(c) X; sqrt(alpha) I]: Sigma is never formed, so its condition is not squared."""
    n = x.shape[-1]
    eye = torch.eye(n, dtype=x.dtype, device=x.device)
    top = x if gain is None else x * gain.sqrt().view(-1, 1, 1)
    stacked = torch.cat([top, alpha.sqrt().view(-1, 1, 1) * eye], dim=1)
    lower = torch.linalg.qr(stacked, mode="r").R.mT
    pivot = lower.diagonal(0, -2, -1).abs().amin(-1)
    return Factor(lower, False, stacked.square().sum(1).amax(-1) / (pivot * pivot))


class Spectrum(NamedTuple):
    """X = U s V' and Sigma in these directions."""

    u: Tensor  # (B, rows, r)
    s: Tensor  # (B, r)
    vt: Tensor  # (B, r, n)
    sigma: Tensor  # (B, r): c s^2 + alpha
    kept: Tensor  # (B, r): the others are dropped, below rounding where alpha = 0
    lost: Tensor  # (B,): NaN where X is not finite, else 0

    def condition(self) -> Tensor:
        return torch.where(self.kept.any(-1), self.sigma.amax(-1) / _smallest(self.sigma, self.kept), 1.0)


def spectrum(x: Tensor, alpha: Tensor, gain: Tensor | None, whole: bool = False) -> Spectrum:
    """The SVD of X, `whole`: also of directions that no row has. LAPACK would raise for all where one is not finite."""
    finite = torch.isfinite(x).flatten(1).all(-1)
    x = torch.where(finite.view(-1, 1, 1), x, 0.0)
    u, s, vt = torch.linalg.svd(x, full_matrices=whole and x.shape[-1] > x.shape[-2])
    s = torch.nn.functional.pad(s, (0, vt.shape[-2] - s.shape[-1]))
    floor, rtol = alpha.unsqueeze(1), max(x.shape[1:]) * torch.finfo(x.dtype).eps
    sigma = (s.square() if gain is None else s.square() * gain.unsqueeze(1)) + floor
    kept = ((s > rtol * s.amax(-1, keepdim=True)) | (floor > 0)) & (sigma > 0)
    return Spectrum(u, s, vt, sigma, kept, torch.where(finite, 0.0, torch.nan).to(x.dtype))


def pseudo(x: Tensor, alpha: Tensor, gain: Tensor | None) -> Factor:
    """Sigma^+ by the SVD of X; an X that is not finite shows as ratio = NaN."""
    found = spectrum(x, alpha, gain, whole=True)
    _, s, vt, sigma, kept, lost = found
    matrix = torch.bmm(vt.mT * torch.where(kept, 1 / sigma, 0.0).unsqueeze(1), vt)
    spread = torch.where(kept.any(-1), _smallest(s, kept) / s.amax(-1), 1.0)
    return Factor(matrix, True, found.condition() + lost, spread)


def factored(method: str, x: Tensor, alpha: Tensor, gain: Tensor | None, inverse: bool) -> Factor:
    """By "qr", "pinv", or, whatever else it is called, Cholesky."""
    if method == "qr":
        return orthogonal(x, alpha, gain)
    return pseudo(x, alpha, gain) if method == "pinv" else cholesky(x, alpha, gain, inverse)


def solve(factor: Factor, rhs: Tensor) -> Tensor:
    """Sigma^-1 rhs."""
    if factor.inverse:
        return mm(factor.matrix, rhs)
    return torch.cholesky_solve(rhs, factor.matrix)


def solve_rows(factor: Factor, rows: Tensor) -> Tensor:
    """rows Sigma^-1, contiguous: fused attention needs that."""
    if factor.inverse:
        return torch.bmm(rows, factor.matrix)
    return torch.cholesky_solve(rows.mT, factor.matrix).mT.contiguous()


def sigma_times(x: Tensor, alpha: Tensor, gain: Tensor | None, b: Tensor) -> Tensor:
    """Sigma b, from X and not from the Gram: residuals taken this way do not square the condition number."""
    return by_gain(gain, mm(x.mT, mm(x, b))) + alpha.view(-1, 1, 1) * b


def inverse_of_lower(lower: Tensor, failed: Tensor) -> Tensor:
    """Sigma^-1 from L. Elements that failed get some finite number: their ratio already says so."""
    # torch.cholesky_inverse would raise for the whole batch
    lower.diagonal(0, -2, -1).masked_fill_(failed.unsqueeze(1), 1.0)
    if lower.device.type == "cpu":
        return torch.cholesky_inverse(lower)
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.cholesky_solve(eye.expand_as(lower), lower)  # elsewhere torch.cholesky_inverse waits for the device


def _smallest(x: Tensor, kept: Tensor) -> Tensor:
    return torch.where(kept, x, torch.inf).amin(-1)


def _largest_eigenvalue(sigma: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """From above, m + s sqrt(n - 1) with the mean m of all and their spread s, n s^2 = |Sigma - m I|^2; and estimated.

    `sigma` is ours to overwrite. Rows that do not count are left out: what is solved for them is exact.
    """
    n = counts.sum(-1).to(sigma.dtype)
    diagonal = sigma.diagonal(0, -2, -1).mul_(counts)
    mean = diagonal.sum(-1) / n
    scaled = sigma / mean.view(-1, 1, 1)
    scaled.diagonal(0, -2, -1).sub_(counts.to(sigma.dtype))
    spread = torch.linalg.vector_norm(scaled, dim=(-2, -1)) / n.sqrt()
    bound, estimate = 1 + spread * (n - 1).sqrt(), STRETCHED * _stretch(scaled, counts)
    return torch.where(n > 0, mean * bound, 0.0), torch.where(n > 0, mean * estimate, 0.0)


def _stretch(less_one: Tensor, counts: Tensor) -> Tensor:
    """How much 1 + `less_one` stretches a vector that it has been applied to: nearly its norm, and no more."""
    n = counts.shape[-1]
    x = ((37 * torch.arange(n, device=counts.device) % 64 - 31.5).to(less_one.dtype) * counts).unsqueeze(-1)
    before = x
    for _ in range(PRODUCTS):
        before, x = x, x + torch.bmm(less_one, x)
    return torch.linalg.vector_norm(x, dim=(-2, -1)) / torch.linalg.vector_norm(before, dim=(-2, -1))


def _probe(lower: Tensor, counts: Tensor) -> Tensor:
    """|Sigma^-1 b| / |b| for one fixed b: a lower bound of |Sigma^-1| that also sees what grows along the factor."""
    n = lower.shape[-1]
    b = (torch.linspace(1, 2, n, dtype=lower.dtype, device=lower.device) * counts).unsqueeze(-1)
    size = torch.linalg.vector_norm(b, dim=(-2, -1)).clamp_min(1)
    return torch.linalg.vector_norm(torch.cholesky_solve(b, lower), dim=(-2, -1)) / size
