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
from intention.solve.ladder import warn_of_error
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
    size = (normal * moved).detach().sum(-2).clamp_min(0).sqrt()  # the length of a row in the geometry of Sigma
    unit = torch.where(size > 0, 1 / torch.where(size > 0, size, 1.0), 1.0)
    normal, moved, bound = normal * unit.unsqueeze(-2), moved * unit.unsqueeze(-2), bound * unit.unsqueeze(-1)
    gap = (bound - normal.mT @ w).detach().mT  # (..., k, p): a problem per column
    terms = (bound.abs() + normal.abs().mT @ w.abs()).detach().mT  # what gap is a difference of
    absent = (bound == -torch.inf).mT
    gap, terms = torch.where(absent, -1.0, gap), torch.where(absent, 1.0, terms)
    system = (normal.mT @ moved).detach().unsqueeze(-3)
    system = torch.where(absent.unsqueeze(-1) | absent.unsqueeze(-2), 0.0, system)  # a row of zeros asks for nothing
    lead = torch.broadcast_shapes(system.shape[:-2], gap.shape[:-1])
    p = gap.shape[-1]
    gap, terms = gap.expand(*lead, p), terms.expand(*lead, p)
    found = active_set(system.expand(*lead, p, p).reshape(-1, p, p), gap.reshape(-1, p), equal, terms.reshape(-1, p))
    if not bool(found.feasible.all()):
        count, whole = int((~found.feasible).sum()), found.feasible.numel()
        raise ValueError(
            f"the constraints contradict each other in {count} of {whole} problems (batch elements times "
            "columns of w): no w satisfies them all; check the signs (C'w >= c), or relax c"
        )
    if not bool(found.converged.all()):
        nearly = "the active set did not settle; the constraints are nearly dependent, remove those that repeat"
        raise RuntimeError(nearly)
    active = found.active.reshape(*lead, p)
    out, _ = on_planes(w, normal, moved, bound, active)
    lost = torch.isnan(found.multiplier).any(-1).reshape(*lead, 1)  # of keys, values or C that are not finite
    out = out * torch.where(lost, torch.nan, 1.0).mT
    # active constraints hold with equality; by how much they do not says how exact w is
    off = torch.where(active, (normal.mT @ out - bound).mT, 0.0).detach()
    error = (off.abs() / terms.clamp_min(torch.finfo(terms.dtype).tiny)).amax((-2, -1))
    warn_of_error(error)
    return out


def on_planes(w: Tensor, normal: Tensor, moved: Tensor, bound: Tensor, active: Tensor) -> tuple[Tensor, Tensor]:
    """The point w + Z C mu nearest to w (..., d, k) where the `active` (..., k, p) hold with equality, and mu.

    With C = `normal` and Z C = `moved`. C'ZC knows the angles between the planes only by their squares: its rounding
    leaves the first step off by eps over the smallest angle squared. What C'w then lacks says by how much; the second
    step makes up for it, and what remains is the rounding in C'w, eps over the angle.
    """
    system = (normal.mT @ moved).unsqueeze(-3)
    both = active.unsqueeze(-1) & active.unsqueeze(-2)
    eye = torch.eye(normal.shape[-1], dtype=w.dtype, device=w.device)
    inner, _, _ = inverse(torch.where(both, system, eye), w.new_zeros(()))
    multiplier = torch.zeros_like(active, dtype=w.dtype)
    for _ in range(2):
        gap = torch.where(active, (bound - normal.mT @ w).mT, 0.0)
        step = torch.where(active, (inner @ gap.unsqueeze(-1)).squeeze(-1), 0.0)
        w, multiplier = w + moved @ step.mT, multiplier + step
    return w, multiplier


def one_pass(w: Tensor, solve: Callable[[Tensor], Tensor], constraints: tuple[Constraint, ...]) -> Tensor:
    """The paper's formula: the constraints that the free w violates, taken as equalities, once."""
    normal, bound, equal = _stacked(constraints)
    violated = (bound > normal.mT @ w).mT | equal
    out, _ = on_planes(w, normal, solve(normal), bound, violated)
    return out


def _stacked(constraints: tuple[Constraint, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """All constraints as one: C (..., d, p), c (..., p, k) and which of the p are equalities (p,)."""
    lead = torch.broadcast_shapes(*(c.normal.shape[:-2] for c in constraints))
    normal = torch.cat([c.normal.expand(*lead, *c.normal.shape[-2:]) for c in constraints], -1)
    lead = torch.broadcast_shapes(*(c.bound.shape[:-2] for c in constraints))
    bound = torch.cat([c.bound.expand(*lead, *c.bound.shape[-2:]) for c in constraints], -2)
    kinds = [c.kind == "eq" for c in constraints for _ in range(c.normal.shape[-1])]
    return normal, bound, torch.tensor(kinds, device=normal.device)
