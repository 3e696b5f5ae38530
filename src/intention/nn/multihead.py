"""Multi-head mixers with the constructor, forward, masks and state_dict of nn.MultiheadAttention."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention import functional as F
from intention._call import masks_and_weights as masks
from intention._covariance import ON_KEYS, Covariance, default_alpha
from intention.nn import checks
from intention.nn.alpha import Alpha, HoldsAlpha, LearnableAlpha, alpha_repr, hold_alpha
from intention.nn.call import solve
from intention.nn.scaling import Scale, check_scale, scale_queries
from intention.sequences.state import CausalState, Sigma, sigma_stream

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["MultiheadIntention", "Stream"]

Projected = tuple[Tensor, Tensor, Tensor]  # queries, keys and values (batch, heads, n, features)
Memory = Tensor | tuple[Tensor, Tensor] | CausalState | Sigma  # linear, softmax, Intention, sigma
Rotate = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]


class Heads(NamedTuple):
    """What a mixer mixes: (batch, heads, points, features), with a mask and flags as in `functional`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    dropout_p: float
    is_causal: bool
    read: Tensor | None = None  # the values, where `value` is the identity in their place and the output is the map


class Stream(NamedTuple):
    """A sequence as far as it was read: what a mixer remembers of it, and how many tokens there were."""

    memory: Memory
    seen: int


class Multihead(nn.MultiheadAttention):
    """nn.MultiheadAttention with another computation in its heads: `mix` is what a subclass gives."""

    has_map = True  # `mix` is linear in the values

    def __init__(self, embed_dim: int, num_heads: int, *args: Any, **kwargs: Any) -> None:
        checks.sizes(embed_dim, num_heads)
        super().__init__(embed_dim, num_heads, *args, **kwargs)
        # nn.TransformerEncoderLayer in eval would otherwise compute softmax attention from in_proj_weight itself.
        self._qkv_same_embed_dim = False

    def _reset_parameters(self) -> None:
        self._qkv_same_embed_dim = self.in_proj_weight is not None  # which parameters there are
        super()._reset_parameters()
        self._qkv_same_embed_dim = False

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, {self.num_heads}"

    def mix(self, heads: Heads) -> Tensor:
        """(batch, heads, M, k)"""
        raise NotImplementedError

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """As nn.MultiheadAttention: (output, weights or None); in masks True means "ignore".

        query (L, batch, embed_dim), key (S, batch, kdim), value (S, batch, vdim) -> (L, batch, embed_dim), with
        batch_first (batch, ...), or without a batch; key_padding_mask (batch, S), attn_mask (L, S) or
        (batch * num_heads, L, S).

        The weights are the map (L, S) that multiplies the values. That of Intention may be negative and its rows need
        not sum to 1. A query that sees no points gets 0.
        """
        batched = checks.multihead(self, query, key, value)
        same, paired = query is key and key is value, key is value

        def batch_first(x: Tensor) -> Tensor:
            return x.unsqueeze(0) if not batched else x if self.batch_first else x.transpose(0, 1)

        query = batch_first(query)
        key = query if same else batch_first(key)
        value = key if paired else batch_first(value)
        checks.multihead_masks(self, query, key, key_padding_mask, attn_mask, is_causal)
        # the hint stands for the mask where it does in torch, and not where extra points come last, for all to see
        plain = key_padding_mask is None or (attn_mask is not None and attn_mask.dtype == torch.bool)
        is_causal = is_causal and not need_weights and plain and not self._extra_points()
        mask = self._mask(query, None if is_causal else attn_mask, key_padding_mask)
        heads = Heads(*self._heads(query, key, value), mask, self.dropout if self.training else 0.0, is_causal)
        if need_weights and self.has_map:
            mixed, weights = self._mix_and_map(heads)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        else:
            mixed, weights = self.mix(heads), None
        out = self.out_proj(mixed.transpose(1, 2).flatten(-2))
        return (out.squeeze(0) if not batched else out if self.batch_first else out.transpose(0, 1)), weights

    def stream(self, x: Tensor, before: Stream | None = None, rotate: Rotate | None = None) -> tuple[Tensor, Stream]:
        """The next tokens x (batch, n, embed_dim) of a sequence, each of which sees those before it and itself.

        >>> from intention.nn import MultiheadIntention
        >>> mixer, x = MultiheadIntention(32, 4, batch_first=True), torch.randn(2, 11, 32)
        >>> first, stream = mixer.stream(x[:, :10])
        >>> last, stream = mixer.stream(x[:, 10:], stream)
        >>> torch.allclose(torch.cat([first, last], 1), mixer.stream(x)[0], atol=1e-5)
        True

        Args:
            before: what the call before returned; None at the start.
            rotate: (queries, keys, tokens before) -> (queries, keys): rotary positions.
        """
        if x.dim() != 3 or x.shape[-1] != self.embed_dim or self._extra_points():
            raise ValueError(
                f"a stream reads (batch, tokens, {self.embed_dim}) without add_bias_kv and add_zero_attn, got "
                f"{tuple(x.shape)}"
            )
        seen = 0 if before is None else before.seen
        q, k, v = self._heads(x, x, x)
        if rotate is not None:
            q, k = rotate(q, k, seen)
        mixed, memory = self.advance(x, (q, k, v), None if before is None else before.memory, seen)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2)), Stream(memory, seen + x.shape[1])

    def advance(self, x: Tensor, heads: Projected, memory: Any, seen: int) -> tuple[Tensor, Memory]:
        """The heads' answers to the next tokens x, and what is remembered then."""
        raise NotImplementedError(f"{type(self).__name__} does not read streams")

    def _mix_and_map(self, heads: Heads) -> tuple[Tensor, Tensor]:
        """Values that are unit vectors show the map itself."""
        value, n = heads.value, heads.key.shape[-2]
        eye = torch.eye(n, dtype=value.dtype, device=value.device).expand(*heads.key.shape[:-1], n)
        seen = masks.count(heads.mask, None, False, n, value.dtype).seen()
        value = masks.fill(value, seen)  # others hold anything
        weights = self.mix(Heads(heads.query, heads.key, eye, heads.mask, heads.dropout_p, heads.is_causal, value))
        return weights @ value, weights

    def _heads(self, query: Tensor, key: Tensor, value: Tensor) -> Projected:
        """Queries, keys and values (batch, heads, points, features)."""
        if query is key and key is value and self.in_proj_weight is not None and not self._extra_points():
            all_three = TF.linear(query, self.in_proj_weight, self.in_proj_bias)
            split = all_three.reshape(*all_three.shape[:2], 3, self.num_heads, -1)
            q, k, v = split.permute(2, 0, 3, 1, 4).unbind(0)
            return q, k, v
        bias = self.in_proj_bias
        if self.in_proj_weight is not None:
            w_q, w_k, w_v = self.in_proj_weight.chunk(3)
        else:
            w_q, w_k, w_v = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
        b_q, b_k, b_v = (None, None, None) if bias is None else bias.chunk(3)
        q, k, v = TF.linear(query, w_q, b_q), TF.linear(key, w_k, b_k), TF.linear(value, w_v, b_v)
        if self.bias_k is not None and self.bias_v is not None:  # add_bias_kv and add_zero_attn give extra points
            both = (k, self.bias_k), (v, self.bias_v)
            k, v = (torch.cat([x, b.to(x.dtype).expand(x.shape[0], 1, -1)], 1) for x, b in both)
        if self.add_zero_attn:
            k, v = (torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[-1])], 1) for x in (k, v))
        q, k, v = (x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for x in (q, k, v))
        return q, k, v

    def _extra_points(self) -> int:
        return (self.bias_k is not None) + self.add_zero_attn

    def _mask(self, query: Tensor, attn_mask: Tensor | None, padding: Tensor | None) -> Tensor | None:
        """One mask (batch or 1, heads or 1, L or 1, S) as `functional` reads it."""
        if attn_mask is not None:
            if masks.same_for_all_queries(attn_mask):  # known by its stride, which the next lines lose
                attn_mask = attn_mask[..., :1, :]
            attn_mask = _taken(attn_mask, query.dtype)
            attn_mask = attn_mask.unflatten(0, (-1, self.num_heads)) if attn_mask.dim() == 3 else attn_mask[None, None]
        if padding is not None:
            padding = _taken(padding, query.dtype).reshape(query.shape[0], 1, 1, padding.shape[-1])
        mask = masks.both(attn_mask, padding)
        if mask is not None and self._extra_points():
            mask = TF.pad(mask, (0, self._extra_points()), value=mask.dtype == torch.bool)
        return mask

    @classmethod
    def from_attention(cls, attention: nn.MultiheadAttention, **options: Any) -> Self:
        """A mixer with a copy of the weights of `attention`, its configuration, device, dtype and mode."""
        checks.attention_module(attention)
        mixer = cls(**settings_of(attention), **options)
        with torch.no_grad():
            for name, parameter in attention.named_parameters():
                mixer.get_parameter(name).copy_(parameter).requires_grad_(parameter.requires_grad)
        return mixer.train(attention.training)


def settings_of(attention: nn.MultiheadAttention) -> dict[str, Any]:
    """The arguments that make another of its kind."""
    same = ("embed_dim", "num_heads", "dropout", "add_zero_attn", "kdim", "vdim", "batch_first")
    biases = {"bias": attention.in_proj_bias is not None, "add_bias_kv": attention.bias_k is not None}
    place = {"device": attention.out_proj.weight.device, "dtype": attention.out_proj.weight.dtype}
    return {name: getattr(attention, name) for name in same} | biases | place


def unlike_torchs(attention: nn.MultiheadAttention) -> str:
    """Why the parameters of this module are not simply those of an nn.MultiheadAttention; "" if they are."""
    settings: dict[str, Any] = settings_of(attention) | {"device": "meta"}
    fresh = nn.MultiheadAttention(**settings)
    got, wanted = {n for n, _ in attention.named_parameters()}, {n for n, _ in fresh.named_parameters()}
    if got != wanted or any(True for _ in attention.buffers()):
        odd = sorted(got ^ wanted) or [name for name, _ in attention.named_buffers()]
        return f"its parameters are not its own ({', '.join(odd)}): remove pruning, parametrisation or adapters first"
    return ""


class MultiheadIntention(Multihead, HoldsAlpha):
    """Intention in the place of attention: one line changes, weights load.

    >>> mixer = MultiheadIntention(32, 4, batch_first=True)
    >>> x = torch.randn(2, 11, 32)
    >>> out, weights = mixer(x, x, x)
    >>> out.shape, weights.shape
    (torch.Size([2, 11, 32]), torch.Size([2, 11, 11]))
    >>> _ = mixer.load_state_dict(nn.MultiheadAttention(32, 4).state_dict())  # alpha keeps its start value

    Args:
        embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype: as in
            nn.MultiheadAttention. Dropout leaves whole context points out (with softmax: entries of the map).
        softmax: sigma-Intention.
        alpha: a fixed number or tensor (one per head: shape (heads,)), `LearnableAlpha`, `ContextAlpha`, or a module
            (key, value, weight) -> alpha of heads (batch, heads). None: one learnable theta per head, starting at the
            covariance's default. A state_dict without them (one of nn.MultiheadAttention) leaves them as they are; with
            a fixed alpha the state_dict is that of nn.MultiheadAttention.
        covariance: "convex", "ridge" or a callable.
        scale: for the number of points that each query sees, "variance" gives the map entries of variance near 1 at the
            start, "output" gives the output the variance of the values, and "auto" is the first of them with a
            softmax and the second without. "attention" is alpha / sqrt(d), with which a large alpha is attention
            (softmax) or linear attention. Or a number; None is 1.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        *,
        softmax: bool = False,
        alpha: Alpha = None,
        covariance: Covariance = "convex",
        scale: Scale = "auto",
    ) -> None:
        super().__init__(
            embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        )
        checks.mixer_covariance(covariance)
        if scale == "auto":
            scale = "variance" if softmax else "output"
        check_scale(scale, softmax)
        if alpha is None:
            alpha = LearnableAlpha(None, (num_heads,), covariance)
        if isinstance(alpha, Tensor | LearnableAlpha):
            checks.alpha_per_head(tuple(alpha.shape), num_heads)
        if isinstance(alpha, nn.Module):
            alpha = alpha.to(self.out_proj.weight.device, self.out_proj.weight.dtype)
        hold_alpha(self, alpha, covariance, scale)
        if isinstance(alpha, Tensor):
            self._buffers["alpha"] = alpha.to(self.out_proj.weight.device)
        self.softmax, self.covariance, self.scale = softmax, covariance, scale

    def mix(self, heads: Heads) -> Tensor:
        call = F.sigma_intention if self.softmax else F.intention
        held = {"alpha": self.alpha, "scale": self.scale, "covariance": self.covariance}
        own = {"is_causal": heads.is_causal, "dropout_p": heads.dropout_p, "read": heads.read}
        return solve(call, *heads[:4], **held, **own)

    def advance(self, x: Tensor, heads: Projected, memory: Any, seen: int) -> tuple[Tensor, Memory]:
        """A CausalState; with softmax also all keys and values, as softmax attention has to remember them."""
        query, key, value = heads
        computed = isinstance(self.alpha, nn.Module) and not isinstance(self.alpha, LearnableAlpha)
        if computed or self.covariance not in ON_KEYS:
            raise ValueError(
                f"a stream needs the covariance 'ridge' or 'convex' and a fixed or LearnableAlpha, got "
                f"{self.covariance!r} and {type(self.alpha).__name__}"
            )
        alpha: Any = self.alpha() if isinstance(self.alpha, LearnableAlpha) else self.alpha
        alpha = default_alpha(self.covariance) if alpha is None else alpha
        alpha = alpha if isinstance(alpha, Tensor) else torch.tensor(float(alpha), dtype=torch.float64)
        numbers = seen + torch.arange(1, query.shape[-2] + 1, device=query.device).unsqueeze(-1)
        factor = self.scale
        if isinstance(factor, str):
            query, factor = scale_queries(query, factor, numbers, alpha, self.covariance), None
        if not self.softmax:
            state = memory
            if state is None:
                lead, d, k = key.shape[:2], key.shape[-1], value.shape[-1]
                state = CausalState.empty(d, k, lead, alpha=alpha, covariance=str(self.covariance), device=key.device)
            out, state = state.prefill(query, key, value, scale=factor)
            return out.to(value.dtype), state  # scaled queries may be wider
        return sigma_stream(query, key, value, alpha, str(self.covariance), factor, memory)

    def _reset_parameters(self) -> None:
        super()._reset_parameters()
        alpha = getattr(self, "alpha", None)  # not there yet when torch's constructor calls
        if isinstance(alpha, LearnableAlpha):
            alpha.reset_parameters()

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: Any, **kwargs: Any) -> None:
        start = f"{prefix}alpha."
        if isinstance(self.alpha, nn.Module) and not any(name.startswith(start) for name in state_dict):
            own = self.alpha.state_dict()
            if isinstance(self.alpha, LearnableAlpha) and self.alpha.theta.is_meta:  # known without a device
                own = {"theta": torch.tensor(self.alpha.start, dtype=self.alpha.theta.dtype)}
            state_dict.update({start + name: x for name, x in own.items() if not x.is_meta})
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, softmax={self.softmax}, {alpha_repr(self)}, scale={self.scale!r}"


def _taken(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """From nn.MultiheadAttention's masks (True = ignore) to those of `functional` (True = take part)."""
    if mask.dtype == torch.bool:
        return ~mask
    # the lowest number is a usual way to say -inf, and a point that counts exp(-3e38) should not count in N
    return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf).to(dtype)
