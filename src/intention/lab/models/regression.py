"""Few-shot regression with one number in and one out: the models of the sine experiment."""

from __future__ import annotations

from torch import Tensor, nn

from intention import functional as F
from intention.lab.models.attention import WideAttention, WideSigma
from intention.nn import Intention, LearnableAlpha, NeuralProcess, SigmaIntention, mlp

__all__ = ["Attention", "Embedded", "LinearAttention", "intention", "neural_process", "sigma_intention"]


def intention(d: int, embed: tuple[int, ...], alpha: float) -> nn.Module:
    """e_K is shared by keys and queries; values are left as they are."""
    shared = mlp(d, *embed)
    return Intention(LearnableAlpha(alpha), embed_query=shared, embed_key=shared)


def sigma_intention(d: int, embed: tuple[int, ...], alpha: float, heads: int = 1, scale: str = "none") -> nn.Module:
    """With one head as printed; with more, heads as attention has them between the same embeddings."""
    shared, named = mlp(d, *embed), None if scale == "none" else scale
    if heads == 1:
        return SigmaIntention(LearnableAlpha(alpha), scale=named, embed_query=shared, embed_key=shared)
    return Embedded(shared, WideSigma(embed[-1], 1, heads, LearnableAlpha(alpha), named))


class Embedded(nn.Module):
    """A mixer between e_K(Q), e_K(K) and the values as they are."""

    def __init__(self, embed: nn.Module, mixer: nn.Module) -> None:
        super().__init__()
        self.embed_query = self.embed_key = embed
        self.mixer = mixer

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.mixer(self.embed_query(query), self.embed_key(key), value)


class LinearAttention(nn.Module):
    """The same embeddings; the sum over the context is a mean, so that it is of one size for any number of points."""

    def __init__(self, d: int, embed: tuple[int, ...]) -> None:
        super().__init__()
        self.embed = mlp(d, *embed)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.linear_attention(self.embed(query), self.embed(key), value, scale=1 / key.shape[-2])


class Attention(nn.Module):
    """e_P(MHA(e_K(Q), e_K(K), e_V(V)))."""

    def __init__(self, d: int, k: int, embed: tuple[int, ...], decode: tuple[int, ...], heads: int) -> None:
        super().__init__()
        self.embed_key, self.embed_value = mlp(d, *embed), mlp(k, *embed)
        self.mixer = WideAttention(embed[-1], embed[-1], heads)
        self.decode = mlp(embed[-1], *decode)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return self.decode(self.mixer(self.embed_key(query), self.embed_key(key), self.embed_value(value)))


def neural_process(d: int, k: int, embed: tuple[int, ...], decode: tuple[int, ...]) -> nn.Module:
    """e_P(mean of e_H(K, V), Q)."""
    return NeuralProcess(embed_pair=mlp(d + k, *embed), embed_output=mlp(d + embed[-1], *decode))
