"""The state of a causal Intention: prefill, steps, saving, reordering, packed sequences; mixers that stream."""

from __future__ import annotations

import copy
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor

from intention import CausalState, causal_intention
from intention._call.per_query import linear_causal
from intention.nn.mixers import MIXERS, make_mixer
from intention.sequences.recurrent import delta_stream
from intention.sequences.state import sigma_stream

STREAMS = ("intention", "sigma_intention", "attention", "linear_attention", "delta")
D = torch.float64


def draw(n: int, lead: tuple[int, ...] = (2, 3), d: int = 8, k: int = 4) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(*lead, n, d), torch.randn(*lead, n, d), torch.randn(*lead, n, k)


@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("fading", [False, True])
def test_steps_after_a_prefill_are_the_parallel_form(covariance: str, fading: bool) -> None:
    alpha = torch.tensor([0.1, 0.5, 0.9])
    query, key, value = draw(90)
    weight, gamma = torch.rand(2, 3, 90), 0.9 + 0.1 * torch.rand(2, 3, 90) if fading else None
    whole = causal_intention(query, key, value, alpha=alpha, covariance=covariance, weight=weight, decay=gamma, scale=2)
    state = CausalState.empty(8, 4, (2, 3), alpha=alpha, covariance=covariance)
    parts = []
    for a, b in pairwise((0, 70, 71, 80)):
        fade = None if gamma is None else gamma[..., a:b]
        out, state = state.prefill(
            *(x[..., a:b, :] for x in (query, key, value)), weight=weight[..., a:b], decay=fade, scale=2
        )
        parts.append(out)
    for t in range(80, 90):
        fade = None if gamma is None else gamma[..., t]
        out, state = state.step(
            *(x[..., t, :] for x in (query, key, value)), weight=weight[..., t], decay=fade, scale=2
        )
        parts.append(out.unsqueeze(-2))
    torch.testing.assert_close(torch.cat(parts, -2), whole, rtol=1e-5, atol=1e-5)


def test_ten_thousand_steps_do_not_drift() -> None:
    n = 10_000
    query, key, value = draw(n, (1,), d=6, k=2)
    whole = causal_intention(query, key, value, alpha=0.01)
    out, state = CausalState.empty(6, 2, (1,), alpha=0.01).prefill(query[:, :10], key[:, :10], value[:, :10])
    worst = float((out - whole[:, :10]).abs().max())
    with torch.no_grad():
        for t in range(10, n):
            out, state = state.step(query[:, t], key[:, t], value[:, t])
            worst = max(worst, float((out - whole[:, t]).abs().max()))
    assert worst < 1e-5
    assert state.gram.shape == (1, 6, 6)
    assert state.cross.shape == (1, 6, 2)


def test_gradients_go_through_the_state() -> None:
    own = [x.double().requires_grad_() for x in draw(20, (1,), d=3, k=2)]
    alpha = torch.tensor(0.3, dtype=D, requires_grad=True)

    def parts(*own: Tensor) -> Tensor:
        *points, alpha = own
        first, state = CausalState.empty(3, 2, (1,), alpha=alpha).prefill(*(x[:, :12] for x in points))
        second, _ = state.prefill(*(x[:, 12:] for x in points))
        return torch.cat([first, second], 1)

    def whole(*own: Tensor) -> Tensor:
        return causal_intention(*own[:3], alpha=own[3])

    one, two = (torch.autograd.grad(call(*own, alpha).square().sum(), [*own, alpha]) for call in (parts, whole))
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


def test_states_are_saved_and_reordered(tmp_path: Path) -> None:
    query, key, value = draw(12)
    _, state = CausalState.empty(8, 4, (2, 3), alpha=torch.tensor([0.1, 1.0, 2.0])).prefill(query, key, value)
    state.save(tmp_path / "state.safetensors")
    loaded = CausalState.load(tmp_path / "state.safetensors")
    more = [x[..., 0, :] for x in draw(1)]
    want, _ = state.step(*more)
    assert torch.equal(loaded.step(*more)[0], want)
    swapped, _ = state.reorder(torch.tensor([1, 0])).step(*(x.flip(0) for x in more))
    torch.testing.assert_close(swapped, want.flip(0))
    with pytest.raises(ValueError, match="missing"):
        CausalState.from_state_dict({"gram": state.gram})


@pytest.mark.parametrize("ends", [[0, 5, 5, 70, 100, 101, 130], [0, 130], [0, 1, 2, 3, 130]])
def test_packed_sequences_do_not_see_each_other(ends: list[int]) -> None:
    query, key, value = draw(130)
    weight, gamma = torch.rand(2, 3, 130), 0.9 + 0.1 * torch.rand(2, 3, 130)
    alpha = torch.tensor([0.1, 1.0, 10.0])
    got = causal_intention(query, key, value, alpha=alpha, weight=weight, decay=gamma, cu_seqlens=torch.tensor(ends))
    want = [
        causal_intention(
            *(x[..., a:b, :] for x in (query, key, value)), alpha=alpha, weight=weight[..., a:b], decay=gamma[..., a:b]
        )
        for a, b in pairwise(ends)
        if b > a
    ]
    torch.testing.assert_close(got, torch.cat(want, -2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mixer", STREAMS)
def test_a_mixers_stream_is_its_causal_forward(mixer: str) -> None:
    module = make_mixer(mixer, 32, 4, batch_first=True).eval()
    x = torch.randn(2, 100, 32)
    whole, _ = module.stream(x)  # type: ignore[operator]
    copy.deepcopy(module)  # a call leaves nothing behind
    first, stream = module.stream(x[:, :90])  # type: ignore[operator]
    parts = [first]
    for t in range(90, 100):
        out, stream = module.stream(x[:, t : t + 1], stream)  # type: ignore[operator]
        parts.append(out)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=1e-4, atol=1e-5)
    if mixer != "delta":
        mask = torch.ones(100, 100, dtype=torch.bool).triu(1)
        same, _ = module(x, x, x, attn_mask=mask, is_causal=True, need_weights=False)
        torch.testing.assert_close(whole, same, rtol=1e-4, atol=1e-5)


def test_mixers_that_cannot_stream_say_so() -> None:
    x = torch.randn(2, 5, 32)
    with pytest.raises(NotImplementedError, match="streams"):
        make_mixer("neural_process", 32, 4, batch_first=True).stream(x)  # type: ignore[operator]
    with pytest.raises(ValueError, match="batch, tokens, 32"):
        make_mixer("intention", 32, 4, batch_first=True).stream(x[..., :3])  # type: ignore[operator]
    with pytest.raises(NotImplementedError, match="in their order"):
        make_mixer("delta", 32, 4, batch_first=True)(x, x, x, need_weights=False)
    assert set(STREAMS) | {"neural_process"} == set(MIXERS)


def test_the_delta_rule_is_its_recurrence() -> None:
    query, key, value = (x.double() for x in draw(150, (1,), d=4, k=3))
    key = torch.nn.functional.normalize(key, dim=-1)
    beta = torch.rand(1, 150, dtype=D)
    out, last = delta_stream(query, key, value, beta, None)
    sums = torch.zeros(1, 4, 3, dtype=D)
    for t in range(150):
        k = key[:, t].unsqueeze(-1)
        sums = sums + beta[:, t, None, None] * k * (value[:, t].unsqueeze(1) - k.mT @ sums)
        torch.testing.assert_close(out[:, t], (query[:, t].unsqueeze(1) @ sums).squeeze(1))
    torch.testing.assert_close(last, sums)


def test_no_tokens_are_read_as_well() -> None:
    own = [torch.randn(2, 0, 3, requires_grad=True) for _ in range(3)]
    none = torch.ones(2, 0)
    out = causal_intention(*own, decay=none)
    assert out.shape == (2, 0, 3)
    assert [x.shape for x in torch.autograd.grad(out.sum(), own)] == [(2, 0, 3)] * 3
    _, before = CausalState.empty(3, 3, (2,)).prefill(*torch.randn(3, 2, 5, 3))
    out, after = before.prefill(*own, decay=none)
    assert out.shape == (2, 0, 3)
    assert torch.equal(after.gram, before.gram)
    assert torch.equal(after.cross, before.cross)


def test_a_number_as_alpha_is_as_exact_as_the_tokens() -> None:
    query, key, value = (x.double() for x in draw(7, (1,), d=3, k=2))
    exact = torch.tensor(0.1, dtype=D)
    want = causal_intention(query, key, value, alpha=exact)
    assert torch.equal(causal_intention(query, key, value, alpha=0.1), want)
    streamed, _ = CausalState.empty(3, 2, (1,), alpha=0.1).prefill(query, key, value)
    torch.testing.assert_close(streamed, want, rtol=1e-13, atol=1e-13)
    mixer = make_mixer("intention", 6, 2, batch_first=True, alpha=0.1, scale=None).double()
    fixed = make_mixer("intention", 6, 2, batch_first=True, alpha=exact, scale=None).double()
    fixed.load_state_dict(mixer.state_dict())
    x = torch.randn(1, 7, 6, dtype=D)
    assert torch.equal(mixer.stream(x)[0], fixed.stream(x)[0])  # type: ignore[operator]


def test_what_is_no_tensor_or_of_another_size_is_named() -> None:
    query, key, value = draw(5, (2,), d=4, k=3)
    with pytest.raises(TypeError, match=r"decay must be a torch\.Tensor .* use torch\.full"):
        causal_intention(query, key, value, decay=0.9)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weight must be a torch\.Tensor"):
        causal_intention(query, key, value, weight=1.0)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"cu_seqlens must be a torch\.Tensor"):
        causal_intention(query, key, value, cu_seqlens=[0, 5])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"decay must be a torch\.Tensor"):
        CausalState.empty(4, 3).step(query[:, 0], key[:, 0], value[:, 0], decay=0.9)  # type: ignore[arg-type]
    for sizes in ((1, 3), (4, 1), (4, 7), (5, 3)):
        with pytest.raises(ValueError, match=r"CausalState\.empty\(4, 3\)"):
            CausalState.empty(*sizes).prefill(query, key, value)


@pytest.mark.parametrize("cuts", [(0, 5), (0, 2, 4, 5)])
def test_slopes_of_a_softmax_stream_that_nearly_cancel_are_added_before_they_are_rounded(cuts: tuple[int, ...]) -> None:
    """Fewer tokens than features, small alpha: a key moves Sigma and its scores, almost against each other."""
    gen = torch.Generator().manual_seed(0)
    points, upstream = torch.randn(3, 7, 5, 11, generator=gen), torch.randn(7, 5, 11, generator=gen)

    def slopes(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = leaves = [x.to(dtype).requires_grad_() for x in points]
        memory, outs = None, []
        for a, b in pairwise(cuts):
            parts = (x[:, a:b] for x in (q, k, v))
            out, memory = sigma_stream(*parts, torch.tensor(1e-6, dtype=dtype), "convex", None, memory)
            outs.append(out)
        return torch.autograd.grad(torch.cat(outs, 1), leaves, upstream.to(dtype))

    for got, want in zip(slopes(torch.float32), slopes(torch.float64), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4 * want.abs().max().item())


def test_linear_attention_of_no_tokens():
    query, before = torch.randn(2, 5, 3), torch.randn(2, 3, 7)
    none = torch.randn(2, 0, 3), torch.randn(2, 0, 7)
    out, total = linear_causal(query, *none)
    assert out.shape == (2, 5, 7)
    assert not out.any()
    assert not total.any()
    out, total = linear_causal(query, *none, before)
    torch.testing.assert_close(out, query @ before)
    torch.testing.assert_close(total, before)
