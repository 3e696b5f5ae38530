"""Intention and sigma-Intention as attention implementations of Hugging Face transformers.

Needs the extra `intention[transformers]`. In here `transformers` is Hugging Face's: imports of ours are absolute.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

from intention import _checks as checks
from intention import functional as F
from intention._call import masks_and_weights as masks
from intention._covariance import largest_alpha
from intention.nn.scaling import scale_queries

try:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sdpa_mask
except ImportError as error:
    raise ImportError(
        f"intention.integrations.transformers needs transformers 5.22 or later ({error}); "
        'use pip install "transformers>=5.22"'
    ) from error

__all__ = ["register"]

CALLS: dict[str, Callable[..., Tensor]] = {"intention": F.intention, "sigma_intention": F.sigma_intention}

# Keyword arguments of models that change what attention computes -> what to do. Those without a value are ignored, as
# are all others: models also hand over what only some kernels read (position_ids, sliding_window, deterministic, ...).
REFUSED = {
    "softcap": "there is no bounded form of the map Q Sigma^-1 K'; set the config's softcap (attn_logit_softcapping) "
    "to None",
    "s_aux": "a sink is a score without a key, so it has no place in Sigma; use a model without attention sinks",
    "position_bias": "a bias of the scores has no place in Sigma; use a model with rotary or absolute positions",
    "head_mask": "heads are not masked here; scale the rows of the output projection instead",
    "layer_head_mask": "heads are not masked here; scale the rows of the output projection instead",
    "output_attentions": "the map is not formed; use output_attentions=False",
    "indices": "sparse attention picks keys per query; use a model without an indexer",
    "block_indices": "sparse attention picks keys per query; use a model without an indexer",
    "cache": "a paged cache (continuous batching) packs requests together; use generate()",
}


class Settings(NamedTuple):
    """What `register` was given, or the config says (`intention_alpha`, `intention_covariance`, `intention_scale`)."""

    alpha: float | Sequence[float]
    covariance: str
    scale: float | Sequence[float] | str | None


def register(
    alpha: float | Sequence[float] = 1.0,
    covariance: str = "ridge",
    scale: float | Sequence[float] | str | None = "attention",
) -> None:
    """Make `attn_implementation="intention"` and `"sigma_intention"` known to transformers.

    >>> from transformers import AutoModel, BertConfig
    >>> register(alpha=10.0)
    >>> config = BertConfig(hidden_size=12, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8)
    >>> model = AutoModel.from_config(config, attn_implementation="sigma_intention")
    >>> model(torch.tensor([[5, 3, 2]])).last_hidden_state.shape
    torch.Size([1, 3, 12])

    The values are defaults: a model whose config has `intention_alpha`, `intention_covariance` or `intention_scale`
    uses those, read at every call. Registering again replaces the defaults, for models that exist already too.

    Args:
        alpha: number >= 0, or a sequence of one per attention head.
        covariance: "ridge", Sigma = K'K + alpha I, or "convex", Sigma = (1 - alpha) K'K + alpha I with alpha in [0, 1].
        scale: of the map Q Sigma^-1 K'. "attention" is alpha times the model's own scaling (usually head_dim**-0.5):
            for a large alpha (convex: at 1) sigma_intention is then the model's softmax attention, and intention linear
            attention. "auto", for models that are trained from the start, is the scale of `nn.MultiheadIntention`. Or a
            number, a sequence of one per attention head, or None = 1.

    Raises:
        ValueError, TypeError: naming what came and what was wanted.
    """
    settings = Settings(alpha, covariance, scale)
    _check(settings)
    for name, call in CALLS.items():
        AttentionInterface.register(name, partial(_forward, call, settings))
        AttentionMaskInterface.register(name, _mask)


def _forward(
    call: Callable[..., Tensor],
    defaults: Settings,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query (B, H, L, D), key and value (B, Hkv, S, D) -> ((B, L, H, D), None), as transformers wants it."""
    _refuse(kwargs, attention_mask)
    heads, dtype = query.shape[1], query.dtype
    alpha, covariance, scale = _settings(module, defaults, heads)
    if is_causal is None:  # a module that does not say: where it is causal, `_mask` made it a mask
        is_causal = getattr(module, "is_causal", False)
    mask, is_causal = _visible(attention_mask, bool(is_causal), query.shape[2], key.shape[2], query.device)

    working = torch.float64 if dtype == torch.float64 else torch.float32
    alpha = _per_head(alpha, query.device, working)
    if scale == "auto":
        name = "variance" if call is F.sigma_intention else "output"
        counted = masks.count(mask, None, is_causal, key.shape[2], working)
        seen = masks.number_seen(counted, is_causal, query.shape[2], key.shape[2], query.device)
        query, scale = scale_queries(query.to(working), name, seen, alpha, covariance), None
    elif scale == "attention":
        scale = alpha * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    else:
        scale = _per_head(1.0 if scale is None else scale, query.device, working)
    if isinstance(scale, Tensor):  # of the queries, in a precision in which alpha * query neither overflows nor rounds
        query = query.to(working) * (scale.view(-1, 1, 1) if scale.dim() else scale)
        scale = None
    options = {"scale": scale, "enable_gqa": heads != key.shape[1], "alpha": alpha, "covariance": covariance}
    out = call(query, key, value, mask, dropout if module.training else 0.0, is_causal, **options)
    return out.to(dtype).transpose(1, 2).contiguous(), None


def _visible(
    mask: Tensor | None, is_causal: bool, queries: int, keys: int, device: torch.device
) -> tuple[Tensor | None, bool]:
    """The (mask, is_causal) of functional: a mask says all there is to say, without one the flag does."""
    known = getattr(mask, "intention_mask", None)
    if known is not None and known.version == _version(mask):  # else the model has changed it
        return known.seen, known.is_causal
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 4:
            came = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
            raise ValueError(
                f"attention_mask must be a tensor (batch, heads or 1, queries or 1, keys), got {came}; hand the model "
                "its padding mask (batch, keys), from which it makes such a one"
            )
        if not mask.dtype.is_floating_point:
            return mask, False
        # a float as low as its dtype goes means -inf, as models build it
        return mask.masked_fill(mask <= torch.finfo(mask.dtype).min, -torch.inf), False
    if not is_causal or queries == 1:
        return None, False
    if queries == keys:
        return None, True
    # queries behind a cache are the last ones; functional's is_causal takes them for the first
    return masks.triangle(queries, keys, device, keys - queries), False


class Meaning(NamedTuple):
    """What a mask of ours says, beside the float that models may add to scores: mask and flag of functional."""

    seen: Tensor | None  # bool; with `is_causal` (B, 1, 1, S), or None where there is no padding
    is_causal: bool
    version: int  # of the float mask when it was made


def _version(x: Tensor | None) -> int:
    return -1 if x is None or x.is_inference() else x._version


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Tensor | bool] = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    **kwargs: Any,
) -> Tensor | None:
    """A float mask as transformers' eager_mask makes it, 0 and the lowest number, that knows what it stands for.

    A float, and no None for a causal model: some models do not ask for our function but add the mask to scores of their
    own. Where all queries see the same keys it is (B, 1, 1, S): that is fitted once, not once per query. A model that
    wants its mask whole, to add to it, forbids the skip.
    """
    if mask_function is bidirectional_mask_function and allow_is_bidirectional_skip:
        q_length = 1
    sizes = {"batch_size": batch_size, "q_length": q_length, "kv_length": kv_length, "local_size": local_size}
    given: dict[str, Any] = {"q_offset": q_offset, "kv_offset": kv_offset, "mask_function": mask_function, **sizes}
    # the skip also covers a preallocated cache, longer than its first tokens, where no triangle says it
    skip = allow_is_causal_skip and q_length in (1, kv_length)
    skips = {"allow_is_causal_skip": skip, "allow_is_bidirectional_skip": allow_is_bidirectional_skip}
    seen = sdpa_mask(attention_mask=attention_mask, **given, **skips, **kwargs)
    if seen is None and (q_length == 1 or allow_is_bidirectional_skip):  # everything is seen
        return None
    shown = masks.triangle(q_length, kv_length, kwargs.get("device", "cpu")) if seen is None else seen
    shown = shown.expand(batch_size, 1, *shown.shape[-2:])
    out = torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill(~shown, torch.finfo(dtype).min)
    is_causal = seen is None
    # query t is token t, and so is key t; a static cache tells its offset as a tensor
    known = not (isinstance(q_offset, Tensor) and torch.compiler.is_compiling())
    if seen is not None and q_length > 1 and known and kv_offset == 0 and bool(q_offset == 0):
        # a window that holds all keys is no window; what a model combines with causality forbids the skip
        no_window = allow_is_causal_skip and local_size is not None and kv_length < local_size
        if mask_function is causal_mask_function or no_window:
            seen, is_causal = None, True
            if attention_mask is not None:  # what a cache has room for beyond the tokens so far is not there
                padding = attention_mask[:, :kv_length].bool()
                seen = TF.pad(padding, (0, kv_length - padding.shape[1])).unsqueeze(1).unsqueeze(1)  # (B, 1, 1, S)
    out.intention_mask = Meaning(seen, is_causal, _version(out))  # pyright: ignore[reportAttributeAccessIssue]
    return out


def _settings(module: nn.Module, defaults: Settings, heads: int) -> Settings:
    """The config's values where it has them, else the registered ones; one per head where there is a sequence."""
    config = getattr(module, "config", None)
    found = Settings(*(getattr(config, f"intention_{name}", x) for name, x in defaults._asdict().items()))
    _check(found)
    for name, got in (("alpha", found.alpha), ("scale", found.scale)):
        if _is_sequence(got) and len(got) != heads:
            raise ValueError(
                f"{name} has {len(got)} values but {type(module).__name__} has {heads} attention heads; give one "
                f"number or one per head, in register or as config.intention_{name}"
            )
    return found


def _check(settings: Settings) -> None:
    alpha, covariance, scale = settings
    checks.choice("covariance", covariance, ("ridge", "convex"))
    for x in _values(alpha):
        checks.number("alpha", x, "; use a number, or a list of one per head")
        checks.alpha_number(x, largest_alpha(covariance))
        if x == 0 and scale == "attention":
            raise ValueError("scale='attention' is alpha * scaling, which is 0 at alpha=0; use alpha > 0, or scale=1")
    if isinstance(scale, str):
        checks.choice("scale", scale, ("attention", "auto"))
    elif scale is not None:
        for x in _values(scale):
            checks.number("scale", x, "; use 'attention', a number, a list of one per head, or None")


def _refuse(kwargs: dict[str, Any], mask: Tensor | None) -> None:
    """Raise for what would change the result; a model that passes None or False asks for nothing."""
    for name, remedy in REFUSED.items():
        got = kwargs.get(name)
        if got is not None and got is not False:
            came = got if isinstance(got, bool | int | float) else f"a {type(got).__name__}"
            raise NotImplementedError(f"intention does not support {name}, got {came}: {remedy}")
    packed = kwargs.get("cu_seq_lens_q")
    if mask is None and packed is not None and len(packed) > 2:
        raise NotImplementedError(
            f"intention does not read cu_seq_lens_q, got {len(packed) - 1} packed sequences without a mask: pass "
            "position_ids that start at 0 in each sequence and no cache, from which the model makes the mask"
        )


def _is_sequence(x: object) -> TypeGuard[Sequence[float]]:
    return isinstance(x, list | tuple)


def _values(x: Any) -> Sequence[float]:
    return x if _is_sequence(x) else (x,)


def _per_head(x: Any, device: torch.device, dtype: torch.dtype) -> float | Tensor:
    return torch.tensor(x, dtype=dtype, device=device) if _is_sequence(x) else x
