"""What torch is doing around a call: is it recorded, transformed, compiled, in autocast; what can be kept of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

T = TypeVar("T")

# Whether torch.func is at work. Private to torch but used by autograd.Function itself; without it every call takes the
# slower, always right way.
transformed: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009 - torch's stubs do not know it
# torch.autograd.grad(is_grads_batched=True): no transform is active, and rules of a Function are not asked.
legacy_batched: Callable[[Tensor], bool] = getattr(functorch, "is_legacy_batchedtensor", lambda _: False)


class Ctx(Protocol):
    """What torch hands to the methods of an autograd.Function."""

    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def save_for_forward(self, *tensors: Tensor | None) -> None: ...
    def mark_non_differentiable(self, *tensors: Tensor) -> None: ...
    def set_materialize_grads(self, value: bool) -> None: ...


def compiling() -> bool:
    """Which door a call takes."""
    if torch.compiler.is_compiling():
        return True
    if torch._C._is_tracing():  # torch.onnx.export(dynamo=False) records what runs eagerly
        refuse_onnx()
    return False


def refuse_onnx() -> None:
    """Say that ONNX cannot express a fit, where its exporters would name an operator that nobody wrote down."""
    onnx = sys.modules.get("torch.onnx")  # `import torch` does not load it
    if onnx is not None and onnx.is_in_onnx_export():
        raise RuntimeError(
            "ONNX has no operator that factors a matrix (Cholesky) or solves with one, so a fit cannot be exported to "
            "it; export the parts without a fit and run the head outside, or, where the context is fixed, fit it first "
            "and export query @ w (w is that of return_w=True, or context.w); torch.export takes whole modules"
        )


def gradient_free(*tensors: Tensor | None) -> bool:
    """No derivative can be asked of this call, so the 10-30 us of an autograd.Function can be saved."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return False
    return not (transformed() or forward_mode())


def look(x: Tensor) -> Tensor:
    """The values inside what torch.func has wrapped around them, those of a whole vmap at once."""
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x.detach()


def asked(*tensors: Tensor | None) -> bool:
    """Whether a gradient of a compiled call can be asked for; torch.compile guards on what is read here."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def forward_mode() -> bool:
    """Tangents may travel along."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def eager() -> bool:
    """Values can be looked at: nothing is being compiled, batched or transformed."""
    return not (torch.compiler.is_compiling() or transformed())


def unobserved() -> bool:
    """Nothing records or batches what is computed now, so a tensor that is ours may be changed in place."""
    return not (torch.is_grad_enabled() or transformed())


def sum_neighbours(x: Tensor | None, times: int) -> Tensor | None:
    """The gradient of `repeat_interleave(times, 0)`."""
    if x is None or times <= 1:
        return x
    return x.reshape(-1, times, *x.shape[1:]).sum(1)


class lazy(Generic[T]):
    """A property computed once: the first look calls the function, later ones find its result in the instance.

    functools.cached_property holds a lock before Python 3.12, where torch.compile stops; and what was computed under
    no_grad must not be handed out where a gradient is wanted.
    """

    def __init__(self, function: Callable[[Any], T]) -> None:
        self.function, self.name, self.__doc__ = function, function.__name__, function.__doc__

    @overload
    def __get__(self, instance: None, owner: type) -> lazy[T]: ...
    @overload
    def __get__(self, instance: object, owner: type) -> T: ...
    def __get__(self, instance: object, owner: type) -> T | lazy[T]:
        if instance is None:
            return self
        # under this name Python finds it without coming here; it serves no_grad, too, but not the other way round
        name = self.name if torch.is_grad_enabled() else f"{self.name} without gradient"
        if name not in instance.__dict__:
            instance.__dict__[name] = self.function(instance)
        return instance.__dict__[name]
