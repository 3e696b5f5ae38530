"""Causal least squares of a batch, forward and first-order backward: which chunks are done in which precision."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from intention.solve.causal import (
    Chunked,
    Fits,
    Later,
    Pulled,
    Tokens,
    answers,
    chunked,
    fit_chunks,
    pull_chunks,
    running,
)
from intention.solve.doors import no_autocast
from intention.solve.factor import EASY
from intention.solve.ladder import FLOAT64, PRIMAL, Report, has_float64

CHUNK = 64  # tokens


class Part(NamedTuple):
    """Chunks `first` to `last` of all sequences, in one precision."""

    first: int
    last: int
    own: Chunked
    fits: Fits


@no_autocast
def solve_causal(tokens: Tokens) -> tuple[Tensor, Report]:
    """Answers (B, N, k), or (B, N, d) without values; the report tells per sequence the worst of its chunks."""
    parts = fit_parts(tokens)
    dtype = tokens.key.dtype
    out = _join([answers(part.own, part.fits) for part in parts], tokens)
    ratio = torch.cat([part.fits.ratio.to(dtype) for part in parts], 1).amax(1)
    errors = [part.fits.ratio.amax(1) * torch.finfo(part.own.key.dtype).eps for part in parts]
    error = torch.stack([x.to(dtype) for x in errors]).amax(0) + torch.finfo(dtype).eps
    route = FLOAT64 if parts[0].own.key.dtype != dtype else PRIMAL
    return out, Report(torch.full_like(ratio, route), ratio, error)


@no_autocast
def pull_causal(grad: Tensor, tokens: Tokens) -> Tokens:
    """The gradients of all tensors of `tokens`, in the precisions of the forward. Fits are made again: to keep them
    would take more memory than the tokens do."""
    grad = chunked(tokens._replace(query=grad), _size(tokens)).query
    d, k = tokens.key.shape[-1], 0 if tokens.value is None else tokens.value.shape[-1]
    wide = torch.float64 if has_float64(grad.device) else grad.dtype
    nothing = tokens.key.new_zeros(tokens.key.shape[0], d, d + k, dtype=wide)
    later = Later(None if tokens.value is None else nothing[..., d:], nothing[..., :d])
    pulled: list[Pulled] = []
    for first, last, own, fits in reversed(fit_parts(tokens)):
        part, later = pull_chunks(grad[:, first:last].to(own.key.dtype), own, fits, later)
        pulled.insert(0, part)
    query, key, value, weight = (_join([part[i] for part in pulled], tokens) for i in range(4))
    alpha, gain = (torch.stack([part[i] for part in pulled]).sum(0) for i in (4, 5))
    gram = cross = None
    if tokens.gram is not None:
        gain = gain - (tokens.gram * later.gram).sum((1, 2))
        share = -1.0 if tokens.gain is None else -tokens.gain.view(-1, 1, 1)
        gram = (share * later.gram).to(tokens.gram.dtype)
    if tokens.cross is not None and later.cross is not None:
        cross = later.cross.to(tokens.cross.dtype)
    alpha, gain = alpha.to(tokens.alpha.dtype), None if tokens.gain is None else gain.to(tokens.gain.dtype)
    return Tokens(query, key, value, None if tokens.weight is None else weight, alpha, gain, gram, cross)  # type: ignore[arg-type]


def fit_parts(tokens: Tokens) -> list[Part]:
    """The chunks that need it, which come first, in float64; the rest in the working precision."""
    own = chunked(tokens, _size(tokens))
    n, dtype = own.key.shape[1], own.key.dtype
    fits = fit_chunks(own, *_sums(tokens, own))
    first = _hard_until(fits.ratio) if dtype != torch.float64 and has_float64(own.key.device) else 0
    if not first:
        return [Part(0, n, own, fits)]
    head = own.part(0, first, torch.float64)
    parts = [Part(0, first, head, fit_chunks(head, *_sums(tokens, head)))]
    if first < n:
        rest = Fits(*(None if x is None else x[:, first:] for x in fits))  # type: ignore[arg-type]
        parts.append(Part(first, n, own.part(first, n, dtype), rest))
    return parts


def _size(tokens: Tokens) -> int:
    return max(1, min(CHUNK, tokens.key.shape[1]))


def _sums(tokens: Tokens, own: Chunked) -> tuple[Tensor, Tensor | None]:
    """K'WK and K'WV before each chunk, and after the last."""
    key = own.key if own.weight is None else own.weight * own.key
    gram = running(tokens.gram, key.mT @ own.key)
    return gram, None if own.value is None else running(tokens.cross, key.mT @ own.value)


def _hard_until(ratio: Tensor) -> int:
    """How many chunks, from the first on, hold all that float32 does not serve. The one look at the host."""
    hard = (~(ratio < EASY[ratio.dtype])).any(0)
    return int((hard * torch.arange(1, len(hard) + 1, device=ratio.device)).amax())


def _join(parts: list[Tensor | None], tokens: Tokens) -> Tensor | None:
    """(B, N, ...) of chunks, without what filled the last one."""
    found = [part.to(tokens.key.dtype) for part in parts if part is not None]
    return torch.cat(found, 1).flatten(1, 2)[:, : tokens.key.shape[1]] if found else None
