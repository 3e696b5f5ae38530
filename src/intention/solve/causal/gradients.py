"""Derivatives of causal fits, written with the fits themselves: plain products, so that any order and transform works.

    f_t = q_t A_t^-1 B_t g_t
    A_t = alpha I + c (D_t0 S + sum_{s<=t} D_ts w_s k_s k_s'),   B_t = D_t0 B + sum_{s<=t} D_ts w_s k_s v_s'

With z_t = A_t^-1 q_t and r_t = W_t g_t (without values A_t^-1 g_t) all gradients of f are sums over pairs of tokens:
D_ts (z_t k_s) (g_t v_s - c r_t k_s) and the like. They are taken in chunks, O(N), in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.causal.decay import faded_sums

LENGTH = 64  # tokens of a chunk

Nine = tuple[Tensor | None, ...]  # Tokens and the logarithm of the decay
Fits = Callable[[Tensor, bool, bool], Tensor]  # of other rows: (rows, values, transposed)


class Fading(NamedTuple):
    """How much of earlier tokens is left, in chunks."""

    share: Tensor  # (B, n, C, C): D_ts, 0 above the diagonal
    from_start: Tensor  # (B, n, C, 1): from before the chunk
    to_end: Tensor  # (B, n, C, 1): at the end of the chunk
    whole: Tensor  # (B, n, 1, 1)


def fading(log_decay: Tensor | None, key: Tensor) -> Fading:
    steps = _chunks((torch.zeros_like(key[..., 0]) if log_decay is None else log_decay).unsqueeze(-1))
    total = steps.cumsum(2)
    share = (total - total.mT).tril().exp().tril()
    return Fading(share, total.exp(), (total[:, :, -1:] - total).exp(), total[:, :, -1:].exp())


def read(fade: Fading, x: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """sum_{s<=t} D_ts (x_t a_s) b_s + D_t0 x_t start, (B, N, ...)"""
    n = x.shape[1]
    x, a, b = _chunks(x), _chunks(a), _chunks(b)
    before = faded_sums(start, (fade.to_end * a).mT @ b, fade.whole)[:, :-1]
    out = fade.from_start * (x @ before) + (fade.share * (x @ a.mT)) @ b
    return out.flatten(1, 2)[:, :n]


def pull(query: Tensor, grad: Tensor, z: Tensor, r: Tensor, nine: Nine) -> Nine:
    """The gradients of sum f_t, that of the query being r_t."""
    _, key, value, weight, alpha, gain, gram, cross, log_decay = nine
    assert key is not None
    assert alpha is not None
    n, k, fade = key.shape[1], 0 if value is None else value.shape[2], fading(log_decay, key)
    share = key.new_ones(1, 1, 1) if gain is None else gain.view(-1, 1, 1)
    counted = 1.0 if weight is None else weight.unsqueeze(-1)
    own = _chunks(key)
    told = _chunks(-share * key if value is None else torch.cat([value, -share * key], -1))  # [v, -c k]
    heard, moved = _chunks(r if value is None else torch.cat([grad, r], -1)), _chunks(z)  # [g, r], z
    # seen from the end: what the tokens after a chunk say about those in it
    sums = faded_sums(None, ((fade.from_start * moved).mT @ heard).flip(1), fade.whole.flip(1))
    after, back = sums[:, :-1].flip(1), fade.share.mT
    seen, missed = back * (own @ moved.mT), told @ heard.mT  # D_ts z_t k_s, g_t v_s - c r_t k_s
    far = fade.to_end * (own @ after)
    both = _tokens((back * missed) @ moved + fade.to_end * (told @ after.mT), n)
    pairs = _tokens(seen @ heard + far, n)
    weight_grad = _tokens((seen * missed).sum(-1, keepdim=True) + (told * far).sum(-1, keepdim=True), n).squeeze(-1)
    spread = (z * r).sum(-1)
    decay = None
    if log_decay is not None:  # of the sum of its logarithms up to t, then of each
        slope = alpha.unsqueeze(-1) * spread - (weight_grad if weight is None else weight * weight_grad)
        slope = slope - (query * r).sum(-1) if value is None else slope
        decay = slope.flip(1).cumsum(1).flip(1)
    gain_grad = gram_grad = None
    total = sums[:, -1]
    if gram is not None:
        gram_grad = -share * total[..., k:]
    if gain is not None:  # sum_t z_t (A_t - alpha I) r_t / c
        inner = read(fade, z, key, counted * key, gram)
        gain_grad = -(inner * r).sum((1, 2))
    return (
        r,
        counted * (both - share * pairs[..., k:]),
        None if value is None else counted * pairs[..., :k],
        None if weight is None else weight_grad,
        -spread.sum(-1),
        gain_grad,
        gram_grad,
        None if cross is None else total[..., :k],
        decay,
    )


def push(nine: Nine, tangents: Sequence[Tensor | None], transposed: bool, solve: Fits) -> Tensor:
    """The tangent of q_t W_t (without values q_t A_t^-1), or of W_t g_t; `solve(rows, values, transposed)` are fits."""
    x, key, value, weight, _, gain, gram, cross, log_decay = nine
    dx, dkey, dvalue, dweight, dalpha, dgain, dgram, dcross, dlog = tangents
    assert x is not None
    assert key is not None
    assert dx is not None
    assert dkey is not None
    assert dalpha is not None
    fade = fading(log_decay, key)
    counted = torch.ones_like(key[..., :1]) if weight is None else weight.unsqueeze(-1)
    faster = torch.zeros_like(counted) if dlog is None else dlog.cumsum(1).unsqueeze(-1)
    change = -faster * counted if dweight is None else dweight.unsqueeze(-1) - faster * counted

    def moved(
        rows: Tensor, a: Tensor, da: Tensor, b: Tensor, db: Tensor, start: Tensor | None, dstart: Tensor | None
    ) -> Tensor:
        """The tangent of sum D_ts w_s (x_t a_s) b_s + D_t0 x_t start."""
        out = read(fade, rows, da, counted * b, dstart) + read(fade, rows, a, counted * db + change * b)
        return out + faster * read(fade, rows, a, counted * b, start)

    def sigma(rows: Tensor) -> Tensor:
        """x_t dA_t"""
        share = 1.0 if gain is None else gain.view(-1, 1, 1)
        out = dalpha.view(-1, 1, 1) * rows + share * moved(rows, key, dkey, key, dkey, gram, dgram)
        if dgain is not None:
            out = out + dgain.view(-1, 1, 1) * read(fade, rows, key, counted * key, gram)
        return out

    if value is None:
        return solve(dx - sigma(solve(x, False, False)), False, False)
    assert dvalue is not None
    if transposed:
        turned, dturned = (None if y is None else y.mT for y in (cross, dcross))
        inner = moved(x, value, dvalue, key, dkey, turned, dturned) - sigma(solve(x, True, True))
        return solve(dx, True, True) + solve(inner, False, False)
    z = solve(x, False, False)
    return solve(dx - sigma(z), True, False) + moved(z, key, dkey, value, dvalue, cross, dcross)


def _chunks(x: Tensor) -> Tensor:
    """(B, n, C, ...); zeros fill the last chunk."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[1] % LENGTH)).unflatten(1, (-1, LENGTH))


def _tokens(x: Tensor, n: int) -> Tensor:
    return x.flatten(1, 2)[:, :n]
