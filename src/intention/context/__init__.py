"""A context, fitted once and used many times: predictions, variance, leave-one-out, and points that come and go."""

from __future__ import annotations

import dataclasses
from os import PathLike

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import is_named, on_keys
from intention.context import left_out, points, storage
from intention.context.by_points import ByPoints
from intention.context.solved import Kept
from intention.context.sums import Sums
from intention.solve.centring import EPS
from intention.solve.constraints.constrained import Constraint
from intention.solve.doors import eager
from intention.solve.ladder import Report


class Context(Kept):
    """What `fit` returns. Nothing is changed in place: `add`, `remove`, `merge`, ... give a new Context."""

    def __repr__(self) -> str:
        n = "sums" if self.key is None else f"N={self.key.shape[-2]}"
        space = f", kernel={self.kernel.name}" if self.kernel is not None else ""
        name = self.covariance if isinstance(self.covariance, str) else "callable"
        return f"Context({n}, lead={self.lead}, covariance={name}{space}, intercept={self.fits_intercept})"

    # -- answers ------------------------------------------------------------------------------------------------------

    def __call__(self, query: Tensor) -> Tensor:
        """Predictions (..., M, k) for queries (..., M, d)."""
        query, dtype = self._query(query)
        if self.kernel is not None:
            return self._system.predict(query).to(dtype)
        w, mean_key, mean_value, _ = self._linear
        if mean_key is None or mean_value is None:
            return (query @ w).to(dtype)
        return ((query - mean_key) @ w + mean_value).to(dtype)

    @property
    def w(self) -> Tensor:
        """The weights (..., d, k) of a linear fit; of one with features, those of the features."""
        self._need_w("w")
        return self._linear[0].to(self.dtype, copy=True)  # whoever writes into it does not change the context

    @property
    def intercept(self) -> Tensor:
        """The constant (..., k) of a linear fit; 0 where none was asked for."""
        self._need_w("intercept")
        w, mean_key, mean_value, _ = self._linear
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
        level = self.alpha if self._gain is None else self.alpha / self._gain
        out = self._certified.spread(query)
        if self.fits_intercept:
            out = out + (level / self._count)[..., None]
        lead = checks.leading(query=query.shape[:-2], context=self.lead, alpha=self.alpha.shape)
        return (out + level[..., None] if noise else out).expand(*lead, query.shape[-2]).to(dtype)

    def leverage(self) -> Tensor:
        """How much each point pulls its own prediction, df_i/dv_i (..., N)."""
        self._unconstrained("leverage")
        _, _, weight = self._need_points("leverage")
        self._need_closed_form("leverage")
        return self._system.leverage(self._hat, weight).to(self.dtype)

    def leave_one_out(self) -> Tensor:
        """v_i minus the prediction of the fit without point i, (..., N, k), in closed form.

        Points whose leverage is 1 up to rounding are left out one by one instead: there are at most d of them.
        """
        self._unconstrained("leave_one_out")
        key, value, weight = self._need_points("leave_one_out")
        self._need_closed_form("leave_one_out")
        if isinstance(self._system, ByPoints):
            out, risky = self._certified.leave_one_out()  # type: ignore[union-attr,call-arg]
        else:
            w, _, _, report = self._linear
            out, risky = self._system.leave_one_out(self._hat, w, report.error, key, value, weight)
        if eager() and bool(risky.any()):
            out = left_out.refit(self, out, risky)
        return out.to(self.dtype)

    def describe(self) -> Report:
        """Route (an index into `functional.ROUTES`), condition and estimated relative error of the fit (...)."""
        report = self._system.report if self.kernel is not None else self._linear[3]
        return report.told()

    # -- points that come and go --------------------------------------------------------------------------------------

    def add(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Context:
        """The context with more points, (..., n, d) and (..., n, k), without fitting it anew."""
        self._check_points(key, value, weight)
        self._need_sums("add")
        more = self._points_with(key, value, weight) if self.key is not None else {}
        dtype = torch.promote_types(self.dtype, torch.promote_types(key.dtype, value.dtype))
        return dataclasses.replace(self, **more, dtype=dtype, stats=self._sums_with(key, value, weight))

    def remove(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Context:
        """The context without some of its points. Where points are kept they must be there, each as often as given
        (and, with `weight`, with that weight); where only sums are, what is left must be possible.
        """
        self._check_points(key, value, weight)
        self._need_sums("remove")
        if self.key is None:
            return self._remove_sums(key, value, weight)
        left, gone = points.split(self._points, (key, value, weight))
        n, d = left[0].shape[-2:]
        stats = None
        if self.stats is not None and n >= d:
            stats, _ = self.stats.remove(self._stats_of(*gone))
            large = gone[1].detach().abs().amax() > 1e6 * left[1].detach().abs().amax()
            if bool(large | (stats.noise > 1e3 * EPS * stats.scatter.diagonal(0, -2, -1)).any()):
                stats = None  # what went was so much larger that its rounding shows in what is left: sum that anew
        return dataclasses.replace(self, key=left[0], value=left[1], weight=left[2], stats=stats)

    def merge(self, other: Context) -> Context:
        """One context of the points of both, which may have been fitted apart."""
        self._check_same(other)
        self._need_sums("merge")
        dtype = torch.promote_types(self.dtype, other.dtype)
        if self.key is None or other.key is None:
            lost = dict.fromkeys(("key", "value", "weight"))
            return dataclasses.replace(self, **lost, dtype=dtype, stats=self._sums.merge(other._sums))  # type: ignore[arg-type]
        assert other.value is not None
        both = self._points_with(other.key, other.value, other.weight)
        stats = None
        if self._wants_sums(self.key.shape[-2] + other.key.shape[-2]):
            stats = self._sums.merge(other._sums) if other.weight is None else self._sums.add(*other._wide)
        return dataclasses.replace(self, **both, dtype=dtype, stats=stats)

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
        matrix = None
        if not is_named(self.covariance):
            matrix = self._system.matrix  # type: ignore[union-attr]
        return dataclasses.replace(self, key=None, value=None, weight=None, stats=self._sums, matrix=matrix)

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
        return free._linear[0].clone()

    def solve_sigma(self, b: Tensor) -> Tensor:
        """Sigma^-1 b for b (..., d, p), in float64."""
        self._need_w("solve_sigma")
        return self._certified.solve(b)

    # -- keeping ------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Tensor]:
        """All there is as plain tensors, detached; `Context.from_state_dict` takes them back."""
        return storage.state_dict(self)

    @staticmethod
    def from_state_dict(state: dict[str, Tensor]) -> Context:
        return Context(**storage.fields(state))

    def save(self, path: str | PathLike) -> None:
        """Write a safetensors file (extra `safetensors`)."""
        storage.save(self.state_dict(), path)

    @staticmethod
    def load(path: str | PathLike, device: str | torch.device = "cpu") -> Context:
        """Read what `save` wrote, onto `device`."""
        return Context.from_state_dict(storage.load(path, str(device)))

    # -- inside -------------------------------------------------------------------------------------------------------

    def _query(self, query: Tensor) -> tuple[Tensor, torch.dtype]:
        like = self._sums.mean_key if self.key is None else self.key
        checks.query(query, like, self.features is not None and self.key is None)
        checks.leading(query=query.shape[:-2], context=self.lead)
        dtype = torch.promote_types(query.dtype, self.dtype)
        if self.kernel is not None:
            return query.double(), dtype
        return self._mapped(query), dtype

    def _check_points(self, key: Tensor, value: Tensor, weight: Tensor | None) -> None:
        checks.fitted_points(key, value)
        if self.key is not None:
            checks.same_features(key, value, *self._points[:2])
        else:
            assert self.stats is not None
            like = key if self.features is not None else self.stats.mean_key
            checks.same_features(key, value, like, self.stats.mean_value)
        checks.leading(context=self.lead, key=key.shape[:-2], value=value.shape[:-2])
        if weight is not None:
            checks.weight(weight, key.device, key.shape[-2])
        if eager():
            checks.require_values(weight, self.alpha, None)
            if self.covariance == "within":
                checks.one_hot(value)

    def _points_with(self, key: Tensor, value: Tensor, weight: Tensor | None) -> dict[str, Tensor | None]:
        return dict(zip(("key", "value", "weight"), points.join(self._points, (key, value, weight)), strict=True))

    def _wants_sums(self, n: int) -> bool:
        """Whether n points are better kept as d x d sums than as an N x N system."""
        if self.kernel is not None or self.key is None:
            return self.kernel is None
        return self.stats is not None or self.features is not None or n >= self.key.shape[-1]

    def _sums_with(self, key: Tensor, value: Tensor, weight: Tensor | None) -> Sums | None:
        n = 0 if self.key is None else self.key.shape[-2] + key.shape[-2]
        return self._sums.add(self._mapped(key), value, weight) if self._wants_sums(n) else None

    def _remove_sums(self, key: Tensor, value: Tensor, weight: Tensor | None) -> Context:
        assert self.stats is not None
        stats, impossible = self.stats.remove(self._stats_of(key, value, weight))
        if eager() and bool(impossible.any()):
            raise ValueError(
                f"these {key.shape[-2]} points cannot have been in the context: without them its K'K would have a "
                "negative direction; remove only what was added, with the same weight (and gamma of `forget`)"
            )
        return dataclasses.replace(self, stats=stats)

    def _need_points(self, what: str) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.key is None:
            raise ValueError(f"{what} needs the points, and this context keeps sums only; fit with keep_points=True")
        return self._wide

    def _need_closed_form(self, what: str) -> None:
        if not on_keys(self.covariance):
            name = self.covariance if isinstance(self.covariance, str) else "a callable"
            raise ValueError(
                f"{what} has a closed form for covariance 'ridge' and 'convex', where a point changes Sigma by one "
                f"rank; got {name}"
            )

    def _need_w(self, what: str) -> None:
        if self.kernel is not None:
            raise ValueError(
                f"{what} belongs to weights w, and a fit with kernel {self.kernel.name!r} has no w in the space of the "
                "keys; call the context on queries, or use features='nystroem'"
            )

    def _need_sums(self, what: str) -> None:
        if not is_named(self.covariance):
            raise ValueError(
                f"{what} is not possible with a callable covariance, which is no sum over points; fit anew"
            )

    def _unconstrained(self, what: str) -> None:
        if self.constraints:
            raise ValueError(f"{what} is not known in closed form under constraints; ask the unconstrained context")
