"""Causal least squares of a batch, forward and first-order backward: span by span, each in the precision it needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intention.solve.causal import chunks
from intention.solve.causal.chunks import BLOCK, Before, Chunked, Later, Pulled, chunked, running
from intention.solve.ladder import FLOAT64, PRIMAL, Report, has_float64, pack
from intention.solve.native import causal as native
from intention.solve.problem import Tokens

# Tokens of a chunk. The first is short: with few tokens float64 is needed most often. The next ones are as long as all
# before them, so that Sigma does not grow much within a chunk, up to LONGEST. Those of gradients stay short, because
# their work on a chunk grows with its square.
FIRST, LONGEST, PULLED = 128, 512, 64
STEEP = 1e3  # |k|^2 / alpha beyond which gradients of transformed queries are refined
EASY = 30.0  # the ratio below which float32 serves: of the largest diagonal entry, unlike that of a single fit
SPAN = 16  # chunks that are worked on at once: enough to call LAPACK for, and what they need stays in the cache


class Prefix(NamedTuple):
    """K'WK and K'WV of all tokens so far, (B, d, d) and (B, d, k), float64."""

    gram: Tensor | None
    cross: Tensor | None


class Span(NamedTuple):
    """Some chunks of every sequence, flat, in the precision that they need."""

    own: Chunked
    before: Before
    after: Prefix


def solve_causal(tokens: Tokens) -> tuple[Tensor, Tensor, bool]:
    """Answers (B, N, k), or (B, N, d) without values, a packed report, and whether it has been looked at and is good.

    The report tells per sequence the worst of its chunks.
    """
    answered = tokens.query if tokens.value is None else tokens.value
    out = torch.empty_like(answered, memory_format=torch.contiguous_format)
    if not (out.shape[0] and out.shape[1]):
        one = tokens.key.new_ones(len(tokens.key))
        return out, pack(Report(PRIMAL * one, one, torch.finfo(out.dtype).eps * one)), False
    reports = [_solve_group(tokens.take(group), out[group]) for group in _groups(tokens)]
    return out, pack(Report(*(torch.cat(parts) for parts in zip(*reports, strict=True)))), False


def _solve_group(tokens: Tokens, out: Tensor) -> Report:
    dtype = tokens.key.dtype
    ratios, errors, route, first = [], [], PRIMAL, 0
    sums = Prefix(tokens.gram, tokens.cross)
    for own in (spans := _spans(tokens, LONGEST)):
        span = fit_span(own, sums, own is spans[-1])
        shape = own.key.shape[:3]
        last = first + shape[1] * shape[2]
        into = out[:, first:last].unflatten(1, shape[1:])
        for where, part, fits in chunks.blocks(span.own, span.before):
            into[:, :, where] = chunks.answers(part, fits).unflatten(0, shape[:2])
        ratio, working = span.before.ratio.view(shape[:2]).amax(1), span.own.key.dtype
        ratios.append(ratio.to(dtype))
        errors.append((ratio * torch.finfo(working).eps).to(dtype))
        sums, route, first = span.after, route if working == dtype else FLOAT64, last
    ratio, error = torch.stack(ratios).amax(0), torch.stack(errors).amax(0) + torch.finfo(dtype).eps
    return Report(torch.full_like(ratio, route), ratio, error)


def pull_causal(grad: Tensor, tokens: Tokens) -> Tokens:
    """The gradients of all tensors of `tokens`, in the precisions of the forward."""
    steep = tokens.value is None and _steep(tokens)
    if not steep and (found := native.backward(grad, tokens)) is not None:
        pulled = Pulled._make(found[:6])  # without weights their gradient is not asked for
        return _grads([pulled], None if found.gram is None else Later(found.cross, found.gram), tokens)
    if not (tokens.key.shape[0] and tokens.key.shape[1]):
        return tokens.each(torch.zeros_like)
    parts = [_pull_group(grad[group], tokens.take(group)) for group in _groups(tokens)]
    return Tokens._make(None if xs[0] is None else torch.cat(xs) for xs in zip(*parts, strict=True))


def _steep(tokens: Tokens) -> bool:
    """Whether the gradients of transformed queries need a refinement: they lose the square of |k|^2 / alpha."""
    if not tokens.key.numel():
        return False
    size = torch.linalg.vector_norm(tokens.key, dim=-1).amax(-1).square()
    size = size if tokens.gain is None else size * tokens.gain
    return not bool((size < STEEP * tokens.alpha).all())


def _pull_group(grad: Tensor, tokens: Tokens) -> Tokens:
    """Fits are made again: to keep them would take more memory than the tokens do."""
    spans = _spans(tokens, PULLED)
    grads = [own.query for own in _spans(tokens._replace(query=grad, value=None), PULLED)]
    before = [Prefix(tokens.gram, tokens.cross)]
    for own in spans[:-1]:
        before.append(_add(before[-1], own))
    d, k = tokens.key.shape[-1], 0 if tokens.value is None else tokens.value.shape[-1]
    wide = torch.float64 if has_float64(tokens.key.device) else tokens.key.dtype
    none = tokens.key.new_zeros(len(tokens.key), d, d + k, dtype=wide)  # what comes after the last token
    later, pulled = Later(None if tokens.value is None else none[..., d:], none[..., :d]), []
    for own, arrived, sums in reversed(list(zip(spans, grads, before, strict=True))):
        span = fit_span(own, sums, True)
        arrived = arrived.to(span.own.key.dtype).flatten(0, 1)
        gram = None
        if tokens.value is None:  # S before each chunk, flat
            step = _counted(span.own).mT @ span.own.key
            gram = running(sums.gram, step.unflatten(0, own.key.shape[:2]))[0].flatten(0, 1)
        part, later = chunks.pull_chunks(arrived, span.own, chunks.fit_chunks(span.own, span.before), later, gram)
        pulled.append(part)
    return _grads(pulled[::-1], later, tokens)


def _groups(tokens: Tokens) -> list[slice]:
    """Sequences that are worked on at once: some by one chunk of each, or one by some chunks. No token is copied."""
    batch, n = tokens.key.shape[:2]
    if tokens.key.device.type != "cpu":
        return [slice(0, batch)]
    size = SPAN if batch * LONGEST >= n else 1
    return [slice(first, min(first + size, batch)) for first in range(0, batch, size)] or [slice(0, 0)]


def _spans(tokens: Tokens, longest: int) -> list[Chunked]:
    """The chunks of a group. Those of a span are of one length."""
    batch, n = tokens.key.shape[:2]
    several = n if tokens.key.device.type != "cpu" else SPAN if batch == 1 else 1
    if several > 1:
        longest = max(min(FIRST, longest), min(longest, n // SPAN // BLOCK * BLOCK))
    spans, first = [], 0
    while first < n or not spans:
        size = max(1, min(n - first, first or FIRST, longest))
        count = max(1, min(several, (n - first) // size)) if size == longest else 1
        own = (None if x is None else x[:, first : first + count * size] for x in tokens[:4])
        spans.append(chunked(Tokens._make((*own, *tokens[4:])), size))
        first += count * size
    return spans


def fit_span(own: Chunked, before: Prefix, last: bool) -> Span:
    """`last`: the sums after it are not needed."""
    dtype = own.key.dtype
    if dtype == torch.float64 or not has_float64(own.key.device):
        return _fit(own, before, last, dtype)
    if before.gram is not None or bool((_first_ratio(own) < EASY).all()):  # looks at the host
        span = _fit(own, before, last, dtype)
        if bool((span.before.ratio < EASY).all()):  # NaN is not less
            return span
    return _fit(own, before, last, torch.float64)


def _first_ratio(own: Chunked) -> Tensor:
    """The ratio of the first chunk of all, before which Sigma is alpha I: known without a factor."""
    squares = own.key[:, 0].square() if own.weight is None else own.weight[:, 0] * own.key[:, 0].square()
    gain, alpha = 1.0 if own.gain is None else own.gain.view(-1), own.alpha.view(-1)
    return squares.sum(1).amax(-1) * gain / alpha + 1


def _fit(given: Chunked, before: Prefix, last: bool, dtype: torch.dtype) -> Span:
    shape, own = given.key.shape[:2], given.flat(dtype)
    key = _counted(own)
    if last and shape[1] == 1:
        gram, cross = (None if x is None else x.to(dtype, copy=True) for x in before)
        return Span(own, chunks.fit_before(own, gram, cross, (key * own.key).sum(1)), Prefix(None, None))
    step, cross, all_cross = torch.bmm(key.mT, own.key), None, None
    gram, all_gram = running(before.gram, step.unflatten(0, shape))
    if own.value is not None:
        cross, all_cross = running(before.cross, torch.bmm(key.mT, own.value).unflatten(0, shape))
        cross = cross.flatten(0, 1)
    start = None if before.gram is None and shape[1] == 1 else gram.flatten(0, 1)
    fits = chunks.fit_before(own, start, cross, step.diagonal(0, -2, -1))
    return Span(own, fits, Prefix(all_gram, all_cross))


def _counted(own: Chunked) -> Tensor:
    """w k"""
    return own.key if own.weight is None else own.weight * own.key


def _add(before: Prefix, own: Chunked) -> Prefix:
    """The sums after some chunks."""
    key = _counted(own).flatten(1, 2).double()
    gram, cross = key.mT @ own.key.flatten(1, 2).double(), None
    if own.value is not None:
        cross = key.mT @ own.value.flatten(1, 2).double()
        cross = cross if before.cross is None else before.cross + cross
    return Prefix(gram if before.gram is None else before.gram + gram, cross)


def _grads(pulled: list[Pulled], later: Later | None, tokens: Tokens) -> Tokens:
    """The gradients of spans as those of the call; `later` is asked for where there is a state."""

    def joined(parts: Sequence[Any]) -> Any:
        """(B, N, ...) of flat chunks."""
        if parts[0] is None:
            return None
        flat = [x.to(tokens.key.dtype).unflatten(0, (len(tokens.key), -1)).flatten(1, 2) for x in parts]
        return flat[0] if len(flat) == 1 else torch.cat(flat, 1)

    *own, alpha, gain = zip(*pulled, strict=True)
    alpha, gain = (torch.stack(parts).sum(0) for parts in (alpha, gain))
    query, key, value, weight = map(joined, own)
    gram = cross = None
    if tokens.gram is not None and later is not None:
        gain = gain - (tokens.gram * later.gram).sum((1, 2))
        share = -1.0 if tokens.gain is None else -tokens.gain.view(-1, 1, 1)
        gram = (share * later.gram).to(tokens.gram.dtype)
    if tokens.cross is not None and later is not None and later.cross is not None:
        cross = later.cross.to(tokens.cross.dtype)
    weight = None if tokens.weight is None else weight
    alpha, gain = alpha.to(tokens.alpha.dtype), None if tokens.gain is None else gain.to(tokens.gain.dtype)
    return Tokens(query, key, value, weight, alpha, gain, gram, cross)
