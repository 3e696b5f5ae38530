"""Causal least squares that forgets: token s counts D_ts = prod_{s<r<=t} gamma_r times its weight at time t.

    A_t = alpha I + c (D_t0 S + sum_{s<=t} D_ts w_s k_s k_s')
    o_t = q_t A_t^-1 (D_t0 B + sum_{s<=t} D_ts w_s k_s v_s')

Within a chunk D_ts = c_t / c_s, so A_t / c_t would be a sum over tokens as in `causal`, if alpha I / c_t did not grow
with t. With one number in the place of 1 / c_t it is: A_t = B_t + delta_t I, where B_t^-1 costs matrix products alone.
Then (I + delta_t B_t^-1) z_t = B_t^-1 q_t is solved by conjugate gradients, for all tokens at once: its condition is
at most the decay of half a chunk, and its eigenvalues sit near two numbers, so that few steps reach rounding. All of it
is in float64.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.causal.chunks import Chunked, Tokens, chunked, half_solve
from intention.solve.factor import inverse_of_lower
from intention.solve.ladder import FLOAT64, Report

LENGTHS = (64, 32, 16, 8)  # tokens of a chunk; the longest over which all decays stay above WEAKEST
WEAKEST = 1 / 16
LEAST = 1e-6  # of the shortest: beyond it every query needs a fit of its own
STEPS, ENOUGH = 60, 1e-14  # of conjugate gradients, and the relative residual at which they end


class Faded(NamedTuple):
    """Chunks in float64, what came before each, and how it fades: everything that solves and sums need."""

    own: Chunked
    share: Tensor  # (B, n, C, C): D_ts, 0 above the diagonal
    from_start: Tensor  # (B, n, C, 1): c_t, the decay from before the chunk
    to_end: Tensor  # (B, n, C, 1): D of the chunk's end
    gram: Tensor  # (B, n, d, d): the sums before each chunk
    cross: Tensor | None  # (B, n, d, k)


class Base(NamedTuple):
    """B_t^-1 = (P - c E_{<=t}' E_{<=t}) / c_t, and delta_t."""

    before: Tensor  # P
    rows: Tensor  # E
    ratio: Tensor  # (B, n)
    delta: Tensor  # (B, n, C, 1)


def length(log_decay: Tensor, n: int) -> int:
    """Tokens of a chunk; 0 where decays are too strong for any. Looks at the host."""
    slowest = -float(log_decay.amin()) if n else 0.0
    for size in LENGTHS:
        if slowest * size <= -math.log(WEAKEST):
            return size
    total = torch.nn.functional.pad(log_decay, (0, -n % LENGTHS[-1])).unflatten(1, (-1, LENGTHS[-1])).sum(-1)
    return LENGTHS[-1] if n and float(total.amin()) >= math.log(LEAST) else 0


def fade(tokens: Tokens, log_decay: Tensor, size: int) -> Faded:
    own = Chunked._make(None if x is None else x.double() for x in chunked(tokens, size))
    steps = torch.nn.functional.pad(log_decay.double(), (0, -log_decay.shape[1] % size)).unflatten(1, (-1, size))
    total = steps.cumsum(-1).unsqueeze(-1)
    share = (total - total.mT).tril().exp().tril()
    from_start, to_end = total.exp(), (total[:, :, -1:] - total).exp()
    whole = from_start[:, :, -1:]
    key = own.key if own.weight is None else own.weight * own.key
    gram = faded_sums(tokens.gram, (to_end * key).mT @ own.key, whole)
    cross = None if own.value is None else faded_sums(tokens.cross, (to_end * key).mT @ own.value, whole)
    return Faded(own, share, from_start, to_end, gram[:, :-1], None if cross is None else cross[:, :-1])


def faded_sums(start: Tensor | None, steps: Tensor, decay: Tensor) -> Tensor:
    """(B, n + 1, ...): s_0 = start, s_{i+1} = decay_i s_i + steps_i."""
    out = [torch.zeros_like(steps[:, 0]) if start is None else start.double()]
    for i in range(steps.shape[1]):
        out.append(torch.addcmul(steps[:, i], decay[:, i], out[-1]))
    return torch.stack(out, 1)


def base(faded: Faded) -> Base:
    own = faded.own
    gain = 1.0 if own.gain is None else own.gain
    middle = faded.from_start[:, :, -1:].sqrt()
    sigma = faded.gram * gain
    sigma.diagonal(0, -2, -1).add_((own.alpha / middle).squeeze(-1))
    lower, failed = torch.linalg.cholesky_ex(sigma)
    before = inverse_of_lower(lower.flatten(0, 1), failed.flatten().bool()).view_as(lower)
    root = (1.0 if own.weight is None else own.weight) / faded.from_start
    key = root.sqrt() * own.key
    moved = key @ before
    inner = (moved * gain) @ key.mT
    after = (faded.gram + key.mT @ key).diagonal(0, -2, -1).amax(-1)
    inner.diagonal(0, -2, -1).add_(1.0)
    lower, lost = torch.linalg.cholesky_ex(inner)
    rows = half_solve(lower, moved)
    largest = after * (1.0 if own.gain is None else own.gain.view(-1, 1)) + (own.alpha / middle).flatten(1)
    ratio = (largest * before.diagonal(0, -2, -1).amax(-1)).masked_fill_((failed + lost).bool(), torch.inf)
    return Base(before, rows, ratio, own.alpha * (1 - faded.from_start / middle))


def solve(faded: Faded, own: Base, x: Tensor) -> tuple[Tensor, Tensor]:
    """A_t^-1 x_t for every token, and the relative residual that was left (B,)."""
    gain = 1.0 if faded.own.gain is None else faded.own.gain

    def apply(y: Tensor) -> Tensor:
        return (y @ own.before - ((y @ own.rows.mT).tril() * gain) @ own.rows) / faded.from_start

    target = apply(x)
    z = target.clone()
    rest = -own.delta * apply(z)  # target - (z + delta B^-1 z) at z = target
    direction, size = rest.clone(), _dot(rest, rest)
    goal = ENOUGH**2 * _dot(target, target)
    for _ in range(STEPS):
        if bool((size <= goal).all()):
            break
        moved = direction + own.delta * apply(direction)
        step = size / _dot(direction, moved).clamp_min(torch.finfo(torch.float64).tiny)
        step = torch.where(size > goal, step, 0.0)
        z = z + step * direction
        rest = rest - step * moved
        before, size = size, _dot(rest, rest)
        direction = rest + (size / before.clamp_min(torch.finfo(torch.float64).tiny)) * direction
    left = (size / _dot(target, target).clamp_min(torch.finfo(torch.float64).tiny)).sqrt()
    return z, left.flatten(1).amax(-1)


def read(faded: Faded, z: Tensor) -> Tensor:
    """sum_{s<=t} D_ts w_s (z_t k_s) v_s."""
    own = faded.own
    assert own.value is not None
    assert faded.cross is not None
    value = own.value if own.weight is None else own.weight * own.value
    return faded.from_start * (z @ faded.cross) + (faded.share * (z @ own.key.mT)) @ value


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).sum(-1, keepdim=True)


def solve_fading(tokens: Tokens, log_decay: Tensor, size: int) -> tuple[Tensor, Report]:
    """Answers (B, N, k), or (B, N, d) without values."""
    faded = fade(tokens, log_decay, size)
    own = base(faded)
    z, left = solve(faded, own, faded.own.query)
    out = z if tokens.value is None else read(faded, z)
    ratio = own.ratio.amax(1)
    dtype = tokens.query.dtype
    error = ratio * torch.finfo(torch.float64).eps + left + torch.finfo(dtype).eps
    report = Report(torch.full_like(tokens.alpha, FLOAT64), ratio.to(dtype), error.to(dtype))
    return out.flatten(1, 2)[:, : tokens.query.shape[1]].to(dtype), report
