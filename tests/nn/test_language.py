"""The small language model: the same shell for all mixers, positions, ties, and generation from a state."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as TF

from intention.nn import InformerLM
from intention.nn.language import Rotary

MIXERS = ("intention", "sigma_intention", "attention", "linear_attention", "delta")


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("positions", ["rotary", "none"])
def test_parts_of_a_sequence_are_the_whole(mixer: str, positions: str) -> None:
    model = InformerLM(17, 32, 4, 2, mixer=mixer, positions=positions).eval()
    tokens = torch.randint(17, (2, 30))
    whole, _ = model(tokens)
    first, streams = model(tokens[:, :20])
    second, _ = model(tokens[:, 20:], streams)
    torch.testing.assert_close(torch.cat([first, second], 1), whole, rtol=1e-4, atol=1e-4)
    changed = tokens.clone()
    changed[:, 25] = (changed[:, 25] + 1) % 17
    assert torch.equal(model(changed)[0][:, :25], whole[:, :25])


@pytest.mark.parametrize("mixer", MIXERS)
def test_it_learns_to_count(mixer: str) -> None:
    torch.manual_seed(1)
    model = InformerLM(7, 32, 4, 1, mixer=mixer)
    tokens = torch.arange(40).repeat(4, 1) % 7
    optimiser = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(40):
        logits, _ = model(tokens)
        loss = TF.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert float(loss.detach()) < 0.3
    model.train()
    made = model.generate(tokens[:, :10], 20, temperature=0)
    assert model.training
    assert torch.equal(made, torch.arange(30).repeat(4, 1) % 7)


def test_generation_is_a_choice() -> None:
    model = InformerLM(17, 16, 2, 1)
    tokens = torch.randint(17, (3, 5))
    one, two = (model.generate(tokens, 8, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(one, two)
    assert torch.equal(model.generate(tokens, 8, top_k=1), model.generate(tokens, 8, temperature=0))
    assert torch.equal(model.generate(tokens, 0), tokens)
    for bad in ({"count": -1}, {"count": 1, "temperature": -1.0}, {"count": 1, "top_k": 0}):
        with pytest.raises(ValueError, match="must be"):
            model.generate(tokens, **bad)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="tokens must be"):
        model.generate(tokens.float(), 1)
    with pytest.raises(ValueError, match="positions must be"):
        InformerLM(17, 16, 2, 1, positions="learned")


def test_a_state_does_not_grow() -> None:
    model = InformerLM(17, 16, 2, 2).eval()
    _, streams = model(torch.randint(17, (1, 5)))
    with torch.no_grad():
        for _ in range(50):
            _, streams = model(torch.randint(17, (1, 1)), streams)
    assert [stream.seen for stream in streams] == [55, 55]
    assert {stream.memory.gram.shape for stream in streams} == {(1, 2, 8, 8)}
    assert InformerLM(17, 16, 2, 1).read.weight.shape == (17, 16)
    tied, free = InformerLM(17, 16, 2, 1), InformerLM(17, 16, 2, 1, tied=False)
    assert tied.read.weight is tied.embed.weight
    assert free.read.weight is not free.embed.weight


def test_rotary_scores_depend_on_distances_alone() -> None:
    rotate = Rotary(6)
    query, key = torch.randn(2, 1, 6).expand(-1, 9, -1)
    q, k = rotate(query, key, 0)
    later, also = rotate(query, key, 100)
    torch.testing.assert_close(q @ k.mT, later @ also.mT, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(q[3:] @ k[:6].mT, rotate(query[3:], key[3:], 3)[0] @ k[:6].mT)
    assert not torch.allclose(q @ k.mT, query @ key.mT)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_angles_keep_their_precision(dtype: torch.dtype) -> None:
    """In bfloat16 the positions 256 and 257 would be one, whatever the model was cast to."""
    model, x = InformerLM(50, 64, 4, 1).to(dtype), torch.ones(1, 1, 300, 16, dtype=dtype)
    turned, _ = model.rotate(x, x, 0)  # type: ignore[misc]
    assert turned.dtype == dtype
    assert not (turned[0, 0, 1:] == turned[0, 0, :-1]).all(-1).any()
    speed = 10_000.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
    angle = torch.arange(300, dtype=torch.float64).unsqueeze(-1) * speed
    wanted = torch.cat([angle.cos() - angle.sin(), angle.sin() + angle.cos()], -1)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-4 + torch.finfo(dtype).eps
    torch.testing.assert_close(turned[0, 0].double(), wanted, rtol=0, atol=tolerance)


def test_generation_leaves_every_mode_as_it_was() -> None:
    model = InformerLM(17, 16, 2, 2).train()
    model.layers[0].eval()  # frozen
    modes = [module.training for module in model.modules()]
    model.generate(torch.randint(17, (1, 3)), 2)
    assert [module.training for module in model.modules()] == modes
    with pytest.raises(IndexError):
        model.generate(torch.tensor([[99]]), 2)
    assert [module.training for module in model.modules()] == modes


def test_tokens_are_indices() -> None:
    model = InformerLM(17, 16, 2, 1)
    with pytest.raises(TypeError, match=r"tokens must be .* got torch.float32; use .long\(\)"):
        model(torch.zeros(1, 3))
    with pytest.raises(ValueError, match=r"tokens must be \(batch, n\), got \(3,\)"):
        model(torch.zeros(3).long())
    with pytest.raises(ValueError, match=r"multiple of num_heads, got 30 features for 4 heads; use embed_dim=28 or 32"):
        InformerLM(17, 30, 4, 1)


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_model_up_to_its_rounding(mixer: str, dtype: torch.dtype) -> None:
    model = InformerLM(17, 32, 4, 1, mixer=mixer)
    tokens = torch.randint(17, (2, 23))
    want, _ = model(tokens)
    with torch.autocast("cpu", dtype):
        first, streams = model(tokens[:, :19])
        auto = torch.cat([first, model(tokens[:, 19:], streams)[0]], 1)
    model = model.to(dtype)
    first, streams = model(tokens[:, :19])
    half = torch.cat([first, model(tokens[:, 19:], streams)[0]], 1)
    for got in (auto, half):
        assert got.dtype == dtype
        assert float(((got.float() - want).norm() / want.norm()).detach()) < 16 * torch.finfo(dtype).eps
    half.float().square().sum().backward()
    assert all(x.grad is None or torch.isfinite(x.grad).all() for x in model.parameters())
