"""Derivatives of causal fits, written with the fits themselves: plain products, so that any order and transform works.

    f_t = q_t A_t^-1 B_t g_t
    A_t = alpha I + c (D_t0 S + sum_{s<=t} D_ts w_s k_s k_s'),   B_t = D_t0 B + sum_{s<=t} D_ts w_s k_s v_s'

With z_t = A_t^-1 q_t and r_t = W_t g_t (without values A_t^-1 g_t) all gradients of f are sums over pairs of tokens:
D_ts (z_t k_s) (g_t v_s - c r_t k_s) and the like. They are taken in chunks, O(N), in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from intention.solve.causal.fading import Fading, chunks, faded_sums, fading
from intention.solve.problem import Tokens

LENGTH = 64  # tokens of a chunk

Slopes = tuple[Any, ...]  # gradients, in the order of `Tokens`; None for what is none
Fits = Callable[[Tensor, bool, bool], Tensor]  # of other rows: (rows, values, transposed)


def read(fade: Fading, x: Tensor, a: Tensor, b: Tensor, start: Tensor | None = None) -> Tensor:
    """sum_{s<=t} D_ts (x_t a_s) b_s + D_t0 x_t start, (B, N, ...)"""
    n = x.shape[1]
    x, a, b = (chunks(y, LENGTH) for y in (x, a, b))
    before, _ = faded_sums(start, (fade.to_end * a).mT @ b, fade.whole)
    return _tokens(fade.from_start * (x @ before) + (fade.share * (x @ a.mT)) @ b, n)


def pull(grad: Tensor, z: Tensor, r: Tensor, tokens: Tokens, later: Tensor | None = None) -> tuple[Slopes, Tensor]:
    """The gradients of sum f_t, that of the query being r_t, and what all tokens say about those before them.

    `later` (B, d, k + d) is what is said by the tokens that follow: sum D_t z_t [g_t, r_t]', decays counted from here.
    """
    _, key, value, weight, alpha, gain, gram, cross, decay = tokens
    n, k, fade = key.shape[1], 0 if value is None else value.shape[2], faded(decay, key)
    share = key.new_ones(1, 1, 1) if gain is None else gain.view(-1, 1, 1)
    counted = 1.0 if weight is None else weight.unsqueeze(-1)
    own = chunks(key, LENGTH)
    told = chunks(-share * key if value is None else torch.cat([value, -share * key], -1), LENGTH)  # [v, -c k]
    heard = chunks(r if value is None else torch.cat([grad, r], -1), LENGTH)  # [g, r]
    moved = chunks(z, LENGTH)
    # seen from the end: what the tokens after a chunk say about those in it
    sums, total = faded_sums(later, ((fade.from_start * moved).mT @ heard).flip(1), fade.whole.flip(1))
    after, back = sums.flip(1), fade.share.mT
    near, missed = own @ moved.mT, told @ heard.mT  # z_t k_s, g_t v_s - c r_t k_s
    seen = back * near  # D_ts z_t k_s
    far = fade.to_end * (own @ after)
    both = _tokens((back * missed) @ moved + fade.to_end * (told @ after.mT), n)
    pairs = _tokens(seen @ heard + far, n)
    weight_grad = (seen * missed).sum(-1, keepdim=True) + (told * far).sum(-1, keepdim=True)
    spread = (z * r).sum(-1)
    decay_grad = None
    if decay is not None:  # <what is said about the state before t by t and later tokens, this state>
        start = gram if gram is None else -share * gram
        start = start if cross is None or start is None else torch.cat([cross, start], -1)
        known = chunks(counted * key, LENGTH)
        before, _ = faded_sums(start, (fade.to_end * known).mT @ told, fade.whole)
        less, c_less = fade.shifted()
        weights = 1.0 if weight is None else chunks(weight.unsqueeze(-1), LENGTH)
        said = (moved @ before * heard).sum(-1, keepdim=True)  # by t about the state before the chunk
        kept = (own @ after * told).sum(-1, keepdim=True)  # by later chunks about s
        decay_grad = (
            fade.to_end * c_less * (after * before).sum((-2, -1), keepdim=True)
            + c_less * (back @ said)
            + fade.to_end * (less @ (weights * kept))
            + ((weights * near * missed @ fade.share).mT * less).sum(-1, keepdim=True)
        )
        decay_grad = _tokens(decay_grad, n).squeeze(-1)
    gain_grad = None
    if gain is not None:  # sum_t z_t (A_t - alpha I) r_t / c
        gain_grad = -(read(fade, z, key, counted * key, gram) * r).sum((1, 2))
    found = (
        r,
        counted * (both - share * pairs[..., k:]),
        None if value is None else counted * pairs[..., :k],
        None if weight is None else _tokens(weight_grad, n).squeeze(-1),
        -spread if alpha.dim() > 1 else -spread.sum(-1),
        gain_grad,
        None if gram is None else -share * total[..., k:],
        None if cross is None else total[..., :k],
        decay_grad,
    )
    return found, total


def faded(decay: Tensor | None, key: Tensor) -> Fading:
    return fading(torch.ones_like(key[..., 0]) if decay is None else decay, LENGTH).to(key.dtype)


def _tokens(x: Tensor, n: int) -> Tensor:
    return x.flatten(1, 2)[:, :n]
