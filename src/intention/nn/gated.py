"""A causal sequence layer with all its parts: short convolution, unit keys, gates that write, forget and read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention._checks import alpha_number, choice
from intention._checks import cu_seqlens as ends_of
from intention._distances import wide
from intention.nn import checks
from intention.nn.convolution import ShortConvolution
from intention.nn.gated_mixers import RULES, Gated, Memory
from intention.nn.rotary import Rotary
from intention.sequences.ragged import Compact, States, in_groups

__all__ = ["GatedIntention", "GatedState"]

MOST, LEAST = 1e-2, 1e-4  # between which 1 - gamma is at the start, from the first to the last head


class GatedState(NamedTuple):
    """Sequences as far as a gated layer has read them; the first dimension of every tensor is the batch."""

    tail: Tensor | None  # (batch, taps - 1, channels): what the convolution needs of the last tokens
    memory: Memory
    seen: Tensor  # (batch,)

    def reorder(self, index: Tensor) -> GatedState:
        """The states of the sequences `index` (n,): what a beam search needs."""
        return self.each(lambda x: x.index_select(0, index.to(x.device)))

    def detach(self) -> GatedState:
        """The same state without the graph that led to it."""
        return self.each(Tensor.detach)

    def each(self, change: Callable[[Tensor], Tensor]) -> GatedState:
        """Every tensor changed."""
        tail = None if self.tail is None else change(self.tail)
        return GatedState(tail, tuple(change(x) for x in self.memory), change(self.seen))


class Projection(nn.Linear):
    """A linear layer whose outputs start with the size of its inputs."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.in_features**-0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class ForgetGate(nn.Linear):
    """gamma before its sigmoid: at the start the same for every token, and another one for each head."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        with torch.no_grad():
            self.bias.copy_(self.first_bias())

    def first_bias(self) -> Tensor:
        lost = torch.logspace(math.log10(MOST), math.log10(LEAST), self.out_features + 2, dtype=torch.float64)[1:-1]
        return torch.logit(1 - lost)


class GatedIntention(nn.Module):
    """Causal Intention with the parts that make a language model's layer of it; every part is a choice.

    >>> layer, x = GatedIntention(32, 4), torch.randn(2, 11, 32)
    >>> y, state = layer(x)
    >>> first, state = layer(x[:, :6])
    >>> second, state = layer(x[:, 6:], state=state)
    >>> torch.allclose(torch.cat([first, second], 1), y, atol=1e-5)
    True

    q, k and v are linear in the tokens, then convolved over the last `taps` of them, through SiLU, and q and k have
    unit length. Token t writes with beta_t and forgets with gamma_t (weight and decay of `causal_intention`), and what
    it reads is multiplied by an output gate; all three are a sigmoid of a linear function of the token.

    Args:
        d_model, heads, head_dim (None is d_model / heads): sizes. Queries have `heads` heads.
        kv_heads: of keys and values, each shared by heads / kv_heads query heads, as with enable_gqa in `functional`.
            A fit, its gates and its alpha belong to a kv head. None is `heads`.
        value_dim: features of a value head; None is head_dim. Several value heads for one of queries and keys are
            one value head that is as much wider: they share the fit.
        mixer: "intention", "sigma_intention", "delta", "gated_delta", "linear_attention" or "attention": the same
            layer around another computation. "attention" and "sigma_intention" remember keys and values, the others
            a state of constant size.
        taps: of the convolution; 0 is none.
        convolved: which of q, k and v are.
        silu: of q, k and v.
        unit: q and k have length 1. The softmax mixers then have a learnable scale per head.
        beta, gamma: gates per token and kv head. None is as published: both, but no gamma with "delta", and neither
            with "attention", where they may be switched on (they multiply what a key counts), and "sigma_intention".
        alpha: start of the learnable ridge; "intention" and "sigma_intention" have one.
        alpha_per: "channel" of each kv head, or "head".
        gate: of the output.
        output_norm: RMS norm of what a head reads. None is no, but yes for "linear_attention", whose sums grow.
        rotary: rotary positions of q and k.
    """

    def __init__(
        self,
        d_model: int,
        heads: int,
        head_dim: int | None = None,
        *,
        kv_heads: int | None = None,
        value_dim: int | None = None,
        mixer: str = "intention",
        taps: int = 4,
        convolved: str = "qkv",
        silu: bool = True,
        unit: bool = True,
        beta: bool | None = None,
        gamma: bool | None = None,
        alpha: float = 0.1,
        alpha_per: str = "channel",
        gate: bool = True,
        output_norm: bool | None = None,
        rotary: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        place: Any = {"device": device, "dtype": dtype}
        choice("mixer", mixer, tuple(RULES))
        choice("alpha_per", alpha_per, ("channel", "head"))
        alpha_number(alpha)
        sizes = {"d_model": d_model, "heads": heads, "head_dim": head_dim, "kv_heads": kv_heads, "value_dim": value_dim}
        checks.gated_sizes(sizes, taps, convolved, alpha)
        rule = RULES[mixer]
        beta, gamma = checks.gates(mixer, beta, rule.beta, gamma, rule.gamma)
        head_dim = d_model // heads if head_dim is None else head_dim
        kv_heads = heads if kv_heads is None else kv_heads
        value_dim = head_dim if value_dim is None else value_dim
        self.d_model, self.heads, self.kv_heads = d_model, heads, kv_heads
        self.head_dim, self.value_dim = head_dim, value_dim
        self.mixer, self.silu, self.unit, self.start = mixer, silu, unit, alpha
        self.sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * value_dim}
        self.convolved = convolved if taps else ""
        self.in_proj = Projection(d_model, sum(self.sizes.values()), bias=False, **place)
        channels = sum(self.sizes[x] for x in self.convolved)
        self.convolution = ShortConvolution(channels, taps, **place) if channels else None
        self.beta_proj = Projection(d_model, kv_heads, **place) if beta else None
        self.gamma_proj = ForgetGate(d_model, kv_heads, **place) if gamma else None
        self.gate_proj = Projection(d_model, heads * value_dim, bias=False, **place) if gate else None
        shape = (kv_heads, head_dim if alpha_per == "channel" else 1)
        self.log_alpha = nn.Parameter(torch.empty(shape, **place)) if rule.ridge else None
        self.log_scale = nn.Parameter(torch.empty(heads, **place)) if rule.softmax and unit else None
        normed = rule.norm if output_norm is None else output_norm
        self.output_norm = nn.RMSNorm(value_dim, eps=1e-6, **place) if normed else None
        self.rotate = Rotary(head_dim) if rotary else None
        self.out_proj = Projection(heads * value_dim, d_model, bias=False, **place)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The start: beta near 1/2, gamma between .99 and .9999 whatever the token, alpha as given."""
        for child in self.children():
            if isinstance(child, nn.Linear | nn.RMSNorm | ShortConvolution):
                child.reset_parameters()
        self.reset_own_parameters()

    def reset_own_parameters(self) -> None:
        """Those that are of no part."""
        if self.log_alpha is not None:
            nn.init.constant_(self.log_alpha, math.log(self.start))
        if self.log_scale is not None:  # unit vectors times sqrt(d) are what others compare over sqrt(d)
            nn.init.constant_(self.log_scale, math.log(self.head_dim) / 2 if self.mixer == "attention" else 0.0)

    def extra_repr(self) -> str:
        parts = f"{self.d_model}, {self.heads}, {self.head_dim}, kv_heads={self.kv_heads}, value_dim={self.value_dim}"
        return f"{parts}, mixer={self.mixer!r}, convolved={self.convolved!r}, silu={self.silu}, unit={self.unit}"

    def forward(
        self,
        x: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        state: GatedState | None = None,
        *,
        need_state: bool = True,
    ) -> tuple[Tensor, GatedState | None]:
        """Tokens (batch, n, d_model), each of which sees those before it and itself, and the state after them.

        Args:
            attention_mask: (batch, n); 0 or False is padding, wherever it is: it is not seen, changes no state, and
                gets 0.
            cu_seqlens: (S + 1,) integers from 0 to n: x is (1, n, d_model) with S sequences in a row. States are then
                those of S sequences.
            state: what the call before returned; None at the start.
            need_state: False saves the work for the state, in training for instance; None is returned for it.
        """
        checks.gated_input(x, self.d_model, attention_mask, cu_seqlens, None if state is None else state.seen)
        if x.shape[1] == 0:  # one token of padding in the place of none
            nothing = x.new_zeros(len(x) if cu_seqlens is None else len(cu_seqlens) - 1, 1, self.d_model)
            return x, self._advance(nothing, nothing.new_zeros(len(nothing), dtype=torch.int64), state, need_state)[1]
        if cu_seqlens is not None:
            return self._packed(x, ends_of(cu_seqlens, x.shape[1]), state, need_state)
        if attention_mask is None:
            return self._advance(x, None, state, need_state)
        compact = Compact.of(attention_mask.to(torch.bool))
        y, state = self._advance(compact.moved(x), compact.length, state, need_state)
        return compact.back(y), state

    def stream(self, x: Tensor, before: GatedState | None = None) -> tuple[Tensor, GatedState]:
        """The next tokens x (batch, n, d_model) of a sequence."""
        y, state = self(x, state=before)
        return y, state

    def step(self, x: Tensor, state: GatedState | None = None) -> tuple[Tensor, GatedState]:
        """One token x (batch, d_model) of each sequence."""
        y, state = self.stream(x.unsqueeze(1), state)
        return y.squeeze(1), state

    def _packed(
        self, x: Tensor, ends: list[int], state: GatedState | None, need_state: bool
    ) -> tuple[Tensor, GatedState | None]:
        """Sequences of similar length side by side."""

        def advance(rows: tuple[Tensor, ...], there: Tensor, which: Tensor) -> tuple[Tensor, States]:
            before = None if state is None else state.reorder(which)
            out, after = self._advance(rows[0], there.sum(1), before, need_state)
            return out, () if after is None else (after.tail, after.seen, *after.memory)

        y, states = in_groups((x,), ends, advance)
        if not need_state:
            return y, None
        tail, seen, *memory = states
        return y, GatedState(tail, tuple(memory), seen)

    def _advance(
        self, x: Tensor, length: Tensor | None, state: GatedState | None, need_state: bool
    ) -> tuple[Tensor, GatedState | None]:
        """The layer on tokens of which the first `length` (batch,) of each sequence are there."""
        batch, n = x.shape[:2]
        seen = x.new_zeros(batch, dtype=torch.int64) if state is None else state.seen
        q, k, v, tail = self._heads(x, None if state is None else state.tail, length)
        if self.rotate is not None:
            q, k = self.rotate(q, k, seen.view(-1, 1, 1))
        weight, decay = self._gates(x)
        if length is not None:
            there = (torch.arange(n, device=x.device) < length.unsqueeze(1)).view(batch, 1, 1, n)
            k = k.masked_fill(~there.squeeze(1).unsqueeze(-1), 0.0)  # adds nothing, whatever its weight
            decay = None if decay is None else torch.where(there, decay, 1.0)
        alpha = None if self.log_alpha is None else wide(self.log_alpha).exp().unsqueeze(1)
        scale = None if self.log_scale is None else wide(self.log_scale).exp().view(self.kv_heads, -1, 1, 1)
        q, k, v = q.unflatten(1, (self.kv_heads, -1)), k.unsqueeze(2), v.unsqueeze(2)
        tokens = Gated(q, k, v, weight, decay, seen, alpha, scale, need_state)
        mixed, memory = self._mix(tokens, None if state is None else state.memory)
        y = self._read(x, mixed.flatten(1, 2).transpose(1, 2), v.dtype)
        if not need_state or memory is None:
            return y, None
        return y, GatedState(tail, memory, seen + (n if length is None else length))

    def _mix(self, tokens: Gated, memory: Memory | None) -> tuple[Tensor, Memory | None]:
        return RULES[self.mixer].mix(tokens, memory)

    def _heads(
        self, x: Tensor, tail: Tensor | None, length: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q (batch, heads, n, head_dim), k and v (batch, kv heads, n, features), and the tail of the convolution."""
        every = self.in_proj(x)
        parts = dict(zip("qkv", every.split(list(self.sizes.values()), -1), strict=True))
        if self.convolution is not None:
            channels = every if self.convolved == "qkv" else torch.cat([parts[p] for p in self.convolved], -1)
            out, tail = self.convolution(channels, tail, length)
            parts |= zip(self.convolved, out.split([self.sizes[p] for p in self.convolved], -1), strict=True)
        heads = {"q": self.heads, "k": self.kv_heads, "v": self.kv_heads}
        parts = {p: TF.silu(x) if self.silu else x for p, x in parts.items()}
        q, k, v = (parts[p].unflatten(-1, (heads[p], -1)).transpose(1, 2) for p in "qkv")
        if self.unit:
            q, k = _unit(q), _unit(k)
        return q, k, v.to(every.dtype), tail

    def _gates(self, x: Tensor) -> tuple[Tensor | None, Tensor | None]:
        """beta and gamma (batch, kv heads, 1, n), in float32 or better: in bfloat16 .9999 is 1."""

        def opened(linear: nn.Linear | None) -> Tensor | None:
            if linear is None:
                return None
            logit = wide(TF.linear(x, linear.weight)) + wide(linear.bias)
            return torch.sigmoid(logit).transpose(1, 2).unsqueeze(2)

        return opened(self.beta_proj), opened(self.gamma_proj)

    def _read(self, x: Tensor, mixed: Tensor, dtype: torch.dtype) -> Tensor:
        """(batch, n, d_model) of what heads read, (batch, n, heads, value_dim)."""
        mixed = mixed if self.output_norm is None else self.output_norm(mixed.to(self.output_norm.weight.dtype))
        mixed = mixed.flatten(2).to(dtype)
        return self.out_proj(mixed if self.gate_proj is None else mixed * torch.sigmoid(self.gate_proj(x)))


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1, without steep slopes near 0."""
    x = wide(x)
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
