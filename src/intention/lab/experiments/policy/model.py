"""The models of policy distillation (appendix "Policy Distillation"): each predicts the target (B, 1, 2) from O."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from intention.lab.models.attention import WideAttention, WideSigma
from intention.lab.models.few_points import FewPoints
from intention.nn import LearnableAlpha, LinearAttention, SigmaIntention, mlp

__all__ = ["MODELS", "ReadsAll", "ReadsMean", "ReadsOutputs", "ReadsWeights", "build"]


def stacked(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[K, V, Q] (B, N, 9): here the same O thrice, so its rank is 3 and the fit needs alpha > 0."""
    return torch.cat([key, value, query], -1)


class ReadsWeights(nn.Module):
    """e_P(w), w flattened: what the head has fitted is the answer, no query is asked."""

    def __init__(self, head: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.head, self.decode = head, decode

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        points = stacked(query, key, value)
        unit = torch.eye(points.shape[-1], dtype=points.dtype, device=points.device)
        w = self.head(unit, points, points)  # (B, 9, k): the prediction at the unit vectors is w
        return self.decode(w.flatten(-2)).unsqueeze(-2)


class ReadsOutputs(nn.Module):
    """e_P(mean of the outputs): heads with a softmax have no w; the points are their own queries."""

    def __init__(self, mixer: nn.Module, decode: nn.Module, embed_value: nn.Module | None = None) -> None:
        super().__init__()
        self.mixer, self.decode = mixer, decode
        self.embed_value = nn.Identity() if embed_value is None else embed_value

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        points = stacked(query, key, value)
        out = self.mixer(points, points, self.embed_value(points))  # (B, N, k)
        return self.decode(out.mean(-2, keepdim=True))


class ReadsMean(nn.Module):
    """Neural Process: e_P(mean_i e_H([K, V, Q]_i))."""

    def __init__(self, embed: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.embed, self.decode = embed, decode

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(self.embed(stacked(query, key, value)).mean(-2, keepdim=True))


class ReadsAll(nn.Module):
    """MLP: e_P of all numbers in a row, point by point."""

    def __init__(self, decode: nn.Module) -> None:
        super().__init__()
        self.decode = decode

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(stacked(query, key, value).flatten(-2)).unsqueeze(-2)


def build(
    name: str,
    embed: Sequence[int],
    decode: Sequence[int],
    *,
    heads: int = 1,
    scale: str = "none",
    alpha: float = 1.0,
    points: int = 5,
) -> nn.Module:
    """A model by its name; `embed` and `decode` are the layer sizes of the appendix, e_P's last one included.

    >>> model = build("intention", (64, 64), (32, 2))
    >>> seen = torch.randn(7, 5, 3)
    >>> model(seen, seen, seen).shape
    torch.Size([7, 1, 2])
    """
    d = 9  # [K, V, Q]
    if name == "mlp":
        return ReadsAll(mlp(points * d, *embed, *decode))
    if name == "neural_process":
        return ReadsMean(mlp(d, *embed), mlp(embed[-1], *decode))
    if name == "attention":
        return ReadsOutputs(WideAttention(d, embed[-1], heads), mlp(embed[-1], *decode), mlp(d, *embed))
    if name == "sigma_intention":
        named = None if scale == "none" else scale
        if heads == 1:
            head = SigmaIntention(LearnableAlpha(alpha), scale=named, embed_value=mlp(d, *embed))
            return ReadsOutputs(head, mlp(embed[-1], *decode))
        mixer = WideSigma(d, embed[-1], heads, LearnableAlpha(alpha), named)
        return ReadsOutputs(mixer, mlp(embed[-1], *decode), mlp(d, *embed))
    if name == "intention":
        head = FewPoints(alpha, None, mlp(d, *embed))
    elif name == "linear_attention":
        head = LinearAttention(scale=1 / points, embed_value=mlp(d, *embed))  # w = K'E_V / N, a mean over points
    else:
        raise ValueError(f"there is no model {name!r} for policy distillation; choose one of {MODELS}")
    return ReadsWeights(head, mlp(d * embed[-1], *decode))


MODELS = ("intention", "sigma_intention", "linear_attention", "attention", "neural_process", "mlp")
