"""Language models of gated layers: every kind of layer, padding, packing, generation, checkpoints of plain models."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.nn import GatedIntention, InformerLM
from intention.nn.gated_mixers import RULES

KINDS = [
    {},
    {"attention_every": 2},
    {"norm": "rms", "feedforward": "swiglu", "kv_heads": 2, "output_norm": True},
    {"attention_every": 1, "positions": "rotary", "norm": "rms"},
]


def model_of(**options: object) -> InformerLM:
    torch.manual_seed(0)
    return InformerLM(17, 16, 4, 2, layer="gated", **options).double().eval()


def mixers(model: InformerLM) -> list[GatedIntention]:
    return [module for module in model.modules() if isinstance(module, GatedIntention)]


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("options", KINDS)
def test_parts_padding_and_packing_are_the_whole(mixer: str, options: dict[str, object]) -> None:
    model = model_of(mixer=mixer, **options)
    tokens = torch.randint(17, (2, 12))
    whole, _ = model(tokens)
    first, streams = model(tokens[:, :7])
    second, _ = model(tokens[:, 7:], streams)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    left = torch.cat([torch.full((2, 3), 5), tokens], 1)
    mask = torch.cat([torch.zeros(2, 3), torch.ones(2, 12)], 1).long()
    torch.testing.assert_close(model(left, attention_mask=mask)[0][:, 3:], whole)
    packed, none = model(tokens.view(1, -1), cu_seqlens=torch.tensor([0, 12, 24]), need_streams=False)
    torch.testing.assert_close(packed.view_as(whole), whole)
    assert none == [None, None]
    changed = tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % 17
    torch.testing.assert_close(model(changed)[0][:, :9], whole[:, :9])


@pytest.mark.parametrize("mixer", RULES)
def test_it_learns_to_count(mixer: str) -> None:
    torch.manual_seed(1)
    model = InformerLM(7, 32, 4, 1, mixer=mixer, layer="gated")
    tokens = torch.arange(40).repeat(4, 1) % 7
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    loss = torch.tensor(torch.inf)
    for _ in range(20):
        logits, _ = model(tokens, need_streams=False)
        loss = TF.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.3
    assert torch.equal(model.generate(tokens[:, :10], 20, temperature=0), torch.arange(30).repeat(4, 1) % 7)


def sizes(streams: list) -> list[list[torch.Size]]:
    return [[s.tail.shape, *(x.shape for x in s.memory), s.seen.shape] for s in streams]


def test_every_second_layer_is_attention_and_the_others_do_not_grow() -> None:
    model = model_of(attention_every=2)
    kinds = [(mixer.mixer, mixer.rotate is not None) for mixer in mixers(model)]
    assert kinds == [("intention", False), ("attention", True)]
    model = model_of()
    _, streams = model(torch.randint(17, (1, 9)))
    before = sizes(streams)
    for _ in range(3):
        _, streams = model(torch.randint(17, (1, 1)), streams)
    assert sizes(streams) == before


def test_plain_models_and_their_checkpoints_are_as_before() -> None:
    names = {
        *("embed.weight", "norm.weight", "norm.bias", "read.weight"),
        *(f"layers.0.norm{i}.{x}" for i in (1, 2) for x in ("weight", "bias")),
        *(f"layers.0.feedforward.{i}.{x}" for i in (0, 2) for x in ("weight", "bias")),
        *(f"layers.0.mixer.{x}" for x in ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")),
        "layers.0.mixer.alpha.theta",
    }
    model = InformerLM(17, 16, 4, 1)
    assert set(model.state_dict()) == names
    assert model.rotate is not None
    assert InformerLM(17, 16, 4, 1, positions="none").rotate is None
    hybrid = InformerLM(17, 16, 4, 2, attention_every=2, alpha=0.3, norm="rms", feedforward="swiglu")
    assert [type(layer.mixer).__name__ for layer in hybrid.layers] == ["MultiheadIntention", "MultiheadAttention"]
    assert hybrid(torch.randint(17, (2, 5)))[0].isfinite().all()


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_activations_start_at_an_ordinary_size(norm: str) -> None:
    torch.manual_seed(0)
    model = InformerLM(101, 64, 4, 6, layer="gated", norm=norm, feedforward="swiglu")
    grown: list[Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _, args, out: grown.append((out[0].std() / args[0].std()).detach()))
    logits, _ = model(torch.randint(101, (2, 64)))
    assert 0.5 < float(logits.detach().std()) < 2
    assert all(1 <= float(x) < 2 for x in grown)


def test_errors_name_what_came_and_what_to_do() -> None:
    tokens = torch.zeros(1, 3).long()
    for bad, message in (
        ({"layer": "plane"}, "layer must be one of 'plain', 'gated', got 'plane'"),
        ({"norm": "batch"}, "norm must be one of"),
        ({"feedforward": "relu"}, "feedforward must be one of"),
        ({"attention_every": 0}, "attention_every must be an integer >= 1, or None"),
        ({"layer": "gated", "mixer": "neural_process"}, "mixer must be one of"),
    ):
        with pytest.raises(ValueError, match=message):
            InformerLM(17, 16, 4, 1, **bad)
    with pytest.raises(ValueError, match=r"use InformerLM\(layer='gated'\)"):
        InformerLM(17, 16, 4, 1)(tokens, attention_mask=tokens)


def test_gates_of_the_fit_are_not_those_of_attention_beside_it() -> None:
    model = model_of(attention_every=2, beta=True, alpha=0.5, taps=3)
    fitted, attends = mixers(model)
    assert (fitted.start, fitted.beta_proj is not None, attends.beta_proj) == (0.5, True, None)
    assert len(attends.convolution.weight) == 3
