"""Causal least squares by triangular factors, made by QR of the tokens themselves. O(N d^2 (d + k)) at most.

    [sqrt(c) K_t, V_t; sqrt(alpha) I, 0] = Q_t [R_t, Y_t; 0, *]   with rows sqrt(D_ts w_s) of the tokens s <= t
    A_t = R_t'R_t,   W_t = R_t^-1 Y_t / sqrt(c)

No Gram matrix is formed, so the condition of R_t is the root of that of A_t: for sequences that sums in float64 do not
serve (low-rank keys beside a small alpha), and decays so strong that a chunk is nearly empty. A chunk starts from the
factor of all before it. Inside, tokens have a factor each, of this one and of few rows; or, where no token forgets and
one chunk alone has a moderate condition, with K = sqrt(c w) k R^-1 and V = sqrt(w) v,

    L L' = I + K K',   E = L^-1 K,   F = L^-1 (V - K Y)
    R A_t^-1 R' = I - E_{<=t}'E_{<=t},   R W_t = Y + E_{<=t}'F_{<=t}

as in `causal`, but in coordinates in which all tokens before the chunk, and alpha, are the identity.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention.solve.causal import Tokens, chunked, half_solve
from intention.solve.ladder import has_float64

LENGTH, BLOCK = 32, 16  # tokens of a chunk, and chunks of a block
AT_ONCE = 1 << 22  # numbers in the matrices that are factored at once (32 MiB)
MODERATE = 1e9  # condition of I + K K'


def rooted(tokens: Tokens, log_decay: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
    """q_t W_t, without values q_t A_t^-1, (B, N, ...); or W_t g_t where `query` holds g (B, N, k). In float64, with a
    bound of the condition from below (B,)."""
    wide = torch.float64 if has_float64(tokens.key.device) else tokens.key.dtype
    batch, n, d = tokens.key.shape
    own = chunked(Tokens(*(None if x is None else x.to(wide) for x in tokens)), LENGTH)  # type: ignore[arg-type]
    gain = own.alpha.new_ones(batch, 1, 1, 1) if own.gain is None else own.gain.sqrt()
    rows = gain * own.key if own.value is None else torch.cat([gain * own.key, own.value], -1)
    rows = rows if own.weight is None else own.weight.sqrt() * rows
    steps = rows.new_zeros(rows.shape[:3])
    if log_decay is not None:
        steps = torch.nn.functional.pad(log_decay.to(wide), (0, -n % LENGTH)).unflatten(1, (-1, LENGTH))
    total = steps.cumsum(-1).unsqueeze(-1) / 2  # of roots of decays
    floor = own.alpha.squeeze(1).sqrt() * torch.eye(d, rows.shape[-1], dtype=wide, device=rows.device)
    start = _root(tokens, gain, rows.shape[-1])
    added = rows[..., :d].square().sum((2, 3)).amax(1) / own.alpha.view(-1)  # bounds K K', as R'R >= alpha I
    together = log_decay is None and bool((added < MODERATE).all())  # looks at the host
    if together:
        start = torch.linalg.qr(torch.cat([floor, start], 1), mode="r").R[:, :d]
    starts = _starts(start, rows, total)
    step = max(1, AT_ONCE // (batch * LENGTH * (2 * d + LENGTH) * rows.shape[-1]))
    found = []
    for first in range(0, rows.shape[1], step):
        some = slice(first, first + step)
        x, before, inside = own.query[:, some], starts[:, some], rows[:, some]
        if together:
            found.append((_read_chunks(x, before, inside, transposed), _ratio(before[..., :d], inside[..., :d])))
        else:
            factor = _factors(floor, before, inside, total[:, some])
            found.append((_read(x, factor, own.value is not None, transposed), _ratio(factor[..., :d]).amax(-1)))
    out = torch.cat([one for one, _ in found], 1)
    if own.value is not None:
        out = out / torch.where(gain > 0, gain, 1.0)
    return out.flatten(1, 2)[:, :n], torch.cat([two for _, two in found], 1).amax(1)


def _root(tokens: Tokens, gain: Tensor, width: int) -> Tensor:
    """(B, d, d + k): rows of which a state's sums are the products."""
    start = gain.new_zeros(*tokens.key.shape[::2], width)
    if tokens.gram is None:
        return start
    spectrum, vectors = torch.linalg.eigh(tokens.gram.to(start.dtype))
    top = spectrum[:, -1:]
    there = spectrum > tokens.key.shape[2] * torch.finfo(start.dtype).eps * top
    size = torch.where(there, spectrum, 0.0).sqrt().unsqueeze(-1)
    keys = gain.squeeze(1) * size * vectors.mT
    if tokens.cross is None:
        return keys
    values = vectors.mT @ tokens.cross.to(start.dtype) / torch.where(size > 0, size, torch.inf)
    return torch.cat([keys, values], -1)


def _starts(start: Tensor, rows: Tensor, total: Tensor) -> Tensor:
    """(B, n, d, d + k): the factor of the tokens before each chunk, from `start`.

    Every QR adds rounding, so that few follow each other: block by block, and in a block each chunk by itself.
    """
    found, d, ends = [], start.shape[1], total[:, :, -1:].cumsum(1)
    for first in range(0, rows.shape[1], BLOCK):
        here, end = rows[:, first : first + BLOCK], ends[:, first : first + BLOCK]
        origin = ends[:, first - 1 : first] if first else torch.zeros_like(end[:, :1])
        own = total[:, first : first + BLOCK]
        at = (end - own[:, :, -1:] + own).flatten(1, 2)
        until = torch.cat([origin, end], 1)  # before each chunk, and at the end of the block
        n, size = here.shape[1], here.shape[1] * here.shape[2]
        seen = torch.arange(size, device=rows.device) < here.shape[2] * torch.arange(n + 1, device=rows.device)[:, None]
        share = torch.where(seen, until.squeeze(-1) - at.mT, -torch.inf).exp()  # (B, n + 1, tokens)
        stack = torch.cat(
            [
                (until - origin).exp() * start.unsqueeze(1),
                share.unsqueeze(-1) * here.flatten(1, 2).unsqueeze(1),
            ],
            2,
        )
        factors = torch.linalg.qr(stack, mode="r").R[:, :, :d]
        found.append(torch.cat([start.unsqueeze(1), factors[:, 1:-1]], 1))
        start = factors[:, -1]
    return torch.cat(found, 1)


def _factors(floor: Tensor, starts: Tensor, rows: Tensor, total: Tensor) -> Tensor:
    """(B, n, C, d, d + k): [R_t, Y_t]"""
    size, d = rows.shape[2], floor.shape[1]
    share = (total - total.mT).tril().exp().tril()  # (B, n, C, C)
    before = total.exp().unsqueeze(-1) * starts.unsqueeze(2)
    inside = share.unsqueeze(-1) * rows.unsqueeze(2)
    floor = floor.view(len(floor), 1, 1, d, -1).expand(*rows.shape[:2], size, d, rows.shape[-1])
    return torch.linalg.qr(torch.cat([floor, before, inside], -2), mode="r").R[..., :d, :]


def _read(x: Tensor, factor: Tensor, values: bool, transposed: bool) -> Tensor:
    d = factor.shape[-2]
    root, rest = factor[..., :d], factor[..., d:]
    x = x.unsqueeze(-1)
    if not transposed:
        x = torch.linalg.solve_triangular(root.mT, x, upper=False)
        if values:
            return (rest.mT @ x).squeeze(-1)
    else:
        x = rest @ x
    return torch.linalg.solve_triangular(root, x, upper=True).squeeze(-1)


def _read_chunks(x: Tensor, starts: Tensor, rows: Tensor, transposed: bool) -> Tensor:
    d = starts.shape[-2]
    root, before, value = starts[..., :d], starts[..., d:], rows[..., d:]
    key = _over(rows[..., :d], root)
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


def _over(x: Tensor, root: Tensor) -> Tensor:
    """x R^-1"""
    return torch.linalg.solve_triangular(root, x, upper=True, left=False)


def _ratio(root: Tensor, added: Tensor | None = None) -> Tensor:
    """(B, n, ...): of diagonal entries of A_t, after `added` rows, and of its factor before them."""
    largest, smallest = root.square().sum(-2), root.diagonal(0, -2, -1).square().amin(-1)
    largest = largest if added is None else largest + added.square().sum(-2)
    return largest.amax(-1) / smallest
