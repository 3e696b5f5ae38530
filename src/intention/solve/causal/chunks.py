"""Causal least squares: the fit of token t sees tokens <= t. Chunks, matrix products, O(N (d^2 + d k)).

    A_t = alpha I + c (S + sum_{s<=t} w_s k_s k_s'),   W_t = A_t^-1 (B + sum_{s<=t} w_s k_s v_s'),   o_t = q_t W_t

S and B are the sums of a state from before. With P = A^-1 and W of the tokens before a chunk, and the rows
K = sqrt(w) k and V = sqrt(w) v of the chunk itself,

    R R' = I + c K P K',   E = R^-1 K P,   Y = R^-1 (V - c K W)
    A_t^-1 = P - c E_{<=t}' E_{<=t},   W_t = W + E_{<=t}' Y_{<=t}

because leading blocks of a triangular factor are the factors of leading blocks. All chunks are worked on at once.
Each has a prefix Gram of its own, factored from sums that are kept in float64: nothing is updated from chunk to chunk,
so nothing drifts. Chunks that float32 does not serve (they come first: few tokens, a small alpha) are done in float64.
Within a chunk the factor R is made block by block of tokens, with P - c E'E and W + E'Y after each of them, because
LAPACK is slow for factors of more than 32 rows.

Without values the answer is A_t^-1 q_t, the transformed queries of sigma-Intention.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.causal.fading import chunks
from intention.solve.factor import inverse_of_lower
from intention.solve.ladder import has_float64
from intention.solve.problem import Tokens

BLOCK = 32  # tokens


class Before(NamedTuple):
    """The fits of the tokens before some chunks."""

    both: Tensor  # (M, d, d + k): [P, -W]
    ratio: Tensor  # (M,): a lower bound of the condition of the worst A_t of a chunk; inf or NaN where it failed


class Fits(NamedTuple):
    """The fits of chunks or blocks: from those before, by their own rows."""

    inverse: Tensor  # (M, d, d): P
    minus_w: Tensor  # (M, d, k): -W
    rows: Tensor  # (M, C, d): E
    rest: Tensor  # (M, C, k): Y


class Chunked(NamedTuple):
    """Tokens in chunks (B, n, C, ...), of all sequences some that follow each other; or flat: (M, C, ...), M = B n."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    weight: Tensor | None  # (B, n, C, 1)
    alpha: Tensor  # (B, 1, 1, 1) or (B, n, C, 1)
    gain: Tensor | None  # (B, 1, 1, 1)

    def flat(self, dtype: torch.dtype) -> Chunked:
        """As one batch; copied only where that needs it."""
        b, n = self.key.shape[:2]
        spread = (None if x is None else x.expand(b, n, 1, 1) for x in self[4:])
        return Chunked._make(None if x is None else x.to(dtype).flatten(0, 1) for x in (*self[:4], *spread))

    def tokens(self, where: slice) -> Chunked:
        """Some tokens of each chunk of a flat batch."""
        return Chunked._make((*(None if x is None else x[:, where] for x in self[:4]), *self[4:]))


def chunked(tokens: Tokens, size: int) -> Chunked:
    """Zeros fill the last chunk: a token of key 0 and value 0 changes no fit."""
    weight, alpha = None if tokens.weight is None else tokens.weight.unsqueeze(-1), tokens.alpha
    if alpha.dim() > 1:
        missing = -alpha.shape[1] % size
        alpha = torch.cat([alpha, alpha[:, -1:].expand(-1, missing)], 1).unflatten(1, (-1, size)).unsqueeze(-1)
    else:
        alpha = alpha.view(-1, 1, 1, 1)
    gain = None if tokens.gain is None else tokens.gain.view(-1, 1, 1, 1)
    value, weight = (None if x is None else chunks(x, size) for x in (tokens.value, weight))
    return Chunked(chunks(tokens.query, size), chunks(tokens.key, size), value, weight, alpha, gain)


def running(start: Tensor | None, steps: Tensor) -> tuple[Tensor, Tensor]:
    """What is before each chunk, (B, n, ...) in the precision of its step, and all together, in float64."""
    wide = torch.float64 if has_float64(steps.device) else steps.dtype
    total = torch.zeros_like(steps[:, 0], dtype=wide) if start is None else start.to(wide, copy=True)
    before = torch.empty_like(steps)
    for i in range(steps.shape[1]):  # cumsum is slower, and so is a product with ones and zeros
        before[:, i] = total
        total += steps[:, i]
    return before, total


def fit_before(own: Chunked, gram: Tensor | None, cross: Tensor | None, step: Tensor) -> Before:
    """`gram` and `cross` are the sums before each chunk, None: nothing; `step` (M, d) is what the chunk adds to the
    diagonal of `gram`. All is flat. Writes over `gram`."""
    alpha, gain = own.alpha.view(-1), None if own.gain is None else own.gain.view(-1)
    # eigenvalues are at least diagonal entries: of Sigma after the chunk, of its inverse before it
    largest = (step if gram is None else step + gram.diagonal(0, -2, -1)).amax(-1)
    largest = (largest if gain is None else largest * gain) + alpha
    d, k = own.key.shape[2], 0 if own.value is None else own.value.shape[2]
    both = own.key.new_zeros(len(own.key), d, d + k) if gram is None else own.key.new_empty(len(own.key), d, d + k)
    if gram is None:
        both.diagonal(0, -2, -1).copy_((1 / alpha).unsqueeze(1))
        return Before(both, largest / alpha)
    sigma = gram if own.gain is None else gram.mul_(own.gain)
    sigma.diagonal(0, -2, -1).add_(alpha.unsqueeze(1))
    lower, failed = torch.linalg.cholesky_ex(sigma)
    inverse = inverse_of_lower(lower, failed.bool())
    ratio = largest * inverse.diagonal(0, -2, -1).amax(-1)
    both[..., :d] = inverse
    if cross is not None:
        both[..., d:] = torch.bmm(inverse, cross).neg_()
    return Before(both, ratio.masked_fill_(failed.bool(), torch.inf))


def blocks(own: Chunked, before: Before) -> Iterator[tuple[slice, Chunked, Fits]]:
    """Of flat chunks which tokens, these tokens, and their fits, which last until the next ones. Writes over `before`.

    Where `before` has a ratio that its precision serves, I + c K P K' has eigenvalues of 1 and more, and a factor.
    """
    both, size, d = before.both, own.key.shape[1], own.key.shape[2]
    for first in range(0, size, BLOCK):
        where = slice(first, min(first + BLOCK, size))
        part = own.tokens(where)
        root = None if part.weight is None else part.weight.sqrt()
        key = part.key if root is None else root * part.key
        moved = torch.bmm(key, both)  # [K P, -K W]
        if part.gain is not None:
            moved[..., d:] *= part.gain
        if part.value is not None:
            moved[..., d:] += part.value if root is None else root * part.value
        inner = torch.bmm(moved[..., :d] if part.gain is None else moved[..., :d] * part.gain, key.mT)
        inner.diagonal(0, -2, -1).add_(1.0)
        pair = half_solve(torch.linalg.cholesky_ex(inner).L, moved)  # [E, Y]
        yield where, part, Fits(both[..., :d], both[..., d:], pair[..., :d], pair[..., d:])
        if where.stop < size:
            rows = pair[..., :d] if part.gain is None else pair[..., :d] * part.gain
            if part.gain is None:
                both.baddbmm_(rows.mT, pair, alpha=-1)
            else:
                both[..., :d].baddbmm_(rows.mT, pair[..., :d], alpha=-1)
                both[..., d:].baddbmm_(pair[..., :d].mT, pair[..., d:], alpha=-1)


def fit_chunks(own: Chunked, before: Before) -> Fits:
    """The fits of whole chunks, of which gradients are made."""
    d = own.key.shape[2]
    parts = [fits for _, _, fits in blocks(own, before._replace(both=before.both.clone()))]
    rows, rest = (torch.cat(x, 1) for x in zip(*((fits.rows, fits.rest) for fits in parts), strict=True))
    return Fits(before.both[..., :d], before.both[..., d:], rows, rest)


def half_solve(lower: Tensor, x: Tensor) -> Tensor:
    """R^-1 x. Row t depends on rows <= t alone, bit by bit. From the right BLAS is 3 times faster."""
    return torch.linalg.solve_triangular(lower.mT, x.mT, upper=True, left=False).mT


def answers(own: Chunked, fits: Fits) -> Tensor:
    """q_t W_t; without values q_t A_t^-1."""
    if own.value is None:
        return transformed(own.query, own, fits)
    seen = torch.bmm(own.query, fits.rows.mT).tril_()
    return torch.bmm(seen, fits.rest).baddbmm_(own.query, fits.minus_w, alpha=-1)


def transformed(rows: Tensor, own: Chunked, fits: Fits) -> Tensor:
    """x_t A_t^-1 for rows x_t of every token."""
    seen = torch.bmm(rows, fits.rows.mT).tril_()
    seen = seen if own.gain is None else seen * own.gain
    return torch.bmm(rows, fits.inverse).baddbmm_(seen, fits.rows, alpha=-1)


def refined(moved: Tensor, rows: Tensor, own: Chunked, fits: Fits, gram: Tensor) -> Tensor:
    """One step of refinement of x_t A_t^-1, with the residual from the keys; `gram` (M, d, d) is S before each chunk.

    P - c E'E cancels along the keys that a fit has seen, by as much as alpha is smaller than they are.
    """
    counted = own.key if own.weight is None else own.weight * own.key
    product = torch.bmm(torch.bmm(moved, own.key.mT).tril_(), counted).baddbmm_(moved, gram)
    product = product if own.gain is None else product * own.gain
    return moved + transformed(rows - product - own.alpha * moved, own, fits)


class Later(NamedTuple):
    """Sums over the tokens after some point, float64: what they say about the keys and values before it."""

    cross: Tensor | None  # (B, d, k): sum z_t g_t'
    gram: Tensor  # (B, d, d): sum z_t r_t'


class Pulled(NamedTuple):
    """Gradients of flat chunks; `alpha` and `gain` (B,) are sums over them."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    weight: Tensor
    alpha: Tensor
    gain: Tensor


def pull_chunks(
    grad: Tensor, own: Chunked, fits: Fits, later: Later, gram: Tensor | None = None
) -> tuple[Pulled, Later]:
    """Gradients of flat chunks from those of their answers, g_t; `later` is about the chunks that follow.

    `gram` is S before each chunk, where there are no values: g_t is then made of keys, along which A_t^-1 cancels.

    With z_t = A_t^-1 q_t and r_t = W_t g_t (without values A_t^-1 g_t), every fit that sees token s adds to its
    gradients: z_t (g_t v_s) - c z_t (r_t k_s) - c r_t (z_t k_s) to that of k_s, g_t (z_t k_s) to that of v_s.
    """
    key, gain = own.key, 1.0 if own.gain is None else own.gain
    z = transformed(own.query, own, fits)
    if own.value is None:
        r = transformed(grad, own, fits)
        r = r if gram is None else refined(r, grad, own, fits, gram)
    else:
        r = torch.bmm(torch.bmm(grad, fits.rest.mT).tril_(), fits.rows).baddbmm_(grad, fits.minus_w.mT, alpha=-1)
    seen, also = torch.bmm(key, z.mT).triu_(), torch.bmm(key, r.mT).triu_()
    after, gram = _after(later.gram, torch.bmm(z.mT, r))
    one = torch.bmm(also, z).baddbmm_(key, after.mT)  # sum z_t (r_t k_s)
    two = torch.bmm(seen, r).baddbmm_(key, after)  # sum r_t (z_t k_s)
    value, cross, both = None, None, -gain * one
    if own.value is not None and later.cross is not None:
        after, cross = _after(later.cross, torch.bmm(z.mT, grad))
        value = torch.bmm(seen, grad).baddbmm_(key, after)
        both.baddbmm_(torch.bmm(own.value, grad.mT).triu_(), z).baddbmm_(own.value, after.mT)  # sum z_t (g_t v_s)
    counted = 1.0 if own.weight is None else own.weight
    sequences = len(later.gram)
    pulled = Pulled(
        r,
        counted * (both - gain * two),
        None if value is None else counted * value,
        (key * both).sum(-1),
        -(z * r).sum((1, 2), dtype=gram.dtype).view(sequences, -1).sum(1),
        -(counted * key * one).sum((1, 2), dtype=gram.dtype).view(sequences, -1).sum(1),
    )
    return pulled, Later(cross, gram)


def _after(later: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """What comes after each chunk, and after what is before the first."""
    after, total = running(later, steps.unflatten(0, (len(later), -1)).flip(1))
    return after.flip(1).flatten(0, 1), total
