"""Causal least squares, each sequence by the route it needs, and its operator.

chunks           `chunks`, or `forget` where tokens are forgotten or have an alpha of their own
token by token   `by_roots`: conditions that sums in float64 do not serve
query by query   beyond: alpha = 0; by the ladder

Derivatives are written with causal fits (`gradients`), so any order and every transform of torch works; the first has a
shorter way where chunks serve.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve import ladder
from intention.solve.causal import forget, gradients
from intention.solve.causal.by_roots import root_of_state, rooted
from intention.solve.causal.each_query import each_query
from intention.solve.causal.fading import fading
from intention.solve.causal.gradients import Slopes
from intention.solve.causal.spans import pull_causal, solve_causal
from intention.solve.factor import inverse_of_lower
from intention.solve.ladder import QR, Report, has_float64, pack, unpack, warn_inaccurate
from intention.solve.native import causal as native
from intention.solve.operator import Note, Operator, Saved
from intention.solve.problem import Plan, Problem, Tokens
from intention.solve.ridge.ridge import ridge
from intention.solve.torch_state import compiling, eager, gradient_free
from intention.solve.transform.transform import transform

# How a sequence was solved. STEEP: in chunks, but gradients of its weights and alpha need pairs of tokens.
PLAIN, STEEP, ROOTED, FAR = range(4)
# The conditions up to which float64 serves: of chunks whose solutions derivatives are made of (their errors grow with
# the square: W_t g_t meets 1 / alpha); of gradients of weights and alpha by sums; of the factors of single tokens, with
# fewer tokens than features (then the ladder is exact, and not long) and with more; and from sums of a state.
DERIVED_RATIO, STEEP_RATIO, SHORT_RATIO, LONG_RATIO, STATE_RATIO = 1e5, 1e5, 1e12, 1e15, 4e10


class Seen(NamedTuple):
    """What a forward saw on the host."""

    far: bool  # some sequence goes query by query
    report: Report | None  # of those that went token by token


def causal(tokens: Tokens) -> tuple[Tensor, Tensor]:
    """Answers (B, N, k), or (B, N, d) without values, and a packed report (B, 3): the worst token of each sequence."""
    if tokens.decay is None and tokens.alpha.dim() > 1:
        tokens = Tokens(*tokens[:8], torch.ones_like(tokens.alpha))
    if compiling():
        out, packed = CAUSAL(*tokens, False)
        return out, packed
    if gradient_free(*tokens):
        (out, way, packed), seen = CAUSAL.solve(*tokens, False, False)
    else:
        note = Note()
        out, way, packed = CAUSAL.function.apply(*tokens, False, note)
        seen = note.seen
    assert isinstance(seen, Seen)
    if seen.report is None and not seen.far:
        return out, packed
    return _completed(tokens, out, way, packed, seen)


def _traced(*args: Any) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
    """`fits` with the sequences that are FAR: a graph has no second call."""
    (out, way, packed), seen = fits(*args)
    out, packed = _completed(Tokens._make(args[:9]), out, way, packed, seen)
    return (out, way, packed), None


def _completed(tokens: Tokens, out: Tensor, way: Tensor, packed: Tensor, seen: Seen) -> tuple[Tensor, Tensor]:
    """With the sequences that go query by query; where values cannot be looked at all are solved so."""
    if seen.report is not None:
        warn_inaccurate(seen.report)
    if not seen.far:
        return out, packed
    far = way == FAR
    if eager():
        index = far.nonzero()[:, 0]
        again, report = _query_by_query(tokens.take(index))
        return out.index_copy(0, index, again), packed.index_copy(0, index, pack(report))
    again, report = _query_by_query(tokens)
    return torch.where(far.view(-1, 1, 1), again, out), torch.where(far.unsqueeze(-1), pack(report), packed)


def fits(*args: Any) -> tuple[tuple[Tensor, Tensor, Tensor], Seen]:
    """(q_t W_t, or q_t A_t^-1 without values, or W_t g_t with g for the query; how it was solved; packed report).

    The answers of sequences that are FAR are 0. Looks at the host.
    """
    tokens, transposed = Tokens._make(args[:9]), args[9]
    out, packed, settled = _in_chunks(tokens, transposed)
    condition, error = packed[:, 1], packed[:, 2]
    if settled or not out.numel():
        return (out, _steep(condition), packed), Seen(False, None)
    derived = transposed or (tokens.decay is not None and tokens.value is None)
    limit = DERIVED_RATIO if derived else ladder.SEQUENCE_RATIO
    least = tokens.alpha.amin(1) if tokens.alpha.dim() > 1 else tokens.alpha
    usable = ladder.screen(least, tokens.weight, least, tokens.gain)
    hard = ~(condition + 0 * usable < limit) | ~(error < ladder.SEQUENCE_ERROR)
    way = _steep(condition)
    if not bool(hard.any()):
        return (out.contiguous(), way, packed), Seen(False, None)
    finite = torch.isfinite(tokens.key).flatten(1).all(-1)
    out, packed = (torch.where(finite.view(-1, *[1] * (x.dim() - 1)), x, torch.nan) for x in (out, packed))
    hard = hard & finite
    index, far = (hard & (usable > 0)).nonzero()[:, 0], (hard & ~(usable > 0)).nonzero()[:, 0]
    told = None
    if index.numel():
        again, report, good = _token_by_token(tokens.take(index), transposed)
        out, packed = out.index_copy(0, index, again), packed.index_copy(0, index, pack(report))
        way = way.index_fill(0, index, ROOTED)
        far = torch.cat([far, index[~good]])
        told = Report(*(x[good] for x in report))
    out, way = out.index_fill(0, far, 0.0).contiguous(), way.index_fill(0, far, FAR)
    return (out, way, packed), Seen(far.numel() > 0, told)


def _steep(condition: Tensor) -> Tensor:
    return (condition >= STEEP_RATIO).to(torch.int8) * STEEP


def _in_chunks(tokens: Tokens, transposed: bool) -> tuple[Tensor, Tensor, bool]:
    """Answers, a packed report, and whether it has been looked at and is good."""
    if tokens.decay is not None and tokens.key.numel():
        checks.decay(tokens.decay)
        if not transposed:
            return *forget.solve(tokens), False
        wide, _ = _solver(tokens, _plain)
        out, packed = forget.solve(wide._replace(query=_told(wide), value=None, cross=None))
        return out.to(tokens.key.dtype), packed.to(tokens.key.dtype), False
    if not transposed:
        return native.forward(tokens) or solve_causal(tokens)
    _, packed, _ = solve_causal(tokens._replace(query=tokens.key, value=None, cross=None))
    return pull_causal(tokens.query, tokens._replace(query=tokens.key)).query, packed, False


def _told(tokens: Tokens) -> Tensor:
    """B_t g_t, `query` being g."""
    grad, key, value, weight, *_, cross, decay = tokens
    assert value is not None
    counted = key if weight is None else weight.unsqueeze(-1) * key
    return gradients.read(gradients.faded(decay, key), grad, value, counted, None if cross is None else cross.mT)


def _residual(tokens: Tokens, r: Tensor) -> Tensor:
    """B_t g_t - A_t r_t, from the tokens and not from their sums: g_t v_s - c r_t k_s is small before it meets k_s.

    A state counts as the tokens that its root is made of."""
    wide = tokens.each(lambda x: x.to(r.dtype))
    grad, key, value, weight, alpha, gain, gram, _, decay = wide
    assert value is not None
    share = 1.0 if gain is None else gain.view(-1, 1, 1)
    fade = gradients.faded(tokens.decay, key)
    rows, told = torch.cat([grad, r], -1), torch.cat([value, -share * key], -1)
    counted = key if weight is None else weight.unsqueeze(-1) * key
    alpha = alpha.unsqueeze(-1) if alpha.dim() > 1 else alpha.view(-1, 1, 1)
    out = gradients.read(fade, rows, told, counted) - alpha * r
    if gram is None:
        return out
    d = key.shape[2]
    before = root_of_state(wide, key.new_ones(len(key), 1, 1, 1), d + value.shape[2])
    told = torch.cat([before[..., d:], -share * before[..., :d]], -1)
    left = 1.0 if decay is None else decay.cumprod(1).unsqueeze(-1)
    return out + left * ((rows @ told.mT) @ before[..., :d])


def _token_by_token(tokens: Tokens, transposed: bool) -> tuple[Tensor, Report, Tensor]:
    """Answers, a report, and which of them it serves."""
    out, ratio = rooted(tokens, transposed)
    if transposed:  # W_t g_t lies in the span of the keys; what is beside it meets 1 / alpha in the gradients
        rest = _residual(tokens, out)
        out = out + rooted(tokens._replace(query=rest, value=None, cross=None), False)[0]
    limit = torch.full_like(ratio, SHORT_RATIO if tokens.key.shape[1] < tokens.key.shape[2] else LONG_RATIO)
    if tokens.gram is not None:
        limit = torch.where((tokens.gram == 0).flatten(1).all(1), limit, STATE_RATIO)
    dtype = tokens.key.dtype
    error = torch.finfo(out.dtype).eps * ratio + torch.finfo(dtype).eps
    report = Report(torch.full_like(error, QR, dtype=dtype), ratio.to(dtype), error.to(dtype))
    return out.to(dtype), report, ratio < limit


def _query_by_query(tokens: Tokens) -> tuple[Tensor, Report]:
    """Every token's fit by the accuracy ladder, from the keys themselves; differentiable to any order."""
    if tokens.gram is not None:
        checks.require_values(tokens.weight, tokens.alpha, tokens.gain)
        least = float(tokens.alpha.detach().min())
        raise ValueError(
            f"alpha from {least:.1e} is too small beside this state and these keys, or they are "
            f"not finite: the condition is above {STATE_RATIO:.0e}, and of the tokens in a state only sums are "
            "known; use a larger alpha, or give all tokens in one call"
        )
    dual = tokens.key.shape[1] < tokens.key.shape[2]
    value = tokens.key[..., :1] if tokens.value is None else tokens.value
    base, decay = Problem(tokens.query, tokens.key, value, tokens.weight, tokens.alpha, tokens.gain), tokens.decay
    share = None if decay is None else fading(decay, decay.shape[1]).share.squeeze(1).to(base.key.dtype)

    def taken(start: int, rows: int, seen: int) -> Tensor | None:
        return None if share is None else share[:, start : start + rows, :seen]

    def solve(part: Problem) -> tuple[Tensor, Report]:
        if tokens.value is None:
            out, packed = transform(part.expanded(), "auto")
            return out, unpack(packed)
        out, packed = ridge(part, Plan(dual, False, 1.0), "auto")
        return out, unpack(packed)

    return each_query(base, taken, True, solve)


def _first(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> Slopes:
    """The first derivatives. In a graph also of sequences that went query by query; elsewhere those have their own."""
    (grad,), tokens, way, (transposed,) = grads, Tokens._make(saved.tensors), saved.outputs[0], saved.options
    hidden = any(needs[3:6])
    if saved.seen is not None or transposed or not bool((way == FAR).any()):
        return pull_first(grad, tokens, way, transposed, hidden, needs[8])
    with torch.enable_grad():
        own = tokens.each(lambda x: x.detach().requires_grad_())
        out, _ = causal(own)
        found = iter(torch.autograd.grad(out, [x for x in own if x is not None], grad, allow_unused=True))
    return tuple(None if x is None else next(found) for x in own)


def _any_order(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> Slopes:
    (grad,), tokens, (transposed,) = grads, Tokens._make(saved.tensors), saved.options
    if any(needs[1:]):
        return _pull(grad, tokens, transposed, _again)
    wide, solve = _solver(tokens, _again)
    values = tokens.value is not None
    return solve(grad.to(wide.key.dtype), values, values and not transposed).to(grad.dtype), *[None] * 8


def pull_first(grad: Tensor, tokens: Tokens, way: Tensor, transposed: bool, hidden: bool, gates: bool) -> Slopes:
    """First-order gradients of all nine but for sequences that are FAR: those have 0. Looks at the host.

    `hidden`: those of weights, alpha or gain are asked for, where what is large cancels. `gates`: those of decays are.
    """
    fades = tokens.decay is not None and tokens.key.numel() > 0
    slow = way >= (STEEP if fades or (hidden and tokens.weight is not None) else ROOTED)
    if transposed or (fades and bool(slow.all())):
        return _pull(grad, tokens, transposed, _plain)
    if fades:
        quick = forget.pull(grad, tokens, gates)
    else:
        quick = pull_causal(grad, tokens)
        if hidden and bool((way == STEEP).any()):
            slow = slow | ((way == STEEP) & _lost(quick, tokens))
    if not bool(slow.any()):
        return quick
    index = slow.nonzero()[:, 0]
    again = _pull(grad[index], tokens.take(index), False, _plain)
    if hidden and tokens.gram is not None:
        _warn_of_alpha(grad[index], tokens.take(index), again[4])
    return tuple(x if x is None or y is None else x.index_copy(0, index, y) for x, y in zip(quick, again, strict=True))


def _warn_of_alpha(grad: Tensor, tokens: Tokens, found: Tensor | None) -> None:
    """Where alpha's gradient moves if the sums of a state, all that is known of it, move by their own rounding."""
    gram, cross = tokens.gram, tokens.cross
    assert gram is not None
    if found is None or not bool(gram.any()):
        return
    cross = None if cross is None else _rounded(cross)
    moved = _pull(grad, tokens._replace(gram=_rounded(gram), cross=cross), False, _plain)[4]
    gap, size = (x.double().reshape(len(gram), -1).norm(dim=1) for x in (moved - found, found))
    error = torch.where(gap > 0, gap / size, 0.0)
    remedy = "or give all tokens in one call: of the tokens in a state only sums are known"
    ladder.warn_of_error(error, "gradients of alpha", remedy)


def _rounded(sums: Tensor) -> Tensor:
    """Sums in float64 that differ by a few roundings; symmetric ones stay so."""
    rows, columns = sums.shape[1:]
    first, second = (torch.arange(1.0, 1.0 + n, dtype=sums.dtype, device=sums.device) for n in (rows, columns))
    signs = (first.square().unsqueeze(-1) * second.square()).cos()
    return sums * (1 + 4 * torch.finfo(sums.dtype).eps * signs)


def _lost(found: Slopes, tokens: Tokens) -> Tensor:
    """Where alpha's gradient, sum z_t r_t, may have lost more than 1e-3: |z_t| <= |q_t| |A_t^-1|, and of r_t = W_t g_t,
    the gradient of the query, eps |A_t| |A_t^-1| is rounding. |A_t^-1| is 1 / alpha until keys point everywhere.
    """
    query, key, _, weight, alpha, gain, gram, *_ = tokens.each(Tensor.double)
    counted = key if weight is None else weight.unsqueeze(-1) * key
    few, c = 2 * key.shape[2], 1.0 if gain is None else gain
    start = torch.bmm(counted[:, :few].mT, key[:, :few])
    start = start if gram is None else start + gram
    before = start.diagonal(0, -2, -1)
    after = before + (counted[:, few:] * key[:, few:]).sum(1)
    sigma = start * torch.as_tensor(c).view(-1, 1, 1)
    sigma.diagonal(0, -2, -1).add_(alpha.unsqueeze(-1))
    lower, failed = torch.linalg.cholesky_ex(sigma)
    inverse = inverse_of_lower(lower, failed.bool()).diagonal(0, -2, -1).sum(-1)  # at least its largest eigenvalue
    inverse = torch.where(failed.bool(), torch.inf, inverse).fmin(1 / alpha)
    both = query.norm(dim=-1) * found[0].double().norm(dim=-1)
    lost = (
        before.amax(-1) * both[:, :few].sum(1) / alpha.square()
        + after.amax(-1) * both[:, few:].sum(1) * inverse.square()
    )
    return ~(torch.finfo(torch.float64).eps * c * lost < 1e-3 * found[4].double().abs())


def _plain(*args: Any) -> Tensor:
    return fits(*args, True)[0][0]


def _again(*args: Any) -> Tensor:
    return CAUSAL.function.apply(*args, Note())[0]


def _solver(tokens: Tokens, call: Callable[..., Tensor]) -> tuple[Tokens, gradients.Fits]:
    """All in float64, where products that cancel leave enough; and fits of other rows, as `gradients` asks for them."""
    wide = tokens.each(Tensor.double) if has_float64(tokens.key.device) else tokens

    def solve(rows: Tensor, values: bool, transposed: bool) -> Tensor:
        kept = wide if values else wide._replace(value=None, cross=None)
        return call(*kept._replace(query=rows), transposed)

    return wide, solve


def _pull(grad: Tensor, tokens: Tokens, transposed: bool, call: Callable[..., Tensor]) -> Slopes:
    if not tokens.key.numel():
        return tokens.each(torch.zeros_like)
    wide, solve = _solver(tokens, call)
    x, values = wide.query, wide.value is not None
    grad = grad.to(x.dtype)
    query, told = (grad, x) if transposed else (x, grad)
    found, _ = gradients.pull(told, solve(query, False, False), solve(told, values, values), wide)
    if transposed:
        found = (solve(query, True, False), *found[1:])
    return tuple(None if x is None or y is None else y.to(x.dtype) for x, y in zip(tokens, found, strict=True))


def _shapes(query: Tensor, key: Tensor, value: Tensor | None, *rest: object) -> tuple[Tensor, Tensor, Tensor]:
    batch, n, d = key.shape
    width = d if value is None or rest[-1] else value.shape[2]
    return key.new_empty(batch, n, width), key.new_empty(batch, dtype=torch.int8), key.new_empty(batch, 3)


CAUSAL = Operator(
    "causal",
    tensors="query key value? weight? alpha gain? gram? cross? decay?",
    options="bool transposed",
    answers=1,
    outputs=3,  # answers, how each sequence was solved, packed report
    solve=fits,
    shapes=_shapes,
    pull=_first,
    differentiable=_any_order,
    saves_answers=False,
    traced=_traced,
)
