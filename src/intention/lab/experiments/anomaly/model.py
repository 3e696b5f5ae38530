"""The five -formers of the anomaly detection: one logit per item of a set."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from intention.nn import Informer, LinTransformer, NPFormer, SigmaInformer, Transformer
from intention.nn.blocks import Former

__all__ = ["LABELS", "MODELS", "STARTS", "OddOneOut", "build"]

FORMERS: dict[str, type[Former]] = {
    "neural_process": NPFormer,
    "linear_attention": LinTransformer,
    "intention": Informer,
    "attention": Transformer,
    "sigma_intention": SigmaInformer,
}
MODELS = tuple(FORMERS)
LABELS = {
    "neural_process": "NP-Former",
    "linear_attention": "Lin-Transformer",
    "intention": "Informer",
    "attention": "Transformer",
    "sigma_intention": "σInformer",
}
STARTS = ("random", "geometry")


class OddOneOut(nn.Module):
    """logit_i = e(former(P x))_i, without positions: the order of the items does not matter.

    Features of length 1 come in; they are scaled by sqrt(d), so that each has variance near 1.
    """

    def __init__(self, dims: int, former: Former, width: int, input_dropout: float) -> None:
        super().__init__()
        self.scale = dims**0.5
        self.drop = nn.Dropout(input_dropout)
        self.project, self.former, self.logit = nn.Linear(dims, width), former, nn.Linear(width, 1)

    def forward(self, items: Tensor) -> Tensor:
        return self.logit(self.former(self.project(self.drop(self.scale * items)))).squeeze(-1)  # (B, N)


def build(
    name: str,
    dims: int,
    *,
    layers: int = 1,
    width: int = 1024,
    hidden: int = 2048,
    heads: int = 4,
    input_dropout: float = 0.2,
    dropout: float = 0.0,
    start: str = "random",
) -> OddOneOut:
    """A model by its name.

    >>> model = build("sigma_intention", 7, width=16, hidden=11)
    >>> model(torch.randn(3, 10, 7)).shape
    torch.Size([3, 10])
    """
    if name not in FORMERS:
        raise ValueError(f"there is no -former {name!r}; choose one of {MODELS}")
    former = FORMERS[name](width, heads, layers, hidden, dropout, batch_first=True, embed_input=True)
    model = OddOneOut(dims, former, width, input_dropout)
    if start == "geometry":
        keep_geometry(model)
    return model


NEAR_ZERO = 0.3  # times the usual size: queries and keys begin so small that all items weigh nearly the same


@torch.no_grad()
def keep_geometry(model: OddOneOut) -> None:
    """Start from weights that keep the angles of the features and, roughly, take the mean of a set from its items.

    The stream begins as (x, 1): a LayerNorm of (x - mean, 1) then tells how far x is from the mean. max(0, e_X) keeps x
    as (max(0, x), max(0, -x)), of which the embeddings take the second half with minus sign, so that they are linear in
    x. Those of queries and keys are equal and small, that of the values is orthogonal, and the layer behind the heads
    undoes it with minus sign. The same for every mixer.
    """
    width, dims = model.project.weight.shape
    half = width // 2
    eye = torch.eye(half, width)
    model.project.weight.zero_()[:half] = torch.eye(half, dims)
    model.project.bias.zero_()[half:] = 1.0
    for layer in model.former.layers:
        embed: Any = layer.embed_input
        embed.weight.zero_()[: 2 * half] = torch.cat([eye, -eye])
        embed.bias.zero_()
        mixer: Any = layer.self_attn
        query, key, value = mixer.in_proj_weight.chunk(3)
        query *= NEAR_ZERO
        nn.init.orthogonal_(value[:, :half])
        mixer.out_proj.weight.zero_()[:half] = -value[:, :half].mT
        for weight in (query, value):
            weight[:, half : 2 * half] = -weight[:, :half]
        key.copy_(query)
