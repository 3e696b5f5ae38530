"""Causal least squares of a batch, forward and first-order backward: span by span, each in the precision it needs."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
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

CHUNK = 64  # tokens; with d = 64, chunks of 32 and of 128 are slower
SPAN = 16  # chunks of all sequences that are worked on at once: what they need stays in the cache
FIRST = 2  # chunks of a sequence in the first span: where there are few tokens, float64 is needed most often


class Sums(NamedTuple):
    """K'WK and K'WV of all tokens so far, (B, d, d) and (B, d, k), float64."""

    gram: Tensor | None
    cross: Tensor | None


class Span(NamedTuple):
    """Some chunks of every sequence, in the precision that they need."""

    own: Chunked
    fits: Fits
    after: Sums


@no_autocast
def solve_causal(tokens: Tokens) -> tuple[Tensor, Report]:
    """Answers (B, N, k), or (B, N, d) without values; the report tells per sequence the worst of its chunks."""
    own, dtype = chunked(tokens, _size(tokens)), tokens.key.dtype
    outs, ratios, errors, route = [], [], [], PRIMAL
    sums = Sums(tokens.gram, tokens.cross)
    for first, last in _spans(own):
        span = fit_span(own.part(first, last), sums)
        sums, working = span.after, span.own.key.dtype
        outs.append(answers(span.own, span.fits).to(dtype))
        ratios.append(span.fits.ratio.amax(1).to(dtype))
        errors.append((span.fits.ratio.amax(1) * torch.finfo(working).eps).to(dtype))
        route = route if working == dtype else FLOAT64
    out = _join(outs, tokens)
    ratio, error = torch.stack(ratios).amax(0), torch.stack(errors).amax(0) + torch.finfo(dtype).eps
    return out, Report(torch.full_like(ratio, route), ratio, error)


@no_autocast
def pull_causal(grad: Tensor, tokens: Tokens) -> Tokens:
    """The gradients of all tensors of `tokens`, in the precisions of the forward. Fits are made again: to keep them
    would take more memory than the tokens do."""
    own = chunked(tokens, _size(tokens))
    grad = chunked(tokens._replace(query=grad), _size(tokens)).query
    spans = list(_spans(own))
    before = [Sums(tokens.gram, tokens.cross)]
    for first, last in spans[:-1]:
        before.append(_add(before[-1], own.part(first, last)))
    later, pulled = _nothing(tokens), []
    for (first, last), sums in reversed(list(zip(spans, before, strict=True))):
        span = fit_span(own.part(first, last), sums)
        part, later = pull_chunks(grad[:, first:last].to(span.own.key.dtype), span.own, span.fits, later)
        pulled.append(part)
    return _grads(pulled[::-1], later, tokens)


def fit_span(own: Chunked, before: Sums) -> Span:
    span = _fit(own, before)
    if own.key.dtype == torch.float64 or not has_float64(own.key.device):
        return span
    if bool((span.fits.ratio < EASY[own.key.dtype]).all()):  # looks at the host; NaN is not less
        return span
    return _fit(own.to(torch.float64), before)


def _fit(own: Chunked, before: Sums) -> Span:
    key = own.key if own.weight is None else own.weight * own.key
    gram = running(before.gram, key.mT @ own.key)
    cross = None if own.value is None else running(before.cross, key.mT @ own.value)
    fits = fit_chunks(own, gram, cross)
    return Span(own, fits, Sums(gram[:, -1], None if cross is None else cross[:, -1]))


def _add(before: Sums, own: Chunked) -> Sums:
    """The sums after some chunks."""
    key = (own.key if own.weight is None else own.weight * own.key).flatten(1, 2).double()
    gram, cross = key.mT @ own.key.flatten(1, 2).double(), None
    if own.value is not None:
        cross = key.mT @ own.value.flatten(1, 2).double()
        cross = cross if before.cross is None else before.cross + cross
    return Sums(gram if before.gram is None else before.gram + gram, cross)


def _size(tokens: Tokens) -> int:
    return max(1, min(CHUNK, tokens.key.shape[1]))


def _spans(own: Chunked) -> Iterator[tuple[int, int]]:
    batch, n = own.key.shape[:2]
    step = max(1, SPAN // max(batch, 1)) if own.key.device.type == "cpu" else n
    return pairwise([0, *range(min(FIRST, n), n, step), n])


def _nothing(tokens: Tokens) -> Later:
    """Of what comes after the last token."""
    d, k = tokens.key.shape[-1], 0 if tokens.value is None else tokens.value.shape[-1]
    wide = torch.float64 if has_float64(tokens.key.device) else tokens.key.dtype
    zeros = tokens.key.new_zeros(tokens.key.shape[0], d, d + k, dtype=wide)
    return Later(None if tokens.value is None else zeros[..., d:], zeros[..., :d])


def _grads(pulled: list[Pulled], later: Later, tokens: Tokens) -> Tokens:
    """The gradients of spans as those of the call."""

    def joined(name: str) -> Tensor | None:
        parts = [getattr(part, name) for part in pulled]
        return None if parts[0] is None else _join([part.to(tokens.key.dtype) for part in parts], tokens)

    alpha, gain = (torch.stack([getattr(part, name) for part in pulled]).sum(0) for name in ("alpha", "gain"))
    gram = cross = None
    if tokens.gram is not None:
        gain = gain - (tokens.gram * later.gram).sum((1, 2))
        share = -1.0 if tokens.gain is None else -tokens.gain.view(-1, 1, 1)
        gram = (share * later.gram).to(tokens.gram.dtype)
    if tokens.cross is not None and later.cross is not None:
        cross = later.cross.to(tokens.cross.dtype)
    return Tokens(
        joined("query"),  # type: ignore[arg-type]
        joined("key"),  # type: ignore[arg-type]
        joined("value"),
        None if tokens.weight is None else joined("weight"),
        alpha.to(tokens.alpha.dtype),
        None if tokens.gain is None else gain.to(tokens.gain.dtype),
        gram,
        cross,
    )


def _join(parts: list[Tensor], tokens: Tokens) -> Tensor:
    """(B, N, ...) of chunks, without what filled the last one."""
    whole = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
    return whole.flatten(1, 2)[:, : tokens.key.shape[1]]
