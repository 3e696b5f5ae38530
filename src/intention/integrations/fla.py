"""Gated Intention with the signatures of flash-linear-attention, which need nothing of it: exact, on any machine.

A layer with the call of its layers, and `chunk_mesa_net`, of which theirs is an approximation by conjugate gradients.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from intention import _checks as checks
from intention.nn import GatedIntention, GatedState
from intention.sequences.ragged import States, in_groups, last_columns
from intention.sequences.state import CausalState

__all__ = ["LayerStates", "MesaIntention", "chunk_mesa_net"]


class LayerStates:
    """What layers remember, with the methods of fla's cache that its layers use; theirs serves as well."""

    def __init__(self) -> None:
        self.states: list[dict[str, Any] | None] = []
        self.seen = 0

    def __len__(self) -> int:
        return len(self.states)

    def __getitem__(self, layer_idx: int) -> dict[str, Any] | None:
        return self.states[layer_idx]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.seen

    def update(self, *, recurrent_state: Any, conv_state: Any, layer_idx: int, offset: int) -> None:
        """What layer `layer_idx` remembers after `offset` more tokens."""
        self.states += [None] * (layer_idx + 1 - len(self.states))
        self.states[layer_idx] = {"recurrent_state": recurrent_state, "conv_state": conv_state}
        self.seen += offset if layer_idx == 0 else 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        for state in self.states:
            if state is not None:
                old = _read(state).reorder(beam_idx)
                state.update(recurrent_state=(*old.memory, old.seen), conv_state=old.tail)


class MesaIntention(GatedIntention):
    """`nn.GatedIntention` with the call of fla's layers.

    >>> layer, x = MesaIntention(32, 4, layer_idx=0), torch.randn(2, 11, 32)
    >>> y, _, past = layer(x[:, :10], use_cache=True)
    >>> last, _, past = layer(x[:, 10:], past_key_values=past, use_cache=True)
    >>> torch.allclose(last, layer(x)[0][:, 10:], atol=1e-5)
    True

    Args:
        hidden_size, num_heads, head_dim: sizes.
        layer_idx: its place in the cache.
        options: of `GatedIntention`.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        head_dim: int | None = None,
        *,
        layer_idx: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(hidden_size, num_heads, head_dim, **options)
        self.layer_idx = layer_idx

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride] - their call
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        use_cache: bool | None = False,
        output_attentions: bool | None = False,
        cu_seqlens: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None, Any]:
        """(output (batch, n, hidden_size), None, the cache).

        attention_mask: (batch, n), or with the columns of tokens before; 0 is padding.
        past_key_values: a `LayerStates`, or a cache of fla's; None with use_cache makes one. It is changed in place.
        cu_seqlens: as in `GatedIntention`. Other keyword arguments are not read.
        """
        if output_attentions:
            raise ValueError("the map is not formed, got output_attentions=True; use output_attentions=False")
        past = LayerStates() if past_key_values is None and use_cache else past_key_values
        if past is not None and self.layer_idx is None:
            raise ValueError("a layer finds its state in the cache by layer_idx, which is None; give it one when made")
        at = self.layer_idx or 0
        known = past[at] if past is not None and len(past) > at else None
        n = hidden_states.shape[1]
        mask = last_columns(attention_mask, n)
        before = None if known is None else _read(known)
        y, state = super().forward(hidden_states, mask, cu_seqlens, before, need_state=past is not None)
        if state is not None and past is not None:
            memory = (*state.memory, state.seen)
            past.update(recurrent_state=memory, conv_state=state.tail, layer_idx=at, offset=n)
        return y, None, past


def _read(known: dict[str, Any]) -> GatedState:
    *memory, seen = known["recurrent_state"]
    return GatedState(known["conv_state"], tuple(memory), seen)


def chunk_mesa_net(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    lamb: Tensor,
    h_kk_init: Tensor | None = None,
    h_kv_init: Tensor | None = None,
    output_final_state: bool = False,
    max_CG_iteration: int | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """q_t (H_t + diag(lamb))^-1 G_t, H_t = e^g_t H_{t-1} + beta_t k_t k_t', G_t = e^g_t G_{t-1} + beta_t k_t v_t'.

    >>> q, k, v = torch.randn(3, 2, 9, 4, 8)
    >>> g, beta, lamb = -torch.rand(2, 9, 4), torch.rand(2, 9, 4), torch.full((4, 8), 0.25)
    >>> o, h_kk, h_kv = chunk_mesa_net(q, k, v, g, beta, lamb, output_final_state=True)
    >>> o.shape, h_kk.shape
    (torch.Size([2, 9, 4, 8]), torch.Size([2, 4, 8, 8]))

    fla's function of this name, solved exactly in place of by conjugate gradients: any dtype, any lamb > 0.

    Args:
        q, k: (B, T, H, K).
        v: (B, T, H, V).
        g: (B, T, H), logarithms of decays, <= 0; -inf is a reset.
        beta: (B, T, H), >= 0.
        lamb: (H, K), > 0.
        h_kk_init, h_kv_init: H and G before the first token, (B, H, K, K) and (B, H, K, V), or one for each packed
            sequence; both or neither.
        output_final_state: also return H and G after the last token.
        max_CG_iteration: not read.
        use_qk_l2norm_in_kernel: q and k are divided by their lengths.
        cu_seqlens: (S + 1,) integers from 0 to T: B is 1, with S sequences in a row.

    Returns:
        (o (B, T, H, V), H or None, G or None), o in the dtype of v, states in float32 or better.
    """
    sequences = None if cu_seqlens is None else len(cu_seqlens) - 1
    checks.mesa(q, k, v, {"g": g, "beta": beta}, lamb, sequences, h_kk_init=h_kk_init, h_kv_init=h_kv_init)
    wide = torch.promote_types(v.dtype, torch.float32)
    if use_qk_l2norm_in_kernel:
        q, k = (x.to(wide) * torch.rsqrt(x.to(wide).square().sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    root = lamb.to(wide).sqrt()  # (H, K): queries and keys divided by it have a ridge of 1
    h_kk = None if h_kk_init is None else h_kk_init / (root.unsqueeze(-1) * root.unsqueeze(-2))
    h_kv = None if h_kv_init is None else h_kv_init / root.unsqueeze(-1)
    tokens = (q.to(wide) / root, k.to(wide) / root, v.to(wide), g.to(wide), beta.to(wide))

    def run(rows: tuple[Tensor, ...], which: Tensor | None) -> tuple[Tensor, States]:
        q, k, v, g, beta = (x.transpose(1, 2) for x in rows)
        if h_kk is not None and h_kv is not None:
            gram, cross = (x if which is None else x[which] for x in (h_kk, h_kv))
            state = CausalState(gram.double(), cross.double(), torch.ones((), dtype=torch.float64, device=q.device))
        else:
            state = CausalState.empty(k.shape[-1], v.shape[-1], tuple(k.shape[:2]), alpha=1.0, device=k.device)
        out, state = state.prefill(q, k, v, weight=beta, decay=g.exp())
        return out.transpose(1, 2), (state.gram, state.cross) if output_final_state else ()

    if cu_seqlens is None:
        out, states = run(tokens, None)
    else:
        ends = checks.cu_seqlens(cu_seqlens, q.shape[1])
        out, states = in_groups(tokens, ends, lambda rows, there, which: run(rows, which))
    if not output_final_state:
        return out.to(v.dtype), None, None
    gram, cross = states
    gram, cross = gram * (root.unsqueeze(-1) * root.unsqueeze(-2)), cross * root.unsqueeze(-1)
    return out.to(v.dtype), gram.to(wide), cross.to(wide)
