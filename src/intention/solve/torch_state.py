"""What torch is doing around a call: is it recorded, transformed, compiled, in autocast."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

# Private to torch but used by autograd.Function itself; without it every call takes the slower, always right way.
_transforms_active: Callable[[], bool] = getattr(torch._C, "_are_functorch_transforms_active", lambda: True)
_wrappers: Any = getattr(torch._C, "_functorch")  # noqa: B009 - torch's stubs do not know it
_legacy_batched: Callable[[Tensor], bool] = getattr(_wrappers, "is_legacy_batchedtensor", lambda _: False)


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
    return not (_transforms_active() or forward_mode())


def look(x: Tensor) -> Tensor:
    """The values inside what torch.func has wrapped around them, those of a whole vmap at once."""
    while _wrappers.is_functorch_wrapped_tensor(x):
        x = _wrappers.get_unwrapped(x)
    return x.detach()


def asked(*tensors: Tensor | None) -> bool:
    """Whether a gradient of a compiled call can be asked for; torch.compile guards on what is read here."""
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def transformed() -> bool:
    """torch.func is at work."""
    return _transforms_active()


def forward_mode() -> bool:
    """Tangents may travel along."""
    return getattr(forward_ad, "_current_level", 0) >= 0


def eager() -> bool:
    """Values can be looked at: nothing is being compiled, batched or transformed."""
    return not (torch.compiler.is_compiling() or _transforms_active())


def unobserved() -> bool:
    """Nothing records or batches what is computed now, so a tensor that is ours may be changed in place."""
    return not (torch.is_grad_enabled() or _transforms_active())


def legacy_batched(x: Tensor) -> bool:
    """torch.autograd.grad(is_grads_batched=True): no transform is active, and rules of a Function are not asked."""
    return _legacy_batched(x)


def sum_neighbours(x: Tensor | None, times: int) -> Tensor | None:
    """The gradient of `repeat_interleave(times, 0)`."""
    if x is None or times <= 1:
        return x
    return x.reshape(-1, times, *x.shape[1:]).sum(1)
