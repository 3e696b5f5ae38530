"""Which constraints hold with equality at the optimum: a batched dual active-set method.

    minimise 1/2 (w - w*)' Sigma (w - w*)   subject to   C'w >= c   (some rows with = instead)

With D = C' Sigma^-1 C (p x p) and gap = c - C'w*, the solution is w = w* + Sigma^-1 C mu, where

    slack = D mu - gap >= 0,   mu >= 0,   mu_i slack_i = 0      for the inequalities,
    slack = 0,                 mu free                          for the equalities.

So D and gap are all that is needed, and the search is for the active set A: mu_A = D_AA^-1 gap_A, zero elsewhere. The
method is that of Goldfarb and Idnani (1983). It starts at w*, holds the multipliers right at every step and takes up
one violated constraint after another. The dual objective grows with each, so no active set comes back.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

# Everything below is measured after D is scaled to a unit diagonal: a constraint is then a unit vector in the geometry
# of Sigma, gap_j the distance from w* to its plane, and units and row lengths are gone.
#
# z = v'Dv with v = (1, -r) is the squared distance of a constraint from the span of the active ones. Rounding in D
# moves it by eps |v|_1^2; below DEPENDENT |v|_1^2 it counts as zero. Constraints closer than an angle of about 1e-6 are
# thus parallel, and whether such a pair can be met is decided as if they were.
DEPENDENT = 1e-12
# D_jA mu_A is a sum whose terms may cancel: nothing below this share of their sizes can be called a violation.
ROUNDING = 64 * torch.finfo(torch.float64).eps

# Candidates this close to the best are as good as it: the first of them is taken, so that rounding does not choose.
TIE = 1e-9


class ActiveSet(NamedTuple):
    """The active set and its multipliers: D_AA is nonsingular and mu_A = D_AA^-1 gap_A (signs cleaned of rounding).

    Where `feasible` or `converged` is False they are only where the search stopped, finite but no solution.
    """

    active: Tensor  # (B, p) bool
    multiplier: Tensor  # (B, p), zero off the active set; NaN where the input is not finite
    feasible: Tensor  # (B,) bool: False where no w meets the constraints
    converged: Tensor  # (B,) bool: False where the iterations ran out or D_AA could not be factored
    iterations: int  # of the slowest element


class _Search(NamedTuple):
    """The elements still at work."""

    unit: Tensor  # (b, p, p): D with a unit diagonal
    gap: Tensor  # (b, p), scaled alike
    noise: Tensor  # (b, p): violations below are none
    rtol: Tensor  # (b,)
    bound: Tensor  # (b, p) bool: inequalities
    active: Tensor  # (b, p) bool
    entering: Tensor  # (b,): the constraint being taken up, -1 if there is none
    weight: Tensor  # (b,): its multiplier so far
    passed: Tensor  # (b, p) bool: found to hold as well as rounding in the active ones allows

    def take(self, index: Tensor) -> _Search:
        return _Search(*(x[index] for x in self))


@torch.no_grad()
def active_set(
    d: Tensor, gap: Tensor, equal: Tensor, size: Tensor | None = None, rtol: float = 1e-9, limit: int | None = None
) -> ActiveSet:
    """The optimal active set of a batch of problems. No gradient: differentiate through mu_A = D_AA^-1 gap_A instead.

    >>> d, gap = torch.eye(2, dtype=torch.float64)[None], torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    >>> active_set(d, gap, torch.tensor([False, False])).active
    tensor([[ True, False]])

    Args:
        d: (B, p, p) float64, C' Sigma^-1 C. Best formed as Y'Y with Y = L^-1 C: dependent constraints then stay so.
            A zero on the diagonal means C_j = 0: such a row is ignored, or infeasible if it asks for more than 0.
        gap: (B, p) float64, c - C'w*.
        equal: (p,) or (B, p) bool, rows that are equalities. Dependent ones are dropped as redundant if they agree.
        size: (B, p), size of the terms gap is the difference of, |c| + |C'||w*|; |gap| if None. It matters where w*
            lies on two opposite constraints up to rounding, which from gap alone looks like a contradiction.
        rtol: constraint j holds if it is violated by at most rtol (size_j + sqrt(D_jj) |w - w*|_Sigma). Both terms
            change with the units of c and with the length of row j as the violation does.
        limit: the most iterations, 10 p + 100 if None. Each adds or drops one constraint in every element.
    """
    batch, p = _check(d, gap, equal)
    equal = equal.expand(batch, p)
    size = gap.abs() if size is None else size
    finite = torch.isfinite(d).all(-1).all(-1) & torch.isfinite(gap).all(-1) & torch.isfinite(size).all(-1)
    if p == 0 or batch == 0:
        yes = torch.ones(batch, dtype=torch.bool, device=d.device)
        return ActiveSet(torch.zeros_like(equal), gap.clone(), yes, yes.clone(), 0)
    search, root, feasible = _start(d, gap, equal, size, rtol, finite)
    found = _run(search, finite & feasible, 10 * p + 100 if limit is None else limit)
    multiplier = torch.where(equal, found.multiplier, found.multiplier.clamp(min=0)) / root
    multiplier = multiplier.masked_fill(~finite.unsqueeze(1), torch.nan)
    return found._replace(multiplier=multiplier, feasible=feasible & found.feasible)


def _check(d: Tensor, gap: Tensor, equal: Tensor) -> tuple[int, int]:
    """B and p, or an error that says what does not fit."""
    if d.ndim != 3 or d.shape[1:] != (d.shape[-1], d.shape[-1]) or gap.shape != d.shape[:2]:
        raise ValueError(f"want d (B, p, p) and gap (B, p), got {tuple(d.shape)} and {tuple(gap.shape)}")
    if d.dtype != torch.float64 or gap.dtype != torch.float64 or equal.dtype != torch.bool:
        raise TypeError(f"want d and gap float64 and equal bool, got {d.dtype}, {gap.dtype} and {equal.dtype}")
    if equal.shape not in (gap.shape, gap.shape[1:]):
        raise ValueError(f"want equal (p,) or (B, p) for gap {tuple(gap.shape)}, got {tuple(equal.shape)}")
    return d.shape[0], d.shape[1]


def _start(
    d: Tensor, gap: Tensor, equal: Tensor, size: Tensor, rtol: float, finite: Tensor
) -> tuple[_Search, Tensor, Tensor]:
    """The scaled problem with its independent equalities active, sqrt(diag D), and which elements may be feasible."""
    d = torch.where(finite.view(-1, 1, 1), d, 0.0)
    gap, size = (torch.where(finite.unsqueeze(1), x, 0.0) for x in (gap, size))
    diagonal = d.diagonal(0, -2, -1)
    empty = diagonal <= torch.finfo(d.dtype).tiny  # C_j = 0
    root = torch.where(empty, 1.0, diagonal).sqrt()
    unit = d / root.unsqueeze(1) / root.unsqueeze(2)
    gap, noise = gap / root, rtol * size / root
    asked = torch.where(equal, gap.abs(), gap) > noise
    feasible = ~(empty & asked).any(-1)

    equal = equal & ~empty
    active = _independent(unit, equal)
    none = torch.full(gap.shape[:1], -1, device=gap.device)
    every = torch.full_like(gap[:, 0], rtol)
    search = _Search(unit, gap, noise, every, ~equal & ~empty, active, none, 0 * every, torch.zeros_like(active))
    if active.any():  # the equalities left out must hold where the others do
        lower, _ = _factor(search)
        lack, tolerance = _violation(search, _solve(lower, gap * active))
        feasible &= ~(equal & ~active & (lack.abs() > tolerance)).any(-1)
    return search, root, feasible


def _independent(unit: Tensor, among: Tensor) -> Tensor:
    """A largest independent subset of the constraints in `among`, by Cholesky with diagonal pivoting."""
    schur = unit.clone()
    chosen = torch.zeros_like(among)
    for _ in range(int(among.sum(-1).max())):
        left = torch.where(among & ~chosen, schur.diagonal(0, -2, -1), 0.0)
        pivot, j = (x.unsqueeze(1) for x in _largest(left))
        ok = pivot > DEPENDENT
        chosen |= torch.zeros_like(chosen).scatter(1, j, ok)
        # S <- S - S_:j S_j: / S_jj
        column = torch.take_along_dim(schur, j.unsqueeze(1), 2).squeeze(2)
        column = torch.where(ok, column / pivot.clamp(min=DEPENDENT).sqrt(), 0.0)
        schur -= column.unsqueeze(2) * column.unsqueeze(1)
    return chosen


def _largest(x: Tensor) -> tuple[Tensor, Tensor]:
    """The largest entry per row, or the first close to it: repeated constraints tie, and rounding must not choose."""
    j = (x >= (1 - TIE) * x.amax(-1, keepdim=True)).max(-1).indices
    return x.gather(1, j.unsqueeze(1)).squeeze(1), j


def _run(search: _Search, wanted: Tensor, limit: int) -> ActiveSet:
    """Add and drop constraints until every element is optimal or known to be infeasible."""
    active, multiplier = search.active.clone(), torch.zeros_like(search.gap)
    feasible, converged = torch.ones_like(wanted), ~wanted
    live = wanted.nonzero().squeeze(1)
    search = search.take(live)
    iterations = 0
    while live.numel() and iterations < limit:
        iterations += 1
        lower, failed = _factor(search)
        mu = _solve(lower, search.gap * search.active)
        active[live], multiplier[live] = search.active, mu
        lack, tolerance = _violation(search, mu)
        search, optimal = _pick(search, lack, tolerance)
        search, stuck = _move(search, lower, mu, tolerance, ~optimal)
        feasible[live] = failed | ~stuck
        converged[live] = (optimal | stuck) & ~failed
        going = (~(optimal | stuck | failed)).nonzero().squeeze(1)
        if going.numel() < live.numel():  # those that are done cost nothing from here on
            live, search = live[going], search.take(going)
    return ActiveSet(active, multiplier, feasible, converged, iterations)


def _factor(search: _Search) -> tuple[Tensor, Tensor]:
    """The Cholesky factor of D_AA with ones on the diagonal elsewhere, and where there is none (the identity then)."""
    on = search.active.to(search.unit.dtype)
    masked = search.unit * on.unsqueeze(1) * on.unsqueeze(2)
    masked.diagonal(0, -2, -1).fill_(1.0)
    lower, info = torch.linalg.cholesky_ex(masked)
    failed = info.bool()
    eye = torch.eye(lower.shape[-1], dtype=lower.dtype, device=lower.device)
    return torch.where(failed.view(-1, 1, 1), eye, lower), failed


def _solve(lower: Tensor, rhs: Tensor) -> Tensor:
    """D_AA^-1 rhs for one right-hand side that is zero off A, and so is the result."""
    return torch.cholesky_solve(rhs.unsqueeze(2), lower).squeeze(2)


def _violation(search: _Search, mu: Tensor) -> tuple[Tensor, Tensor]:
    """gap - D mu, and how much of it is to be overlooked."""
    reached = torch.bmm(search.unit, mu.unsqueeze(2)).squeeze(2)
    terms = torch.bmm(search.unit.abs(), mu.abs().unsqueeze(2)).squeeze(2)
    # |w - w*|_Sigma^2 = mu'D mu, and no entry of D mu is larger, as the constraints are unit vectors
    distance = (mu * reached).sum(-1).clamp(min=0).sqrt()
    return search.gap - reached, search.noise + (search.rtol * distance).unsqueeze(1) + ROUNDING * terms


def _pick(search: _Search, lack: Tensor, tolerance: Tensor) -> tuple[_Search, Tensor]:
    """Where nothing is entering, let the most violated inequality enter; where there is none, w is optimal."""
    candidate = search.bound & ~search.active & ~search.passed & (lack > tolerance)
    worst, j = _largest(torch.where(candidate, lack, 0.0))
    free = search.entering < 0
    entering = torch.where(free, j, search.entering)
    weight = torch.where(free, 0.0, search.weight)
    return search._replace(entering=entering, weight=weight), free & ~(worst > 0)


def _move(search: _Search, lower: Tensor, mu: Tensor, tolerance: Tensor, moving: Tensor) -> tuple[_Search, Tensor]:
    """Raise the weight t of the entering constraint j until it holds, or until an active one lets go.

    The active constraints keep holding: mu_A(t) = mu_A - t r with r = D_AA^-1 D_Aj, and the lack of j falls from its
    value at t = 0 by t z with z = D_jj - D_jA r. Only A, j and t are carried along, so rounding does not pile up.
    """
    j = search.entering.unsqueeze(1)
    column = torch.take_along_dim(search.unit, j.unsqueeze(1), 2).squeeze(2) * search.active  # D_Aj
    r = _solve(lower, column)
    z = 1 - (column * r).sum(-1)
    lack = search.gap.gather(1, j).squeeze(1) - (column * mu).sum(-1)
    length = 1 + r.abs().sum(-1)  # |v|_1
    full = torch.where(z > DEPENDENT * length.square(), lack / z, torch.inf)
    # an r_i that is rounding must not block: it would hide that nothing does, which is infeasible
    blocks = search.active & search.bound & (r > DEPENDENT * length.unsqueeze(1))
    partial, leaving = torch.where(blocks, mu / r, torch.inf).min(-1)
    # rounding may put either a hair below where we stand
    full, partial = torch.maximum(full, search.weight), torch.maximum(partial, search.weight)

    # Nothing can give way. If planes moved by their tolerances would meet, j holds as well as can be told.
    stuck = moving & torch.isinf(full) & torch.isinf(partial)
    passes = stuck & (search.weight == 0) & (lack <= tolerance.gather(1, j).squeeze(1) + (r.abs() * tolerance).sum(-1))
    adds = (full <= partial) & ~stuck
    change = torch.where(adds, search.entering, leaving).unsqueeze(1)
    kept = search.active.scatter(1, change, adds.unsqueeze(1))
    search = search._replace(
        active=torch.where(stuck.unsqueeze(1), search.active, kept),
        entering=torch.where(adds | passes, -1, search.entering),
        weight=torch.where(adds | passes, 0.0, partial),
        passed=torch.where(adds.unsqueeze(1), False, search.passed.scatter(1, j, passes.unsqueeze(1))),
    )
    return search, stuck & ~passes
