"""Explicit features phi with phi(x)'phi(y) close to k(x, y): ridge on them approximates the kernel, at the cost of m.

Nystroem        phi(x) = k(x, Z) k(Z, Z)^(-1/2), Z a few points of the context; exact on Z
random Fourier  phi(x) = sqrt(2 / m) cos(x omega + b), omega drawn from the kernel's spectrum
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention._distances import wide
from intention.kernels import BoundKernel, Custom, Function, Kernel, as_kernel, restore
from intention.solve.ladder import has_float64
from intention.solve.matrix.roots import inverse_root
from intention.solve.operator import no_autocast

__all__ = ["Features", "Fourier", "Nystroem", "fourier", "nystroem"]


class Features(ABC):
    """`features(x)` is (..., M, m) for x (..., M, d); made by `nystroem`, `fourier` or `restore_features`."""

    name: str

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor: ...

    @abstractmethod
    def settings(self) -> dict[str, object]:
        """Plain values that, with `name` and `state()`, make equal features."""

    @abstractmethod
    def state(self) -> dict[str, Tensor]:
        """Tensors that, with `name` and `settings()`, make equal features; detached."""


class Nystroem(Features):
    """phi(x) = k(x, Z) R with R = k(Z, Z)^(-1/2); `landmarks` is Z (..., m, d)."""

    name = "nystroem"

    def __init__(self, kernel: BoundKernel, landmarks: Tensor, root: Tensor) -> None:
        self.kernel, self.landmarks, self.root = kernel, landmarks, root

    def __call__(self, x: Tensor) -> Tensor:
        return _product(self.kernel(wide(x), self.landmarks), self.root).to(x.dtype)

    def settings(self) -> dict[str, object]:
        return {"kernel": self.kernel.name, "kernel_settings": self.kernel.settings()}

    def state(self) -> dict[str, Tensor]:
        inner = {f"kernel.{k}": v for k, v in self.kernel.state().items()}
        return {"landmarks": self.landmarks.detach(), "root": self.root.detach(), **inner}


class Fourier(Features):
    """phi(x) = sqrt(2 / m) cos(x omega + b); omega (..., d, m), b (m,)."""

    name = "fourier"

    def __init__(self, omega: Tensor, offset: Tensor) -> None:
        self.omega, self.offset = omega, offset

    def __call__(self, x: Tensor) -> Tensor:
        phase = _product(wide(x), self.omega) + self.offset
        return (phase.cos() * math.sqrt(2 / self.omega.shape[-1])).to(x.dtype)

    def settings(self) -> dict[str, object]:
        return {}

    def state(self) -> dict[str, Tensor]:
        return {"omega": self.omega.detach(), "offset": self.offset}


def nystroem(
    kernel: str | Kernel | BoundKernel | Function,
    key: Tensor,
    landmarks: int,
    weight: Tensor | None = None,
    choose: str = "uniform",
    generator: torch.Generator | None = None,
) -> Nystroem:
    """Features that span what `landmarks` of the keys see of the kernel; with all of them phi phi' = k.

    >>> key, query = torch.randn(2, 11, 3), torch.randn(2, 7, 3)
    >>> phi = nystroem("gaussian", key, landmarks=5)
    >>> phi(query).shape, phi.landmarks.shape
    (torch.Size([2, 7, 5]), torch.Size([2, 5, 3]))

    key (..., N, d), weight (..., N). Each leading element has its own landmarks, at most N, no point twice; points of
    weight 0 come last, only where there are too few others. `choose`: "uniform", or "kmeans++" (with probability
    proportional to weight times the squared distance from those already chosen), which spreads them out. Gradients
    flow to the keys chosen and to the kernel's gamma, once (see `inverse_root`). Half precision computes in float32.
    """
    checks.points(key, key, key)
    checks.choice("choose", choose, ("uniform", "kmeans++"))
    _check_count("landmarks", landmarks, at_most=key.shape[-2])
    if weight is not None:
        checks.weight(weight, key.device, key.shape[-2])
        key = key.expand(*checks.leading(key=key.shape[:-2], weight=weight.shape[:-1]), *key.shape[-2:])
    bound = kernel if isinstance(kernel, BoundKernel) else as_kernel(kernel).bind(key, weight)
    pick = _uniform if choose == "uniform" else _kmeans
    at = pick(wide(key.detach()), weight, landmarks, generator).sort(-1).values
    z = wide(key).gather(-2, at.unsqueeze(-1).expand(*at.shape, key.shape[-1]))  # (..., m, d)
    matrix = bound(z, z)
    precise = matrix.double() if has_float64(matrix.device) else matrix
    # what the kernel's own precision cannot tell from 0 is dropped: its root would be noise
    root = inverse_root(precise, matrix.shape[-1] * torch.finfo(matrix.dtype).eps)
    return Nystroem(bound, z, root.to(matrix.dtype))


def fourier(
    kernel: str | Kernel | BoundKernel,
    key: Tensor,
    features: int,
    generator: torch.Generator | None = None,
    weight: Tensor | None = None,
) -> Fourier:
    """Random Fourier features of a Gaussian or Laplacian kernel (Rahimi & Recht 2007); off by about 1 / sqrt(m).

    >>> fourier("gaussian", torch.randn(2, 11, 3), features=5)(torch.randn(2, 7, 3)).shape
    torch.Size([2, 7, 5])

    The keys (..., N, d) give d, the device and, where gamma is None, gamma. Leading elements share the draws:
    omega = sqrt(2 gamma) times normal ones for the Gaussian, gamma times Cauchy ones for the Laplacian, so gradients
    flow to gamma.
    """
    _check_count("features", features)
    bound = kernel if isinstance(kernel, BoundKernel) else as_kernel(kernel).bind(key, weight)
    if bound.name not in ("gaussian", "laplacian") or bound.gamma is None:
        raise ValueError(
            f"fourier needs a 'gaussian' or 'laplacian' kernel, got {bound.name!r}; use nystroem, which takes any"
        )
    gamma = bound.gamma[..., None, None]
    shape = key.shape[-1], features
    if bound.name == "gaussian":
        omega = _drawn(torch.randn, shape, gamma, generator) * (2 * gamma).sqrt()
    else:
        omega = torch.tan(math.pi * (_drawn(torch.rand, shape, gamma, generator) - 0.5)) * gamma
    return Fourier(omega, 2 * math.pi * _drawn(torch.rand, (features,), gamma, generator))


def restore_features(name: str, settings: dict[str, Any], state: dict[str, Tensor]) -> Features:
    """The features that `name`, `settings()` and `state()` of others describe.

    >>> x = torch.randn(11, 3)
    >>> phi = nystroem("laplacian", x, landmarks=5)
    >>> torch.equal(restore_features(phi.name, phi.settings(), phi.state())(x), phi(x))
    True
    """
    checks.choice("name", name, (Nystroem.name, Fourier.name))
    wanted = ("omega", "offset") if name == Fourier.name else ("landmarks", "root")
    if missing := [entry for entry in wanted if entry not in state]:
        raise ValueError(f"the state of {name} features has the entries {list(wanted)}, got none for {missing}")
    if name == Fourier.name:
        return Fourier(state["omega"], state["offset"])
    inner = {k.removeprefix("kernel."): v for k, v in state.items() if k.startswith("kernel.")}
    kernel = restore(settings["kernel"], settings["kernel_settings"], inner)
    return Nystroem(kernel, state["landmarks"], state["root"])


@no_autocast
def _product(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.promote_types(a.dtype, b.dtype)
    return torch.matmul(a.to(dtype), b.to(dtype))


@torch.no_grad()
def _uniform(key: Tensor, weight: Tensor | None, m: int, generator: torch.Generator | None) -> Tensor:
    """m indices per leading element: the smallest of random numbers; without weight they are larger."""
    score = _drawn(torch.rand, key.shape[:-1], key, generator)
    if weight is not None:
        score = score + 2.0 * (weight <= 0)
    return score.topk(m, dim=-1, largest=False).indices


@torch.no_grad()
def _kmeans(key: Tensor, weight: Tensor | None, m: int, generator: torch.Generator | None) -> Tensor:
    """m indices per leading element, one after the other: P(i) ~ w_i min_j |k_i - z_j|^2, the first P(i) ~ w_i."""
    weight = torch.ones_like(key[..., 0]) if weight is None else weight.to(key.dtype).expand(key.shape[:-1])
    near, free = torch.ones_like(weight), torch.ones_like(weight)
    chosen = []
    for step in range(m):
        mass = weight * near * free
        for other in (weight * free, free):  # only copies of chosen points left; only points without weight left
            mass = torch.where((mass > 0).any(-1, keepdim=True), mass, other)
        # the largest of mass_i / e_i with e_i exponential is i with probability mass_i / sum(mass)
        at = (mass / -torch.log1p(-_drawn(torch.rand, mass.shape, mass, generator))).nan_to_num(0.0).argmax(-1, True)
        point = key.gather(-2, at.unsqueeze(-1).expand(*at.shape, key.shape[-1]))
        distance = (key - point).square().sum(-1)
        near = distance if step == 0 else torch.minimum(near, distance)
        free = free.scatter(-1, at, 0.0)
        chosen.append(at)
    return torch.cat(chosen, -1)


def _drawn(
    draw: Callable[..., Tensor], shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None
) -> Tensor:
    device = like.device if generator is None else generator.device
    return draw(shape, generator=generator, dtype=like.dtype, device=device).to(like.device)


def _check_count(name: str, got: object, at_most: int | None = None) -> None:
    if isinstance(got, bool) or not isinstance(got, int):
        raise TypeError(f"{name} must be a whole number, got {type(got).__name__}; use int({name})")
    if got < 1 or (at_most is not None and got > at_most):
        wanted = ">= 1" if at_most is None else f"between 1 and the number of keys N = {at_most}"
        raise ValueError(f"{name} must be {wanted}, got {got}" + ("" if at_most is None else "; use min(m, N)"))


def same_map(a: object, b: object) -> bool:
    """Whether two bound kernels, or two feature maps, are the same function."""
    if a is b or a is None or b is None:
        return a is b
    if not isinstance(a, BoundKernel | Features) or not isinstance(b, BoundKernel | Features):
        return False
    if getattr(getattr(a, "kernel", None), "name", "") == Custom.name:  # of code nothing is known
        return False
    if type(a) is not type(b) or a.name != b.name or a.settings() != b.settings():
        return False
    mine, theirs = a.state(), b.state()
    return mine.keys() == theirs.keys() and all(torch.equal(x, theirs[name]) for name, x in mine.items())
