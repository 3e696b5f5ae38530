"""Error messages of the modules: what came, what was wanted, what to do."""

from __future__ import annotations

from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from intention import _checks as checks
from intention._checks import shape

__all__ = [
    "alpha_per_head",
    "attention_every",
    "attention_module",
    "gated_input",
    "gated_sizes",
    "gates",
    "generation",
    "mixer_covariance",
    "multihead",
    "multihead_masks",
    "sizes",
    "tokens",
]


def multihead(mixer: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> bool:
    """The points of a call of an nn.MultiheadAttention: whether they are batched."""
    if query.is_nested or key.is_nested or value.is_nested:
        raise ValueError(
            "nested tensors are not supported; pass a padded tensor and key_padding_mask (in nn.TransformerEncoder: "
            "enable_nested_tensor=False, which swap_attention sets)"
        )
    if query.dim() not in (2, 3) or not query.dim() == key.dim() == value.dim():
        raise ValueError(
            "query, key and value must all have 3 dimensions (batched) or 2 (one item), got "
            f"{shape(query)}, {shape(key)} and {shape(value)}"
        )
    batched = query.dim() == 3
    batch, points = (0, 1) if mixer.batch_first else (1, 0)
    features = (query.shape[-1], key.shape[-1], value.shape[-1])
    wanted = (mixer.embed_dim, mixer.kdim, mixer.vdim)
    alike = key.shape[:-1] == value.shape[:-1] and (not batched or query.shape[batch] == key.shape[batch])
    if features != wanted or not alike:
        order = ("batch, points" if points else "points, batch") if batched else "points"
        raise ValueError(
            f"wanted ({order}, features) with {wanted} features of query, key and value, as many keys as values, one "
            f"batch size, got {shape(query)}, {shape(key)} and {shape(value)}"
            + ("; with batch_first=False the batch is the second dimension" if batched and not points else "")
        )
    return batched


def multihead_masks(
    mixer: nn.MultiheadAttention,
    query: Tensor,
    key: Tensor,
    padding: Tensor | None,
    attn_mask: Tensor | None,
    is_causal: bool,
) -> None:
    """The masks of such a call, for query (batch, M, features) and key (batch, N, features)."""
    (b, m, _), n, heads = query.shape, key.shape[1], mixer.num_heads
    if is_causal and attn_mask is None:
        raise RuntimeError(
            "is_causal is a hint about attn_mask, which is missing; pass also "
            f"attn_mask=torch.nn.Transformer.generate_square_subsequent_mask({m})"
        )
    if padding is not None and tuple(padding.shape) != (b, n) and not (b == 1 and tuple(padding.shape) == (n,)):
        raise ValueError(f"key_padding_mask must have shape (batch, keys) = {(b, n)}, got {tuple(padding.shape)}")
    if attn_mask is not None and tuple(attn_mask.shape) not in ((m, n), (b * heads, m, n)):
        raise ValueError(
            f"attn_mask must have shape (queries, keys) = {(m, n)} or (batch * heads, queries, keys) = "
            f"{(b * heads, m, n)}, got {tuple(attn_mask.shape)}"
        )
    for name, mask in (("key_padding_mask", padding), ("attn_mask", attn_mask)):
        if mask is not None and mask.dtype != torch.bool and not mask.dtype.is_floating_point:
            raise TypeError(f"{name} must be bool (True = ignore) or floating point, got {mask.dtype}; use mask.bool()")


def mixer_covariance(got: object) -> None:
    checks.covariance(got)
    if got == "within":
        raise ValueError(
            "covariance='within' needs one-hot values, which a projection does not give; use nn.Intention or "
            "functional.intention"
        )


def alpha_per_head(got: tuple[int, ...], heads: int) -> None:
    if got not in ((), (1,), (heads,)):
        raise ValueError(f"alpha must be a scalar or have shape ({heads},), one per head, got {got}")


def attention_module(got: object) -> None:
    if not isinstance(got, nn.MultiheadAttention):
        raise TypeError(f"from_attention needs an nn.MultiheadAttention, got {type(got).__name__}")


def sizes(embed_dim: Any, num_heads: Any) -> None:
    """Heads share the features among them."""
    for name, got in (("embed_dim", embed_dim), ("num_heads", num_heads)):
        if isinstance(got, bool) or not isinstance(got, Integral) or got < 1:
            raise ValueError(f"{name} must be an integer >= 1, got {got!r}")
    if embed_dim % num_heads:
        fits = embed_dim - embed_dim % num_heads
        raise ValueError(
            f"embed_dim must be a multiple of num_heads, got {embed_dim} features for {num_heads} heads; use "
            + (f"embed_dim={fits} or {fits + num_heads}" if fits else f"embed_dim={num_heads}")
            + ", or another number of heads"
        )


def tokens(tokens: object) -> None:
    if not isinstance(tokens, Tensor) or tokens.dtype not in (torch.int32, torch.int64):
        got = tokens.dtype if isinstance(tokens, Tensor) else type(tokens).__name__
        raise TypeError(f"tokens must be a tensor of int64 or int32 indices of words, got {got}; use .long()")
    if tokens.dim() != 2:
        raise ValueError(f"tokens must be (batch, n), got {tuple(tokens.shape)}; use tokens[None] for one sequence")


def generation(tokens: Tensor, count: int, temperature: float, top_k: int | None) -> None:
    if tokens.dim() != 2 or tokens.shape[1] == 0 or tokens.dtype.is_floating_point:
        raise ValueError(f"tokens must be integers (batch, n) with n > 0, got {tokens.dtype} {tuple(tokens.shape)}")
    if count < 0 or temperature < 0 or (top_k is not None and top_k < 1):
        raise ValueError(
            f"count and temperature must be >= 0 and top_k >= 1 or None, got {count}, {temperature} and {top_k}"
        )


def gated_sizes(sizes: dict[str, Any], taps: object, convolved: object, alpha: float) -> None:
    """Sizes of a gated layer."""
    for name, got in sizes.items():
        may_miss = name not in ("d_model", "heads")
        if not (got is None and may_miss) and (isinstance(got, bool) or not isinstance(got, Integral) or got < 1):
            raise ValueError(f"{name} must be an integer >= 1{' or None' if may_miss else ''}, got {got!r}")
    d_model, heads, head_dim, kv_heads, _ = sizes.values()
    if head_dim is None and d_model % heads:
        raise ValueError(f"d_model must be a multiple of heads, got {d_model} and {heads}; or give head_dim")
    if kv_heads is not None and heads % kv_heads:
        raise ValueError(f"heads must be a multiple of kv_heads, which they share, got {heads} and {kv_heads}")
    if isinstance(taps, bool) or not isinstance(taps, Integral) or taps < 0 or taps == 1:
        raise ValueError(f"taps must be an integer >= 2, or 0 for no convolution, got {taps!r}")
    checks.choice("convolved", convolved, ("qkv", "qk", "qv", "kv", "q", "k", "v"))
    if alpha == 0:
        raise ValueError("alpha is learnt as a logarithm, so it must start > 0, got 0; use a small one, 1e-4")


def gates(
    mixer: str, beta: bool | None, default_beta: bool | None, gamma: bool | None, default_gamma: bool | None
) -> tuple[bool, bool]:
    """Which gates a gated layer has; a default of None says that its mixer has no such gate."""
    for name, got, default in (("beta", beta, default_beta), ("gamma", gamma, default_gamma)):
        if got and default is None:
            other = "'gated_delta'" if mixer == "delta" else "'attention'"
            raise ValueError(f"mixer={mixer!r} has no gate {name}, got {name}={got}; use mixer={other}")
    beta, gamma = (default if got is None else got for got, default in ((beta, default_beta), (gamma, default_gamma)))
    return bool(beta), bool(gamma)


def attention_every(got: object) -> None:
    if got is not None and (isinstance(got, bool) or not isinstance(got, Integral) or got < 1):
        raise ValueError(f"attention_every must be an integer >= 1, or None for no attention layers, got {got!r}")


def gated_input(x: Tensor, d_model: int, mask: Tensor | None, cu_seqlens: Tensor | None, seen: Tensor | None) -> None:
    if not isinstance(x, Tensor) or x.dim() != 3 or x.shape[-1] != d_model:
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ValueError(f"wanted tokens (batch, n, {d_model}), got {got}; use x[None] for one sequence")
    if mask is not None:
        if cu_seqlens is not None:
            raise ValueError("packed sequences have no padding, got both attention_mask and cu_seqlens; pass one")
        if not isinstance(mask, Tensor) or tuple(mask.shape) != tuple(x.shape[:2]):
            got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be (batch, n) = {tuple(x.shape[:2])}, 0 where padding is, got {got}; of a longer "
                "one that also covers the tokens before, pass the last n columns"
            )
    if cu_seqlens is not None and x.shape[0] != 1:
        raise ValueError(f"with cu_seqlens all sequences are in one row, x (1, n, {d_model}), got {tuple(x.shape)}")
    sequences = x.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    if seen is not None and seen.shape[0] != sequences:
        raise ValueError(
            f"the state is of {seen.shape[0]} sequences, got {sequences}; use state.reorder to choose some"
        )
