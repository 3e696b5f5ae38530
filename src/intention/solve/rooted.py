"""Causal least squares by a triangular factor for every token, made by QR of the tokens themselves. O(N d^2 (d + k)).

    [sqrt(c) K_t, V_t; sqrt(alpha) I, 0] = Q_t [R_t, Y_t; 0, *]   with rows sqrt(D_ts w_s) of the tokens s <= t
    A_t = R_t'R_t,   W_t = R_t^-1 Y_t / sqrt(c)

No Gram matrix is formed, so the condition of R_t is the root of that of A_t: for sequences that sums in float64 do not
serve (low-rank keys beside a small alpha), and decays so strong that a chunk is nearly empty. A chunk starts from the
factor of all before it; that of a token in the chunk is made of this one and of few rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from intention.solve.causal import Tokens, chunked
from intention.solve.ladder import has_float64

LENGTH = 16  # tokens of a chunk
AT_ONCE = 1 << 22  # numbers in the matrices that are factored at once (32 MiB)


def rooted(tokens: Tokens, log_decay: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor]:
    """q_t W_t, without values q_t A_t^-1, (B, N, ...); or W_t g_t where `query` holds g (B, N, k). In float64, with a
    bound of the condition from below (B,)."""
    wide = torch.float64 if has_float64(tokens.key.device) else tokens.key.dtype
    batch, n, d = tokens.key.shape
    own = chunked(Tokens(*(None if x is None else x.to(wide) for x in tokens)), LENGTH)  # type: ignore[arg-type]
    gain = tokens.alpha.new_ones(batch, 1, 1, 1) if own.gain is None else own.gain.sqrt()
    rows = gain * own.key if own.value is None else torch.cat([gain * own.key, own.value], -1)
    rows = rows if own.weight is None else own.weight.sqrt() * rows
    steps = rows.new_zeros(rows.shape[:3])
    if log_decay is not None:
        steps = torch.nn.functional.pad(log_decay.to(wide), (0, -n % LENGTH)).unflatten(1, (-1, LENGTH))
    total = steps.cumsum(-1).unsqueeze(-1) / 2  # of roots of decays
    floor = own.alpha.squeeze(1).sqrt() * torch.eye(d, rows.shape[-1], dtype=wide, device=rows.device)
    starts = _starts(_root(tokens, gain, rows.shape[-1]), rows, total)
    step = max(1, AT_ONCE // (batch * LENGTH * (2 * d + LENGTH) * rows.shape[-1]))
    found = []
    for first in range(0, rows.shape[1], step):
        some = slice(first, first + step)
        factor = _factors(floor, starts[:, some], rows[:, some], total[:, some])
        found.append((_read(own.query[:, some], factor, own.value is not None, transposed), _ratio(factor[..., :d])))
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
    """(B, n, d, d + k): the factor of the tokens before each chunk, without alpha."""
    found, d = [start], start.shape[1]
    later = (total[:, :, -1:] - total).exp() * rows
    whole = total[:, :, -1:].exp()
    for i in range(rows.shape[1] - 1):
        found.append(torch.linalg.qr(torch.cat([whole[:, i] * found[-1], later[:, i]], 1), mode="r").R[:, :d])
    return torch.stack(found, 1)


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


def _ratio(root: Tensor) -> Tensor:
    """(B, n): of diagonal entries of A_t and of its factor."""
    largest, smallest = root.square().sum(-2).amax(-1), root.diagonal(0, -2, -1).square().amin(-1)
    return (largest / smallest).amax(-1)
