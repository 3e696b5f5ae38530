"""Language models of gated layers whose memory has a constant size, and what they remember."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.nn import GatedIntention, InformerLM
from intention.nn.gated_mixers import Gated, Memory

__all__ = ["MODELS", "Windowed", "build", "read", "size"]

IN_SHELL: dict[str, dict[str, Any]] = {
    "intention": {"mixer": "intention"},
    "intention_kept": {"mixer": "intention", "gamma": False},
    "linear_attention": {"mixer": "linear_attention"},
    "gated_delta": {"mixer": "gated_delta"},
    "delta": {"mixer": "delta"},
}
MODELS = (*IN_SHELL, "window")


def build(name: str, *, vocabulary: int, width: int, heads: int, layers: int, window: int) -> InformerLM:
    """A model by name; "window" is softmax attention to the last `window` tokens of each layer.

    >>> model = build("window", vocabulary=9, width=8, heads=2, layers=1, window=4)
    >>> model(torch.randint(9, (2, 7)))[0].shape
    torch.Size([2, 7, 9])
    """
    if name != "window":
        return InformerLM(vocabulary, width, heads, layers, layer="gated", **IN_SHELL[name])
    model = InformerLM(vocabulary, width, heads, layers, layer="gated", mixer="attention")
    weights = model.state_dict()
    for layer in model.layers:
        layer.mixer = Windowed(width, heads, window)
    model.load_state_dict(weights)
    return model


class Windowed(GatedIntention):
    """Softmax attention with rotary positions, in which a token sees the last `window`, itself included."""

    def __init__(self, d_model: int, heads: int, window: int) -> None:
        super().__init__(d_model, heads, mixer="attention", rotary=True)
        self.window = window

    def _mix(self, tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        assert tokens.scale is not None
        dtype, n = tokens.value.dtype, tokens.query.shape[-2]
        query, key, value = (tokens.query * tokens.scale).to(dtype), tokens.key.to(dtype), tokens.value
        if memory is not None:
            key, value = (torch.cat([old, new], -2) for old, new in zip(memory, (key, value), strict=True))
        at = torch.arange(key.shape[-2], device=key.device)
        back = at[-n:, None] - at
        shown = (back >= 0) & (back < self.window)
        out = TF.scaled_dot_product_attention(query, key, value, shown, scale=1.0)
        old = max(0, key.shape[-2] - self.window + 1)
        return out, (key[..., old:, :], value[..., old:, :])


def size(streams: list[Any]) -> int:
    """Bytes that layers hold between two tokens."""
    held = [x for stream in streams for x in (stream.tail, *stream.memory) if x is not None]
    return sum(x.numel() * x.element_size() for x in held)


@torch.no_grad()
def read(model: InformerLM, tokens: Tensor, asked: int, chunk: int) -> tuple[Tensor, list[Any]]:
    """Logits (B, asked, vocabulary) at the last tokens of a stream, read in pieces, and what is remembered before."""
    streams: list[Any] = []
    for piece in tokens[:, :-asked].split(chunk, 1):
        _, streams = model(piece, streams or None)
    return model(tokens[:, -asked:], streams)[0], streams
