"""Language models of gated Intention layers for Hugging Face transformers, with a cache of constant size.

Needs the extra `intention[transformers]`. Importing this module makes the models known to the Auto classes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from intention import _checks as checks
from intention.nn.causal_layers import FEEDFORWARDS, NORMS, GatedLayer, gated_layers, make_norm
from intention.nn.convolution import ShortConvolution
from intention.nn.gated import ForgetGate, GatedIntention, GatedState, Projection
from intention.nn.gated_mixers import RULES
from intention.sequences.ragged import last_columns

try:
    from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
    from transformers import initialization as init
    from transformers.cache_utils import Cache, CacheLayerMixin
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
except ImportError as error:
    raise ImportError(
        f"intention.integrations.causal_lm needs transformers 5.22 or later ({error}); "
        'use pip install "transformers>=5.22"'
    ) from error

__all__ = ["IntentionCache", "IntentionConfig", "IntentionForCausalLM", "IntentionModel"]

# arguments of `GatedIntention` that have the same name here
PARTS = "head_dim value_dim taps convolved silu unit beta gamma alpha alpha_per gate output_norm rotary".split()  # noqa: SIM905 - names as one line


class IntentionConfig(PreTrainedConfig):
    """Sizes and parts of a model; the parts are those of `nn.GatedIntention`, whose arguments have the same names.

    >>> config = IntentionConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model = AutoModelForCausalLM.from_config(config)
    >>> model.generate(torch.tensor([[5, 3, 2]]), max_new_tokens=4, do_sample=False).shape
    torch.Size([1, 7])

    Args:
        intermediate_size: of the feed-forward network; None is 8/3 hidden_size, with "gelu" 4 hidden_size.
        num_key_value_heads: kv_heads; None is num_attention_heads.
        attention_every: every k-th layer is softmax attention; None is none. Such layers remember keys and values.
        layer_norm, feedforward: "rms" or "layer", "swiglu" or "gelu".
        rotary: rotary positions; None is in softmax attention layers alone.
        dropout: of what layers add.
    """

    model_type = "intention"
    keys_to_ignore_at_inference = ("past_key_values",)

    vocab_size: int = 32000
    hidden_size: int = 512
    intermediate_size: int | None = None
    num_hidden_layers: int = 8
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_dim: int | None = None
    mixer: str = "intention"
    attention_every: int | None = None
    taps: int = 4
    convolved: str = "qkv"
    silu: bool = True
    unit: bool = True
    beta: bool | None = None
    gamma: bool | None = None
    alpha: float = 0.1
    alpha_per: str = "channel"
    gate: bool = True
    output_norm: bool | None = None
    rotary: bool | None = None
    layer_norm: str = "rms"
    feedforward: str = "swiglu"
    dropout: float = 0.0
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    tie_word_embeddings: bool = True

    def __post_init__(self, **kwargs: Any) -> None:
        checks.choice("mixer", self.mixer, tuple(RULES))
        checks.choice("layer_norm", self.layer_norm, NORMS)
        checks.choice("feedforward", self.feedforward, FEEDFORWARDS)
        super().__post_init__(**kwargs)

    def make_layers(self) -> list[GatedLayer]:
        options = {"kv_heads": self.num_key_value_heads, **{name: getattr(self, name) for name in PARTS}}
        sizes = self.hidden_size, self.num_attention_heads, self.num_hidden_layers, self.intermediate_size
        kinds = {"mixer": self.mixer, "attention_every": self.attention_every, "norm": self.layer_norm}
        return gated_layers(*sizes, self.dropout, **kinds, feedforward=self.feedforward, options=options)


class StateLayer(CacheLayerMixin):
    """What one layer remembers, and how many tokens it has read, padding included."""

    def __init__(self) -> None:
        super().__init__()
        self.state: GatedState | None = None
        self.length = 0

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """There is nothing to prepare."""

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("a gated layer has no keys and values to add; IntentionModel keeps its states here")

    def keep(self, state: GatedState | None, tokens: int) -> None:
        self.state, self.length = state, self.length + tokens

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.state, self.length = None, 0

    def crop(self, tokens_to_remove: int) -> None:
        if tokens_to_remove:
            raise NotImplementedError(
                f"tokens cannot be taken out of a state, asked to crop {tokens_to_remove}; keep a copy.deepcopy of the "
                "cache from before them"
            )

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.state = None if self.state is None else self.state.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        self.reorder_cache(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        if self.state is not None:
            self.state = self.state.each(lambda x: x.repeat_interleave(repeats, 0))

    def offload(self) -> None:
        """Constant sizes are small enough to stay."""

    def prefetch(self) -> None:
        """It is there."""


class IntentionCache(Cache):
    """States of all layers; their size does not depend on the number of tokens, but for softmax attention layers."""

    def __init__(self, layers: int) -> None:
        self.states = [StateLayer() for _ in range(layers)]
        super().__init__(layers=list(self.states))


class IntentionPreTrainedModel(PreTrainedModel):
    config: IntentionConfig
    config_class = IntentionConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["GatedLayer"]  # noqa: RUF012 - as transformers has them
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _is_stateful = True

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Parameters of a module that were not loaded; torch's functions, as transformers calls this, know which."""
        if isinstance(module, nn.Embedding):
            init.normal_(module.weight, std=module.embedding_dim**-0.5)
        elif isinstance(module, GatedIntention):
            module.reset_own_parameters()
        elif isinstance(module, ForgetGate):
            init.zeros_(module.weight)
            init.copy_(module.bias, module.first_bias())
        elif isinstance(module, nn.Linear | nn.RMSNorm | nn.LayerNorm | ShortConvolution):
            module.reset_parameters()
            if getattr(module, "ends_branch", False) and not getattr(module.weight, "_is_hf_initialized", False):
                module.weight.mul_((2 * self.config.num_hidden_layers) ** -0.5)


class IntentionModel(IntentionPreTrainedModel):
    """The layers without an output layer."""

    def __init__(self, config: IntentionConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        layers = config.make_layers()
        for linear in (x for layer in layers for x in layer.last_linears()):
            linear.ends_branch = True  # pyright: ignore[reportArgumentType] - read by _init_weights
        self.layers = nn.ModuleList(layers)
        self.norm = make_norm(config.layer_norm, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: IntentionCache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> BaseModelOutputWithPast | tuple[Any, ...]:
        """As models of transformers.

        attention_mask: (batch, tokens so far), 0 is padding, on any side.
        cu_seqlens (or `cu_seq_lens_q`, as their collators call it): packed sequences, as in `nn.GatedIntention`.
        position_ids are not read: positions are the counts of tokens that are not padding.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError(
                "pass either input_ids or inputs_embeds, got " + ("neither" if input_ids is None else "both")
            )
        if past_key_values is not None and not isinstance(past_key_values, IntentionCache):
            raise TypeError(
                f"past_key_values must be an IntentionCache, got {type(past_key_values).__name__}; use "
                f"IntentionCache({len(self.layers)}), or None with use_cache=True"
            )
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        checkpointing = self.gradient_checkpointing and self.training
        use_cache = (self.config.use_cache and not self.training) if use_cache is None else use_cache
        past = past_key_values
        if past is None and use_cache and not checkpointing:
            past = IntentionCache(len(self.layers))
        n, mask = x.shape[1], last_columns(attention_mask, x.shape[1])
        packed = kwargs.get("cu_seq_lens_q") if cu_seqlens is None else cu_seqlens
        hidden = [x]
        for i, layer in enumerate(self.layers):
            if checkpointing and past is None:
                x, _ = self._gradient_checkpointing_func(layer.__call__, x, mask, packed, None, False)
            else:
                x, state = layer(x, mask, packed, None if past is None else past.states[i].state, past is not None)
                if past is not None:
                    past.states[i].keep(state, n)
            hidden.append(x)
        hidden[-1] = x = self.norm(x)
        wanted = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states = tuple(hidden) if wanted else None
        out = BaseModelOutputWithPast(last_hidden_state=x, past_key_values=past, hidden_states=states)
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return out if as_dict else out.to_tuple()


class IntentionForCausalLM(IntentionPreTrainedModel, GenerationMixin):
    """A language model that generates with a cache of constant size.

    >>> config = IntentionConfig(vocab_size=100, hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
    >>> model, tokens = IntentionForCausalLM(config), torch.tensor([[5, 3, 2], [7, 1, 4]])
    >>> out = model(tokens, labels=tokens)
    >>> out.logits.shape, out.loss.shape
    (torch.Size([2, 3, 100]), torch.Size([]))
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012 - as transformers has it

    def __init__(self, config: IntentionConfig) -> None:
        super().__init__(config)
        self.model = IntentionModel(config)
        self.lm_head = Projection(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: IntentionCache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        return_dict: bool | None = None,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast | tuple[Any, ...]:
        """As models of transformers; `labels` (batch, n), -100 where there is none, give the loss."""
        given = input_ids, attention_mask, past_key_values, inputs_embeds, use_cache, output_hidden_states, cu_seqlens
        out: Any = self.model(*given, return_dict=True, **kwargs)
        x = out.last_hidden_state
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(x[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        told = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        as_dict = self.config.return_dict if return_dict is None else return_dict
        return told if as_dict else told.to_tuple()

    def _prepare_cache_for_generation(  # pyright: ignore[reportIncompatibleMethodOverride] - transformers' own hook
        self, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> None:
        if generation_config.cache_implementation is not None:
            raise ValueError(
                f"the cache of this model has one form, got cache_implementation="
                f"{generation_config.cache_implementation!r}; leave it out"
            )
        if model_kwargs.get("past_key_values") is None and generation_config.use_cache is not False:
            model_kwargs["past_key_values"] = IntentionCache(self.config.num_hidden_layers)


AutoConfig.register("intention", IntentionConfig, exist_ok=True)
AutoModel.register(IntentionConfig, IntentionModel, exist_ok=True)
AutoModelForCausalLM.register(IntentionConfig, IntentionForCausalLM, exist_ok=True)
