"""The layers of causal language models: norm, mixer, norm, feed-forward network, each with a sum around it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from intention.nn.gated import GatedIntention, GatedState
from intention.nn.multihead import Stream
from intention.nn.rotary import Rotary

__all__ = [
    "FEEDFORWARDS",
    "NORMS",
    "CausalLayer",
    "GatedLayer",
    "gated_layers",
    "is_attention",
    "make_norm",
    "shrink_branches",
]

NORMS = ("layer", "rms")
FEEDFORWARDS = ("gelu", "swiglu")
FITTED = ("alpha", "alpha_per", "beta", "gamma")  # options of a gated layer that are not for attention beside it


def make_norm(norm: str, d_model: int) -> nn.Module:
    return nn.LayerNorm(d_model) if norm == "layer" else nn.RMSNorm(d_model, eps=1e-6)


def make_feedforward(feedforward: str, d_model: int, hidden: int | None) -> nn.Module:
    """None is 4 d_model, with SwiGLU 8/3 d_model: as many parameters."""
    if feedforward == "swiglu":
        return SwiGLU(d_model, hidden or -(-8 * d_model // 3))
    hidden = hidden or 4 * d_model
    return nn.Sequential(nn.Linear(d_model, hidden), nn.GELU(), nn.Linear(hidden, d_model))


class SwiGLU(nn.Module):
    """(SiLU(x a) * x b) c"""

    def __init__(self, d_model: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(nn.functional.silu(gate) * value)


class CausalLayer(nn.Module):
    """Around a mixer with bare projections."""

    def __init__(
        self,
        d_model: int,
        mixer: Any,
        dim_feedforward: int | None,
        dropout: float,
        norm: str = "layer",
        feedforward: str = "gelu",
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = make_norm(norm, d_model), make_norm(norm, d_model)
        self.mixer = mixer
        self.feedforward = make_feedforward(feedforward, d_model, dim_feedforward)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, before: Stream | None, rotate: Rotary | None) -> tuple[Tensor, Stream]:
        mixed, stream = self.mixer.stream(self.norm1(x), before, rotate)
        return self.added(x, mixed), stream

    def added(self, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feedforward(self.norm2(x)))


class GatedLayer(CausalLayer):
    """Around a `GatedIntention`, whatever it computes."""

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - it has its own positions, and masks
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: GatedState | None = None,
        need_state: bool = True,
    ) -> tuple[Tensor, GatedState | None]:
        """Arguments as in `GatedIntention`."""
        mixed, after = self.mixer(self.norm1(x), attention_mask, cu_seqlens, state, need_state=need_state)
        return self.added(x, mixed), after

    def last_linears(self) -> list[nn.Linear]:
        """What makes the two terms that the layer adds."""
        *_, last = (module for module in self.feedforward.modules() if isinstance(module, nn.Linear))
        return [self.mixer.out_proj, last]


def gated_layers(
    d_model: int,
    heads: int,
    num_layers: int,
    dim_feedforward: int | None = None,
    dropout: float = 0.0,
    *,
    mixer: str = "intention",
    attention_every: int | None = None,
    norm: str = "layer",
    feedforward: str = "gelu",
    options: dict[str, Any],
) -> list[GatedLayer]:
    """A stack, in which every `attention_every`-th layer is softmax attention.

    options: of `GatedIntention`; a `rotary` that is None stands for softmax attention layers alone.
    """
    options = dict(options)
    rotary = options.pop("rotary", None)
    layers = []
    for i in range(num_layers):
        attends = is_attention(i, attention_every)
        own = {name: x for name, x in options.items() if name not in FITTED} if attends else options
        name = "attention" if attends else mixer
        turned = name == "attention" if rotary is None else rotary
        mixing = GatedIntention(d_model, heads, mixer=name, rotary=turned, **own)
        layers.append(GatedLayer(d_model, mixing, dim_feedforward, dropout, norm, feedforward))
    return layers


def is_attention(i: int, every: int | None) -> bool:
    """Whether layer i, the first is 0, is softmax attention in a stack that has some."""
    return every is not None and (i + 1) % every == 0


def shrink_branches(layers: list[GatedLayer]) -> None:
    """What layers add to the sum starts smaller the more there are, so that the sum does not grow with them."""
    with torch.no_grad():
        for linear in (x for layer in layers for x in layer.last_linears()):
            linear.weight.mul_((2 * len(layers)) ** -0.5)
