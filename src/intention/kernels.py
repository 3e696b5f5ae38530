"""Kernels k(x, y), small modules: least squares on them bends, where on the points themselves it is a straight line.

A kernel is bound to a context before it is used, so that what depends on the context (the median heuristic's gamma)
is found once and serves every query. Nothing here factors a matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from intention import _checks as checks
from intention._buffers import KeepsPrecision
from intention._distances import absolute_distance, inner, median_distance, squared_distance, wide, with_diagonal

__all__ = ["ArcCosine", "BoundKernel", "Custom", "Gaussian", "Kernel", "Laplacian", "Linear", "Polynomial"]

Function = Callable[[Tensor, Tensor], Tensor]


class Kernel(nn.Module):
    """The base of all kernels: `kernel(x, y)` is (..., M, N) for x (..., M, d) and y (..., N, d).

    >>> key, query = torch.randn(2, 11, 3), torch.randn(2, 7, 3)
    >>> Gaussian(gamma=0.5)(query, key).shape
    torch.Size([2, 7, 11])
    >>> bound = Gaussian().bind(key)  # gamma by the median heuristic, one per leading element
    >>> bound(query, key).shape, bound.gamma.shape
    (torch.Size([2, 7, 11]), torch.Size([2]))

    An own kernel is any callable (x, y) -> (..., M, N). One with a gamma derives from this class and defines
    `evaluate`, `evaluate_diagonal` and `find_gamma`; half precision arrives there as it was given.
    """

    name = "custom"

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """k(x_i, y_j), (..., M, N), of x (..., M, d) and y (..., N, d)."""
        return self.bind(y)(x, y)

    def diagonal(self, x: Tensor) -> Tensor:
        """k(x_i, x_i), (..., M), of x (..., M, d)."""
        return self.bind(x).diagonal(x)

    def bind(self, key: Tensor, weight: Tensor | None = None) -> BoundKernel:
        """Fix what depends on the context, key (..., N, d). Points of weight (..., N) 0 do not count."""
        checks.points(key, key, key)
        if weight is not None:
            checks.weight(weight, key.device, key.shape[-2])
        return BoundKernel(self, self.find_gamma(key, weight))

    def find_gamma(self, key: Tensor, weight: Tensor | None) -> Tensor | None:
        """gamma (...) of a context key (..., N, d) with weight (..., N); None for a kernel without one."""
        return None

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        """k(x_i, y_j), (..., M, N), of x (..., M, d) and y (..., N, d), with gamma (...)."""
        raise NotImplementedError(f"{type(self).__name__} must define evaluate(x, y, gamma) -> (..., M, N)")

    def evaluate_diagonal(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        """k(x_i, x_i), (..., M), of x (..., M, d), with gamma (...)."""
        return self.evaluate(x.unsqueeze(-2), x.unsqueeze(-2), None if gamma is None else gamma[..., None])[..., 0, 0]

    def settings(self) -> dict[str, float]:
        """What makes this kernel again, besides the state of a bound one."""
        return {}


class BoundKernel:
    """A kernel whose numbers are fixed: `bound(x, y)`, `bound.diagonal(x)`. Made by `Kernel.bind` or `restore`.

    >>> key = torch.randn(11, 3)
    >>> bound = Gaussian().bind(key)
    >>> again = restore(bound.name, bound.settings(), bound.state())
    >>> torch.equal(again(key, key), bound(key, key))
    True
    """

    def __init__(self, kernel: Kernel, gamma: Tensor | None) -> None:
        self.kernel, self.gamma, self.name = kernel, gamma, kernel.name

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """k(x_i, y_j), (..., M, N), of x (..., M, d) and y (..., N, d)."""
        checks.points(x, y, y)
        checks.leading(query=x.shape[:-2], key=y.shape[:-2])
        dtype = torch.promote_types(x.dtype, y.dtype)
        return self.kernel.evaluate(x.to(dtype), y.to(dtype), self.gamma).to(dtype)

    def diagonal(self, x: Tensor) -> Tensor:
        """k(x_i, x_i), (..., M), of x (..., M, d)."""
        checks.points(x, x, x)
        return self.kernel.evaluate_diagonal(x, self.gamma).to(x.dtype)

    def take(self, lead: tuple[int, ...], index: Tensor) -> BoundKernel:
        """The kernel of the elements `index` of the flat batch that leading dimensions `lead` make."""
        gamma = self.gamma
        return BoundKernel(self.kernel, gamma if gamma is None else gamma.expand(lead).reshape(-1)[index])

    def settings(self) -> dict[str, float]:
        return self.kernel.settings()

    def state(self) -> dict[str, Tensor]:
        """Tensors that, with `name` and `settings()`, make an equal kernel; detached."""
        if type(self.kernel) is not KINDS.get(self.name):
            made = self.kernel.function if isinstance(self.kernel, Custom) else self.kernel
            name = getattr(made, "__name__", type(made).__name__)
            raise ValueError(
                f"a kernel that is a {name} cannot be stored: its code is not part of the state; keep the kernel "
                f"itself, or use one of {NAMES}"
            )
        return {} if self.gamma is None else {"gamma": self.gamma.detach()}


class Linear(Kernel):
    """k = x'y.

    >>> Linear()(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[11.]])
    """

    name = "linear"

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        return inner(x, y)

    def evaluate_diagonal(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        return wide(x).square().sum(-1)


class _Scaled(Kernel, KeepsPrecision):
    """A kernel with a gamma: a number, a tensor (a Parameter is trained as it is), or None = read from the context."""

    log_gamma: nn.Parameter | None

    def __init__(self, gamma: float | Tensor | None = None, learnable: bool = False) -> None:
        super().__init__()
        _check_gamma(gamma)
        if isinstance(gamma, Tensor) and not isinstance(gamma, nn.Parameter):
            self.register_buffer("gamma", gamma)  # so that it moves with .to(device)
        else:
            self.gamma = gamma
        self.log_gamma = nn.Parameter(torch.zeros(())) if learnable else None

    def find_gamma(self, key: Tensor, weight: Tensor | None) -> Tensor:
        """exp(log_gamma) times what was given, or what the context says."""
        gamma = self.of_context(wide(key.detach()), weight) if self.gamma is None else self.gamma
        gamma = torch.as_tensor(gamma, dtype=wide(key).dtype, device=key.device)
        checks.leading(key=key.shape[:-2], gamma=gamma.shape)
        return gamma if self.log_gamma is None else gamma * self.log_gamma.to(gamma.device, gamma.dtype).exp()

    def of_context(self, key: Tensor, weight: Tensor | None) -> float | Tensor:
        raise NotImplementedError


class Polynomial(_Scaled):
    """k = (gamma x'y + coef0)^degree; gamma is 1/d unless given, as in scikit-learn.

    >>> Polynomial(degree=2)(torch.tensor([[1.0, 2.0]]), torch.tensor([[3.0, 4.0]]))  # (11/2 + 1)^2
    tensor([[42.2500]])
    """

    name = "polynomial"

    def __init__(self, degree: int = 3, gamma: float | Tensor | None = None, coef0: float = 1.0) -> None:
        super().__init__(gamma)
        if isinstance(degree, bool) or not isinstance(degree, int) or degree < 1:
            raise ValueError(f"degree must be a whole number >= 1, got {degree!r}; for degree 1 see kernels.Linear")
        checks.number("coef0", coef0)
        if not 0 <= coef0 < math.inf:
            raise ValueError(f"coef0 must be finite and >= 0, got {coef0}; below 0 the kernel has negative eigenvalues")
        self.degree, self.coef0 = degree, coef0

    def of_context(self, key: Tensor, weight: Tensor | None) -> float:
        return 1 / key.shape[-1]

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        return (_per_matrix(gamma) * inner(x, y) + self.coef0) ** self.degree

    def evaluate_diagonal(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        return (_per_matrix(gamma)[..., 0] * wide(x).square().sum(-1) + self.coef0) ** self.degree

    def settings(self) -> dict[str, float]:
        return {"degree": self.degree, "coef0": self.coef0}


class Gaussian(_Scaled):
    """k = exp(-gamma |x - y|^2); gamma is 1 / median(|x_i - x_j|^2) unless given.

    >>> Gaussian(gamma=0.5)(torch.zeros(1, 2), torch.ones(1, 2))  # exp(-1)
    tensor([[0.3679]])
    >>> Gaussian().bind(torch.tensor([[0.0], [1.0], [3.0]])).gamma  # squared distances 1, 4 and 9
    tensor(0.2500)

    Args:
        gamma: a positive number; a positive tensor that broadcasts to the leading dimensions, whose gradient flows; or
            None, the median heuristic: over pairs of different points of the context (for an even number of pairs the
            lower of the two in the middle), each counted w_i w_j, per leading element, without gradient. Of more than
            1000 points 1000 are looked at, evenly spaced. Where there is no pair, gamma is 1.
        learnable: a parameter `log_gamma`, starting at 0, multiplies gamma by exp(log_gamma), so it stays positive.
    """

    name = "gaussian"

    def of_context(self, key: Tensor, weight: Tensor | None) -> Tensor:
        return _reciprocal(median_distance(key, weight, p=2.0).square())

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        return torch.exp(-_per_matrix(gamma) * squared_distance(x, y))

    def evaluate_diagonal(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        assert gamma is not None
        return x.new_ones(*checks.leading(key=x.shape[:-2], gamma=gamma.shape), x.shape[-2])

    def diagonal(self, x: Tensor) -> Tensor:
        return x.new_ones(x.shape[:-1]) if self.gamma is None else super().diagonal(x)  # the median is not needed


class Laplacian(Gaussian):
    """k = exp(-gamma |x - y|_1); gamma is 1 / median(|x_i - x_j|_1) unless given, and else as for Gaussian.

    >>> Laplacian(gamma=0.5)(torch.zeros(1, 2), torch.ones(1, 2))  # exp(-1)
    tensor([[0.3679]])

    |.| has a kink at 0; its derivative counts as 0 there.
    """

    name = "laplacian"

    def of_context(self, key: Tensor, weight: Tensor | None) -> Tensor:
        return _reciprocal(median_distance(key, weight, p=1.0))

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        return torch.exp(-_per_matrix(gamma) * absolute_distance(x, y))


class ArcCosine(Kernel):
    """k = |x|^n |y|^n J_n(theta) / pi, of the angle theta between x and y: an infinitely wide layer of max(0, w'x)^n.

        J_0 = pi - theta,  J_1 = sin + (pi - theta) cos,  J_2 = 3 sin cos + (pi - theta) (1 + 2 cos^2)

    >>> ArcCosine(order=0)(torch.tensor([[1.0, 0.0]]), torch.tensor([[0.0, 2.0]]))  # a right angle
    tensor([[0.5000]])

    Cho & Saul, "Kernel methods for deep learning", NIPS 2009. Order 0 has a kink at theta = 0 and pi, order 1 at a zero
    vector; their derivatives count as 0 there. A zero vector is at a right angle to everything, also to itself.
    """

    name = "arccosine"

    def __init__(self, order: int = 1) -> None:
        super().__init__()
        if isinstance(order, bool) or order not in (0, 1, 2):
            raise ValueError(f"order must be 0, 1 or 2, got {order!r}; 1 is the kernel of a ReLU layer")
        self.order = order

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        (length_x, unit_x), (length_y, unit_y) = _polar(wide(x)), _polar(wide(y))
        cos = inner(unit_x, unit_y)
        # Rounding cannot tell angles up to sqrt(8 eps) from 0. The values move to the end, their derivatives stay.
        near = cos.detach()
        cos = cos + torch.where(near.abs() > 1 - 4 * torch.finfo(cos.dtype).eps, near.sign() - near, 0.0)
        if x is y:
            cos = with_diagonal(cos, length_x.detach().sign())
        lengths = (length_x**self.order).unsqueeze(-1) * (length_y**self.order).unsqueeze(-2)
        return lengths * _angular(cos, self.order) / math.pi

    def evaluate_diagonal(self, x: Tensor, gamma: Tensor | None) -> Tensor:
        square = wide(x).square().sum(-1)
        if self.order == 0:
            return torch.where(square == 0, 0.5, 1.0).to(square)
        return square if self.order == 1 else 3 * square.square()

    def settings(self) -> dict[str, float]:
        return {"order": self.order}


class Custom(Kernel):
    """A callable (x, y) -> (..., M, N) as a kernel; the parameters of a module are registered.

    >>> Custom(lambda x, y: 1 + x @ y.mT)(torch.ones(2, 7, 3), torch.ones(11, 3)).shape
    torch.Size([2, 7, 11])
    """

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function

    def evaluate(self, x: Tensor, y: Tensor, gamma: Tensor | None) -> Tensor:
        out = self.function(x, y)
        lead = checks.leading(query=x.shape[:-2], key=y.shape[:-2])
        wanted = (*lead, x.shape[-2], y.shape[-2])
        if not isinstance(out, Tensor) or tuple(out.shape) != wanted:
            got = tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__
            raise ValueError(
                f"kernel(x, y) must return a tensor of shape (..., M, N) = {wanted} for x {tuple(x.shape)} and "
                f"y {tuple(y.shape)}, got {got}; batch it over leading dimensions, as in x @ y.mT"
            )
        return out


KINDS: dict[str, Callable[..., Kernel]] = {k.name: k for k in (Linear, Polynomial, Gaussian, Laplacian, ArcCosine)}
NAMES = ", ".join(map(repr, KINDS))


def as_kernel(kernel: str | Kernel | Function) -> Kernel:
    """A kernel from its name, from itself, or from any callable (x, y) -> (..., M, N).

    >>> as_kernel("gaussian")
    Gaussian()
    """
    if isinstance(kernel, Kernel):
        return kernel
    if isinstance(kernel, str):
        if kernel not in KINDS:
            raise ValueError(f"kernel must be one of {NAMES}, a Kernel or a callable, got {kernel!r}")
        return KINDS[kernel]()
    if isinstance(kernel, type) and issubclass(kernel, Kernel):
        raise TypeError(f"kernel must be a Kernel, got the class {kernel.__name__}; use {kernel.__name__}()")
    if not callable(kernel):
        raise TypeError(
            f"kernel must be one of {NAMES}, a Kernel or a callable (x, y) -> (..., M, N), got {type(kernel).__name__}"
        )
    return Custom(kernel)


def restore(name: str, settings: dict[str, float], state: dict[str, Tensor]) -> BoundKernel:
    """The bound kernel that `name`, `settings()` and `state()` of another one describe."""
    checks.choice("name", name, tuple(KINDS))
    kernel = KINDS[name](**settings)
    wanted = {"gamma"} if isinstance(kernel, _Scaled) else set()
    if set(state) != wanted:
        raise ValueError(f"the state of a {name} kernel has the entries {sorted(wanted)}, got {sorted(state)}")
    return BoundKernel(kernel, state.get("gamma"))


def _reciprocal(median: Tensor) -> Tensor:
    usable = (median > 0) & (median < torch.inf)
    return torch.where(usable, 1 / median, 1.0)


def _polar(x: Tensor) -> tuple[Tensor, Tensor]:
    """Lengths (..., M) and unit vectors; a zero vector has no direction, and a derivative of 0."""
    square = x.square().sum(-1)
    zero = square == 0
    length = torch.where(zero, 1.0, square).sqrt()
    return torch.where(zero, 0.0, length), torch.where(zero.unsqueeze(-1), 0.0, x / length.unsqueeze(-1))


def _angular(cos: Tensor, order: int) -> Tensor:
    """J_n. At the ends sin and theta count as constant, and dJ_1 / dcos = pi - theta, dJ_2 / dcos = 4 J_1 are exact."""
    end = cos.abs() >= 1
    inside = torch.where(end, 0.0, cos)
    rest = torch.where(end, math.pi * (cos > 0).to(cos.dtype), torch.acos(-inside))  # pi - theta
    if order == 0:
        return rest
    sin = torch.where(end, 0.0, ((1 - inside) * (1 + inside)).sqrt())
    return sin + rest * cos if order == 1 else 3 * sin * cos + rest * (1 + 2 * cos.square())


def _per_matrix(gamma: Tensor | None) -> Tensor:
    assert gamma is not None  # `find_gamma` always gives one
    return gamma[..., None, None]


def _check_gamma(gamma: float | Tensor | None) -> None:
    if gamma is None:
        return
    if not isinstance(gamma, Tensor):
        checks.number("gamma", gamma, "; use a tensor for one per head, None to find it from the context")
    else:
        checks.floating_tensor("gamma", gamma)
    if not bool(((gamma > 0) & (gamma < torch.inf)).all() if isinstance(gamma, Tensor) else 0 < gamma < math.inf):
        got = gamma.tolist() if isinstance(gamma, Tensor) else gamma
        raise ValueError(f"gamma must be > 0 and finite, got {got}; use gamma=None to find it from the context")
