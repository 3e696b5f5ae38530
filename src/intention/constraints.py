"""Constraints on the weights w of a fit: C'w >= c and C'w = c, exactly, and the paper's one-pass formula.

`Context.constrain` iterates an active set until it is optimal. The paper takes the constraints that the free solution
violates as equalities, once; that is optimal for equalities and for a single inequality, with more it may be neither
optimal nor feasible. It is here as `one_pass`, to compare.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from intention import _checks as checks
from intention._buffers import KeepsPrecision
from intention.context import Context
from intention.solve.constraints.constrained import KINDS, Constraint
from intention.solve.constraints.constrained import one_pass as _one_pass

__all__ = ["LinearConstraint", "one_pass"]


def one_pass(context: Context, normal: Tensor, bound: float | Tensor, kind: str = "ge") -> Tensor:
    """The paper's w* - Z C(C'ZC)^-1 (C'w* - c) over the constraints that w* violates, (..., d, k); Z = Sigma^-1.

    For comparison with the paper's text; use `Context.constrain` instead, which is optimal with any number of them.
    `normal` is C (..., d, p); `bound`, c, a number, (p,) or a tensor that broadcasts to (..., p, k).
    """
    free = context.free_w()
    constraint = Constraint.of(normal, bound, kind, free)
    return _one_pass(free, context.solve_sigma, (constraint,)).to(context.dtype)


class LinearConstraint(KeepsPrecision):
    """C'w >= c or C'w = c as a module: C (d, p) and c may be parameters, and move with the model that holds it.

    c is a number, (p,) or a tensor that broadcasts to (..., p, k).

    >>> import intention
    >>> none_negative = intention.constraints.LinearConstraint(torch.eye(3), 0.0)
    >>> head = intention.nn.Intention(constraints=none_negative)
    >>> head(torch.randn(7, 3), torch.randn(11, 3), torch.randn(11, 5)).shape
    torch.Size([7, 5])
    """

    def __init__(self, normal: Tensor, bound: float | Tensor, kind: str = "ge") -> None:
        super().__init__()
        checks.choice("kind", kind, KINDS)
        self.kind = kind
        self.normal: Tensor
        self.bound: Tensor
        for name, x in (("normal", normal), ("bound", bound)):
            if isinstance(x, nn.Parameter):
                self.register_parameter(name, x)
            else:
                self.register_buffer(name, x if isinstance(x, Tensor) else torch.as_tensor(x, dtype=torch.float64))

    def forward(self, context: Context) -> Context:
        return context.constrain(self.normal, self.bound, self.kind)

    def extra_repr(self) -> str:
        return f"C {tuple(self.normal.shape)}, {self.kind}"
