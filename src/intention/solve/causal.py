"""Causal least squares: the fit of token t sees tokens <= t. Chunks, matrix products, O(N (d^2 + d k)).

    A_t = alpha I + c (S + sum_{s<=t} w_s k_s k_s'),   W_t = A_t^-1 (B + sum_{s<=t} w_s k_s v_s'),   o_t = q_t W_t

S and B are the sums of a state from before. With P = A^-1 and W of the tokens before a chunk, and the rows
K = sqrt(w) k and V = sqrt(w) v of the chunk itself,

    R R' = I + c K P K',   E = R^-1 K P,   Y = R^-1 (V - c K W)
    A_t^-1 = P - c E_{<=t}' E_{<=t},   W_t = W + E_{<=t}' Y_{<=t}

because leading blocks of a triangular factor are the factors of leading blocks. All chunks are worked on at once.
Each has a prefix Gram of its own, factored from sums that are kept in float64: nothing is updated from chunk to chunk,
so nothing drifts. Chunks that float32 does not serve (they come first: few tokens, a small alpha) are done in float64.

Without values the answer is A_t^-1 q_t, the transformed queries of sigma-Intention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.factor import inverse_of_lower


class Tokens(NamedTuple):
    """Sequences of one flat batch."""

    query: Tensor  # (B, N, d)
    key: Tensor  # (B, N, d)
    value: Tensor | None  # (B, N, k)
    weight: Tensor | None  # (B, N)
    alpha: Tensor  # (B,)
    gain: Tensor | None  # (B,)
    gram: Tensor | None  # (B, d, d): S
    cross: Tensor | None  # (B, d, k): B


class Fits(NamedTuple):
    """The fits of some chunks (B, n, ...), and what their gradients need."""

    before: Tensor  # (B, n, d, d): P
    w: Tensor | None  # (B, n, d, k): W
    rows: Tensor  # (B, n, C, d): E
    rest: Tensor | None  # (B, n, C, k): Y
    ratio: Tensor  # (B, n): a lower bound of the condition of the worst A_t of a chunk; inf or NaN where it failed


class Chunked(NamedTuple):
    """Tokens in chunks (B, n, C, ...), the first or the last of a sequence, in one precision."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    weight: Tensor | None  # (B, n, C, 1)
    alpha: Tensor  # (B, 1, 1, 1)
    gain: Tensor | None  # (B, 1, 1, 1)

    def weighted(self) -> tuple[Tensor, Tensor | None]:
        if self.weight is None:
            return self.key, self.value
        root = self.weight.sqrt()
        return root * self.key, None if self.value is None else root * self.value

    def part(self, first: int, last: int) -> Chunked:
        """The chunks `first` to `last`, in one piece of memory."""
        parts = (None if x is None else x[:, first:last].contiguous() for x in self[:4])
        return Chunked(*parts, self.alpha, self.gain)  # type: ignore[arg-type]

    def to(self, dtype: torch.dtype) -> Chunked:
        return Chunked(*(None if x is None else x.to(dtype) for x in self))  # type: ignore[arg-type]


def chunked(tokens: Tokens, size: int) -> Chunked:
    """Zeros fill the last chunk: a token of key 0 and value 0 changes no fit."""
    missing = -tokens.query.shape[1] % size

    def cut(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        if missing:
            x = torch.nn.functional.pad(x, (0, 0, 0, missing))
        return x.unflatten(1, (-1, size))

    weight = None if tokens.weight is None else tokens.weight.unsqueeze(-1)
    alpha, gain = tokens.alpha.view(-1, 1, 1, 1), None if tokens.gain is None else tokens.gain.view(-1, 1, 1, 1)
    return Chunked(cut(tokens.query), cut(tokens.key), cut(tokens.value), cut(weight), alpha, gain)  # type: ignore[arg-type]


def running(start: Tensor | None, steps: Tensor) -> Tensor:
    """Sums (B, n + 1, ...) of what comes before each chunk, and of all, in float64."""
    n = steps.shape[1]
    # a product with ones and zeros: to add 0 times what comes later changes no bit, and it is faster than cumsum
    before = torch.ones(n + 1, n, dtype=torch.float64, device=steps.device).tril(-1)
    out = (before @ steps.flatten(2).double()).unflatten(2, steps.shape[2:])
    return out if start is None else out.add_(start.unsqueeze(1))


def fit_chunks(own: Chunked, gram: Tensor, cross: Tensor | None) -> Fits:
    """`gram` (B, n + 1, d, d) and `cross` (B, n + 1, d, k) are the sums before each chunk, and after the last."""
    key, value = own.weighted()
    dtype, gain = key.dtype, 1.0 if own.gain is None else own.gain
    sigma = gram[:, :-1].to(dtype, copy=True) if own.gain is None else gram[:, :-1].to(dtype) * gain
    sigma.diagonal(0, -2, -1).add_(own.alpha.squeeze(-1))
    lower, failed = torch.linalg.cholesky_ex(sigma)
    before = inverses(lower, failed)
    # eigenvalues are at least diagonal entries: of Sigma after the chunk, of its inverse before it
    largest = gram[:, 1:].diagonal(0, -2, -1).amax(-1).to(dtype)
    largest = largest * (1.0 if own.gain is None else own.gain.view(-1, 1)) + own.alpha.view(-1, 1)
    ratio = largest * before.diagonal(0, -2, -1).amax(-1)
    moved = key @ before  # K P
    inner = (moved if own.gain is None else moved * gain) @ key.mT
    inner.diagonal(0, -2, -1).add_(1.0)
    lower, lost = torch.linalg.cholesky_ex(inner)
    ratio = ratio.masked_fill_((failed + lost).bool(), torch.inf)
    rows = half_solve(lower, moved)
    if value is None or cross is None:
        return Fits(before, None, rows, None, ratio)
    w = before @ cross[:, :-1].to(dtype)
    fitted = key @ w if own.gain is None else (key @ w) * gain
    return Fits(before, w, rows, half_solve(lower, fitted.neg_().add_(value)), ratio)


def half_solve(lower: Tensor, x: Tensor) -> Tensor:
    """R^-1 x. Row t depends on rows <= t alone, bit by bit. From the right BLAS is 3 times faster."""
    return torch.linalg.solve_triangular(lower.mT, x.mT, upper=True, left=False).mT


def answers(own: Chunked, fits: Fits) -> Tensor:
    """q_t W_t (B, n, C, k); without values q_t A_t^-1."""
    if fits.w is None or fits.rest is None:
        return transformed(own.query, own, fits)
    return (own.query @ fits.w).add_((own.query @ fits.rows.mT).tril_() @ fits.rest)


def transformed(rows: Tensor, own: Chunked, fits: Fits) -> Tensor:
    """x_t A_t^-1 for rows x_t of every token."""
    seen = (rows @ fits.rows.mT).tril_()
    return (rows @ fits.before).sub_((seen if own.gain is None else seen * own.gain) @ fits.rows)


def inverses(lower: Tensor, failed: Tensor) -> Tensor:
    flat = inverse_of_lower(lower.flatten(0, 1), failed.flatten().bool())
    return flat.unflatten(0, lower.shape[:2])


class Later(NamedTuple):
    """Sums over the tokens after some point, float64: what they say about the keys and values before it."""

    cross: Tensor | None  # (B, d, k): sum z_t g_t'
    gram: Tensor  # (B, d, d): sum z_t r_t'


class Pulled(NamedTuple):
    """Gradients of some chunks; `alpha` and `gain` (B,) are sums over them."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    weight: Tensor
    alpha: Tensor
    gain: Tensor


def pull_chunks(grad: Tensor, own: Chunked, fits: Fits, later: Later) -> tuple[Pulled, Later]:
    """Gradients of tokens from those of their answers, g_t; `later` is about the chunks that follow.

    With z_t = A_t^-1 q_t and r_t = W_t g_t (without values A_t^-1 g_t), every fit that sees token s adds to its
    gradients: z_t (g_t v_s) - c z_t (r_t k_s) - c r_t (z_t k_s) to that of k_s, g_t (z_t k_s) to that of v_s.
    """
    key, gain = own.key, 1.0 if own.gain is None else own.gain
    z = transformed(own.query, own, fits)
    if fits.w is None or fits.rest is None:
        r = transformed(grad, own, fits)
    else:
        r = grad @ fits.w.mT + (grad @ fits.rest.mT).tril_() @ fits.rows
    seen, also = (key @ z.mT).triu_(), (key @ r.mT).triu_()
    gram = running(later.gram, (z.mT @ r).flip(1))
    after = gram[:, :-1].flip(1).to(key.dtype)
    one, two = key @ after.mT + also @ z, key @ after + seen @ r  # sum z_t (r_t k_s), sum r_t (z_t k_s)
    value, cross, moved = None, None, 0.0
    if own.value is not None:
        cross = running(later.cross, (z.mT @ grad).flip(1))
        after = cross[:, :-1].flip(1).to(key.dtype)
        value = key @ after + seen @ grad
        moved = own.value @ after.mT + (own.value @ grad.mT).triu_() @ z  # sum z_t (g_t v_s)
    both = moved - gain * one
    weight = (key * both).sum(-1)
    counted = 1.0 if own.weight is None else own.weight
    share = (key * one).sum(-1) if own.weight is None else (key * one * own.weight).sum(-1)
    pulled = Pulled(
        r,
        counted * (both - gain * two),
        None if value is None else counted * value,
        weight,
        -(z.double() * r.double()).sum((1, 2, 3)),
        -share.double().sum((1, 2)),
    )
    return pulled, Later(None if cross is None else cross[:, -1], gram[:, -1])
