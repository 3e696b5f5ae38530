"""A small causal language model in which the mixer is a choice: Intention, attention, linear attention, delta rule."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention._checks import choice
from intention.nn import causal_layers, checks
from intention.nn.mixers import make_mixer
from intention.nn.rotary import Rotary

__all__ = ["InformerLM"]


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
        positions: "rotary", or "none": a causal mixer knows the order without. None is rotary positions in all plain
            layers, and in those gated ones that are softmax attention.
        tied: the output layer has the weights of the embedding.
        layer: "plain", a mixer with bare projections, or "gated", a `GatedIntention`, which has a short convolution and
            gates around any of these mixers, and "gated_delta".
        attention_every: every k-th layer is softmax attention; None is none.
        norm: "layer" or "rms".
        feedforward: "gelu", or "swiglu", whose width is 8/3 d_model if none is given.
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
        positions: str | None = None,
        tied: bool = True,
        layer: str = "plain",
        attention_every: int | None = None,
        norm: str = "layer",
        feedforward: str = "gelu",
        **options: Any,
    ) -> None:
        super().__init__()
        if positions is not None:
            choice("positions", positions, ("rotary", "none"))
        choice("layer", layer, ("plain", "gated"))
        choice("norm", norm, causal_layers.NORMS)
        choice("feedforward", feedforward, causal_layers.FEEDFORWARDS)
        checks.attention_every(attention_every)
        self.embed = nn.Embedding(vocabulary, d_model)
        nn.init.normal_(self.embed.weight, std=d_model**-0.5)
        self.gated = layer == "gated"
        if self.gated:
            sizes = (d_model, nhead, num_layers, dim_feedforward, dropout)
            kinds = {"mixer": mixer, "attention_every": attention_every, "norm": norm, "feedforward": feedforward}
            own = {"rotary": None if positions is None else positions == "rotary", **options}
            layers = causal_layers.gated_layers(*sizes, **kinds, options=own)
            causal_layers.shrink_branches(layers)
        else:
            layers = []
            for i in range(num_layers):
                name, own = ("attention", {}) if causal_layers.is_attention(i, attention_every) else (mixer, options)
                mixing = make_mixer(name, d_model, nhead, batch_first=True, **own)
                layers.append(causal_layers.CausalLayer(d_model, mixing, dim_feedforward, dropout, norm, feedforward))
        self.layers = nn.ModuleList(layers)
        self.norm = causal_layers.make_norm(norm, d_model)
        self.read = nn.Linear(d_model, vocabulary, bias=False)
        if tied:
            self.read.weight = self.embed.weight
        self.rotate = Rotary(d_model // nhead) if positions != "none" and not self.gated else None

    def forward(
        self,
        tokens: Tensor,
        before: list[Any] | None = None,
        *,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        need_streams: bool = True,
    ) -> tuple[Tensor, list[Any]]:
        """Logits (batch, n, vocabulary) of what follows each of the tokens (batch, n), and streams to go on with.

        attention_mask and cu_seqlens, of gated layers alone: padding and packed sequences, as in `GatedIntention`.
        need_streams: False lets gated layers save the work for them; a list of None is returned.
        """
        checks.tokens(tokens)
        if not self.gated and (attention_mask is not None or cu_seqlens is not None):
            raise ValueError("plain layers read neither attention_mask nor cu_seqlens; use InformerLM(layer='gated')")
        x, streams = self.embed(tokens), []
        for i, layer in enumerate(self.layers):
            stream = None if before is None else before[i]
            if self.gated:
                x, stream = layer(x, attention_mask, cu_seqlens, stream, need_streams)
            else:
                x, stream = layer(x, stream, self.rotate)
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
