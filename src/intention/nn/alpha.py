"""alpha as a module holds it: fixed, learnable, or computed from the context."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from intention import _checks as checks
from intention._buffers import KeepsPrecision
from intention._call import masks_and_weights as masks
from intention._call.masks_and_weights import Counted
from intention._covariance import Covariance, default_alpha, gain_of, largest_alpha
from intention._distances import wide
from intention.nn.embed import mlp
from intention.nn.scaling import Scale

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["ContextAlpha", "LearnableAlpha"]

Alpha = float | Tensor | nn.Module | None


class LearnableAlpha(nn.Module):
    """alpha = exp(theta), or sigmoid(theta) for the convex covariance: always positive, theta is learnt.

    The two agree: (1 - sigmoid) K'K + sigmoid I is a multiple of K'K + exp(theta) I.

    >>> round(LearnableAlpha(0.1)().item(), 6)
    0.1
    >>> LearnableAlpha(shape=(8,), covariance="convex")().shape  # one for each of 8 heads, 0.5 to start with
    torch.Size([8])

    Args:
        start: number or tensor; None is the default of the covariance.
        shape: of theta, where `start` is a number: () is one for all heads, (heads,) one for each.
        covariance: that of the module it is for; every one but "convex" takes alpha = exp(theta).
        device, dtype: of theta.
    """

    def __init__(
        self,
        start: float | Tensor | None = None,
        shape: tuple[int, ...] = (),
        covariance: Covariance = "ridge",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.convex = covariance == "convex"
        theta = _theta(start, covariance)
        self.shape = tuple(theta.shape) if isinstance(start, Tensor) else shape
        self.start = theta.expand(self.shape or (1,)).tolist()  # FSDP does not shard scalars
        self.theta = nn.Parameter(torch.empty(self.shape or (1,), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the start value."""
        with torch.no_grad():
            self.theta.copy_(torch.tensor(self.start, dtype=torch.float64, device="cpu"))

    def forward(self) -> Tensor:
        """alpha, of the shape that was asked for."""
        alpha = _positive(self.theta, self.convex)
        return alpha if self.shape else alpha.reshape(())

    def extra_repr(self) -> str:
        return f"shape={self.shape}, covariance={'convex' if self.convex else 'ridge'!r}"


class ContextAlpha(nn.Module):
    """alpha(K, V), the dashed path of the paper's diagram: a network reads each point, another their mean.

    >>> alpha = ContextAlpha(3, 5, start=0.1)
    >>> alpha(torch.randn(2, 11, 3), torch.randn(2, 11, 5))  # starts at `start` whatever the points are
    tensor([0.1000, 0.1000], grad_fn=<ExpBackward0>)

    Args:
        d: features of the (embedded) keys.
        k: features of the (embedded) values.
        hidden: width of the networks.
        start: the alpha before training; None is the default of the covariance.
        covariance: that of the module it is for.
        device, dtype: of the networks.
    """

    def __init__(
        self,
        d: int,
        k: int,
        hidden: int = 64,
        start: float | None = None,
        covariance: Covariance = "ridge",
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.convex = covariance == "convex"
        self.read = mlp(d + k, hidden, hidden, device=device, dtype=dtype)
        self.answer = mlp(hidden, hidden, 1, device=device, dtype=dtype)
        last: Any = self.answer[-1]
        nn.init.zeros_(last.weight)
        nn.init.constant_(last.bias, _theta(start, covariance).item())

    def forward(self, key: Tensor, value: Tensor, weight: Tensor | None = None) -> Tensor:
        """(...) from key (..., N, d), value (..., N, k) and weights (..., N) of the points."""
        lead = torch.broadcast_shapes(key.shape[:-2], value.shape[:-2])
        pairs = torch.cat([key.expand(*lead, *key.shape[-2:]), value.expand(*lead, *value.shape[-2:])], -1)
        read = self.read(pairs)  # (..., N, hidden)
        mean = mean_of_points(read, None if weight is None else weight.unsqueeze(-2))
        return _positive(self.answer(mean).squeeze((-2, -1)), self.convex)


def mean_of_points(x: Tensor, weight: Tensor | None) -> Tensor:
    """(..., M or 1, f): means of the rows of x (..., N, f), counted as weight (..., M or 1, N) says; of none 0."""
    dtype, x = x.dtype, wide(x)
    if weight is None:
        return (x.sum(-2, keepdim=True) / max(x.shape[-2], 1)).to(dtype)
    weight = weight.to(x.dtype)
    total = weight.sum(-1, keepdim=True)
    return ((weight / torch.where(total > 0, total, 1.0)) @ x).to(dtype)


class HoldsAlpha(KeepsPrecision):
    """A module with an alpha that was given by `hold_alpha`; in bfloat16 a fixed 0.999 were 1, in float16 1e5 inf."""

    alpha: Any  # an `Alpha`: which of them, who made the module knows
    covariance: Covariance
    given_alpha: Tensor | None = None  # a fixed one that is a tensor, as it came: on meta the buffer has no value

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """A fixed alpha is not in the state_dict, so it must survive the way over meta."""
        before = self._buffers.get("alpha")
        super()._apply(fn, recurse)
        after = self._buffers.get("alpha")
        if before is not None and before.is_meta and after is not None and not after.is_meta:
            self._buffers["alpha"] = after if self.given_alpha is None else self.given_alpha.to(after.device)
        return self


def hold_alpha(module: HoldsAlpha, alpha: Alpha, covariance: Covariance, scale: Scale) -> None:
    """Check alpha and register it: a fixed one is configuration and stays out of the state_dict."""
    vanishing = covariance == "convex" and scale in ("variance", "output")
    known = not isinstance(alpha, nn.Module | None) and not (isinstance(alpha, Tensor) and alpha.is_meta)
    if vanishing and known and bool((torch.as_tensor(alpha) == 1).any()):
        raise ValueError(
            f"alpha=1 with covariance='convex' leaves nothing of K'K, and scale={scale!r} is times 1 - alpha = 0; use "
            "scale='attention' for what it is then: attention, or linear attention"
        )
    if isinstance(alpha, nn.Parameter):
        raise TypeError(
            "alpha as a bare nn.Parameter may turn negative in training; use LearnableAlpha(start), which cannot, "
            "or a module of your own that returns it"
        )
    if isinstance(alpha, LearnableAlpha | ContextAlpha) and alpha.convex != (covariance == "convex"):
        raise ValueError(
            f"alpha was made for a covariance {'convex' if alpha.convex else 'ridge'!r} and the module has "
            f"{covariance!r}; pass {type(alpha).__name__}(..., covariance={covariance!r})"
        )
    if isinstance(alpha, Tensor):
        if alpha.requires_grad:
            raise TypeError(
                "a fixed alpha must not require a gradient; use LearnableAlpha, or a module that returns it"
            )
        checks.floating_tensor("alpha", alpha)
        if not alpha.is_meta:
            checks.require_values(None, alpha, gain_of(alpha, covariance))
        module.given_alpha = alpha
        module.register_buffer("alpha", alpha, persistent=False)
        return
    if alpha is not None and not isinstance(alpha, nn.Module):
        checks.alpha_number(alpha, largest_alpha(covariance))
    module.alpha = alpha


def alpha_repr(module: HoldsAlpha) -> str:
    """alpha and covariance as a module prints them; an alpha that is a module has a line of its own below."""
    alpha, covariance = module.alpha, module.covariance
    if isinstance(alpha, nn.Module):
        told = type(alpha).__name__
    elif isinstance(alpha, Tensor):
        told = f"tensor{tuple(alpha.shape)}" if alpha.numel() > 1 or alpha.is_meta else f"{alpha.item():g}"
    else:
        told = str(default_alpha(covariance) if alpha is None else alpha)
    name = repr(covariance) if isinstance(covariance, str) else getattr(covariance, "__name__", "callable")
    return f"alpha={told}, covariance={name}"


def alpha_of_call(
    alpha: Alpha, covariance: Covariance, key: Tensor, value: Tensor, counted: Counted, is_causal: bool
) -> float | Tensor:
    """The alpha of one call, from what `hold_alpha` registered."""
    if alpha is None:
        return default_alpha(covariance)
    if not isinstance(alpha, nn.Module):
        return alpha
    if isinstance(alpha, LearnableAlpha):
        return alpha()
    if is_causal or counted.per_query is not None:
        raise ValueError(
            "an alpha computed from the context sees all points, and here queries see different ones; use a fixed or a "
            "LearnableAlpha, or a mask that is equal for all queries"
        )
    return alpha(masks.fill(key, counted.keep), masks.fill(value, counted.keep), counted.total(key.dtype))


def _theta(start: float | Tensor | None, covariance: Covariance) -> Tensor:
    start = default_alpha(covariance) if start is None else start
    upper = largest_alpha(covariance)
    value = torch.as_tensor(start, dtype=torch.float64, device="cpu")  # also where the default device is meta
    if not bool(((value > 0) & (value < upper)).all()):
        raise ValueError(
            f"the start of a learnable alpha must be inside (0, {'1' if upper == 1 else 'inf'}), got {start}; a fixed "
            "alpha may be at the edge"
        )
    return torch.logit(value) if covariance == "convex" else value.log()


def _positive(theta: Tensor, convex: bool) -> Tensor:
    theta = wide(theta)
    # inside what float32 can tell from 0, 1 and infinity
    return torch.sigmoid(theta.clamp(-15, 15)) if convex else theta.clamp(-80, 80).exp()
