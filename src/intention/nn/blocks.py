"""Layers and stacks: a Transformer whose attention is any mixer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention.nn import checks
from intention.nn.mixers import make_mixer
from intention.nn.multihead import settings_of
from intention.solve.torch_state import unobserved

__all__ = [
    "Former",
    "Informer",
    "InformerDecoderLayer",
    "InformerLayer",
    "LinTransformer",
    "NPFormer",
    "SigmaInformer",
    "Transformer",
]

Mixer = str | nn.Module | Callable[..., nn.Module]


class InformerLayer(nn.TransformerEncoderLayer):
    """nn.TransformerEncoderLayer with a pluggable mixer. ("Informer" as in Intention, not the time-series model.)

    >>> layer = InformerLayer(32, 4, batch_first=True, mixer="sigma_intention", alpha=0.5)
    >>> layer(torch.randn(2, 11, 32)).shape
    torch.Size([2, 11, 32])
    >>> stack = nn.TransformerEncoder(layer, num_layers=3, enable_nested_tensor=False)

    What comes before `mixer` is as in nn.TransformerEncoderLayer.

    Args:
        mixer: "intention", "sigma_intention", "attention", "linear_attention" or "neural_process"; a class or function
            that takes the arguments of nn.MultiheadAttention; or a module with its forward, used as it is.
        embed_input: the paper's block: the mixer reads max(0, e_X(x)), with one linear e_X for all heads.
        options: of the mixer, such as alpha, covariance and scale of `MultiheadIntention`.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = TF.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: Mixer = "intention",
        embed_input: bool = False,
        **options: Any,
    ) -> None:
        checks.sizes(d_model, nhead)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, **place
        )
        self.self_attn: Any = _mixer(mixer, self.self_attn, options)
        self.embed_input = nn.Linear(d_model, d_model, bias=bias, **place) if embed_input else None

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As nn.TransformerEncoderLayer, always through the mixer: there is no fast path that knows it.

        src (n, batch, d_model), or (batch, n, d_model) with batch_first; src_mask (n, n), src_key_padding_mask
        (batch, n). The output has the shape of src.
        """
        masks = (src_mask, src_key_padding_mask, is_causal)
        if self.norm_first:
            src = src + self._sa_block(self.norm1(src), *masks)
            return src + self._ff_block(self.norm2(src))
        src = self.norm1(src + self._sa_block(src, *masks))
        return self.norm2(src + self._ff_block(src))

    def _sa_block(
        self, x: Tensor, attn_mask: Tensor | None, key_padding_mask: Tensor | None, is_causal: bool = False
    ) -> Tensor:
        x = x if self.embed_input is None else TF.relu(self.embed_input(x))
        return super()._sa_block(x, attn_mask, key_padding_mask, is_causal)

    def _ff_block(self, x: Tensor) -> Tensor:
        """As torch's; where nobody sees the hidden units, ReLU stays in their memory: fresh one takes longer."""
        seen = type(self.linear1) is not nn.Linear or self.linear1._forward_hooks or not unobserved()
        if seen or self.activation is not TF.relu:
            return super()._ff_block(x)
        return self.dropout2(self.linear2(self.dropout(torch.relu_(self.linear1(x)))))


class InformerDecoderLayer(nn.TransformerDecoderLayer):
    """nn.TransformerDecoderLayer with pluggable mixers: self-Intention over tgt, cross-Intention from memory to tgt.

    >>> layer = InformerDecoderLayer(32, 4, batch_first=True)
    >>> layer(torch.randn(2, 7, 32), torch.randn(2, 11, 32)).shape
    torch.Size([2, 7, 32])

    Args:
        mixer, options: as in `InformerLayer`, for both mixers; other arguments as in nn.TransformerDecoderLayer.
        cross_mixer: another mixer between tgt and memory, with the same options.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = TF.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        mixer: str | Callable[..., nn.Module] = "intention",
        cross_mixer: str | Callable[..., nn.Module] | None = None,
        **options: Any,
    ) -> None:
        checks.sizes(d_model, nhead)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        super().__init__(
            d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, **place
        )
        self.self_attn: Any = make_mixer(mixer, **_settings(self.self_attn), **options)
        self.multihead_attn: Any = make_mixer(cross_mixer or mixer, **_settings(self.multihead_attn), **options)


class Former(nn.Module):
    """A stack of `num_layers` layers, each with parameters of its own; `Informer` and its siblings name the mixer.

    >>> model = Informer(32, 4, 3, batch_first=True)
    >>> x, lengths = torch.randn(2, 11, 32), torch.tensor([11, 5])
    >>> model(x, src_key_padding_mask=torch.arange(11) >= lengths[:, None]).shape
    torch.Size([2, 11, 32])

    Args:
        num_layers: how many layers.
        final_norm: a LayerNorm after the last layer; None: where norm_first leaves the sum without one.
        others: as in `InformerLayer`.
    """

    mixer = "intention"

    def __init__(
        self,
        d_model: int,
        nhead: int,
        num_layers: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = TF.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        embed_input: bool = False,
        final_norm: bool | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias)
        own = {"mixer": self.mixer, "embed_input": embed_input, **options}
        self.layers = nn.ModuleList(InformerLayer(*sizes, device, dtype, **own) for _ in range(num_layers))
        last = norm_first if final_norm is None else final_norm
        self.norm = nn.LayerNorm(d_model, layer_norm_eps, bias=bias, device=device, dtype=dtype) if last else None
        self.batch_first = batch_first

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """As nn.TransformerEncoder; `is_causal` without a mask makes the mask.

        src (n, batch, d_model), or (batch, n, d_model) with batch_first; mask (n, n), src_key_padding_mask (batch, n).
        The output has the shape of src.
        """
        if is_causal and mask is None:
            length = src.shape[1] if self.batch_first and src.dim() == 3 else src.shape[0]
            mask = torch.ones(length, length, dtype=torch.bool, device=src.device).triu(1)
        for layer in self.layers:
            src = layer(src, mask, src_key_padding_mask, is_causal)
        return src if self.norm is None else self.norm(src)


class Informer(Former):
    """A stack of Intention layers; see `intention.nn.blocks.Former` for the arguments."""

    mixer = "intention"


class SigmaInformer(Former):
    """A stack of sigma-Intention layers."""

    mixer = "sigma_intention"


class Transformer(Former):
    """A stack of softmax attention layers, the baseline of the others."""

    mixer = "attention"


class LinTransformer(Former):
    """A stack of linear attention layers."""

    mixer = "linear_attention"


class NPFormer(Former):
    """A stack of Neural Process layers."""

    mixer = "neural_process"


def _mixer(mixer: Mixer, attention: nn.MultiheadAttention, options: dict[str, Any]) -> nn.Module:
    """What stands in the place of `attention`."""
    if not isinstance(mixer, nn.Module):
        return make_mixer(mixer, **_settings(attention), **options)
    if options:
        raise TypeError(f"options {sorted(options)} are for a mixer that is made here, and got one that exists already")
    if getattr(mixer, "batch_first", attention.batch_first) != attention.batch_first:
        raise ValueError(
            f"the mixer has batch_first={not attention.batch_first} and the layer {attention.batch_first}; "
            "make them agree"
        )
    for name, wanted in (("batch_first", attention.batch_first), ("_qkv_same_embed_dim", False)):
        if not hasattr(mixer, name):
            vars(mixer)[name] = wanted  # nn.TransformerEncoder asks for them
    return mixer


def _settings(attention: nn.MultiheadAttention) -> dict[str, Any]:
    """What a layer tells its mixer."""
    told = ("embed_dim", "num_heads", "dropout", "bias", "batch_first", "device", "dtype")
    return {name: x for name, x in settings_of(attention).items() if name in told}
