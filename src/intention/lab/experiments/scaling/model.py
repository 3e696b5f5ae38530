"""The models of the scaling experiment: N pairs (x, y) in, the weights W of the regression out, one latent size s."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from intention import functional as F
from intention.lab.experiments.base import added, check_scale
from intention.lab.models import output
from intention.lab.models.attention import WideAttention, WideSigma
from intention.nn import LearnableAlpha, mlp
from intention.nn.scaling import variance_scale

__all__ = [
    "MODELS",
    "Exact",
    "FlatPairs",
    "FromWeights",
    "Layers",
    "PooledAttention",
    "PooledPairs",
    "PooledSigmaIntention",
    "build",
]

MODELS = ("intention", "sigma_intention", "linear_attention", "attention", "neural_process", "mlp")
FLAT = ("intention", "linear_attention")  # read a flattened w: (s^2) -> s, so s^3 parameters


@dataclass(frozen=True)
class Layers:
    """How many layers embed a pair and how many read the result. All have the latent size that is looked for."""

    embed: int
    decode: int
    largest: int = 8192  # where the search ends
    heads: int = 1
    slope: float = 0.0  # of the leaky ReLU for negative numbers
    scale: Literal["none", "variance"] = added("none")  # of σIntention's scores

    def __post_init__(self) -> None:
        if self.embed < 0 or self.decode < 1 or self.largest < 1 or self.heads < 1:
            raise ValueError(f"wanted embed >= 0, decode >= 1, largest >= 1 and heads >= 1, got {self}")
        check_scale(self.scale)


def build(model: str, d: int, n: int, size: int, layers: Layers, alpha: float) -> nn.Module:
    """A model whose layers all have `size` units. `n` is the number of pairs, `alpha` a start value: it is learnt."""
    if model not in MODELS:
        raise ValueError(f"there is no model {model!r} in the scaling experiment; there are {', '.join(MODELS)}")
    if model in FLAT:
        return FromWeights(d, size, layers, alpha if model == "intention" else None)
    if model == "sigma_intention":
        return PooledSigmaIntention(d, size, layers, alpha)
    if model == "attention":
        return PooledAttention(d, size, layers)
    return PooledPairs(d, size, layers) if model == "neural_process" else FlatPairs(d, n, size, layers)


def embedding(d: int, size: int, layers: Layers) -> nn.Sequential:
    return mlp(d + 1, *[size] * layers.embed)


def decoder(inputs: int, size: int, d: int, layers: Layers) -> nn.Sequential:
    return mlp(inputs, *[size] * (layers.decode - 1), d)


def pairs(key: Tensor, value: Tensor) -> Tensor:
    """What every embedding reads: [x, y] of each pair, (B, N, d + 1). The task has no queries."""
    return torch.cat([key, value], -1)


def solver_of(key: Tensor) -> str:
    """One plain Cholesky factor of the smaller Gram matrix: in training the last digits matter less than the time."""
    return "primal" if key.shape[-1] < key.shape[-2] else "dual"


class FromWeights(nn.Module):
    """e_P(w) with w = [K'K + alpha I]^-1 K'V of the embedded pairs; without alpha w = K'V / N, linear attention's."""

    def __init__(self, d: int, size: int, layers: Layers, alpha: float | None) -> None:
        super().__init__()
        self.embed_key, self.embed_value = embedding(d, size, layers), embedding(d, size, layers)
        self.alpha = None if alpha is None else LearnableAlpha(alpha)
        self.decode = decoder(size * size, size, d, layers)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = pairs(key, value)
        key, value = self.embed_key(both), self.embed_value(both)  # (B, N, s) each
        if self.alpha is None:
            w = key.mT @ value / key.shape[-2]
        else:  # w is the prediction at the unit vectors
            unit = torch.eye(key.shape[-1], dtype=key.dtype, device=key.device)
            w = output(F.intention(unit, key, value, alpha=self.alpha(), solver=solver_of(key)))
        return self.decode(w.flatten(-2)).unsqueeze(-1)  # (B, s, s) -> (B, d, 1)


class PooledSigmaIntention(nn.Module):
    """The embeddings of `FromWeights`; a softmax has no w, so e_P reads the mean of the outputs at the N pairs."""

    def __init__(self, d: int, size: int, layers: Layers, alpha: float) -> None:
        super().__init__()
        self.embed_key, self.embed_value = embedding(d, size, layers), embedding(d, size, layers)
        self.alpha, self.scale = LearnableAlpha(alpha), layers.scale
        self.heads = WideSigma(size, size, layers.heads, self.alpha, _named(layers.scale)) if layers.heads > 1 else None
        self.decode = decoder(size, size, d, layers)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = pairs(key, value)
        key, value = self.embed_key(both), self.embed_value(both)
        out = self.one(key, value) if self.heads is None else self.heads(key, key, value)  # (B, N, s)
        return self.decode(out.mean(-2)).unsqueeze(-1)

    def one(self, key: Tensor, value: Tensor) -> Tensor:
        """With one head; the queries are the keys."""
        size = float(variance_scale(*key.shape[-2:])) if self.scale == "variance" else None
        return output(F.sigma_intention(key, key, value, alpha=self.alpha(), scale=size, solver=solver_of(key)))


def _named(scale: str) -> str | None:
    return None if scale == "none" else scale


class PooledAttention(nn.Module):
    """Embeddings and decoder around multihead attention, a leaky ReLU after each but the last."""

    def __init__(self, d: int, size: int, layers: Layers) -> None:
        super().__init__()
        self.embed_query, self.embed_key, self.embed_value = (embedding(d, size, layers) for _ in range(3))
        self.mixer = WideAttention(size, size, layers.heads)
        self.leaky = nn.LeakyReLU(layers.slope)
        self.decode = decoder(size, size, d, layers)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        both = pairs(key, value)
        embeds = (self.embed_query, self.embed_key, self.embed_value)
        out = self.leaky(self.mixer(*(self.leaky(embed(both)) for embed in embeds)))  # (B, N, s)
        return self.decode(out.mean(-2)).unsqueeze(-1)


class PooledPairs(nn.Module):
    """Neural Process: e_P(mean_i e_H([x_i, y_i]))."""

    def __init__(self, d: int, size: int, layers: Layers) -> None:
        super().__init__()
        self.embed, self.decode = embedding(d, size, layers), decoder(size, size, d, layers)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(self.embed(pairs(key, value)).mean(-2)).unsqueeze(-1)


class FlatPairs(nn.Module):
    """MLP: e_P of all pairs in one vector."""

    def __init__(self, d: int, n: int, size: int, layers: Layers) -> None:
        super().__init__()
        self.decode = decoder(n * (d + 1), size, d, layers)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(pairs(key, value).flatten(-2)).unsqueeze(-1)


class Exact(nn.Module):
    """W = (x'x)^-1 x'y: Intention on the raw pairs, at the unit vectors."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return output(F.intention(torch.eye(key.shape[-1], dtype=key.dtype), key, value, alpha=0))
