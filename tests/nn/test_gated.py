"""Gated layers: parts against plain loops over tokens; cuts, padding, packing, precisions, gradients, errors."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as TF
from torch import Tensor

from intention.nn import GatedIntention, GatedState
from intention.nn.convolution import ShortConvolution
from intention.nn.gated_mixers import RULES
from intention.sequences.ragged import groups

D = torch.float64
SIZES: dict[str, Any] = {"d_model": 12, "heads": 4, "head_dim": 5}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"kv_heads": 2, "value_dim": 3, "alpha_per": "head"},
    {"output_norm": True, "rotary": True},
    {"output_norm": False, "gate": False, "beta": False, "gamma": False},
    {"taps": 0, "silu": False},
    {"taps": 2, "convolved": "qv", "unit": False},
]


def layer_of(mixer: str = "intention", **options: Any) -> GatedIntention:
    """One whose parameters are all away from their start, in float64."""
    torch.manual_seed(0)
    layer = GatedIntention(**SIZES, mixer=mixer, **options).double()
    with torch.no_grad():
        for name, x in layer.named_parameters():
            x.add_(0.3 * torch.randn_like(x))
            if name == "gamma_proj.bias":
                x.sub_(5)  # decays of .1 to .99
    return layer


def tokens(batch: int = 2, n: int = 9) -> Tensor:
    return torch.randn(batch, n, SIZES["d_model"], dtype=D)


def by_hand(layer: GatedIntention, x: Tensor) -> Tensor:
    """The layer token by token and head by head, from its parameters and the formulas alone; x (n, d_model)."""
    n, d, k = len(x), layer.head_dim, layer.value_dim
    every = dict(zip("qkv", (x @ layer.in_proj.weight.T).split(list(layer.sizes.values()), -1), strict=True))
    if layer.convolution is not None:
        weights = dict(
            zip(
                layer.convolved,
                layer.convolution.weight.split([layer.sizes[p] for p in layer.convolved], 1),
                strict=True,
            )
        )
        for p, w in weights.items():
            every[p] = torch.stack([sum(w[j] * every[p][t - j] for j in range(len(w)) if t >= j) for t in range(n)])  # type: ignore[misc]
    if layer.silu:
        every = {p: y * torch.sigmoid(y) for p, y in every.items()}
    out = torch.zeros(n, layer.heads, k, dtype=x.dtype)
    for h in range(layer.heads):
        g = h // (layer.heads // layer.kv_heads)
        q, key, v = (every[p][:, i * s : (i + 1) * s] for p, i, s in (("q", h, d), ("k", g, d), ("v", g, k)))
        if layer.unit:
            q, key = (y / (y.square().sum(-1, keepdim=True) + 1e-6).sqrt() for y in (q, key))
        if layer.rotate is not None:
            q, key = (layer.rotate(y, y, 0)[0] for y in (q, key))
        ones = torch.ones(n, dtype=x.dtype)
        beta, gamma = (
            ones if gate is None else torch.sigmoid(x @ gate.weight[g] + gate.bias[g])
            for gate in (layer.beta_proj, layer.gamma_proj)
        )
        out[:, h] = read_by_hand(layer, h, g, q, key, v, beta, gamma)
    if layer.output_norm is not None:
        out = out * (out.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * layer.output_norm.weight
    out = out.flatten(1)
    if layer.gate_proj is not None:
        out = out * torch.sigmoid(x @ layer.gate_proj.weight.T)
    return out @ layer.out_proj.weight.T


def read_by_hand(
    layer: GatedIntention, h: int, g: int, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gamma: Tensor
) -> Tensor:
    n, d = k.shape
    scale = d**-0.5 if layer.log_scale is None else layer.log_scale[h].exp()
    alpha = torch.eye(d, dtype=k.dtype)
    if layer.log_alpha is not None:
        alpha = torch.diag(layer.log_alpha[g].exp().expand(d))
    outs = []
    sums = torch.zeros(d, v.shape[-1], dtype=k.dtype)
    for t in range(n):
        left = torch.stack([gamma[s + 1 : t + 1].prod() for s in range(t + 1)]) * beta[: t + 1]
        seen, values = k[: t + 1], v[: t + 1]
        gram = seen.T @ (left[:, None] * seen)
        if layer.mixer == "intention":
            outs.append(q[t] @ torch.linalg.solve(gram + alpha, seen.T @ (left[:, None] * values)))
        elif layer.mixer == "linear_attention":
            outs.append(q[t] @ (seen.T @ (left[:, None] * values)))
        elif layer.mixer in ("delta", "gated_delta"):
            sums = gamma[t] * sums
            sums = sums + beta[t] * torch.outer(k[t], v[t] - k[t] @ sums)
            outs.append(q[t] @ sums)
        elif layer.mixer == "attention":
            outs.append(torch.softmax(scale * (seen @ q[t]) + left.log(), 0) @ values)
        else:
            own = 1.0 if layer.log_scale is None else layer.log_scale[h].exp()
            closed = (t + 1) * (t - d) / d if t + 1 > d else d - t - 2
            factor = max(closed, 2 * min(t + 1, d) ** 0.5) ** 0.5  # docs/nn.md: "variance"
            outs.append(torch.softmax(own * factor * (seen @ torch.linalg.solve(gram + alpha, q[t])), 0) @ values)
    return torch.stack(outs)


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_it_is_the_formula(mixer: str, options: dict[str, Any]) -> None:
    layer, x = layer_of(mixer, **options), tokens()
    want = torch.stack([by_hand(layer, own) for own in x])
    y, state = layer(x)
    torch.testing.assert_close(y, want)
    assert isinstance(state, GatedState)
    torch.testing.assert_close(layer(x, need_state=False)[0], want)
    slopes = torch.randn_like(y)
    got = torch.autograd.grad(y, list(layer.parameters()), slopes, retain_graph=True)
    for (name, _), a, b in zip(
        layer.named_parameters(), got, torch.autograd.grad(want, list(layer.parameters()), slopes), strict=True
    ):
        torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}", rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("options", [{"beta": True}, {"gamma": True}, {"beta": True, "gamma": True, "kv_heads": 2}])
def test_attention_may_have_gates(options: dict[str, Any]) -> None:
    layer, x = layer_of("attention", **options), tokens(1)
    want = by_hand(layer, x[0])
    torch.testing.assert_close(layer(x)[0][0], want)
    first, state = layer(x[:, :4])
    torch.testing.assert_close(torch.cat([first, layer(x[:, 4:], state=state)[0]], 1)[0], want)


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_any_cut_and_single_steps_are_the_whole(mixer: str, options: dict[str, Any]) -> None:
    layer, x = layer_of(mixer, **options), tokens(n=7).requires_grad_()
    whole, last = layer(x)
    slope = torch.randn_like(whole)
    (want,) = torch.autograd.grad(whole, x, slope, retain_graph=True)
    for cut in range(1, 7):
        first, state = layer.stream(x[:, :cut])
        second, state = layer.stream(x[:, cut:], state)
        y = torch.cat([first, second], 1)
        torch.testing.assert_close(y, whole)
        torch.testing.assert_close(torch.autograd.grad(y, x, slope)[0], want)  # slopes flow through the state
    state, parts = None, []
    for t in range(7):
        y, state = layer.step(x[:, t], state)
        parts.append(y)
    torch.testing.assert_close(torch.stack(parts, 1), whole)
    same_state(state, last)


def same_state(a: GatedState | None, b: GatedState | None) -> None:
    torch.testing.assert_close((a.tail, *a.memory, a.seen), (b.tail, *b.memory, b.seen))


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("options", OPTIONS)
def test_padding_anywhere_is_not_there(mixer: str, options: dict[str, Any]) -> None:
    layer, x, more = layer_of(mixer, **options), tokens(5), tokens(5, 3)
    mask = torch.ones(5, 9, dtype=torch.long)
    mask[0, :4], mask[1, 6:], mask[2, ::2], mask[3, :] = 0, 0, 0, 0
    shown = x.masked_fill(mask.unsqueeze(-1) == 0, torch.nan).requires_grad_()  # whatever stands there
    y, state = layer(shown, mask)
    later, end = layer(more, state=state)
    assert y[mask == 0].eq(0).all()
    (slope,) = torch.autograd.grad(y.sum() + later.sum(), shown)
    assert slope.isfinite().all()
    assert slope[mask == 0].eq(0).all()
    for i in range(5):
        own = mask[i].bool()
        single, alone = layer(x[i : i + 1, own]) if own.any() else (x[:1, :0], None)
        torch.testing.assert_close(y[i : i + 1, own], single)
        after, known = layer(more[i : i + 1], state=alone)
        torch.testing.assert_close(later[i : i + 1], after)
        assert end.seen[i] == known.seen[0]


@pytest.mark.parametrize(
    ("mixer", "options"),
    [(m, {}) for m in RULES] + [(m, {"beta": True, "gamma": True}) for m in RULES if RULES[m].gamma is not None],
)
def test_padding_may_come_later(mixer: str, options: dict[str, Any]) -> None:
    layer, x = layer_of(mixer, **options), tokens(2, 12)
    mask = torch.ones(2, 4, dtype=torch.bool)
    mask[0, 1:3], mask[1, 2:] = False, False
    first, state = layer(x[:, :5])
    second, state = layer(x[:, 5:9], mask, None, state)
    third, _ = layer(x[:, 9:], state=state)
    for i in range(2):
        kept = torch.cat([torch.ones(5).bool(), mask[i], torch.ones(3).bool()])
        got = torch.cat([first[i], second[i, mask[i]], third[i]])
        torch.testing.assert_close(got, layer(x[i : i + 1, kept])[0][0])


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("options", OPTIONS[:3])
def test_packed_sequences_do_not_meet(mixer: str, options: dict[str, Any]) -> None:
    layer, x = layer_of(mixer, **options), tokens(1, 18)
    ends = [0, 7, 8, 8, 11, 18]
    cu = torch.tensor(ends, dtype=torch.int32)
    y, state = layer(x, cu_seqlens=cu)
    again, end = layer(x, cu_seqlens=cu, state=state)
    assert layer(x, cu_seqlens=cu, need_state=False)[1] is None
    for i, (a, b) in enumerate(itertools.pairwise(ends)):
        if a == b:
            continue
        single, alone = layer(x[:, a:b])
        torch.testing.assert_close(y[:, a:b], single)
        torch.testing.assert_close(again[:, a:b], layer(x[:, a:b], state=alone)[0])
        assert end.seen[i] == 2 * (b - a)


def test_groups_of_packed_sequences_waste_at_most_half() -> None:
    ends = [0, 100, 101, 101, 105, 170, 178, 188]
    found = groups(ends, torch.device("cpu"))
    assert sorted(i for group in found for i in group.which) == list(range(7))
    for _, places, there in found:
        if places.shape[1] > 1:
            assert there.float().mean() > 0.5
    assert sorted(torch.cat([places[there] for _, places, there in found]).tolist()) == list(range(188))


def test_the_convolution_is_that_of_torch() -> None:
    conv, x = ShortConvolution(6, 4).double(), torch.randn(2, 9, 6, dtype=D)
    wanted = TF.conv1d(TF.pad(x.mT, (3, 0)), conv.weight.flip(0).T.unsqueeze(1), groups=6).mT
    torch.testing.assert_close(conv(x)[0], wanted)


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_the_layer_up_to_its_rounding(mixer: str, dtype: torch.dtype) -> None:
    layer, x = GatedIntention(32, 4, mixer=mixer, output_norm=True, rotary=True), torch.randn(2, 90, 32)
    layer = layer.requires_grad_()
    want, _ = layer(x)
    mask = torch.ones(2, 60)
    with torch.autocast("cpu", dtype):
        first, state = layer(x[:, :60], mask)
        auto = torch.cat([first, layer(x[:, 60:], state=state)[0]], 1)
    half = copy.deepcopy(layer).to(dtype)
    first, state = half(x[:, :60].to(dtype), mask)
    pure = torch.cat([first, half(x[:, 60:].to(dtype), state=state)[0]], 1)
    for got in (auto, pure):
        assert got.dtype == dtype
        assert float(((got.float() - want).norm() / want.norm()).detach()) < 4 * torch.finfo(dtype).eps
    pure.float().square().sum().backward()
    auto.float().square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (*half.parameters(), *layer.parameters()))


def test_gates_start_where_they_should_in_any_precision() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        layer = GatedIntention(32, 8, dtype=dtype)
        beta, gamma = layer._gates(torch.randn(2, 50, 32).to(dtype))
        assert (gamma > 0.99).all()
        assert (gamma < 0.9999).all()
        assert len(gamma.unique()) == 8
        assert 0.4 < float(beta.detach().mean()) < 0.6
        torch.testing.assert_close(layer.log_alpha.exp().float(), torch.full((8, 4), 0.1), rtol=0.01, atol=0)


def test_a_small_ridge_trains_in_half_precision() -> None:
    """Where conjugate gradients on sums in half precision diverge."""
    torch.manual_seed(0)
    layer = GatedIntention(16, 2, alpha=1e-4)
    optimiser = torch.optim.Adam(layer.parameters(), 1e-2)
    x = torch.randn(2, 64, 16)
    losses = []
    for _ in range(12):
        with torch.autocast("cpu", torch.bfloat16):
            y, _ = layer(x, need_state=False)
        loss = TF.mse_loss(y[:, 1:].float(), x[:, :-1])
        optimiser.zero_grad()
        loss.backward()
        assert all(p.grad.isfinite().all() for p in layer.parameters())
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("mixer", ["intention", "gated_delta"])
def test_compiled_it_is_the_same(mixer: str) -> None:
    torch._dynamo.reset()
    layer, x = layer_of(mixer), tokens(2, 9)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :3] = 0
    _, state = layer(tokens())
    y, after = layer(x, mask, None, state.detach())
    got, known = compiled(x, mask, None, state.detach())
    torch.testing.assert_close(got, y)
    same_state(known, after)
    want = torch.autograd.grad(y.sum(), list(layer.parameters()))
    torch.testing.assert_close(torch.autograd.grad(got.sum(), list(layer.parameters())), want, rtol=1e-5, atol=1e-7)


def test_two_calls_are_equal_bit_by_bit() -> None:
    layer, x = layer_of().float(), tokens().float()
    mask = torch.rand(2, 9) < 0.7
    assert torch.equal(layer(x, mask)[0], layer(x, mask)[0])


@pytest.mark.parametrize("mixer", RULES)
def test_states_are_chosen_detached_and_do_not_grow(mixer: str) -> None:
    layer, x = layer_of(mixer), tokens(3)
    _, state = layer(x)
    chosen = state.reorder(torch.tensor([2, 2, 0])).detach()
    assert not any(t.requires_grad for t in (chosen.tail, *chosen.memory))
    torch.testing.assert_close(layer(x, state=chosen)[0], layer(x, state=state)[0][[2, 2, 0]] * 0 + torch.cat(
        [layer(x[i : i + 1], state=state.reorder(torch.tensor([j])))[0] for i, j in enumerate((2, 2, 0))]
    ))  # fmt: skip
    _, later = layer(x, state=state)
    grows = mixer in ("attention", "sigma_intention")
    assert (sum(t.numel() for t in later.memory) > sum(t.numel() for t in state.memory)) == grows


@pytest.mark.parametrize("mixer", RULES)
def test_no_tokens_are_read_as_well(mixer: str) -> None:
    layer, x = layer_of(mixer), tokens()
    _, start = layer(x[:, :0])
    whole, state = layer(x, state=start)
    torch.testing.assert_close(whole, layer(x)[0])
    y, same = layer(x[:, :0], state=state)
    assert y.shape == (2, 0, 12)
    torch.testing.assert_close(layer(x, state=same)[0], layer(x, state=state)[0])
    assert layer(x[:1, :0], cu_seqlens=torch.tensor([0, 0, 0]))[1].seen.tolist() == [0, 0]


@pytest.mark.parametrize("mixer", RULES)
@pytest.mark.parametrize("options", [{}, {"taps": 0}, {"kv_heads": 2, "value_dim": 3}])
def test_no_sequences_are_read_as_well(mixer: str, options: dict[str, Any]) -> None:
    """Nothing comes back, with states that take it on: in a batch of none, and of none that has no tokens."""
    layer, none = layer_of(mixer, **options), tokens(0, 5)
    for x, rest in (
        (none, {}),
        (none[:, :0], {}),
        (none, {"attention_mask": torch.ones(0, 5)}),
        (tokens(2, 0), {"attention_mask": torch.ones(2, 0)}),
        (none, {"need_state": False}),
    ):
        x = x.clone().requires_grad_()
        y, state = layer(x, **rest)
        assert y.shape == x.shape
        y.sum().backward()
        assert x.grad is not None
        if rest.get("need_state", True):
            assert state.seen.tolist() == [0] * len(x)
            later, state = layer(tokens(len(x), 3), state=state)
            assert later.shape == (len(x), 3, 12)
            assert state.seen.tolist() == [3] * len(x)
    _, some = layer(tokens())
    y, state = layer.step(none[:, 0], some.reorder(torch.tensor([], dtype=torch.int64)))
    assert y.shape == (0, 12)
    _, other = layer(tokens(2, 1), state=some)
    assert [x.shape[1:] for x in state.memory] == [x.shape[1:] for x in other.memory]


def test_parts_are_there_or_not() -> None:
    bare = GatedIntention(12, 4, taps=0, beta=False, gamma=False, gate=False)
    assert [name for name, _ in bare.named_parameters()] == ["log_alpha", "in_proj.weight", "out_proj.weight"]
    shared = GatedIntention(12, 4, kv_heads=1, value_dim=7, alpha_per="head")
    assert shared.in_proj.weight.shape == (12 + 3 + 7, 12)
    assert shared.out_proj.weight.shape == (12, 28)
    assert shared.log_alpha.shape == (1, 1)
    parts = {m: GatedIntention(12, 4, mixer=m) for m in RULES}
    assert {m for m, x in parts.items() if x.gamma_proj is not None} == {"intention", "gated_delta", "linear_attention"}
    assert {m for m, x in parts.items() if x.log_alpha is not None} == {"intention", "sigma_intention"}
    assert {m for m, x in parts.items() if x.output_norm is not None} == {"linear_attention"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": 0}, "heads must be an integer >= 1, got 0"),
        ({"d_model": 10, "head_dim": None}, "d_model must be a multiple of heads, got 10 and 4; or give head_dim"),
        ({"kv_heads": 3}, "heads must be a multiple of kv_heads"),
        ({"taps": 1}, "taps must be an integer >= 2, or 0"),
        ({"convolved": "vq"}, "convolved must be one of"),
        ({"mixer": "mamba"}, "mixer must be one of"),
        ({"alpha": 0.0}, "must start > 0, got 0"),
        ({"alpha": -1.0}, "alpha must be finite and >= 0"),
        ({"alpha_per": "token"}, "alpha_per must be one of 'channel', 'head'"),
        ({"mixer": "delta", "gamma": True}, "has no gate gamma, got gamma=True; use mixer='gated_delta'"),
        ({"mixer": "sigma_intention", "beta": True}, "has no gate beta, got beta=True; use mixer='attention'"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GatedIntention(**(SIZES | options))


def test_inputs_that_do_not_fit_are_named() -> None:
    layer, x = layer_of(), tokens()
    _, state = layer(x)
    mask, cu = torch.ones(2, 9), torch.tensor([0, 9])
    for args, message in (
        ((x[0],), r"wanted tokens \(batch, n, 12\), got \(9, 12\); use x\[None\]"),
        ((x, mask[:, :8]), r"attention_mask must be \(batch, n\) = \(2, 9\).*got \(2, 8\)"),
        ((x, mask, cu), "got both attention_mask and cu_seqlens; pass one"),
        ((x, None, cu), r"in one row, x \(1, n, 12\), got \(2, 9, 12\)"),
        ((x[:1], None, torch.tensor([0, 8])), "cu_seqlens must be integers that rise from 0 to N = 9"),
        ((x[:1], None, None, state), "the state is of 2 sequences, got 1; use state.reorder"),
    ):
        with pytest.raises(ValueError, match=message):
            layer(*args)
