"""A context, fitted once and used many times: predictions, variance, leave-one-out, and points that come and go."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from os import PathLike

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import ON_KEYS, Covariance
from intention.context import leave_one_out, points, storage
from intention.context.points import Sums
from intention.context.solved import Solved
from intention.features import Features
from intention.kernels import BoundKernel
from intention.solve.centring import EPS
from intention.solve.constraints.constrained import Constraint
from intention.solve.ladder import Report
from intention.solve.torch_state import eager

__all__ = ["Context"]


@dataclasses.dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Context:
    """What `fit` returns. Nothing is changed in place: `add`, `remove`, `merge`, ... give a new Context."""

    key: Tensor | None  # (..., N, d) the points, in the dtype they came in; None where only sums are kept
    value: Tensor | None  # (..., N, k)
    weight: Tensor | None  # (..., N)
    stats: Sums | None  # the sums, where points came or went, or are not kept
    alpha: Tensor  # (...) float64
    fits_intercept: bool
    covariance: Covariance
    kernel: BoundKernel | None
    features: Features | Callable[[Tensor], Tensor] | None
    dtype: torch.dtype
    matrix: Tensor | None = None  # what a callable covariance estimated, where the points are not kept
    constraints: tuple[Constraint, ...] = ()
    _solved: Solved = dataclasses.field(init=False)  # the answers, each computed when it is first asked

    def __post_init__(self) -> None:
        kept = None if self.key is None or self.value is None else (self.key, self.value, self.weight)
        made = self.covariance, self.kernel, self.features, self.matrix, self.constraints, self.dtype
        solved = Solved(kept, self.stats, self.alpha, self.fits_intercept, *made)
        object.__setattr__(self, "_solved", solved)

    @property
    def device(self) -> torch.device:
        return self.alpha.device if self.key is None else self.key.device

    @property
    def lead(self) -> tuple[int, ...]:
        """The leading dimensions of the fit, those of alpha aside."""
        if self.key is None or self.value is None:
            assert self.stats is not None
            return checks.leading(key=self.stats.scatter.shape[:-2], value=self.stats.cross.shape[:-2])
        weight = () if self.weight is None else self.weight.shape[:-1]
        gamma = () if self.kernel is None or self.kernel.gamma is None else self.kernel.gamma.shape
        return checks.leading(key=self.key.shape[:-2], value=self.value.shape[:-2], weight=weight, gamma=gamma)

    @property
    def sizes(self) -> tuple[int, int]:
        """(d, k): of the points, or of their features where only sums are kept"""
        key, value = self._like
        return key.shape[-1], value.shape[-1]

    def __repr__(self) -> str:
        n = "sums" if self.key is None else f"N={self.key.shape[-2]}"
        space = f", kernel={self.kernel.name}" if self.kernel is not None else ""
        name = self.covariance if isinstance(self.covariance, str) else "callable"
        return f"Context({n}, lead={self.lead}, covariance={name}{space}, intercept={self.fits_intercept})"

    # -- answers ------------------------------------------------------------------------------------------------------

    def __call__(self, query: Tensor) -> Tensor:
        """Predictions (..., M, k) for queries (..., M, d)."""
        query, dtype = self._query(query)
        return self._solved.predict(query).to(dtype)

    @property
    def w(self) -> Tensor:
        """The weights (..., d, k) of a linear fit; of one with features, those of the features."""
        self._need_w("w")
        return self._solved.linear[0].to(self.dtype, copy=True)  # whoever writes into it does not change the context

    @property
    def intercept(self) -> Tensor:
        """The constant (..., k) of a linear fit; 0 where none was asked for."""
        self._need_w("intercept")
        w, mean_key, mean_value, _ = self._solved.linear
        if mean_key is None or mean_value is None:
            return torch.zeros_like(w[..., 0, :]).to(self.dtype)
        return (mean_value - mean_key @ w).squeeze(-2).to(self.dtype)

    def variance(self, query: Tensor, noise: bool = False) -> Tensor:
        """The posterior variance (..., M) of a prediction: alpha q Sigma^-1 q' (prior variance 1, noise alpha).

        `noise=True` is the variance of an observation: alpha more. The intercept has a flat prior. For the convex
        covariance the noise is alpha / (1 - alpha), which is the ridge it is a multiple of.
        """
        self._unconstrained("variance")
        query, dtype = self._query(query)
        lead = checks.leading(query=query.shape[:-2], context=self.lead, alpha=self.alpha.shape)
        return self._solved.variance(query, noise).expand(*lead, query.shape[-2]).to(dtype)

    def leverage(self) -> Tensor:
        """How much each point pulls its own prediction, df_i/dv_i (..., N)."""
        self._need_closed_form("leverage")
        return leave_one_out.leverage(self._solved).to(self.dtype)

    def leave_one_out(self) -> Tensor:
        """v_i minus the prediction of the fit without point i, (..., N, k), in closed form.

        Points whose leverage is 1 up to rounding are left out one by one instead: there are at most d of them.
        """
        self._need_closed_form("leave_one_out")
        return leave_one_out.leave_one_out(self._solved).to(self.dtype)

    def describe(self) -> Report:
        """Route (an index into `functional.ROUTES`), condition and estimated relative error of the fit (...)."""
        report = self._solved.system.solution.report if self.kernel is not None else self._solved.linear[3]
        return report.told()

    # -- points that come and go --------------------------------------------------------------------------------------

    def add(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Context:
        """The context with more points, (..., n, d) and (..., n, k), weight (..., n), without fitting it anew."""
        self._check_points("add", key, value, weight)
        fit = self._solved
        stats = fit.sums.add(fit.mapped(key), value, weight) if self._wants_sums(key.shape[-2]) else None
        both = None if fit.points is None else points.join(fit.points, (key, value, weight))
        return self._with(both, stats, torch.promote_types(key.dtype, value.dtype))

    def remove(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Context:
        """The context without some of its points, (..., n, d) and (..., n, k), weight (..., n).

        Where points are kept they must be there, each as often as given (and, with `weight`, with that weight); where
        only sums are, what is left must be possible.
        """
        self._check_points("remove", key, value, weight)
        fit, stats = self._solved, None
        if fit.points is None:
            stats, impossible = fit.sums.remove(Sums.of(fit.mapped(key), value, weight))
            if eager() and bool(impossible.any()):
                raise ValueError(
                    f"these {key.shape[-2]} points cannot have been in the context: without them its K'K would have a "
                    "negative direction; remove only what was added, with the same weight (and gamma of `forget`)"
                )
            return self._with(None, stats, self.dtype)
        left, gone = points.split(fit.points, (key, value, weight))
        if self.stats is not None and left[0].shape[-2] >= left[0].shape[-1]:
            stats, _ = self.stats.remove(Sums.of(fit.mapped(gone[0]), *gone[1:]))
            large = gone[1].detach().abs().amax() > 1e6 * left[1].detach().abs().amax()
            if bool(large | (stats.noise > 1e3 * EPS * stats.scatter.diagonal(0, -2, -1)).any()):
                stats = None  # what went was so much larger that its rounding shows in what is left: sum that anew
        return self._with(left, stats, self.dtype)

    def merge(self, other: Context) -> Context:
        """One context of the points of both, which may have been fitted apart."""
        if not isinstance(other, Context):
            raise TypeError(f"merge takes another Context, got {type(other).__name__}; use add(key, value) for points")
        if self.device != other.device:
            raise ValueError(f"the contexts are on {self.device} and {other.device}; fit them on one device")
        # with features one may tell d, the other the number of features
        comparable = self.features is None or (self.key is None) == (other.key is None)
        if self.sizes[1] != other.sizes[1] or (comparable and self.sizes != other.sizes):
            raise ValueError(f"contexts of different (d, k) cannot be merged: {self.sizes} and {other.sizes}")
        mine, theirs = self._solved, other._solved
        mine.check_alike(theirs)
        self._need_sums("merge")
        if mine.points is None or theirs.points is None:
            return self._with(None, mine.sums.merge(theirs.sums), other.dtype)
        stats = None
        if self._wants_sums(theirs.points[0].shape[-2]):
            stats = mine.sums.merge(theirs.sums) if other.weight is None else mine.sums.add(*theirs.wide)
        return self._with(points.join(mine.points, theirs.points), stats, other.dtype)

    def forget(self, gamma: float | Tensor) -> Context:
        """Every point so far counts `gamma` times what it did; 0 < gamma <= 1, a number or a tensor (...)."""
        self._need_sums("forget")
        if not isinstance(gamma, Tensor):
            checks.number("gamma", gamma)
            gamma = torch.tensor(float(gamma), dtype=torch.float64, device=self.device)
        if eager() and not bool(((gamma > 0) & (gamma <= 1)).all()):
            raise ValueError(f"gamma must be in (0, 1], got {gamma.detach()}; 1 forgets nothing, 0.9 a tenth per call")
        gamma = gamma.double()
        weight = None
        if self.key is not None:
            weight = self.key.new_ones(self.key.shape[:-1]) if self.weight is None else self.weight
            weight = weight.double() * gamma[..., None]
        return dataclasses.replace(self, weight=weight, stats=None if self.stats is None else self.stats.forget(gamma))

    def without_points(self) -> Context:
        """The same fit, kept as sums alone."""
        if self.kernel is not None:
            raise ValueError("a kernel fit is made of its points; use features='nystroem' to keep sums")
        matrix = self._solved.estimated if callable(self.covariance) else None
        return dataclasses.replace(self._with(None, self._solved.sums, self.dtype), matrix=matrix)

    def constrain(self, normal: Tensor, bound: float | Tensor, kind: str = "ge") -> Context:
        """The fit under constraints on each column of w: C'w >= c ("ge") or C'w = c ("eq").

        normal: C (..., d, p). bound: c, a number or a tensor that broadcasts to (..., p, k); one of shape (p,) holds
        for every column. They add to the constraints that are there. ValueError when they cannot all hold.
        """
        self._need_w("constrain")
        constraint = Constraint.of(normal, bound, kind, self.free_w())
        if constraint.normal.shape[-1] == 0:
            return self
        return dataclasses.replace(self, constraints=(*self.constraints, constraint))

    def free_w(self) -> Tensor:
        """w (..., d, k) without the constraints, in float64."""
        self._need_w("free_w")
        free = self if not self.constraints else dataclasses.replace(self, constraints=())
        return free._solved.linear[0].clone()

    def solve_sigma(self, b: Tensor) -> Tensor:
        """Sigma^-1 b for b (..., d, p), in float64."""
        self._need_w("solve_sigma")
        return self._solved.certified.solve(b)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All there is as plain tensors, detached; `Context.from_state_dict` takes them back."""
        return storage.state_dict(self._solved)

    @staticmethod
    def from_state_dict(state: dict[str, Tensor]) -> Context:
        return storage.restored(state, Context)

    def save(self, path: str | PathLike) -> None:
        """Write a safetensors file (extra `safetensors`)."""
        storage.save(self.state_dict(), path)

    @staticmethod
    def load(path: str | PathLike, device: str | torch.device = "cpu") -> Context:
        """Read what `save` wrote, onto `device`."""
        return Context.from_state_dict(storage.load(path, str(device)))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _with(self, kept: points.PointSet | None, stats: Sums | None, dtype: torch.dtype) -> Context:
        """The same fit of other points, some of this dtype; None where only sums are kept."""
        key, value, weight = (None, None, None) if kept is None else kept
        dtype = torch.promote_types(self.dtype, dtype)
        return dataclasses.replace(self, key=key, value=value, weight=weight, stats=stats, dtype=dtype)

    def _wants_sums(self, more: int) -> bool:
        """Whether the context with so many more points is better solved by d x d sums than by an N x N system."""
        if self.kernel is not None or self.key is None:
            return self.kernel is None
        return self.stats is not None or self.features is not None or self.key.shape[-2] + more >= self.key.shape[-1]

    @property
    def _like(self) -> tuple[Tensor, Tensor]:
        """Keys and values as they are in this context: its points, or (where only sums are kept) their means."""
        if self.key is not None and self.value is not None:
            return self.key, self.value
        assert self.stats is not None
        return self.stats.mean_key.unsqueeze(-2), self.stats.mean_value.unsqueeze(-2)

    def _query(self, query: Tensor) -> tuple[Tensor, torch.dtype]:
        """Queries in the space of the fit, and the dtype of what is answered."""
        like, lead = self._like[0], self.lead
        checks.query(query, like, self.features is not None and self.key is None)
        checks.leading(query=query.shape[:-2], context=lead)
        return self._solved.mapped(query), torch.promote_types(query.dtype, self.dtype)

    def _check_points(self, what: str, key: Tensor, value: Tensor, weight: Tensor | None) -> None:
        """Points that come or go are like those of the context."""
        mine, values = self._like
        like = key if self.features is not None and self.key is None else mine
        checks.fitted_points(key, value, weight, (like, values), self.lead)
        if (weight is not None or self.covariance == "within") and eager():
            checks.require_values(weight, self.alpha, None)
            if self.covariance == "within":
                checks.one_hot(value)
        self._need_sums(what)

    def _need_sums(self, what: str) -> None:
        if callable(self.covariance):
            raise ValueError(
                f"{what} is not possible with a callable covariance, which is no sum over points; fit anew"
            )

    def _need_w(self, what: str) -> None:
        if self.kernel is not None:
            raise ValueError(
                f"{what} belongs to weights w, and a fit with kernel {self.kernel.name!r} has no w in the space of the "
                "keys; call the context on queries, or use features='nystroem'"
            )

    def _unconstrained(self, what: str) -> None:
        if self.constraints:
            raise ValueError(f"{what} is not known in closed form under constraints; ask the unconstrained context")

    def _need_closed_form(self, what: str) -> None:
        self._unconstrained(what)
        if self.key is None:
            raise ValueError(f"{what} needs the points, and this context keeps sums only; fit with keep_points=True")
        if self.covariance not in ON_KEYS:
            name = self.covariance if isinstance(self.covariance, str) else "a callable"
            raise ValueError(
                f"{what} has a closed form for covariance 'ridge' and 'convex', where a point changes Sigma by one "
                f"rank; got {name}"
            )
