"""Causal least squares that forgets: token s counts D_ts = prod_{s<r<=t} gamma_r times its weight at time t.

    A_t = alpha_t I + c (D_t0 S + sum_{s<=t} D_ts w_s k_s k_s')
    o_t = q_t A_t^-1 (D_t0 B + sum_{s<=t} D_ts w_s k_s v_s')

Blocks of a few tokens, of which some are worked on at once; what is before each comes from sums in float64. Within a
block D_ts = c_t / c_s, so A_t / c_t would be a sum over tokens as in `chunks`, if alpha_t / c_t did not change with t.
With one number beta in its place it is: A_t = B_t + delta_t I, where B_t^-1 costs matrix products alone. Of
(I + delta_t B_t^-1) z_t = B_t^-1 q_t the spectrum is known to lie between 1 and alpha_t / (beta c_t): Chebyshev's
iteration, whose number of steps is known as well. Blocks that float32 does not serve are done in float64; in those in
which too much is forgotten for this (a decay of 0: everything) every token has a factor of its own. Where no token of a
span feels more than the last W <= FEW, that factor has W rows: with u_s^2 = D_ts w_s

    z_t = (q_t - c sum_s u_s y_s k_s) / alpha_t,   (alpha_t I + c [u_r u_s k_r k_s']) y = [u_s k_s q_t']
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from intention.solve.causal import gradients
from intention.solve.causal.chunks import chunked, half_solve
from intention.solve.causal.fading import chunks, faded_sums, fading
from intention.solve.causal.gradients import Slopes
from intention.solve.ladder import FLOAT64, PRIMAL, Report, has_float64, pack
from intention.solve.native import causal as native
from intention.solve.problem import Tokens

# Tokens: the longest of which few forget more than SHORT, as long blocks need fewer factors and more steps.
BLOCKS = (32, 16, 8)
SHORT = 0.1
SEQUENCES, AT_ONCE = 16, 64  # that are worked on at once, and blocks of them: what they need stays in the cache
WEAKEST = 1e-2  # of alpha_t / c_t, the smallest of a block to the largest: beyond it tokens have factors of their own
FACTORED = 32  # blocks whose tokens are factored at once
NUMBERS = 1 << 18  # of factors that are made at once
FEW = 40  # tokens: beyond as many Chebyshev's iteration is faster
FORGOTTEN = 1e-9  # of alpha, the trace of what changes A_t by less than counts
EASY = 30.0  # the ratio below which float32 serves
ENOUGH = {torch.float32: 1e-7, torch.float64: 1e-14}  # what Chebyshev's iteration leaves
HIDDEN = 1e-10  # the same in float64, where answers are in float32


class Blocks(NamedTuple):
    """Blocks, flat (M, C, ...): everything that their fits need."""

    query: Tensor
    key: Tensor
    value: Tensor | None
    weight: Tensor | None  # (M, C, 1)
    alpha: Tensor  # (M, C, 1)
    gain: Tensor | None  # (M, 1, 1)
    grad: Tensor | None  # of the answers, where z_t and r_t are wanted
    share: Tensor  # (M, C, C): D_ts, 0 above the diagonal
    from_start: Tensor  # (M, C, 1): c_t, the decay from before the block
    before: Tensor  # (M, d, d + k): [S, B] before the block

    def take(self, index: Tensor | None, dtype: torch.dtype) -> Blocks:
        return Blocks._make(None if x is None else (x if index is None else x[index]).to(dtype) for x in self)

    def counted(self, x: Tensor) -> Tensor:
        return x if self.weight is None else self.weight * x

    def rows(self) -> Tensor:
        """(M, C or 2 C, d): what A_t^-1 is applied to, q_t and B_t g_t (without values g_t)."""
        if self.grad is None:
            return self.query
        if self.value is None:
            return torch.cat([self.query, self.grad], 1)
        told = (self.share * (self.grad @ self.value.mT)) @ self.counted(self.key)
        told = told + self.from_start * (self.grad @ self.before[..., self.key.shape[2] :].mT)
        return torch.cat([self.query, told], 1)

    def read(self, z: Tensor) -> Tensor:
        """z_t B_t; without values z_t."""
        if self.value is None:
            return z
        near = (self.share * (z @ self.key.mT)) @ self.counted(self.value)
        return near + self.from_start * (z @ self.before[..., self.key.shape[2] :])


class SolvedBlocks(NamedTuple):
    """Some blocks of a span, in the precision that they need."""

    which: Tensor | None  # None: all
    own: Blocks
    z: Tensor  # A_t^-1 of their rows
    report: Tensor  # (M, 3), packed; the condition is a lower bound of that of the worst A_t


class Base(NamedTuple):
    """B_t^-1 = (P - c E_{<=t}' E_{<=t}) / c_t."""

    inverse: Tensor  # P
    rows: Tensor  # E
    ratio: Tensor  # (M,): a lower bound of the condition
    easy: Tensor  # (M,): whether float32 serves
    beta: Tensor  # (M, 1, 1)

    def take(self, index: Tensor) -> Base:
        return Base._make(x[index] for x in self)


class Few(NamedTuple):
    """The tokens that those of blocks feel, W of each, and room to their left."""

    key: Tensor  # (M, W + C, d): the W tokens before a block, and its own
    value: Tensor | None
    roots: Tensor  # (M, C, W): u, of the last W tokens of each
    ratio: Tensor  # (M,): a bound of the condition from above

    def take(self, some: slice, dtype: torch.dtype) -> Few:
        return Few._make(None if x is None else x[some].to(dtype) for x in self)


def solve(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Answers (B, N, k), or (B, N, d) without values, and a packed report: the worst token of each sequence."""
    if (found := native.forget_forward(tokens)) is not None:
        return found
    outs, reports = zip(*map(_solve_group, _groups(tokens)), strict=True)
    return torch.cat(outs), torch.cat(reports)


def _solve_group(tokens: Tokens) -> tuple[Tensor, Tensor]:
    outs, reports, narrow, total, (size, brief) = [], [], True, _start(tokens), _size(tokens)
    for part, where in _spans(tokens, size):
        own, total = _blocks(part, total, size)
        found, narrow = _solved(own, narrow, _few(tokens, where, own) if brief else None)
        outs.append(_tokens(_joined([x.own.read(x.z) for x in found], found, part.key.dtype), part))
        reports.append(_joined([x.report for x in found], found, part.key.dtype).unflatten(0, (len(part.key), -1)))
    return torch.cat(outs, 1), torch.cat(reports, 1).amax(1)


def pull(grad: Tensor, tokens: Tokens, gates: bool = True) -> Slopes:
    """First-order gradients of all tensors, those of decays if asked for, in the precisions of the forward."""
    if (found := native.forget_backward(grad, tokens, gates)) is not None:
        return found
    parts = list(map(_pull_group, grad.split(SEQUENCES), _groups(tokens)))
    return tuple(None if xs[0] is None else torch.cat(xs) for xs in zip(*parts, strict=True))


def _pull_group(grad: Tensor, tokens: Tokens) -> Slopes:
    """Fits are made again: to keep them would take more memory than the tokens do."""
    (size, brief), totals = _size(tokens), [_start(tokens)]
    spans = _spans(tokens, size)
    for part, _ in spans[:-1]:
        totals.append(_blocks(part, totals[-1], size)[1])
    d, later, narrow, pulled = tokens.key.shape[2], None, True, []
    for (part, where), total in zip(reversed(spans), reversed(totals), strict=True):
        own, _ = _blocks(part, total, size, grad[:, where])
        found, narrow = _solved(own, narrow, _few(tokens, where, own) if brief else None)
        working = max((x.z.dtype for x in found), key=lambda x: x.itemsize)
        z, r = (_tokens(x, part) for x in _joined([x.z for x in found], found, working).chunk(2, 1))
        before = total[..., :d], None if part.value is None else total[..., d:], part.decay
        given = Tokens._make((*(None if x is None else x.to(working) for x in part[:6]), *before))
        one, later = gradients.pull(grad[:, where].to(working), z, r, given, later)
        pulled.append(one)
    return tuple(
        None if x is None else _put_together(i, [one[i] for one in reversed(pulled)], x) for i, x in enumerate(tokens)
    )


def _put_together(i: int, parts: list[Tensor | None], like: Tensor) -> Tensor:
    """Gradients of spans as those of a call: of tokens, of the state at the start, or sums."""
    there = [x.to(like.dtype) for x in parts if x is not None]
    if i in (6, 7):
        return there[0]
    return torch.cat(there, 1) if i < 4 or i == 8 or like.dim() > 1 else torch.stack(there).sum(0)


def _groups(tokens: Tokens) -> list[Tokens]:
    return [tokens.take(slice(i, i + SEQUENCES)) for i in range(0, len(tokens.key), SEQUENCES)]


def _size(tokens: Tokens) -> tuple[int, bool]:
    """Tokens of a block, and whether everywhere most is forgotten within FEW tokens. Looks at the host."""
    decay = tokens.decay
    assert decay is not None
    if float(chunks(decay.unsqueeze(-1), FEW).prod(2).amax()) < FORGOTTEN:
        return BLOCKS[0], True
    for size in BLOCKS[:-1]:
        if float((chunks(decay.unsqueeze(-1), size, 1.0).prod(2) < SHORT).double().mean()) < 1 / size:
            return size, False
    return BLOCKS[-1], False


def _spans(tokens: Tokens, size: int) -> list[tuple[Tokens, slice]]:
    """Some blocks of all sequences, that follow each other, and which tokens these are."""
    found, step = [], size * max(1, AT_ONCE // len(tokens.key))
    for i in range(0, tokens.key.shape[1], step):
        some = slice(i, i + step)
        query, key, value, weight, decay = (None if x is None else x[:, some] for x in (*tokens[:4], tokens.decay))
        alpha = tokens.alpha[:, some] if tokens.alpha.dim() > 1 else tokens.alpha
        part = query, key, value, weight, alpha, tokens.gain, None, None, decay
        found.append((Tokens._make(part), some))
    return found


def _start(tokens: Tokens) -> Tensor:
    """[S, B] before the first token, in float64."""
    wide = torch.float64 if has_float64(tokens.key.device) else tokens.key.dtype
    (b, _, d), k = tokens.key.shape, 0 if tokens.value is None else tokens.value.shape[2]
    gram = tokens.key.new_zeros(b, d, d) if tokens.gram is None else tokens.gram
    cross = tokens.key.new_zeros(b, d, k) if tokens.cross is None else tokens.cross
    return torch.cat([gram.to(wide), cross.to(wide)], -1)


def _blocks(part: Tokens, total: Tensor, size: int, grad: Tensor | None = None) -> tuple[Blocks, Tensor]:
    """The blocks of a span, and [S, B] after it; `total` is that before it."""
    assert part.decay is not None
    own, fade = chunked(part, size), fading(part.decay.to(total.dtype), size)
    key = own.key if own.weight is None else own.weight * own.key.to(total.dtype)
    both = own.key if own.value is None else torch.cat([own.key, own.value], -1)
    before, total = faded_sums(total, (fade.to_end * key).mT @ both.to(total.dtype), fade.whole)
    n, told = own.key.shape[1], None if grad is None else chunks(grad, size)
    alpha, gain = own.alpha.expand(-1, n, size, 1), None if own.gain is None else own.gain.expand(-1, n, 1, 1)
    every = (*own[:4], alpha, gain, told, fade.share, fade.from_start, before)
    return Blocks._make(None if x is None else x.flatten(0, 1) for x in every), total


def _few(tokens: Tokens, where: slice, own: Blocks) -> Few | None:
    """The tokens that those of a span feel, if all feel few (in float32: beyond, few are many). Looks at the host."""
    size, wide = own.key.shape[1], own.before.dtype
    if own.key.dtype == wide or tokens.decay is None:
        return None
    batch, stop = len(tokens.key), min(where.stop, tokens.key.shape[1])
    n = len(own.key) // batch * size  # with what fills the last block
    first = max(0, where.start - FEW)

    def row(x: Tensor) -> Tensor:
        """Of the span and of FEW tokens before it, 0 where there is none."""
        return pad(x[:, first:stop], (0, 0) * (x.dim() - 2) + (FEW + first - where.start, n + where.start - stop))

    def last(x: Tensor) -> Tensor:
        """(B, n, FEW): of each token, its own first."""
        return row(x).unfold(1, FEW, 1)[:, 1:].flip(2)

    key, squares = row(tokens.key), own.key.to(wide).square().sum(-1, True)
    fades = last(tokens.decay.to(wide)).cumprod(2)
    count = torch.cat([torch.ones_like(fades[..., :1]), fades[..., :-1]], 2)
    count = count if tokens.weight is None else count * last(tokens.weight)
    scale = (1.0 if own.gain is None else own.gain.to(wide)) / own.alpha.to(wide)
    trace = own.from_start * own.before.diagonal(0, -2, -1).sum(-1).view(-1, 1, 1)
    trace = (trace + own.share @ own.counted(squares)) * scale
    felt = count * key.to(wide).square().sum(-1).unfold(1, FEW, 1)[:, 1:].flip(2)
    rest = trace.view(batch, n, 1) - felt.cumsum(2) * scale.reshape(batch, n, 1)
    serves = (rest.abs() < FORGOTTEN)[:, : stop - where.start].all(1).all(0).tolist()
    if True not in serves:
        return None
    width = min(FEW, -(-(serves.index(True) + 1) // 8) * 8)
    roots = count[..., :width].flip(2).sqrt().view(len(own.key), size, width)

    def around(x: Tensor) -> Tensor:
        return x[:, FEW - width :].unfold(1, width + size, size).flatten(0, 1).mT

    value = None if tokens.value is None or own.grad is None else around(row(tokens.value))
    return Few(around(key), value, roots, trace.amax((1, 2)) + 1)


def _solved(own: Blocks, narrow: bool, few: Few | None) -> tuple[list[SolvedBlocks], bool]:
    """By precision and by how much is forgotten; and whether float32 serves any. `narrow`: it did in the last span."""
    wide, dtype, found = own.before.dtype, own.key.dtype, []
    if few is not None:
        part = own.take(None, dtype if bool(few.ratio.amax() < EASY) else wide)
        return [SolvedBlocks(None, part, *_by_last_tokens(part, few, dtype))], narrow
    edge = own.alpha / own.from_start
    low, high = edge.amin((1, 2)), edge.amax((1, 2))
    mild = (low > 0) & (high < torch.inf) & (low >= WEAKEST * high)
    every, worst = torch.stack([mild.all().to(wide), torch.where(mild, high / low, 1.0).amax()]).tolist()
    rest = None if every else mild.nonzero()[:, 0]  # None: all
    if not every:
        hard = (~mild).nonzero()[:, 0]
        part = own.take(hard, wide)
        found.append(SolvedBlocks(hard, part, *_each_token(part, dtype)))
    if narrow and dtype != wide and (rest is None or len(rest)):
        part = own.take(rest, dtype)
        base = _base(part)
        easy, index = base.easy, rest
        if bool(easy.all()):
            rest = own.alpha.new_empty(0, dtype=torch.int64)
        else:
            some, rest = ((x if rest is None else rest[x]) for x in ((y.nonzero()[:, 0]) for y in (easy, ~easy)))
            part, base, index = own.take(some, dtype), base.take(easy), some
        narrow = bool(len(part.key))
        if narrow:
            found.append(SolvedBlocks(index, part, *_chebyshev(part, base, worst, dtype)))
    if rest is None or len(rest):
        part = own.take(rest, wide)
        base = _base(part)
        found.append(SolvedBlocks(rest, part, *_chebyshev(part, base, worst, dtype)))
        narrow = narrow or bool(base.easy.any())
    return found, narrow


def _base(own: Blocks) -> Base:
    d, gain, edge = own.key.shape[2], 1.0 if own.gain is None else own.gain, own.alpha / own.from_start
    low, high = edge.amin(1, True), edge.amax(1, True)
    beta = (low * high).sqrt()
    sigma = own.before[..., :d] * gain
    before = sigma.diagonal(0, -2, -1)
    key = (own.counted(gain / own.from_start)).sqrt() * own.key
    squares, tiny = key.square(), torch.finfo(key.dtype).tiny
    largest = (before + squares.sum(1)).amax(-1)  # eigenvalues are at least diagonal entries,
    heavy = torch.linalg.vector_norm(sigma, dim=(1, 2)).square() / before.sum(-1).clamp_min(tiny)
    # means weighted by themselves, squares of keys
    heavy = torch.stack([largest, heavy, squares.sum(2).amax(-1)]).amax(0)
    before.add_(beta.squeeze(-1))
    lower, failed = torch.linalg.cholesky_ex(sigma)
    eye = torch.eye(d, dtype=lower.dtype, device=lower.device)
    half = half_solve(lower, eye.expand_as(lower))  # 3 times faster than torch.cholesky_inverse
    inverse = torch.bmm(half.mT, half)
    moved = torch.bmm(key, inverse)
    inner = torch.bmm(moved, key.mT)
    inner.diagonal(0, -2, -1).add_(1.0)
    lower, lost = torch.linalg.cholesky_ex(inner)
    inner, failed = inverse.diagonal(0, -2, -1).amax(-1), (failed + lost).bool()
    grown = (high / low).sqrt().flatten()  # the condition of I + delta_t B_t^-1, which rounding meets as well
    easy = (grown * (heavy + beta.flatten()) * inner < EASY) & ~failed
    ratio = ((largest + beta.flatten()) * inner).masked_fill_(failed, torch.inf)
    return Base(inverse, half_solve(lower, moved), ratio, easy, beta)


def _chebyshev(own: Blocks, base: Base, worst: float, answered: torch.dtype) -> tuple[Tensor, Tensor]:
    """A_t^-1 of the rows, and a packed report. `worst`: of alpha_t / c_t, the largest to the smallest."""
    rows = own.rows()
    m, size, times = len(rows), own.key.shape[1], rows.shape[1] // own.key.shape[1]
    from_start, alpha = (x.repeat(1, times, 1) for x in (own.from_start, own.alpha))
    turned = base.rows.mT

    def apply(y: Tensor) -> Tensor:
        """c_t B_t^-1 y_t"""
        seen = torch.bmm(y, turned)
        seen.view(m, times, size, size).tril_()
        return torch.bmm(y, base.inverse).baddbmm_(seen, base.rows, alpha=-1)

    edge = alpha / (base.beta * from_start)  # the spectrum lies between 1 and this
    middle, radius = (1 + edge) / 2, (1 - edge).abs() / 2
    delta = (alpha - base.beta * from_start) / from_start
    enough, condition = ENOUGH[rows.dtype] if rows.dtype == answered else HIDDEN, math.sqrt(worst)
    degree = 1
    if condition > 1 + enough:
        degree = math.ceil(math.acosh(1 / enough) / (2 * math.atanh(condition**-0.5)))
    rest = apply(rows).div_(from_start)
    step, rate = rest / middle, radius / middle
    z = step.clone()
    for _ in range(1, degree):
        rest.sub_(step).addcmul_(delta, apply(step), value=-1)
        scale = 1 / (2 * middle - radius * rate)
        step.mul_(radius * scale * rate).addcmul_(2 * scale, rest)
        z.add_(step)
        rate = radius * scale
    error = base.ratio * torch.finfo(rows.dtype).eps + enough + torch.finfo(answered).eps
    route = torch.full_like(error, PRIMAL if rows.dtype == answered else FLOAT64)
    return z, pack(Report(route, base.ratio, error))


def _by_last_tokens(own: Blocks, few: Few, answered: torch.dtype) -> tuple[Tensor, Tensor]:
    """A_t^-1 of the rows, by a factor of the last tokens of each; and a packed report."""
    (m, size, _), dtype, width = own.key.shape, own.key.dtype, few.roots.shape[2]
    n, outs, failures, step = width + size, [], [], max(1, NUMBERS // (size * width**2))
    for first in range(0, m, step):
        some = slice(first, first + step)
        key, value, roots, _ = few.take(some, dtype)
        query, alpha, gain = own.query[some], own.alpha[some], 1.0 if own.gain is None else own.gain[some]
        given, count = [query] if own.grad is None else [query, own.grad[some]], len(key)

        def of_last(seen: Tensor, roots: Tensor = roots) -> Tensor:
            """u_s times column t of (m, W + C, C) in the rows s that token t feels: (m, C, W)."""
            return roots * seen.as_strided(roots.shape, (n * size, size + 1, size), size)

        sigma = torch.bmm(key, key.mT).as_strided((count, size, width, width), (n * n, n + 1, n, 1), n + 1)
        sigma = (gain * roots).unsqueeze(-1) * sigma
        sigma.mul_(roots.unsqueeze(-2)).diagonal(0, -2, -1).add_(alpha)
        lower, failed = torch.linalg.cholesky_ex(sigma)
        seen = [torch.bmm(key if value is None or x is query else value, x.mT) for x in given]
        y = torch.cholesky_solve(torch.stack(list(map(of_last, seen)), -1), lower)
        told = []
        for x, one in zip(given, y.unbind(-1), strict=True):
            placed = key.new_zeros(count, size, n)
            placed.as_strided(roots.shape, (n * size, n + 1, 1), 1).copy_(roots * one)
            spanned = torch.bmm(placed, key)
            if value is None or x is query:
                told.append((x - gain * spanned) / alpha)
            else:  # in the span of keys: (B_t g_t - ...) / alpha would cancel; what is not finite before it counts
                told.append(spanned + 0 * (x @ own.before[some, :, key.shape[2] :].mT))
        outs.append(torch.cat(told, 1))
        failures.append(failed.bool().any(1))
    ratio = few.ratio.masked_fill(torch.cat(failures), torch.inf)
    error = ratio * torch.finfo(dtype).eps + torch.finfo(answered).eps
    route = torch.full_like(error, PRIMAL if dtype == answered else FLOAT64)
    return torch.cat(outs), pack(Report(route, ratio, error))


def _each_token(own: Blocks, answered: torch.dtype) -> tuple[Tensor, Tensor]:
    """The same by a factor of each token."""
    rows, d, size = own.rows(), own.key.shape[2], own.key.shape[1]
    fades = torch.cat([own.from_start[:, :1], own.share.diagonal(-1, -2, -1).unsqueeze(-1)], 1)
    outs, ratios = [], []
    for first in range(0, len(rows), FACTORED):
        some = slice(first, first + FACTORED)
        part, fade = own.take(torch.arange(len(rows), device=rows.device)[some], rows.dtype), fades[some]
        key, state = part.counted(part.key), part.before[..., :d]
        sigma = state.new_empty(len(state), size, d, d)
        for t in range(size):
            state = torch.baddbmm(fade[:, t : t + 1] * state, key[:, t : t + 1].mT, part.key[:, t : t + 1])
            sigma[:, t] = state
        if part.gain is not None:
            sigma *= part.gain.unsqueeze(-1)
        sigma.diagonal(0, -2, -1).add_(part.alpha)
        lower, failed = torch.linalg.cholesky_ex(sigma)
        right = rows[some].unflatten(1, (-1, size)).permute(0, 2, 3, 1)
        outs.append(torch.cholesky_solve(right, lower).permute(0, 3, 1, 2).flatten(1, 2))
        smallest = lower.diagonal(0, -2, -1).square().amin(-1)
        ratio = sigma.diagonal(0, -2, -1).amax(-1) / smallest
        ratios.append(ratio.masked_fill_(failed.bool(), torch.inf).amax(1))
    ratio = torch.cat(ratios)
    error = ratio * torch.finfo(rows.dtype).eps + torch.finfo(answered).eps
    route = torch.full_like(error, PRIMAL if rows.dtype == answered else FLOAT64)
    return torch.cat(outs), pack(Report(route, ratio, error))


def _joined(parts: list[Tensor], found: list[SolvedBlocks], dtype: torch.dtype) -> Tensor:
    """Of all blocks of a span."""
    if found[0].which is None:
        return parts[0].to(dtype)
    out = parts[0].new_empty(sum(map(len, parts)), *parts[0].shape[1:], dtype=dtype)
    for part, one in zip(parts, found, strict=True):
        assert one.which is not None
        out[one.which] = part.to(dtype)
    return out


def _tokens(x: Tensor, part: Tokens) -> Tensor:
    """(B, N, ...) of flat blocks."""
    return x.unflatten(0, (len(part.key), -1)).flatten(1, 2)[:, : part.key.shape[1]]
