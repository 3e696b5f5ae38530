"""The other computations of KVQ space as multi-head mixers, and all of them by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention import _checks as checks
from intention import functional as F
from intention._call import masks_and_weights as masks
from intention._distances import wide
from intention.nn.embed import mlp
from intention.nn.heads import NeuralProcess
from intention.nn.multihead import Heads, Multihead, MultiheadIntention, Projected
from intention.nn.scaling import number
from intention.sequences.recurrent import delta_stream, linear_stream

__all__ = ["MultiheadAttention", "MultiheadDelta", "MultiheadLinearAttention", "MultiheadNeuralProcess"]


class Scaled(Multihead):
    """A mixer whose map has a scale that is a number."""

    def __init__(self, *args: Any, scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        checks.scale(scale)
        self.scale = scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, scale={self.scale}"


class MultiheadAttention(Scaled):
    """nn.MultiheadAttention, with a choice of scale and 0 (not NaN) where a query sees nothing.

    >>> x = torch.randn(2, 11, 32)
    >>> MultiheadAttention(32, 4, batch_first=True)(x, x, x)[0].shape
    torch.Size([2, 11, 32])

    Args:
        scale: multiplies the map; None is 1 / sqrt(d). The paper prints its block with 1.
    """

    def mix(self, heads: Heads) -> Tensor:
        return F.attention(*heads[:6], scale=self.scale)

    def advance(
        self, x: Tensor, heads: Projected, memory: tuple[Tensor, Tensor] | None, seen: int
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """All keys and values: the memory grows with the tokens."""
        query, key, value = heads
        if memory is not None:
            key, value = (torch.cat([old, new], -2) for old, new in zip(memory, (key, value), strict=True))
        shown = None if seen == 0 else masks.triangle(query.shape[-2], key.shape[-2], key.device, seen)
        return F.attention(query, key, value, shown, is_causal=seen == 0, scale=self.scale), (key, value)


class MultiheadLinearAttention(Scaled):
    """(Q K') V in the place of attention.

    Args:
        scale: multiplies the map. None is 1 / sqrt(d N) with N the number of points that a query sees, which gives the
            output the variance of the values at the start. The paper prints its block with 1.
    """

    def mix(self, heads: Heads) -> Tensor:
        if self.scale is None:  # entries of Q K' have variance d, and N of them are summed
            query, key = heads.query, heads.key
            counted = masks.count(heads.mask, None, heads.is_causal, key.shape[-2], key.dtype)
            seen = masks.number_seen(counted, heads.is_causal, query.shape[-2], key.shape[-2], query.device)
            n = number(seen, query)
            n = n.clamp_min(1) if isinstance(n, Tensor) else max(n, 1)
            query = (query * (self.head_dim * n) ** -0.5).to(query.dtype)
            return F.linear_attention(query, *heads[1:6])
        return F.linear_attention(*heads[:6], scale=self.scale)

    def advance(self, x: Tensor, heads: Projected, memory: Tensor | None, seen: int) -> tuple[Tensor, Tensor]:
        """The sum K'V."""
        query, key, value = heads
        if self.scale is None:
            numbers = seen + torch.arange(1, query.shape[-2] + 1, device=query.device).unsqueeze(-1)
            query = query * (self.head_dim * numbers.to(query.dtype)) ** -0.5
        elif self.scale != 1:
            query = query * self.scale
        return linear_stream(query, key, value, memory)


class MultiheadDelta(Multihead):
    """The delta rule: a matrix S that every token corrects, S + beta k (v - k'S)', with unit keys and beta in (0, 1).

    One step of gradient descent per token on the squares that Intention minimises. beta is a linear function of the
    token, for each head, through a sigmoid.
    """

    has_map = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        weight = self.out_proj.weight
        self.strength = nn.Linear(self.embed_dim, self.num_heads, device=weight.device, dtype=weight.dtype)

    def mix(self, heads: Heads) -> Tensor:
        raise NotImplementedError("the delta rule reads tokens in their order; use stream(x) in the place of a forward")

    def advance(self, x: Tensor, heads: Projected, memory: Tensor | None, seen: int) -> tuple[Tensor, Tensor]:
        """The matrix S."""
        query, key, value = heads
        beta = torch.sigmoid(self.strength(x)).transpose(1, 2)  # (batch, heads, n)
        # in half precision the slope of a short vector's direction would be its rounding over its length
        query, key = (TF.normalize(wide(x), dim=-1) for x in (query, key))
        out, memory = delta_stream(query, key, value, beta, memory)
        return out.to(value.dtype), memory


class MultiheadNeuralProcess(Multihead):
    """Neural Processes in the place of attention heads: every query sees one summary of the points.

    Per head, as in the paper's block: c = e_C(mean_i [K_i; V_i]) with a network e_C, out = e_Z([Q; c]) with a linear
    e_Z. There is no map over points: the weights are always None. Dropout acts on c.

    Args:
        hidden: width of e_C; None is embed_dim.
    """

    has_map = False

    def __init__(self, *args: Any, hidden: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        d, weight = self.head_dim, self.out_proj.weight
        place: Any = {"device": weight.device, "dtype": weight.dtype}

        def head() -> NeuralProcess:
            network = mlp(2 * d, hidden or self.embed_dim, d, **place)
            context = nn.Sequential(network, nn.Dropout(self.dropout))
            return NeuralProcess(embed_context=context, embed_output=nn.Linear(2 * d, d, **place))

        self.heads = nn.ModuleList(head() for _ in range(self.num_heads))

    def mix(self, heads: Heads) -> Tensor:
        mask = heads.mask
        each = [None] * self.num_heads if mask is None else mask.expand(-1, self.num_heads, -1, -1).unbind(1)
        points = zip(*(x.unbind(1) for x in heads[:3]), each, strict=True)
        own = zip(self.heads, points, strict=True)
        return torch.stack([head(*seen, is_causal=heads.is_causal) for head, seen in own], dim=1)


MIXERS: dict[str, tuple[type[Multihead], dict[str, bool]]] = {
    "intention": (MultiheadIntention, {}),
    "sigma_intention": (MultiheadIntention, {"softmax": True}),
    "attention": (MultiheadAttention, {}),
    "linear_attention": (MultiheadLinearAttention, {}),
    "neural_process": (MultiheadNeuralProcess, {}),
    "delta": (MultiheadDelta, {}),
}


def make_mixer(mixer: str | Callable[..., nn.Module], *args: Any, **options: Any) -> nn.Module:
    """A mixer by name, or by a class or function that takes the arguments of nn.MultiheadAttention.

    >>> type(make_mixer("sigma_intention", 32, 4, alpha=0.5)).__name__
    'MultiheadIntention'
    """
    if isinstance(mixer, nn.Module):
        raise TypeError(
            f"the mixer must be a name, a class or a function that makes one, got a {type(mixer).__name__} that exists "
            "already; one module cannot stand at several places with weights of its own"
        )
    options = copy.deepcopy(options)  # layers do not share an alpha that is a module
    if not isinstance(mixer, str):
        return mixer(*args, **options)
    checks.choice("mixer", mixer, tuple(MIXERS))
    made, fixed = MIXERS[mixer]
    return made(*args, **fixed, **options)
