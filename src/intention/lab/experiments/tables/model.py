"""Networks that answer a table from its context, and what needs no training."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import intention
from intention.lab.experiments.base import Net
from intention.lab.experiments.tables.task import FEATURES
from intention.lab.models.attention import WideAttention
from intention.lab.tasks import Episode
from intention.nn import Intention, LearnableAlpha, mlp

__all__ = ["MODELS", "WITHOUT_TRAINING", "build", "nearest_rows", "ridge"]

MODELS = ("intention", "attention")
NEIGHBOURS = (1, 3, 5, 9, 15)


class Beside(nn.Module):
    """Columns, and what a network makes of them."""

    def __init__(self, embed: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = mlp(FEATURES, *embed)
        self.d = FEATURES + embed[-1]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.embed(x)], -1)


class Reader(nn.Module):
    """e_P(MHA(e_K(Q), e_K(K), e_V(V)))."""

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.embed = Beside(net.embed)
        self.embed_value = mlp(1, *net.embed[-1:])
        self.mixer = WideAttention(self.embed.d, net.embed[-1], net.heads)
        self.decode = mlp(net.embed[-1], *net.decode)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(self.mixer(self.embed(query), self.embed(key), self.embed_value(value)))


def build(model: str, net: Net, alpha: float) -> nn.Module:
    if model == "attention":
        return Reader(net)
    shared = Beside(net.embed)
    return Intention(LearnableAlpha(alpha), embed_query=shared, embed_key=shared, intercept=True)


def zero(episode: Episode) -> Tensor:
    return torch.zeros_like(episode.target)


def ridge(episode: Episode) -> Tensor:
    """Each task has the alpha that its leave-one-out errors choose."""
    context: Any = intention.fit(episode.key.double(), episode.value.double(), alpha="loo", intercept=True)
    return context(episode.query.double()).to(episode.target.dtype)


def nearest_rows(episode: Episode) -> Tensor:
    """The mean of the k nearest rows, with the k whose leave-one-out error is smallest in each task."""
    n = episode.key.shape[-2]
    within = torch.cdist(episode.key, episode.key)
    within.diagonal(dim1=-2, dim2=-1).fill_(torch.inf)
    across = torch.cdist(episode.query, episode.key)
    errors, answers = [], []
    for k in [k for k in NEIGHBOURS if k < n]:
        errors.append((_mean_of(within, episode.value, k) - episode.value).square().mean((-2, -1)))
        answers.append(_mean_of(across, episode.value, k))
    chosen = torch.stack(errors).argmin(0)  # (B,)
    return torch.stack(answers)[chosen, torch.arange(len(chosen))]


def _mean_of(distance: Tensor, value: Tensor, k: int) -> Tensor:
    rows = distance.topk(k, largest=False).indices  # (B, M, k)
    return value.squeeze(-1).unsqueeze(1).expand(-1, rows.shape[1], -1).gather(-1, rows).mean(-1, keepdim=True)


WITHOUT_TRAINING = {"zero": zero, "ridge_loo": ridge, "nearest_rows": nearest_rows}
