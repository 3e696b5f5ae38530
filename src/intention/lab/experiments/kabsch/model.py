"""The models of the generalised Kabsch task (appendix "Learning generalised Kabsch algorithm")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from intention.lab.models.attention import WideAttention, WideSigma
from intention.lab.models.few_points import FewPoints
from intention.nn import LearnableAlpha, LinearAttention, NeuralProcess, SigmaIntention, mlp

__all__ = ["MODELS", "AllAtOnce", "EmbeddedAttention", "PerQuery", "build"]


class PerQuery(nn.Module):
    """e_P(head(query, key, value)) for each query on its own: any number of queries can be asked."""

    def __init__(self, head: nn.Module, decode: nn.Module) -> None:
        super().__init__()
        self.head, self.decode = head, decode

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(self.head(query, key, value))


class EmbeddedAttention(nn.Module):
    """Multihead attention between e_K(Q), e_K(K) and e_V(V)."""

    def __init__(self, embed: nn.Module, embed_value: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.embed, self.embed_value, self.mixer = embed, embed_value, mixer

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.mixer(self.embed(query), self.embed(key), self.embed_value(value))


class AllAtOnce(nn.Module):
    """MLP: all numbers of K, V and Q in a row; it answers as many queries as it was built for, in their order."""

    def __init__(self, decode: nn.Module) -> None:
        super().__init__()
        self.decode = decode

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        flat = torch.cat([x.flatten(-2) for x in (key, value, query)], -1)
        return self.decode(flat).unflatten(-1, (query.shape[-2], -1))


def build(
    name: str,
    embed: Sequence[int],
    decode: Sequence[int],
    *,
    heads: int = 1,
    scale: str = "none",
    alpha: float = 1.0,
    dims: int = 2,
    points: int = 5,
    queries: int = 5,
) -> nn.Module:
    """A model by its name; `embed` and `decode` are the layer sizes of the appendix.

    The last size of `decode` follows the task: it is that of the printed one in 2-D, and of the cloud's points in 3-D.

    >>> model = build("intention", (64, 64), (64, 64, 2))
    >>> model(torch.randn(7, 11, 2), torch.randn(7, 5, 2), torch.randn(7, 5, 2)).shape
    torch.Size([7, 11, 2])
    """
    inner = tuple(decode[:-1])
    if name == "mlp":
        return AllAtOnce(mlp((2 * points + queries) * dims, *embed, *inner, queries * dims))
    if name == "neural_process":
        return NeuralProcess(embed_pair=mlp(2 * dims, *embed), embed_output=mlp(dims + embed[-1], *inner, dims))
    width = embed[-1]
    shared, embed_value, answer = mlp(dims, *embed), mlp(dims, *embed), mlp(width, *inner, dims)
    if name == "attention":
        return PerQuery(EmbeddedAttention(shared, embed_value, WideAttention(width, width, heads)), answer)
    if name == "intention":
        head = FewPoints(alpha, shared, embed_value)
    elif name == "sigma_intention":
        named = None if scale == "none" else scale
        if heads == 1:
            ridge = LearnableAlpha(alpha)
            head = SigmaIntention(ridge, scale=named, embed_query=shared, embed_key=shared, embed_value=embed_value)
        else:
            mixer = WideSigma(width, width, heads, LearnableAlpha(alpha), named)
            head = EmbeddedAttention(shared, embed_value, mixer)
    elif name == "linear_attention":
        # scale 1 / N: a mean over the points, so that the output starts at the size of one point's
        head = LinearAttention(scale=1 / points, embed_query=shared, embed_key=shared, embed_value=embed_value)
    else:
        raise ValueError(f"there is no model {name!r} for the Kabsch task; choose one of {MODELS}")
    return PerQuery(head, answer)


MODELS = ("intention", "sigma_intention", "linear_attention", "attention", "neural_process", "mlp")
