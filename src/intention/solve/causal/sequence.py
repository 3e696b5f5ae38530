"""Causal least squares, each sequence by the route it needs, and the eager door (`compiled` has the other).

chunks           `causal`, or `decay` where tokens are forgotten
token by token   `rooted`: conditions that sums in float64 do not serve, and decays too strong for chunks
query by query   beyond: alpha = 0; by the ladder

Derivatives are written with causal fits (`slopes`), so any order and every transform of torch works; the first has a
shorter way where chunks serve.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.causal import gradients
from intention.solve.causal.by_roots import root_of_state, rooted
from intention.solve.causal.chunks import Tokens
from intention.solve.causal.decay import length, solve_fading
from intention.solve.causal.each_query import each_query, triangle
from intention.solve.causal.gradients import Nine
from intention.solve.causal.spans import pull_causal, solve_causal
from intention.solve.doors import (
    Door,
    compiling,
    eager,
    forward_mode,
    gather_batch,
    gradient_free,
    legacy_batched,
    no_autocast,
    scatter_batch,
    unobserved,
)
from intention.solve.factor import inverse_of_lower
from intention.solve.ladder import (
    QR,
    SEQUENCE_ERROR,
    SEQUENCE_RATIO,
    Report,
    has_float64,
    pack,
    screen,
    unpack,
    warn_inaccurate,
)
from intention.solve.problem import Plan, Problem
from intention.solve.ridge.ridge import ridge
from intention.solve.transform.rows import Points
from intention.solve.transform.transform import transform

# How a sequence was solved. STEEP: in chunks, but gradients of its weights and alpha need pairs of tokens.
PLAIN, STEEP, ROOTED, FAR = range(4)
# The conditions up to which float64 serves: of chunks whose solutions derivatives are made of (their errors grow with
# the square: W_t g_t meets 1 / alpha); of gradients of weights and alpha by sums; of the factors of single tokens, with
# fewer tokens than features (then the ladder is exact, and not long) and with more; and from sums of a state.
DERIVED_RATIO, STEEP_RATIO, SHORT_RATIO, LONG_RATIO, STATE_RATIO = 1e5, 1e5, 1e12, 1e15, 4e10


class Note:
    """What a forward saw on the host, where derivatives and transforms cannot look."""

    far = False  # some sequence goes query by query
    report: Report | None = None  # of those that went token by token


def causal(tokens: Tokens, log_decay: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Answers (B, N, k), or (B, N, d) without values, and a packed report (B, 3): the worst token of each sequence."""
    nine, note = (*tokens, log_decay), Note()
    if compiling():
        out, packed, _ = torch.ops.intention.causal(*nine)
        return out, packed
    if gradient_free(*nine):
        out, packed, way = fits(nine, False, note)
    else:
        out, packed, way = Causal.apply(*nine, False, note)
    if note.report is not None:
        warn_inaccurate(note.report)
    if note.far:
        return _with_far(nine, out, packed, way)
    return out, packed


def causal_batch(*nine: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(answers, packed report, how each sequence was solved), for the compiled door."""
    note = Note()
    out, packed, way = fits(nine, False, note)
    if note.report is not None:
        warn_inaccurate(note.report)
    return (*_with_far(nine, out, packed, way), way) if note.far else (out, packed, way)


def _with_far(nine: Nine, out: Tensor, packed: Tensor, way: Tensor) -> tuple[Tensor, Tensor]:
    """With the sequences that go query by query; where values cannot be looked at all are solved so."""
    far = way == FAR
    if eager():
        index = far.nonzero()[:, 0]
        again, report = _query_by_query(_take(nine, index))
        return out.index_copy(0, index, again), packed.index_copy(0, index, pack(report))
    again, report = _query_by_query(nine)
    return torch.where(far.view(-1, 1, 1), again, out), torch.where(far.unsqueeze(-1), pack(report), packed)


@no_autocast
def fits(nine: Nine, transposed: bool, note: Note) -> tuple[Tensor, Tensor, Tensor]:
    """(q_t W_t, or q_t A_t^-1 without values, or W_t g_t with g for the query; packed report; how it was solved).

    The answers of sequences that are FAR are 0. Looks at the host.
    """
    tokens, log_decay = Tokens(*nine[:8]), nine[8]  # type: ignore[arg-type]
    out, packed, settled = _in_chunks(tokens, log_decay, transposed)
    condition, error = packed[:, 1], packed[:, 2]
    if settled:
        return out, packed, _steep(condition)
    derived = transposed or (log_decay is not None and tokens.value is None)
    limit = DERIVED_RATIO if derived else SEQUENCE_RATIO
    usable = screen(tokens.alpha, tokens.weight, tokens.alpha, tokens.gain)
    hard = ~(condition + 0 * usable < limit) | ~(error < SEQUENCE_ERROR)
    way = _steep(condition)
    if not bool(hard.any()):
        return out.contiguous(), packed, way
    finite = torch.isfinite(tokens.key).flatten(1).all(-1)
    out, packed = (torch.where(finite.view(-1, *[1] * (x.dim() - 1)), x, torch.nan) for x in (out, packed))
    hard = hard & finite
    index, far = (hard & (usable > 0)).nonzero()[:, 0], (hard & ~(usable > 0)).nonzero()[:, 0]
    if index.numel():
        again, report, good = _token_by_token(_take(nine, index), transposed)
        out, packed = out.index_copy(0, index, again), packed.index_copy(0, index, pack(report))
        way = way.index_fill(0, index, ROOTED)
        far = torch.cat([far, index[~good]])
        note.report = Report(*(x[good] for x in report))
    note.far = note.far or far.numel() > 0
    return out.index_fill(0, far, 0.0).contiguous(), packed, way.index_fill(0, far, FAR)


def _steep(condition: Tensor) -> Tensor:
    return (condition >= STEEP_RATIO).to(torch.int8) * STEEP


def _in_chunks(tokens: Tokens, log_decay: Tensor | None, transposed: bool) -> tuple[Tensor, Tensor, bool]:
    """Answers, a packed report, and whether it has been looked at and is good."""
    if log_decay is not None and tokens.key.shape[1]:
        checks.log_decay(log_decay)
        return *_with_decay(tokens, log_decay, transposed), False
    if not transposed:
        return solve_causal(tokens)
    _, packed, _ = solve_causal(tokens._replace(query=tokens.key, value=None, cross=None))
    return pull_causal(tokens.query, tokens._replace(query=tokens.key)).query, packed, False


def _with_decay(tokens: Tokens, log_decay: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    if not (size := length(log_decay, tokens.key.shape[1])):
        shape = tokens.key if transposed or tokens.value is None else tokens.value
        endless = torch.full_like(tokens.alpha, torch.inf)
        return torch.zeros_like(shape), pack(Report(endless, endless, endless))
    if transposed:  # A_t^-1 (B_t g_t)
        assert tokens.value is not None
        wide = Tokens(*(None if x is None else x.double() for x in tokens))  # type: ignore[arg-type]
        assert wide.value is not None
        key = wide.key if wide.weight is None else wide.weight.unsqueeze(-1) * wide.key
        start = None if wide.cross is None else wide.cross.mT
        query = gradients.read(gradients.fading(log_decay.double(), wide.key), wide.query, wide.value, key, start)
        out, report = solve_fading(wide._replace(query=query, value=None, cross=None), log_decay, size)
    else:
        out, report = solve_fading(tokens, log_decay, size)
    dtype = tokens.key.dtype
    return out.to(dtype), pack(Report(*(x.to(dtype) for x in report)))


def _residual(tokens: Tokens, log_decay: Tensor | None, r: Tensor) -> Tensor:
    """B_t g_t - A_t r_t, from the tokens and not from their sums: g_t v_s - c r_t k_s is small before it meets k_s.

    A state counts as the tokens that its root is made of."""
    wide = Tokens(*(None if x is None else x.to(r.dtype) for x in tokens))  # type: ignore[arg-type]
    grad, key, value, weight, alpha, gain, gram, _ = wide
    assert value is not None
    share = 1.0 if gain is None else gain.view(-1, 1, 1)
    logs = None if log_decay is None else log_decay.to(r.dtype)
    rows, told = torch.cat([grad, r], -1), torch.cat([value, -share * key], -1)
    counted = key if weight is None else weight.unsqueeze(-1) * key
    out = gradients.read(gradients.fading(logs, key), rows, told, counted) - alpha.view(-1, 1, 1) * r
    if gram is None:
        return out
    d = key.shape[2]
    before = root_of_state(wide, torch.ones_like(alpha).view(-1, 1, 1, 1), d + value.shape[2])
    told = torch.cat([before[..., d:], -share * before[..., :d]], -1)
    left = 1.0 if logs is None else logs.cumsum(1).exp().unsqueeze(-1)
    return out + left * ((rows @ told.mT) @ before[..., :d])


def _token_by_token(nine: Nine, transposed: bool) -> tuple[Tensor, Report, Tensor]:
    """Answers, a report, and which of them it serves."""
    tokens = Tokens(*nine[:8])  # type: ignore[arg-type]
    out, ratio = rooted(tokens, nine[8], transposed)
    if transposed:  # W_t g_t lies in the span of the keys; what is beside it meets 1 / alpha in the gradients
        rest = _residual(tokens, nine[8], out)
        out = out + rooted(tokens._replace(query=rest, value=None, cross=None), nine[8], False)[0]
    limit = torch.full_like(ratio, SHORT_RATIO if tokens.key.shape[1] < tokens.key.shape[2] else LONG_RATIO)
    if tokens.gram is not None:
        limit = torch.where((tokens.gram == 0).flatten(1).all(1), limit, STATE_RATIO)
    dtype = tokens.key.dtype
    error = torch.finfo(out.dtype).eps * ratio + torch.finfo(dtype).eps
    report = Report(torch.full_like(tokens.alpha, QR), ratio.to(dtype), error.to(dtype))
    return out.to(dtype), report, ratio < limit


def _query_by_query(nine: Nine) -> tuple[Tensor, Report]:
    """Every token's fit by the accuracy ladder, from the keys themselves; differentiable to any order."""
    tokens, log_decay = Tokens(*nine[:8]), nine[8]  # type: ignore[arg-type]
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
    base = Problem(tokens.query, tokens.key, value, tokens.weight, tokens.alpha, tokens.gain)
    total = None if log_decay is None else log_decay.cumsum(1)

    def taken(start: int, rows: int, seen: int) -> Tensor:
        shown = triangle(rows, seen, base.key.device, start)
        if total is None:
            return shown.to(base.key.dtype).expand(base.key.shape[0], rows, seen)
        gap = total[:, start : start + rows].unsqueeze(-1) - total[:, :seen].unsqueeze(-2)
        return torch.where(shown, gap, -torch.inf).exp().to(base.key.dtype)

    def solve(part: Problem, trusted: bool) -> tuple[Tensor, Report]:
        if tokens.value is None:
            points = Points(part.query, part.expanded().key, part.weight, part.alpha, part.gain)
            out, packed = transform(points, "auto", trusted)
            return out, unpack(packed, False, out.dtype)
        out, packed = ridge(part, Plan(dual, False, 1.0), "auto", trusted)
        return out, unpack(packed, dual, out.dtype)

    return each_query(base, taken, True, solve)


@no_autocast
def causal_pull(grad: Tensor, nine: Nine, way: Tensor, transposed: bool, hidden: bool) -> Nine:
    """First-order gradients of all nine, also of sequences that went query by query: for the compiled door."""
    if transposed or not bool((way == FAR).any()):
        return pull_first(grad, nine, way, transposed, hidden)
    with torch.enable_grad():
        own = [None if x is None else x.detach().requires_grad_() for x in nine]
        out, _ = causal(Tokens(*own[:8]), own[8])  # type: ignore[arg-type]
        found = iter(torch.autograd.grad(out, [x for x in own if x is not None], grad, allow_unused=True))
    return tuple(None if x is None else next(found) for x in own)


@no_autocast
def pull_first(grad: Tensor, nine: Nine, way: Tensor, transposed: bool, hidden: bool) -> Nine:
    """First-order gradients of all nine but for sequences that are FAR: those have 0. Looks at the host.

    `hidden`: those of weights, alpha or gain are asked for, where what is large cancels.
    """
    if transposed or nine[8] is not None:
        return _pull(grad, nine, transposed, _plain)
    quick = (*pull_causal(grad, Tokens(*nine[:8])), None)  # type: ignore[arg-type]
    slow = way >= (STEEP if hidden and nine[3] is not None else ROOTED)
    if hidden and bool((way == STEEP).any()):
        slow = slow | ((way == STEEP) & _lost(quick, nine))
    if not bool(slow.any()):
        return quick
    index = slow.nonzero()[:, 0]
    again = _pull(grad[index], _take(nine, index), False, _plain)
    return tuple(x if x is None or y is None else x.index_copy(0, index, y) for x, y in zip(quick, again, strict=True))


def _lost(found: Nine, nine: Nine) -> Tensor:
    """Where alpha's gradient, sum z_t r_t, may have lost more than 1e-3: |z_t| <= |q_t| |A_t^-1|, and of r_t = W_t g_t,
    the gradient of the query, eps |A_t| |A_t^-1| is rounding. |A_t^-1| is 1 / alpha until keys point everywhere.
    """
    query, key, _, weight, alpha, gain, gram, *_ = (None if x is None else x.double() for x in nine)
    assert query is not None
    assert key is not None
    assert alpha is not None
    assert found[0] is not None
    assert found[4] is not None
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
    return fits(args[:9], args[9], Note())[0]


def _again(*args: Any) -> Tensor:
    return Causal.apply(*args, Note())[0]  # type: ignore[no-any-return]


def _solver(nine: Nine, call: Any) -> tuple[Nine, Any]:
    """All in float64, where products that cancel leave enough; and fits of other rows, as `slopes` asks for them."""
    assert nine[1] is not None
    if has_float64(nine[1].device):
        nine = tuple(None if x is None else x.double() for x in nine)

    def solve(rows: Tensor, values: bool, transposed: bool) -> Tensor:
        _, key, value, *middle, cross, log_decay = nine
        kept = (value, cross) if values else (None, None)
        return call(rows, key, kept[0], *middle, kept[1], log_decay, transposed)

    return nine, solve


def _pull(grad: Tensor, nine: Nine, transposed: bool, call: Any) -> Nine:
    assert nine[1] is not None
    if not nine[1].numel():
        return tuple(None if x is None else torch.zeros_like(x) for x in nine)
    wide, solve = _solver(nine, call)
    x, values = wide[0], wide[2] is not None
    assert x is not None
    grad = grad.to(x.dtype)
    query, told = (grad, x) if transposed else (x, grad)
    found = gradients.pull(query, told, solve(query, False, False), solve(told, values, values), wide)
    if transposed:
        found = (solve(query, True, False), *found[1:])
    return tuple(None if x is None or y is None else y.to(x.dtype) for x, y in zip(nine, found, strict=True))


@no_autocast
def _push(nine: Nine, tangents: Any, transposed: bool) -> Tensor:
    assert nine[1] is not None
    wide, solve = _solver(nine, _again)
    moved = [
        None if x is None else torch.zeros_like(x) if t is None else t.to(x.dtype)
        for x, t in zip(wide, tangents, strict=True)
    ]
    return gradients.push(wide, moved, transposed, solve).to(nine[1].dtype)


def _take(nine: Nine, index: Tensor) -> Nine:
    return tuple(None if x is None else x[index] for x in nine)


class Causal(Door):
    """(*nine, transposed, note) -> (answers, packed report, how it was solved). Its derivatives are made of itself."""

    @staticmethod
    def forward(*args: Any) -> Any:
        return fits(args[:9], *args[9:])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.transposed = inputs[9]
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs[:9], output[2])
        if forward_mode():
            ctx.save_for_forward(*inputs[:9], output[2])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if (grad := grads[0]) is None:
            return (None,) * 11
        *nine, way = ctx.saved_tensors
        if legacy_batched(grad):
            needs = [need and x is not None for need, x in zip(ctx.needs_input_grad, nine, strict=False)]
            pulled = torch.ops.intention.causal_backward(grad, *nine, way, ctx.transposed, needs)
            found = tuple(x if need else None for x, need in zip(pulled, needs, strict=True))
        elif unobserved():
            found = pull_first(grad, tuple(nine), way, ctx.transposed, any(ctx.needs_input_grad[3:6]))
        else:
            found = _differentiable(grad, tuple(nine), ctx.transposed)
        return *found, None, None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Any:
        return _push(ctx.saved_tensors[:9], tangents[:9], ctx.transposed), None, None

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        size = info.batch_size
        out = Causal.apply(*(gather_batch(a, d, size) for a, d in zip(args, in_dims, strict=True)))
        return tuple(scatter_batch(x, size) for x in out), (0, 0, 0)


@no_autocast
def _differentiable(grad: Tensor, nine: Nine, transposed: bool) -> Nine:
    return _pull(grad, nine, transposed, _again)
