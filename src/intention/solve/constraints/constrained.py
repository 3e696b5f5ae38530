"""Least squares under linear constraints on w, and its derivative through the active set.

    minimise (w - w*)' Sigma (w - w*) / 2  subject to  C'w >= c  or  C'w = c

With Z = Sigma^-1 and the constraints A that hold with equality at the solution,
w = w* + Z C_A (C_A' Z C_A)^-1 (c_A - C_A' w*): differentiable as long as A does not switch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from intention import _checks as checks
from intention.solve.constraints.active_set import active_set
from intention.solve.ladder import Report, warn_inaccurate
from intention.solve.matrix.inverse import inverse

KINDS = ("ge", "eq")


class Constraint(NamedTuple):
    """C'w >= c ("ge") or C'w = c ("eq") for each column of w."""

    normal: Tensor  # C (..., d, p)
    bound: Tensor  # c (..., p, k)
    kind: str

    @staticmethod
    def of(normal: object, bound: object, kind: str, w: Tensor) -> Constraint:
        """Checked against w (..., d, k)."""
        checks.choice("kind", kind, KINDS)
        d, k = w.shape[-2:]
        if not isinstance(normal, Tensor) or not normal.dtype.is_floating_point or normal.dim() < 2:
            got = tuple(normal.shape) if isinstance(normal, Tensor) else type(normal).__name__
            raise ValueError(f"C must be a floating-point tensor (..., d, p), one constraint per column, got {got}")
        if normal.shape[-2] != d:
            raise ValueError(
                f"C must have d = {d} rows, one per weight, got {tuple(normal.shape)}; is it C.mT you mean?"
            )
        if normal.device != w.device:
            raise ValueError(f"C is on {normal.device} but the context is on {w.device}; move it with .to(device)")
        p = normal.shape[-1]
        if not isinstance(bound, Tensor):
            checks.number("c", bound)
            bound = torch.tensor(float(bound), dtype=torch.float64)  # pyright: ignore[reportArgumentType]
        bound = bound.to(w.device, torch.float64)
        if bound.dim() == 1 and bound.shape[0] in (1, p):
            bound = bound.unsqueeze(-1)
        try:
            bound = bound.expand(*torch.broadcast_shapes(bound.shape[:-2], w.shape[:-2]), p, k)
        except RuntimeError:
            raise ValueError(
                f"c must be a number, a tensor (p,) or one that broadcasts to (..., p, k) = (..., {p}, {k}), got "
                f"{tuple(bound.shape)}"
            ) from None
        checks.leading(w=w.shape[:-2], normal=normal.shape[:-2], bound=bound.shape[:-2])
        bad = ~torch.isfinite(bound) if kind == "eq" else torch.isnan(bound) | (bound == torch.inf)
        if bool(bad.any()):
            raise ValueError(f"c must be finite (-inf is no constraint with 'ge'), got {bound[bad][0].item()}")
        return Constraint(normal.double(), bound, kind)


def constrained(w: Tensor, solve: Callable[[Tensor], Tensor], constraints: tuple[Constraint, ...]) -> Tensor:
    """The constrained w (..., d, k) from the free one and `solve(b)` = Sigma^-1 b. Infeasible: ValueError."""
    normal, bound, equal = _stacked(constraints)
    moved = solve(normal)  # Z C (..., d, p)
    system = normal.mT @ moved  # (..., p, p)
    gap = (bound - normal.mT @ w).mT  # (..., k, p): a problem per column
    absent = (bound == -torch.inf).mT
    gap = torch.where(absent, -1.0, gap)
    size = system.detach().diagonal(0, -2, -1).clamp_min(0).sqrt()
    unit = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 1.0)
    terms = (bound.abs() + normal.abs().mT @ w.abs()).mT.detach() * unit.unsqueeze(-2)  # what gap is a difference of
    terms = torch.where(absent, 1.0, terms)
    system, gap = system * unit.unsqueeze(-1) * unit.unsqueeze(-2), gap * unit.unsqueeze(-2)
    lead = torch.broadcast_shapes(system.shape[:-2], gap.shape[:-2])
    k, p = gap.shape[-2:]
    wide = system.unsqueeze(-3).expand(*lead, k, p, p)
    wide = torch.where(absent.unsqueeze(-1) | absent.unsqueeze(-2), 0.0, wide)  # a row of zeros asks for nothing
    gap, terms = gap.expand(*lead, k, p), terms.expand(*lead, k, p)
    flat = wide.detach().reshape(-1, p, p), gap.detach().reshape(-1, p), equal, terms.reshape(-1, p)
    found = active_set(*flat)
    _require_solution(found.feasible, found.converged)
    active = found.active.reshape(*lead, k, p)
    eye = torch.eye(p, dtype=w.dtype, device=w.device)
    both = active.unsqueeze(-1) & active.unsqueeze(-2)
    inner, _, _ = inverse(torch.where(both, wide, eye), w.new_zeros(()))
    multiplier = (inner @ torch.where(active, gap, 0.0).unsqueeze(-1)).squeeze(-1)  # (..., k, p)
    lost = torch.isnan(found.multiplier).any(-1).reshape(*lead, k, 1)  # of keys, values or C that are not finite
    multiplier = torch.where(lost, torch.nan, multiplier)
    out = w + moved @ (multiplier * unit.unsqueeze(-2)).mT
    off = torch.where(active, ((normal.mT @ out).mT - bound.mT) * unit.unsqueeze(-2), 0.0)
    _warn_violated(off.detach(), terms)
    return out


def _warn_violated(off: Tensor, terms: Tensor) -> None:
    """Active constraints hold with equality; by how much they do not says how exact w is."""
    error = (off.abs() / terms.clamp_min(torch.finfo(terms.dtype).tiny)).amax((-2, -1))
    warn_inaccurate(Report(torch.zeros_like(error), torch.zeros_like(error), error))


def one_pass(w: Tensor, solve: Callable[[Tensor], Tensor], constraints: tuple[Constraint, ...]) -> Tensor:
    """The paper's formula: the constraints that the free w violates, taken as equalities, once."""
    normal, bound, equal = _stacked(constraints)
    moved = solve(normal)
    gap = (bound - normal.mT @ w).mT
    violated = (gap > 0) | equal
    both = violated.unsqueeze(-1) & violated.unsqueeze(-2)
    eye = torch.eye(normal.shape[-1], dtype=w.dtype, device=w.device)
    inner, _, _ = inverse(torch.where(both, (normal.mT @ moved).unsqueeze(-3), eye), w.new_zeros(()))
    multiplier = inner @ torch.where(violated, gap, 0.0).unsqueeze(-1)
    return w + moved @ multiplier.squeeze(-1).mT


def _stacked(constraints: tuple[Constraint, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """All constraints as one: C (..., d, p), c (..., p, k) and which of the p are equalities (p,)."""
    lead = torch.broadcast_shapes(*(c.normal.shape[:-2] for c in constraints))
    normal = torch.cat([c.normal.expand(*lead, *c.normal.shape[-2:]) for c in constraints], -1)
    lead = torch.broadcast_shapes(*(c.bound.shape[:-2] for c in constraints))
    bound = torch.cat([c.bound.expand(*lead, *c.bound.shape[-2:]) for c in constraints], -2)
    kinds = [c.kind == "eq" for c in constraints for _ in range(c.normal.shape[-1])]
    return normal, bound, torch.tensor(kinds, device=normal.device)


def _require_solution(feasible: Tensor, converged: Tensor) -> None:
    if bool((feasible & converged).all()):
        return
    if not bool(feasible.all()):
        count = int((~feasible).sum())
        raise ValueError(
            f"the constraints contradict each other in {count} of {feasible.numel()} problems (batch elements times "
            "columns of w): no w satisfies them all; check the signs (C'w >= c), or relax c"
        )
    raise RuntimeError("the active set did not settle; the constraints are nearly dependent, remove those that repeat")
