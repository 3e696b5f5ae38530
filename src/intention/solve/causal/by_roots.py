"""Causal least squares by triangular factors, made by QR of the tokens themselves. O(N d^2 (d + k)) at most.

    [sqrt(c) K_t, V_t; sqrt(alpha) I, 0] = Q_t [R_t, Y_t; 0, *]   with rows sqrt(D_ts w_s) of the tokens s <= t
    A_t = R_t'R_t,   W_t = R_t^-1 Y_t / sqrt(c)

No Gram matrix is formed, so the condition of R_t is the root of that of A_t: for sequences that sums in float64 do not
serve (low-rank keys beside a small alpha), and decays so strong that a chunk is nearly empty. A chunk starts from the
factor of all before it. Inside, tokens have a factor each, of this one and of few rows; or, where no token forgets and
the chunk does not bring what those before it had not, with K = sqrt(c w) k R^-1 and V = sqrt(w) v,

    L L' = I + K K',   E = L^-1 K,   F = L^-1 (V - K Y)
    R A_t^-1 R' = I - E_{<=t}'E_{<=t},   R W_t = Y + E_{<=t}'F_{<=t}

as in `causal`, but in coordinates in which all tokens before the chunk, and alpha, are the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention.solve.causal.chunks import chunked, half_solve
from intention.solve.causal.fading import fading
from intention.solve.ladder import has_float64
from intention.solve.problem import Tokens

LENGTH = 32  # tokens of a chunk
AT_ONCE = 1 << 22  # numbers in the matrices that are factored at once (32 MiB)
MODERATE = 1e9  # condition of I + K K'
NOISE = 4.0  # times d eps: what rounding leaves in a state's sums where no token was


def rooted(tokens: Tokens, transposed: bool) -> tuple[Tensor, Tensor]:
    """q_t W_t, without values q_t A_t^-1, (B, N, ...); or W_t g_t where `query` holds g (B, N, k). In float64, with a
    bound of the condition from below (B,)."""
    wide = torch.float64 if has_float64(tokens.key.device) else tokens.key.dtype
    (batch, n, d), decay = tokens.key.shape, tokens.decay
    own = chunked(tokens.each(lambda x: x.to(wide)), LENGTH)
    gain = own.alpha.new_ones(batch, 1, 1, 1) if own.gain is None else own.gain.sqrt()
    rows = gain * own.key if own.value is None else torch.cat([gain * own.key, own.value], -1)
    rows = rows if own.weight is None else own.weight.sqrt() * rows
    fade = fading(rows.new_ones(batch, n) if decay is None else decay.to(wide).sqrt(), LENGTH)
    floor = own.alpha.sqrt().unsqueeze(-1) * torch.eye(d, rows.shape[-1], dtype=wide, device=rows.device)
    start = root_of_state(tokens, gain, rows.shape[-1])
    if decay is None:
        start = _shortened(torch.cat([floor[:, 0, 0], start], 1), d)
    before = _shortened(fade.to_end[:, :-1] * rows[:, :-1], d)
    fades = torch.cat([torch.ones_like(fade.whole[:, :1]), fade.whole[:, :-1]], 1)
    starts = _prefixes(torch.cat([start.unsqueeze(1), before], 1), fades)  # of the tokens before each chunk
    step = max(1, AT_ONCE // (batch * LENGTH * (2 * d + LENGTH) * rows.shape[-1]))
    found = []
    for first in range(0, rows.shape[1], step):
        some = slice(first, first + step)
        part = own.query[:, some], starts[:, some], rows[:, some]
        if decay is None:
            found.append(_read_chunks(*part, transposed))
        else:
            under = floor[:, some] if own.alpha.shape[1] > 1 else floor
            found.append(_read_tokens(*part, transposed, fade.share[:, some], fade.from_start[:, some], under))
    out = torch.cat([one for one, _ in found], 1)
    if own.value is not None:
        out = out / torch.where(gain > 0, gain, 1.0)
    return out.flatten(1, 2)[:, :n], torch.cat([two for _, two in found], 1).amax(1)


def root_of_state(tokens: Tokens, gain: Tensor, width: int) -> Tensor:
    """(B, d, d + k): rows of which a state's sums are the products.

    Along an eigenvector whose eigenvalue is rounding the sums with values tell whether a token was there: they are of
    the order of its root."""
    start = gain.new_zeros(*tokens.key.shape[::2], width)
    if tokens.gram is None:
        return start
    spectrum, vectors = torch.linalg.eigh(tokens.gram.to(start.dtype))
    eps, top = torch.finfo(start.dtype).eps, spectrum[:, -1:]
    rounding = tokens.key.shape[2] * eps
    there = spectrum > rounding * top
    if tokens.cross is None:
        return gain.squeeze(1) * torch.where(there, spectrum, 0.0).sqrt().unsqueeze(-1) * vectors.mT
    told = vectors.mT @ tokens.cross.to(start.dtype)
    most = told.abs().amax(-1)
    reach = (most / torch.where(there, spectrum, torch.inf).sqrt()).amax(-1, True) * top.sqrt()  # |K| |V|
    there = there | (most > NOISE * rounding * reach)
    size = torch.where(there, spectrum.clamp_min(eps * top), 0.0).sqrt().unsqueeze(-1)
    values = told / torch.where(size > 0, size, torch.inf)
    return torch.cat([gain.squeeze(1) * size * vectors.mT, values], -1)


def _prefixes(factors: Tensor, fades: Tensor) -> Tensor:
    """(B, n, d, d + k): of all up to each, by a tree: every QR adds rounding, and few follow each other."""
    n = factors.shape[1]
    if n == 1:
        return factors
    first, second, fade = factors[:, : n - n % 2 : 2], factors[:, 1::2], fades[:, 1::2]
    pairs = _prefixes(_joined(first, second, fade), fades[:, : n - n % 2 : 2] * fade)
    out = torch.empty_like(factors)
    out[:, 0], out[:, 1::2] = factors[:, 0], pairs
    out[:, 2::2] = _joined(pairs[:, : (n - 1) // 2], factors[:, 2::2], fades[:, 2::2])
    return out


def _joined(first: Tensor, second: Tensor, fade: Tensor) -> Tensor:
    """The factor of both, the first having faded."""
    return _shortened(torch.cat([fade * first, second], 2), first.shape[2])


def _shortened(rows: Tensor, d: int) -> Tensor:
    """d rows, of the same products of the first d columns with all."""
    if rows.shape[-2] <= d:
        return torch.nn.functional.pad(rows, (0, 0, 0, d - rows.shape[-2]))
    return torch.linalg.qr(rows, mode="r").R[..., :d, :]


def _read_chunks(x: Tensor, starts: Tensor, rows: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """Answers (B, n, C, ...) and conditions (B, n) of chunks without decays, alpha being in `starts`."""
    d = starts.shape[-2]
    key = _over(rows[..., :d], starts[..., :d])
    out, ratio = _read_together(x, key, starts, rows[..., d:], transposed), _ratio(starts[..., :d], rows[..., :d])
    alone = (~(key.square().sum((2, 3)) < MODERATE)).nonzero(as_tuple=True)  # looks at the host
    if alone[0].numel():
        kept = torch.ones_like(rows[alone][..., :1])
        share = kept.expand(*kept.shape[:-1], LENGTH).tril()
        out[alone], ratio[alone] = _read_tokens(x[alone], starts[alone], rows[alone], transposed, share, kept)
    return out, ratio


def _read_together(x: Tensor, key: Tensor, starts: Tensor, value: Tensor, transposed: bool) -> Tensor:
    d = starts.shape[-2]
    root, before = starts[..., :d], starts[..., d:]
    inner = key @ key.mT
    inner.diagonal(0, -2, -1).add_(1.0)
    pair = half_solve(torch.linalg.cholesky_ex(inner).L, torch.cat([key, value - key @ before], -1))  # [E, F]
    seen, rest = pair[..., :d], pair[..., d:]
    if transposed:
        out = x @ before.mT + (x @ rest.mT).tril() @ seen
    else:
        x = _over(x, root)
        if value.shape[-1]:
            return x @ before + (x @ seen.mT).tril() @ rest
        out = x - (x @ seen.mT).tril() @ seen
    return torch.linalg.solve_triangular(root, out.mT, upper=True).mT


def _read_tokens(
    x: Tensor,
    starts: Tensor,
    rows: Tensor,
    transposed: bool,
    share: Tensor,
    from_start: Tensor,
    floor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Answers (..., C, ...) and conditions (...) of chunks by a factor [R_t, Y_t] of each token."""
    d = starts.shape[-2]
    stack = [from_start.unsqueeze(-1) * starts.unsqueeze(-3), share.unsqueeze(-1) * rows.unsqueeze(-3)]
    if floor is not None:
        stack.insert(0, floor.expand_as(stack[0]))
    factor = torch.linalg.qr(torch.cat(stack, -2), mode="r").R[..., :d, :]
    root, rest, x = factor[..., :d], factor[..., d:], x.unsqueeze(-1)
    x = rest @ x if transposed else torch.linalg.solve_triangular(root.mT, x, upper=False)
    x = torch.linalg.solve_triangular(root, x, upper=True) if transposed or not rest.shape[-1] else rest.mT @ x
    return x.squeeze(-1), _ratio(root).amax(-1)


def _over(x: Tensor, root: Tensor) -> Tensor:
    """x R^-1"""
    return torch.linalg.solve_triangular(root, x, upper=True, left=False)


def _ratio(root: Tensor, added: Tensor | None = None) -> Tensor:
    """(...): of diagonal entries of A_t, after `added` rows, and of its factor before them."""
    largest, smallest = root.square().sum(-2), root.diagonal(0, -2, -1).square().amin(-1)
    largest = largest if added is None else largest + added.square().sum(-2)
    return largest.amax(-1) / smallest
