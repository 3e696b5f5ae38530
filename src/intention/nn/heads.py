"""Heads that read (query, key, value)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from intention import functional as F
from intention.constraints import LinearConstraint
from intention.context import Context
from intention.covariance import Covariance
from intention.fitting import fit
from intention.kernels import as_kernel


class Intention(nn.Module):
    """Least squares as a layer: fitted on (key, value), evaluated at query.

    >>> head = Intention(alpha=0.1, intercept=True)
    >>> query, key, value = torch.randn(2, 7, 3), torch.randn(2, 11, 3), torch.randn(2, 11, 5)
    >>> head(query, key, value).shape
    torch.Size([2, 7, 5])

    Args:
        alpha: as in `functional.intention`; an nn.Parameter is registered and trained.
        intercept: add an unregularised constant feature.
        covariance: "ridge", "convex", "within" or a callable.
        kernel: a name, a `kernels.Kernel` (its parameters are registered) or a callable.
        constraints: a `LinearConstraint` or several; gradients flow through the constraints that are active.
    """

    def __init__(
        self,
        alpha: float | Tensor | None = None,
        *,
        intercept: bool = False,
        covariance: Covariance = "ridge",
        kernel: Any = None,
        constraints: LinearConstraint | Iterable[LinearConstraint] = (),
    ) -> None:
        super().__init__()
        self.alpha: Any
        if isinstance(alpha, Tensor) and not isinstance(alpha, nn.Parameter):
            self.register_buffer("alpha", alpha)
        else:
            self.alpha = alpha
        self.intercept, self.covariance = intercept, covariance
        self.kernel = None if kernel is None else as_kernel(kernel)
        several = [constraints] if isinstance(constraints, LinearConstraint) else list(constraints)
        self.constraints = nn.ModuleList(several)

    def fit(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Context:
        """The fitted context, under the constraints."""
        context = fit(key, value, self.alpha, weight, self.intercept, self.covariance, self.kernel)
        for constraint in self.constraints:
            context = constraint(context)
        return context

    def forward(self, query: Tensor, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Tensor:
        if self.kernel is not None or len(self.constraints):
            return self.fit(key, value, weight)(query)
        out = F.intention(
            query,
            key,
            value,
            alpha=self.alpha,
            weight=weight,
            intercept=self.intercept,
            covariance=self.covariance,
        )
        assert isinstance(out, torch.Tensor)
        return out
