"""softmax(Q Sigma^-1 K') V as one compiled operation; where it does not apply there are `transform` and SDPA."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.solve.ladder import FLOAT64, Report, has_float64, pack, unpack, warn_inaccurate
from intention.solve.native import sigma as native
from intention.solve.operator import Note, Operator, Saved, define
from intention.solve.problem import Needs, Problem
from intention.solve.torch_state import compiling, eager, forward_mode, gradient_free, unobserved
from intention.solve.transform.transform import transform

Solution = tuple[Tensor, Tensor, Tensor, Tensor]
# The rounding of a score up to which float32 serves: measured on 3,000 calls, answers then err by 5e-6 at most.
SMALL_ROUNDING = 1e-5


def rounding(moved: Tensor, key: Tensor) -> Tensor:
    """How far the rounding of X = Q Sigma^-1 moves a score x.k: up to eps |x| |k|. Infinity shows by itself."""
    reach = torch.linalg.vector_norm(moved, dim=-1).amax(-1) * torch.linalg.vector_norm(key, dim=-1).amax(-1)
    return reach.masked_fill(reach.isinf(), 0.0) * torch.finfo(moved.dtype).eps


def sigma(problem: Problem) -> tuple[Tensor, Tensor] | None:
    """The answer (B, M, k) and a packed report; None: no kernel, or an element is beyond double precision."""
    query, key, value, _, alpha, gain = problem
    if compiling():
        if not native.serves(key):
            return None
        out, packed = SIGMA(query, key, value, alpha, gain)
        return out, packed
    free = gradient_free(*problem)
    if not free and (not eager() or forward_mode()):
        return None
    found = native.forward(problem, keep=not free)  # before the operator: it may have no answer
    if found is None or free:
        return None if found is None else (found.out, found.packed)
    out, packed = SIGMA.recorded((query, key, value, alpha, gain), Note(_outputs(found, True), True, aside=True))
    return out, packed


def _answer(
    query: Tensor, key: Tensor, value: Tensor, alpha: Tensor, gain: Tensor | None, keep: bool
) -> tuple[Solution, bool]:
    """Where there must be an answer: by the kernel, else by `transform` and attention.

    (answer, what is kept of the softmax, Sigma^-1 or L, packed report), and whether the kernel has served: of what is
    kept, zeros throughout say that it has not.
    """
    problem = Problem(query, key, value, None, alpha, gain)
    found = native.forward(problem, keep)
    if found is not None:
        return _outputs(found, keep), True
    (batch, m), n = query.shape[:2], min(key.shape[1:])
    out, packed = _in_torch(problem)
    return (out, query.new_zeros(batch, 2, m), query.new_zeros(batch, n, n), packed), False


def _outputs(found: native.Attended, keep: bool) -> Solution:
    if not keep:
        return found.out, found.packed, found.packed, found.packed
    parts, kept = found.parts, found.kept  # (B * parts, 2, M / parts) -> (B, 2, M)
    kept = kept if parts == 1 else kept.unflatten(0, (-1, parts)).transpose(1, 2).flatten(2)
    return found.out, kept, found.matrix[::parts], found.packed


def _pull(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    """The first derivatives, by the kernel."""
    problem, asked = _asked(saved, needs)
    (grad,), (out, kept, matrix, packed) = grads, saved.outputs
    pulled = None
    if saved.seen or bool(kept.any()):
        parts = native.parts_of(*out.shape[:2]) or 1
        split = kept.unflatten(2, (parts, -1)).transpose(1, 2).flatten(0, 1) if parts > 1 else kept
        matrix = matrix.repeat_interleave(parts, 0) if parts > 1 else matrix
        pulled = native.backward(problem, native.Attended(out, packed, parts, split, matrix), grad, asked)
    if pulled is None:
        pairs = zip(problem, asked, strict=True)
        watched = Problem._make(None if x is None else x.detach().requires_grad_(need) for x, need in pairs)
        pulled = _written_out(grad, watched, asked, packed)
    return *pulled[:3], *pulled[4:6]


def _differentiable(grads: Sequence[Tensor], saved: Saved, needs: Sequence[bool]) -> tuple[Tensor | None, ...]:
    problem, asked = _asked(saved, needs)
    pulled = _written_out(grads[0], problem, asked, saved.outputs[-1])
    return *pulled[:3], *pulled[4:6]


def _asked(saved: Saved, needs: Sequence[bool]) -> tuple[Problem, Needs]:
    query, key, value, alpha, gain = saved.tensors
    problem = Problem._make((query, key, value, None, alpha, gain))
    return problem, Needs._make((*needs[:3], False, *needs[3:]))


def _in_torch(problem: Problem) -> tuple[Tensor, Tensor]:
    """Without the kernel: the answer and a packed report, in float64 where the rounding of scores asks for it."""
    dtype = problem.query.dtype
    wide = dtype == torch.float64 or not has_float64(problem.query.device)
    moved, key, packed = _transformed(problem)
    error = rounding(moved, key)
    if not wide and error.amax().item() > SMALL_ROUNDING:
        problem = problem.take(None, torch.float64)
        moved, key, packed = _transformed(problem)
        error, wide = rounding(moved, key), True
    route, condition, own = unpack(packed)
    if moved.dtype != dtype:
        route = route.clamp_min(FLOAT64)
    report = Report(*(x.to(dtype) for x in (route, condition, torch.fmax(own, error) + torch.finfo(dtype).eps)))
    warn_inaccurate(report)
    return _attended(moved, key, problem.value).to(dtype), pack(report)


def _transformed(problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """(queries, keys, packed report) whose products are the scores: Q Sigma^-1 and K, or Q and G^-1 K if N < d."""
    query, key, _, _, alpha, gain = problem
    if key.shape[-2] < key.shape[-1]:
        moved, packed = transform(Problem.of_points(key.mT, key.mT, None, alpha, gain), "auto")
        return query, moved.mT, packed
    moved, packed = transform(problem, "auto")
    return moved, key, packed


def _attended(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(Q K') V, fused: torch does that for 4-D tensors."""
    out = TF.scaled_dot_product_attention(query.unsqueeze(0), key.unsqueeze(0), value.unsqueeze(0), scale=1.0)
    return out.squeeze(0)


def _written_out(grad: Tensor, problem: Problem, needs: Needs, packed: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients by operations of which torch knows every derivative: its fused attention has but one."""
    again, once = torch.is_grad_enabled(), unobserved()
    wide = torch.float64 if bool((packed[:, 0] >= FLOAT64).any()) else grad.dtype
    with torch.enable_grad():
        # aliases: alpha and gain may be made of each other, and each has a slope of its own
        own = Problem._make(None if x is None else x.view_as(x) for x in problem)
        same = own.take(None, wide)
        moved, key, _ = _transformed(same)
        out = _attended(moved, key, same.value) if once else torch.softmax(moved @ key.mT, -1) @ same.value
        wanted = [x for x, need in zip(own, needs, strict=True) if need and x is not None]
        found = iter(torch.autograd.grad(out, wanted, grad.to(wide), create_graph=again))
    return tuple(next(found) if need and x is not None else None for x, need in zip(problem, needs, strict=True))


def _shapes(query: Tensor, key: Tensor, value: Tensor, *_: Tensor | None) -> tuple[Tensor, ...]:
    (batch, m), k, n = query.shape[:2], value.shape[2], min(key.shape[1:])
    return tuple(query.new_empty(batch, *own) for own in ((m, k), (2, m), (n, n), (3,)))


SIGMA = Operator(
    "sigma",
    tensors="query key value alpha gain?",
    options="",
    answers=1,
    outputs=4,
    solve=_answer,
    shapes=_shapes,
    pull=_pull,
    differentiable=_differentiable,
)


def watched(rows: Tensor, error: Tensor) -> Tensor:
    """In a graph: the rows as they are; says so where their scores are not accurate."""
    return torch.ops.intention.watched(rows, error)


def _warn(rows: Tensor, error: Tensor) -> Tensor:
    warn_inaccurate(Report(error, error / torch.finfo(rows.dtype).eps, error))
    return rows.clone(memory_format=torch.contiguous_format)


define(
    "watched",
    "(Tensor rows, Tensor error) -> Tensor",
    _warn,
    lambda rows, error: rows.new_empty(rows.shape),
    batched=lambda info, in_dims, rows, error: (watched(rows, error), in_dims[0]),
    grad=lambda ctx, grad: (grad, None),
)
