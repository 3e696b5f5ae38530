"""`fit`: from points and options to a `Context`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import Covariance, alpha_of, wide_alpha
from intention.context import Context
from intention.context.leave_one_out import choose_alpha
from intention.features import Features, fourier, nystroem
from intention.kernels import BoundKernel, Custom, Function, Kernel, as_kernel
from intention.solve.torch_state import eager

__all__ = ["fit"]

AnyKernel = str | Kernel | BoundKernel | Function


def fit(
    key: Tensor,
    value: Tensor,
    alpha: float | Tensor | str | list | tuple | None = None,
    weight: Tensor | None = None,
    intercept: bool = False,
    covariance: Covariance = "ridge",
    kernel: AnyKernel | None = None,
    keep_points: bool = True,
    *,
    features: str | Callable[[Tensor], Tensor] | None = None,
    landmarks: int | None = None,
    choose: str = "uniform",
    generator: torch.Generator | None = None,
) -> Context:
    """Fit (key, value), batched over the leading dimensions: W = Sigma^-1 K'WV, in float64 inside.

    >>> key, query = torch.randn(2, 11, 3), torch.randn(2, 7, 3)
    >>> value = key @ torch.tensor([[1.0], [2.0], [3.0]]) + 5
    >>> ctx = fit(key, value, alpha="loo", intercept=True)
    >>> ctx(query).shape, ctx.w.shape, ctx.variance(query).shape, ctx.leave_one_out().shape
    (torch.Size([2, 7, 1]), torch.Size([2, 3, 1]), torch.Size([2, 7]), torch.Size([2, 11, 1]))
    >>> ctx = ctx.add(torch.randn(2, 5, 3), torch.randn(2, 5, 1))

    Args:
        key: (..., N, d).
        value: (..., N, k).
        alpha: number >= 0 or tensor that broadcasts to the leading dimensions, as in `functional.intention`. A list or
            tuple of them is a grid: each batch element takes the one with the smallest (weighted) leave-one-out error.
            "loo" is a grid of 28 values from 1e-6 to 1e3 of the mean eigenvalue of K'K.
        weight: (..., N) sample weights >= 0. 0 leaves a point out.
        intercept: add an unregularised constant feature.
        covariance: "ridge", "convex", "within" or a callable, as in `functional.intention`.
        kernel: a name ("linear", "polynomial", "gaussian", "laplacian", "arccosine"), a Kernel, or a callable
            (x, y) -> (..., M, N). The fit is then the N x N one of kernel ridge regression.
        keep_points: False keeps sums only, O(d^2 + dk) whatever N is; what needs the points then raises.
        features: "nystroem" or "fourier": `landmarks` explicit features of the kernel, so that the cost is O(N m^2); or
            a callable, x -> (..., M, m).
        landmarks: the number m of such features.
        choose: how "nystroem" picks its landmarks among the keys: "uniform" or "kmeans++".
        generator: for the two random choices above.

    Raises:
        ValueError, TypeError: naming what came and what was wanted.

    Warns:
        AccuracyWarning: an answer's estimated relative error is above 1e-3.
    """
    # a number is known at once; a tensor is compared with the leading dimensions, and a grid is chosen from
    number = None if isinstance(alpha, (Tensor, str, list, tuple)) else alpha_of(alpha, covariance)
    checks.fitted_points(key, value, weight)
    checks.covariance(covariance)
    if (weight is not None or covariance == "within") and eager():
        checks.require_values(weight, key.new_zeros(()), None)
        if covariance == "within":
            checks.one_hot(value)
    bound = mapping = None
    if kernel is not None or features is not None or landmarks is not None:
        bound, mapping = _space(key, weight, kernel, covariance, keep_points, features, landmarks, choose, generator)
    context = Context(
        key=key,
        value=value,
        weight=weight,
        stats=None,
        alpha=torch.tensor(number or 0.0, dtype=torch.float64, device=key.device),
        fits_intercept=bool(intercept),
        covariance=covariance,
        kernel=bound,
        features=mapping,
        dtype=torch.promote_types(key.dtype, value.dtype),
    )
    if number is None:
        context = dataclasses.replace(context, alpha=_regularisation(alpha, context))
    return context if keep_points else context.without_points()


def _space(
    key: Tensor,
    weight: Tensor | None,
    kernel: AnyKernel | None,
    covariance: Covariance,
    keep_points: bool,
    features: str | Callable[[Tensor], Tensor] | None,
    landmarks: int | None,
    choose: str,
    generator: torch.Generator | None,
) -> tuple[BoundKernel | None, Features | Callable[[Tensor], Tensor] | None]:
    """The kernel or the feature map of a fit, bound to its keys."""
    if features is None:
        if landmarks is not None:
            raise ValueError(f"landmarks={landmarks} belongs to features='nystroem' or 'fourier', got features=None")
        if callable(covariance):
            raise ValueError(
                "a callable covariance is a d x d matrix, a kernel has no such d; use 'ridge', 'convex' or 'within', "
                "or features='nystroem'"
            )
        if not keep_points:
            raise ValueError(
                "a kernel fit is made of its points, so keep_points=False cannot be; use features='nystroem' with "
                "landmarks"
            )
        assert kernel is not None
        return bind_kernel(kernel, key, weight), None
    if not isinstance(features, str):
        if not callable(features):
            raise TypeError(f"features must be 'nystroem', 'fourier' or a callable, got {type(features).__name__}")
        if kernel is not None or landmarks is not None:
            raise ValueError("features that are a callable stand alone; leave kernel and landmarks out")
        return None, features  # pyright: ignore[reportReturnType] - called with a tensor
    checks.choice("features", features, ("nystroem", "fourier"))
    if kernel is None or landmarks is None:
        raise ValueError(f"features={features!r} needs a kernel and landmarks=m, the number of features")
    bound = bind_kernel(kernel, key, weight)
    wide = key if isinstance(bound.kernel, Custom) else key.double()
    if features == "fourier":
        return None, fourier(bound, wide, landmarks, generator, weight)
    return None, nystroem(bound, wide, landmarks, weight, choose, generator)


def _regularisation(alpha: float | Tensor | str | list | tuple | None, context: Context) -> Tensor:
    """alpha as a float64 tensor (...): given, or chosen by leave-one-out."""
    if isinstance(alpha, str):
        checks.choice("alpha", alpha, ("loo",))
        return choose_alpha(context._solved, None)
    if not isinstance(alpha, (list, tuple)):
        return wide_alpha(alpha, context.covariance, context.device, context.lead)
    if not alpha:
        raise ValueError("alpha is an empty grid; give at least one value, or 'loo'")
    members = [wide_alpha(member, context.covariance, context.device, context.lead) for member in alpha]
    return choose_alpha(context._solved, torch.stack(torch.broadcast_tensors(*members), -1))


def bind_kernel(kernel: AnyKernel, key: Tensor, weight: Tensor | None) -> BoundKernel:
    """In float64, but for a function of the user's own, which may hold parameters of another dtype."""
    if isinstance(kernel, BoundKernel):
        return kernel
    chosen = as_kernel(kernel)
    return chosen.bind(key if isinstance(chosen, Custom) else key.double(), weight)
