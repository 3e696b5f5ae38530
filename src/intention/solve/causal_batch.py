"""Causal least squares of a batch, forward and first-order backward: which chunks are done in which precision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.causal import Chunked, Fits, Later, Pulled, Tokens, chunked, fit_chunks, pull_chunks, running
from intention.solve.doors import no_autocast
from intention.solve.factor import EASY
from intention.solve.ladder import FLOAT64, PRIMAL, Report, has_float64


class Kept(NamedTuple):
    """What the backward needs: chunks up to `head` in float64, the others in the working precision."""

    head: Fits | None
    tail: Fits | None


@no_autocast
def solve_causal(tokens: Tokens, size: int) -> tuple[Tensor, Kept, Report]:
    """Answers (B, N, k), or (B, N, d) without values; the report says per sequence what is the worst of its chunks."""
    own = chunked(tokens, size)
    n, dtype = own.key.shape[1], own.key.dtype
    out, tail = fit_chunks(own, *_sums(tokens, own))
    ratio, head = tail.ratio, None
    first = _float64_until(ratio, dtype) if has_float64(out.device) else 0  # the one look at the host
    route = torch.full_like(ratio[:, 0], FLOAT64 if first else PRIMAL)
    error = ratio * torch.finfo(dtype).eps
    if first:
        part = own.part(0, first, torch.float64)
        redone, head = fit_chunks(part, *_sums(tokens, part))
        out = torch.cat([redone.to(dtype), out[:, first:]], 1)
        better = head.ratio * torch.finfo(torch.float64).eps + torch.finfo(dtype).eps
        ratio, error = torch.cat([head.ratio.to(dtype), ratio[:, first:]], 1), torch.cat([better.to(dtype), error[:, first:]], 1)
        tail = None if first == n else Fits(*(None if x is None else x[:, first:] for x in tail))  # type: ignore[arg-type]
    out = out.flatten(1, 2)[:, : tokens.query.shape[1]]
    return out, Kept(head, tail), Report(route, ratio.amax(1), error.amax(1))


@no_autocast
def pull_causal(grad: Tensor, tokens: Tokens, kept: Kept, size: int) -> Tokens:
    """The gradients of all tensors of `tokens`, in the precision of the forward."""
    own = chunked(tokens._replace(query=grad), size)
    grad, own = own.query, chunked(tokens, size)
    first = 0 if kept.head is None else kept.head.ratio.shape[1]
    d, k = tokens.key.shape[-1], 0 if tokens.value is None else tokens.value.shape[-1]
    wide = torch.float64 if has_float64(grad.device) else grad.dtype
    nothing = tokens.key.new_zeros(tokens.key.shape[0], d, d + k, dtype=wide)
    later = Later(nothing[..., d:] if k else None, nothing[..., :d])
    parts: list[Pulled] = []
    for fits, (start, end) in ((kept.tail, (first, own.key.shape[1])), (kept.head, (0, first))):
        if fits is not None:
            dtype = fits.rows.dtype
            pulled, later = pull_chunks(grad[:, start:end].to(dtype), own.part(start, end, dtype), fits, later)
            parts.insert(0, pulled)
    n = tokens.key.shape[1]

    def joined(pieces: list[Tensor | None]) -> Tensor | None:
        if pieces[0] is None:
            return None
        whole = torch.cat([x.to(tokens.key.dtype) for x in pieces], 1)  # type: ignore[union-attr]
        return whole.flatten(1, 2)[:, :n]

    query, key, value, weight = (joined([part[i] for part in parts]) for i in range(4))
    alpha, gain = (torch.stack([part[i] for part in parts]).sum(0) for i in (4, 5))
    gram = cross = None
    if tokens.gram is not None:
        gain = gain - (tokens.gram * later.gram).sum((1, 2))
        gram = -later.gram if tokens.gain is None else -later.gram * tokens.gain.view(-1, 1, 1)
    if tokens.cross is not None and later.cross is not None:
        cross = later.cross.to(tokens.cross.dtype)
    dtype = tokens.key.dtype
    return Tokens(
        query,  # type: ignore[arg-type]
        key,  # type: ignore[arg-type]
        value,
        None if tokens.weight is None else weight,
        alpha.to(dtype),
        None if tokens.gain is None else gain.to(dtype),
        None if gram is None else gram.to(tokens.gram.dtype),  # type: ignore[union-attr]
        cross,
    )


def _sums(tokens: Tokens, own: Chunked) -> tuple[Tensor, Tensor | None]:
    """K'WK and K'WV before each chunk, and after the last."""
    key = own.key if own.weight is None else own.weight * own.key
    gram = running(tokens.gram, key.mT @ own.key)
    return gram, None if own.value is None else running(tokens.cross, key.mT @ own.value)


def _float64_until(ratio: Tensor, dtype: torch.dtype) -> int:
    """How many chunks, from the first on, hold all that float32 does not serve."""
    if dtype == torch.float64:
        return 0
    hard = (~(ratio < EASY[dtype])).any(0)
    return int((hard * torch.arange(1, len(hard) + 1, device=ratio.device)).amax())
