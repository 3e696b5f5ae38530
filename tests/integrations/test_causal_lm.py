"""Models for transformers: a cache equals none, padding and beams, checkpoints, gradients, Auto classes."""

from __future__ import annotations

import copy
import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from intention.integrations.causal_lm import (
    IntentionCache,
    IntentionConfig,
    IntentionForCausalLM,
    IntentionModel,
)
from intention.nn import GatedIntention, InformerLM

KINDS: list[dict[str, Any]] = [
    {},
    {"attention_every": 2, "num_key_value_heads": 2, "layer_norm": "layer", "feedforward": "gelu"},
    {"mixer": "gated_delta", "output_norm": True},
    {"mixer": "sigma_intention"},
]


def model_of(**options: Any) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = IntentionForCausalLM(IntentionConfig(**sizes, pad_token_id=0, eos_token_id=1, **options)).eval()
    with torch.no_grad():
        for x in model.parameters():
            x.add_(0.2 * torch.randn_like(x))  # so that texts are not one token again and again
    return model


def prompts(batch: int = 2, n: int = 6) -> Tensor:
    return torch.randint(2, 19, (batch, n))


@pytest.mark.parametrize("options", KINDS)
def test_parts_with_a_cache_are_the_whole(options: dict[str, Any]) -> None:
    model, tokens = model_of(**options).double(), prompts(2, 9)
    whole = model(tokens, use_cache=False)
    assert whole.past_key_values is None
    first = model(tokens[:, :4], use_cache=True)
    past = first.past_key_values
    assert past.get_seq_length() == 4
    second = model(tokens[:, 4:8], past_key_values=past)
    third = model(tokens[:, 8:], past_key_values=past)
    got = torch.cat([first.logits, second.logits, third.logits], 1)
    torch.testing.assert_close(got, whole.logits)
    assert past.get_seq_length() == 9
    torch.testing.assert_close(model(tokens, logits_to_keep=1).logits, whole.logits[:, -1:])


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize(
    "how",
    [
        {"do_sample": False},
        {"do_sample": False, "num_beams": 3},
        {"do_sample": False, "num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 5},
    ],
)
def test_generation_with_a_cache_is_that_without(options: dict[str, Any], how: dict[str, Any]) -> None:
    model, tokens = model_of(**options).double(), prompts(3)
    texts = []
    for use_cache in (True, False):
        torch.manual_seed(0)
        texts.append(model.generate(tokens, max_new_tokens=7, use_cache=use_cache, **how))
    assert torch.equal(*texts)
    assert len(texts[0].unique()) > 3


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("beams", [1, 3])
def test_a_left_padded_batch_is_its_items(options: dict[str, Any], beams: int) -> None:
    model, tokens = model_of(**options).double(), prompts(3, 7)
    mask = torch.ones_like(tokens)
    mask[0, :4], mask[1, :1] = 0, 0
    how = {"max_new_tokens": 6, "do_sample": False, "num_beams": beams}
    texts = model.generate(tokens * mask, attention_mask=mask, **how)
    for i in range(3):
        own = tokens[i : i + 1, mask[i] == 1]
        alone = model.generate(own, **how)[0, own.shape[1] :]
        assert torch.equal(texts[i, 7 : 7 + len(alone)], alone)
        assert texts[i, 7 + len(alone) :].le(1).all()  # padding, or with beams more ends
    logits = model(tokens, attention_mask=mask).logits
    torch.testing.assert_close(logits[0, 4:], model(tokens[:1, 4:]).logits[0])


def test_the_cache_does_not_grow() -> None:
    def size(past: IntentionCache) -> int:
        return sum(x.numel() for layer in past.states for x in (layer.state.tail, *layer.state.memory))

    model = model_of()
    past = model(prompts(1, 3)).past_key_values
    before = size(past)
    longer = model.generate(
        prompts(1, 3), max_new_tokens=20, do_sample=False, return_dict_in_generate=True, min_length=20
    )
    assert longer.past_key_values.get_seq_length() >= 19
    assert size(longer.past_key_values) == before
    hybrid = model_of(attention_every=2)
    past = hybrid(prompts(1, 3)).past_key_values
    assert [layer.state.memory[0].shape[-2] for layer in past.states] == [4, 3]  # d, and tokens


def test_a_conversation_goes_on_from_its_cache() -> None:
    model, tokens = model_of().double(), prompts(1, 5)
    how = {"max_new_tokens": 4, "do_sample": False, "eos_token_id": 99, "return_dict_in_generate": True}
    first = model.generate(tokens, **how)
    more = torch.cat([first.sequences, prompts(1, 3)], 1)
    again = model.generate(more, past_key_values=first.past_key_values, **how)
    assert torch.equal(again.sequences, model.generate(more, **how).sequences)


@torch.no_grad()
def test_states_of_a_cache_are_chosen() -> None:
    model, tokens = model_of().double(), prompts(3)
    past = model(tokens).past_key_values
    following = prompts(3, 1)
    for change, index in (
        (lambda p: p.reorder_cache(torch.tensor([2, 0, 0])), [2, 0, 0]),
        (lambda p: p.batch_select_indices(torch.tensor([1])), [1]),
        (lambda p: p.batch_repeat_interleave(2), [0, 0, 1, 1, 2, 2]),
    ):
        own = copy.deepcopy(past)
        change(own)
        got = model(following[index], past_key_values=own).logits
        want = model(torch.cat([tokens, following], 1)).logits[index][:, -1:]
        torch.testing.assert_close(got, want)
    past.reset()
    assert past.get_seq_length() == 0
    torch.testing.assert_close(model(tokens, past_key_values=past).logits, model(tokens).logits)
    with pytest.raises(NotImplementedError, match=r"asked to crop -1; keep a copy.deepcopy"):
        past.crop(-1)


@pytest.mark.parametrize("options", [*KINDS[:2], {"tie_word_embeddings": False}])
def test_checkpoints_come_back_bit_by_bit(options: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = model_of(**options), prompts()
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "intention"
    config = AutoConfig.from_pretrained(tmp_path)
    assert isinstance(config, IntentionConfig)
    assert config.attention_every == options.get("attention_every")
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    back, told = loaded
    assert isinstance(back, IntentionForCausalLM)
    assert not told["missing_keys"]
    assert not told["unexpected_keys"]
    tied = options.get("tie_word_embeddings", True)
    assert (back.lm_head.weight is back.model.embed_tokens.weight) == tied
    for name, x in model.state_dict().items():
        assert torch.equal(x, back.state_dict()[name]), name
    assert torch.equal(model(tokens).logits, back.eval()(tokens).logits)
    base = AutoModel.from_pretrained(tmp_path)
    assert isinstance(base, IntentionModel)
    assert torch.equal(base.eval()(tokens).last_hidden_state, model.model(tokens).last_hidden_state)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert half(tokens).logits.dtype == torch.bfloat16


def test_what_a_checkpoint_lacks_starts_as_it_should(tmp_path: Path) -> None:
    model = model_of()
    kept = {name: x for name, x in model.state_dict().items() if "gamma" not in name and name != "lm_head.weight"}
    model.save_pretrained(tmp_path, state_dict=kept)
    back = IntentionForCausalLM.from_pretrained(tmp_path)
    gates = dict(back.named_parameters())
    assert gates["model.layers.0.mixer.gamma_proj.weight"].eq(0).all()
    assert gates["model.layers.0.mixer.gamma_proj.bias"].sigmoid().gt(0.99).all()
    assert all(torch.equal(x, back.state_dict()[name]) for name, x in kept.items())


def test_it_starts_as_informers_do() -> None:
    config = IntentionConfig(vocab_size=101, hidden_size=64, num_hidden_layers=3, num_attention_heads=4)
    model = IntentionForCausalLM(config)
    like = InformerLM(101, 64, 4, 3, layer="gated", norm="rms", feedforward="swiglu")
    ours, theirs = (dict(x.named_parameters()) for x in (model.model, like))
    for name, x in ours.items():
        other = theirs[name.replace("embed_tokens", "embed")]
        if other.std() > 0 and "gamma" not in name and "alpha" not in name:
            torch.testing.assert_close(x.std(), other.std(), rtol=0.15, atol=0)
        else:
            assert torch.equal(x, other)
    assert isinstance(model.model.layers[0].mixer, GatedIntention)


def test_checkpointed_gradients_are_the_gradients() -> None:
    model, tokens = model_of(attention_every=2).double().train(), prompts(2, 9)
    mask = torch.ones_like(tokens)
    mask[0, 6:] = 0

    def slopes() -> list[Tensor]:
        model.zero_grad()
        out = model(tokens, attention_mask=mask, labels=tokens)
        assert out.past_key_values is None
        out.loss.backward()
        return [x.grad.clone() for x in model.parameters()]

    want = slopes()
    calls: list[int] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda *_: calls.append(1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # it has a new name
        model.gradient_checkpointing_enable({"use_reentrant": False})
    torch.testing.assert_close(slopes(), want, rtol=1e-12, atol=1e-12)
    assert len(calls) == 4  # each layer twice


def test_packed_sequences_and_outputs() -> None:
    model, tokens = model_of().double(), prompts(2, 6)
    whole = model(tokens, output_hidden_states=True)
    assert len(whole.hidden_states) == 3
    for name in ("cu_seqlens", "cu_seq_lens_q"):
        packed = model(tokens.view(1, 12), use_cache=False, **{name: torch.tensor([0, 6, 12])})
        torch.testing.assert_close(packed.logits.view_as(whole.logits), whole.logits)
    embedded = model(inputs_embeds=model.model.embed_tokens(tokens))
    torch.testing.assert_close(embedded.logits, whole.logits)
    logits, past = model(tokens, return_dict=False)
    assert isinstance(past, IntentionCache)
    assert torch.equal(logits, model(tokens).logits)


def test_errors_name_what_came_and_what_to_do() -> None:
    from transformers import DynamicCache

    model, tokens = model_of(), prompts()
    with pytest.raises(ValueError, match="got neither"):
        model()
    with pytest.raises(TypeError, match=r"must be an IntentionCache, got DynamicCache; use IntentionCache\(2\)"):
        model(tokens, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="cache_implementation='static'; leave it out"):
        model.generate(tokens, max_new_tokens=2, cache_implementation="static")
    with pytest.raises(ValueError, match="mixer must be one of"):
        IntentionConfig(mixer="mamba")
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, tokens so far\)"):
        model(tokens, attention_mask=torch.ones(2, 3))
