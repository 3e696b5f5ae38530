"""A small causal language model in which the mixer is a choice: Intention, attention, linear attention, delta rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention._checks import choice
from intention.nn import checks
from intention.nn.mixers import make_mixer
from intention.nn.multihead import Multihead, Stream
from intention.nn.rotary import Rotary

__all__ = ["InformerLM"]

POSITIONS = ("rotary", "none")


class CausalLayer(nn.Module):
    """Norm, mixer, norm, two linear layers, each with a sum around it."""

    def __init__(self, d_model: int, mixer: Multihead, dim_feedforward: int, dropout: float) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.mixer = mixer
        self.feedforward = nn.Sequential(
            nn.Linear(d_model, dim_feedforward), nn.GELU(), nn.Linear(dim_feedforward, d_model)
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, before: Stream | None, rotate: Rotary | None) -> tuple[Tensor, Stream]:
        mixed, stream = self.mixer.stream(self.norm1(x), before, rotate)
        x = x + self.dropout(mixed)
        return x + self.dropout(self.feedforward(self.norm2(x))), stream


class InformerLM(nn.Module):
    """A language model over tokens 0 ... vocabulary - 1. ("Informer" as in Intention, not the time-series model.)

    >>> model = InformerLM(50, 32, 4, 2)
    >>> tokens = torch.randint(50, (2, 11))
    >>> logits, streams = model(tokens)
    >>> logits.shape
    torch.Size([2, 11, 50])
    >>> model.generate(tokens, 5).shape
    torch.Size([2, 16])

    Args:
        vocabulary, d_model, nhead, num_layers, dim_feedforward (None is 4 d_model), dropout: sizes.
        mixer: "intention", "sigma_intention", "attention", "linear_attention" or "delta". Intention, linear attention
            and the delta rule remember a matrix per head, whatever the number of tokens; the others all keys and
            values.
        positions: "rotary", or "none": a causal mixer knows the order without.
        tied: the output layer has the weights of the embedding.
        options: of the mixer.
    """

    def __init__(
        self,
        vocabulary: int,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int | None = None,
        dropout: float = 0.0,
        *,
        mixer: str = "intention",
        positions: str = "rotary",
        tied: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        choice("positions", positions, POSITIONS)
        self.embed = nn.Embedding(vocabulary, d_model)
        nn.init.normal_(self.embed.weight, std=d_model**-0.5)
        self.layers = nn.ModuleList(
            CausalLayer(
                d_model,
                make_mixer(mixer, d_model, nhead, batch_first=True, **options),  # pyright: ignore[reportArgumentType] - by name
                dim_feedforward or 4 * d_model,
                dropout,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)
        self.read = nn.Linear(d_model, vocabulary, bias=False)
        if tied:
            self.read.weight = self.embed.weight
        self.rotate = Rotary(d_model // nhead) if positions == "rotary" else None

    def forward(self, tokens: Tensor, before: list[Stream] | None = None) -> tuple[Tensor, list[Stream]]:
        """Logits (batch, n, vocabulary) of what follows each of the tokens (batch, n), and streams to go on with."""
        checks.tokens(tokens)
        x, streams = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            x, stream = layer(x, None if before is None else before[i], self.rotate)
            streams.append(stream)
        return self.read(self.norm(x)), streams

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        count: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The tokens (batch, n) and `count` more, one at a time; the memory is that of the streams.

        temperature: 0 always takes the most likely token. top_k: only the k most likely ones are drawn.
        """
        checks.generation(tokens, count, temperature, top_k)
        modes = [(module, module.training) for module in self.modules()]
        self.eval()
        try:
            logits, streams = self(tokens)
            found = [tokens]
            for i in range(count):
                following = _draw(logits[:, -1], temperature, top_k, generator)
                found.append(following)
                if i + 1 < count:
                    logits, streams = self(following, streams)
        finally:
            for module, training in modes:  # not self.train(): parts of it may be frozen in eval
                module.training = training
        return torch.cat(found, 1)


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None) -> Tensor:
    """(batch, 1)"""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    logits = logits / temperature
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(TF.softmax(logits, -1), 1, generator=generator)
