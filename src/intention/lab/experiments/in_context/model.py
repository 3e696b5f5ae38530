"""Models that read a sequence of pairs: one Intention layer, and layers of a language model with a choice of mixer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from intention import causal_intention
from intention import functional as F
from intention.lab.experiments.in_context.task import Pairs, before
from intention.lab.experiments.sequences import GATED
from intention.lab.models import output
from intention.nn import LearnableAlpha
from intention.nn.causal_layers import CausalLayer, GatedLayer, gated_layers, shrink_branches
from intention.nn.mixers import make_mixer

__all__ = ["CAN_FORGET", "MODELS", "PLAIN", "OneLayer", "Shell", "build", "kalman", "ridge"]

IN_SHELL = {
    "informer": "intention",
    "sigma_intention": "sigma_intention",
    "transformer": "attention",
    "linear_attention": "linear_attention",
    "delta": "delta",
}
PLAIN = ("intention", *IN_SHELL)
MODELS = (*PLAIN, *GATED)
CAN_FORGET = ("intention_gated", "linear_attention_gated", "attention_gated", "gated_delta_gated")


class OneLayer(nn.Module):
    """One causal Intention from the pairs before: e(x) with a linear e, which is the identity at the start."""

    def __init__(self, dims: int, alpha: float) -> None:
        super().__init__()
        self.embed = nn.Linear(dims, dims, bias=False)
        nn.init.eye_(self.embed.weight)
        self.alpha = LearnableAlpha(alpha)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        query = self.embed(x)
        return causal_intention(query, before(query), before(y), alpha=self.alpha())


class Shell(nn.Module):
    """Layers of a language model. A token holds x and the pair before it, so that every mixer has all it needs."""

    def __init__(self, dims: int, width: int, layers: Sequence[CausalLayer], norm: bool = True) -> None:
        super().__init__()
        self.embed = nn.Linear(2 * dims + 1, width)
        self.layers = nn.ModuleList(layers)
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.read = nn.Linear(width, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        state = self.embed(torch.cat([before(x), before(y), x], -1))
        for layer in self.layers:
            if isinstance(layer, GatedLayer):
                state, _ = layer(state, need_state=False)
            else:
                state, _ = layer(state, None, None)
        return self.read(self.norm(state))


def plain_layers(mixer: str, width: int, heads: int, layers: int) -> list[CausalLayer]:
    return [
        CausalLayer(width, cast(Any, make_mixer(mixer, width, heads, batch_first=True)), 4 * width, 0.0)
        for _ in range(layers)
    ]


def layers_with_gates(name: str, width: int, heads: int, layers: int, forgets: bool | None) -> list[GatedLayer]:
    """forgets: None is as the mixer has it.

    A token holds its pair, so that a convolution, which starts at random, brings together what does not belong
    together. SiLU, vectors of length 1, an output gate and a norm of tokens are not linear, as what is regressed is.
    The delta rules alone need keys of length 1: longer ones overshoot.
    """
    unit = name in ("delta_gated", "gated_delta_gated")
    options = {"gamma": forgets, "taps": 0, "silu": False, "unit": unit, "gate": False, "rotary": False}
    found = gated_layers(width, heads, layers, 4 * width, mixer=GATED[name], options=options)
    for layer in found:
        layer.norm1 = nn.Identity()
    shrink_branches(found)
    return found


def build(
    name: str, dims: int, *, width: int, heads: int, layers: int, alpha: float, forgets: bool | None = None
) -> nn.Module:
    """A model (x, y) -> predictions of y, each from x at its position and the pairs before.

    >>> model = build("transformer", 3, width=16, heads=2, layers=1, alpha=1.0)
    >>> model(torch.randn(2, 7, 3), torch.randn(2, 7, 1)).shape
    torch.Size([2, 7, 1])
    """
    if name == "intention":
        return OneLayer(dims, alpha)
    if name in GATED:
        return Shell(dims, width, layers_with_gates(name, width, heads, layers, forgets), norm=False)
    if name not in IN_SHELL:
        raise ValueError(f"there is no model {name!r} for pairs along a sequence; choose one of {MODELS}")
    return Shell(dims, width, plain_layers(IN_SHELL[name], width, heads, layers))


def ridge(pairs: Pairs, noise: float) -> Tensor:
    """The mean of y given all that was seen: ridge with alpha = the variance of the noise, in float64."""
    x, y = pairs.x.double(), pairs.y.double()
    out = output(F.intention(x, before(x), before(y), alpha=noise**2, is_causal=True))
    return out.to(pairs.y.dtype)


def kalman(pairs: Pairs, noise: float, drift: float) -> Tensor:
    """The mean of y given all that was seen where coefficients drift: Kalman's filter, in float64."""
    x, y = pairs.x.double(), pairs.y.double()
    eye = torch.eye(x.shape[-1], dtype=torch.float64)
    mean, cover = x.new_zeros(len(x), x.shape[-1], 1), eye.expand(len(x), -1, -1)
    found = []
    for t in range(x.shape[1]):
        one = x[:, t].unsqueeze(-1)
        guess, seen = one.mT @ mean, cover @ one
        gain = seen / (one.mT @ seen + noise**2)
        mean, cover = mean + gain * (y[:, t : t + 1] - guess), cover - gain @ seen.mT
        mean, cover = (1 - drift) ** 0.5 * mean, (1 - drift) * cover + drift * eye
        found.append(guess)
    return torch.cat(found, 1).to(pairs.y.dtype)
