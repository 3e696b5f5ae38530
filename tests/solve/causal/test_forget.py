"""Forgetting: decays from 1 to 0, a ridge for each head, token or channel, against a loop over tokens in float64."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from intention import AccuracyWarning, CausalState, causal_intention
from intention.solve.causal import by_roots, forget, gradients, sequence
from intention.solve.causal.sequence import causal
from intention.solve.native import library
from intention.solve.problem import Tokens

D = torch.float64
NAMES = ("query", "key", "value", "weight", "alpha", "decay")


@pytest.fixture(params=[True, False], ids=["native", "torch"])
def native(request: pytest.FixtureRequest) -> Iterator[bool]:
    if request.param and library.library() is None:
        pytest.skip("there are no compiled kernels")
    with contextlib.nullcontext() if request.param else library.off():
        yield request.param


def loop(
    query: Tensor, key: Tensor, value: Tensor, weight: Tensor, alpha: Tensor, decay: Tensor, state: tuple = ()
) -> Tensor:
    """One token after the other; alpha is (B,), (B, N) or (B, 1, d)."""
    sums, told = state or (key.new_zeros(*key.shape[::2], key.shape[2]), key.new_zeros(*key.shape[::2], value.shape[2]))
    outs = []
    for t in range(key.shape[1]):
        left, one = decay[:, t, None, None], weight[:, t, None, None] * key[:, t, :, None]
        sums = left * sums + one * key[:, t, None]
        told = left * told + one * value[:, t, None]
        ridge = alpha[:, 0] if alpha.dim() > 2 else (alpha[:, t] if alpha.dim() > 1 else alpha)[:, None]
        sigma = sums + torch.diag_embed(ridge.expand_as(key[:, t]))
        outs.append(query[:, t, None] @ torch.linalg.solve(sigma, told))
    return torch.cat(outs, 1)


def alone(query: Tensor, key: Tensor, value: Tensor, weight: Tensor, alpha: Tensor) -> Tensor:
    """What the loop is where every token forgets all before it; its slopes lose nothing beside a small alpha."""
    near = weight.unsqueeze(-1) * (query * key).sum(-1, keepdim=True)
    size = weight.unsqueeze(-1) * key.square().sum(-1, keepdim=True)
    return near * value / (alpha.view(-1, 1, 1) + size)


def draw(n: int, d: int, unit: bool, gamma: Tensor, alpha: float, k: int = 5) -> dict[str, Tensor]:
    query, key = torch.randn(2, n, d), torch.randn(2, n, d)
    key = torch.nn.functional.normalize(key, dim=-1) if unit else key
    return {
        "query": query,
        "key": key,
        "value": torch.randn(2, n, k),
        "weight": torch.rand(2, n) + 0.1,
        "alpha": torch.full((2,), alpha),
        "decay": gamma.expand(2, n).clone(),
    }


def called(own: dict[str, Tensor], **rest: object) -> Tensor:
    points = [own[name] for name in NAMES[:3]]
    return causal_intention(*points, **{name: own[name] for name in NAMES[3:]}, **rest)  # type: ignore[arg-type]


def compare(start: dict[str, Tensor], values: float, slopes: float, **rest: object) -> None:
    """Answers and all gradients; an AccuracyWarning excuses them."""
    own = {name: x.clone().requires_grad_() for name, x in start.items()}
    exact = {name: x.double().requires_grad_() for name, x in start.items()}
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        out = called(own, **rest)
        shaped = {**exact, "alpha": exact["alpha"].unsqueeze(1)} if rest.get("alpha_per") == "channel" else exact
        want = loop(**shaped)
        grad = torch.randn_like(want)
        got = torch.autograd.grad(out, list(own.values()), grad.to(out.dtype))
    if any(issubclass(x.category, AccuracyWarning) for x in said):
        return
    size = torch.maximum(want.norm(dim=-1), want.norm(dim=-1).mean())
    assert float(((out.double() - want).norm(dim=-1) / size).max().detach()) < values
    slope = list(torch.autograd.grad(want, list(exact.values()), grad))
    if not start["decay"].any():
        five = list(exact.values())[:5]
        slope[:5] = torch.autograd.grad(alone(*five), five, grad)
    for name, x, y in zip(NAMES, got, slope, strict=True):
        assert float((x.double() - y).norm() / y.norm().clamp_min(1e-30)) < slopes, name


def gates(kind: str, n: int) -> Tensor:
    if kind == "mixed":
        return torch.tensor([1.0, 0.999, 0.9, 0.3, 1.0, 0.05, 1.0, 0.0])[torch.randint(0, 8, (2, n))]
    if kind == "rare":  # one strong gate and one reset among mild ones
        out = torch.full((2, n), 0.99)
        out[0, n // 2], out[1, n // 3] = 1e-3, 0.0
        return out
    return torch.full((2, n), float(kind))


@pytest.mark.parametrize("kind", ["1", ".999", ".97", ".8", ".4", ".01", "0", "mixed", "rare"])
@pytest.mark.parametrize("alpha", [10.0, 0.1, 1e-3, 1e-6])
@pytest.mark.parametrize("unit", [False, True])
@pytest.mark.parametrize("d", [4, 16, 64])
def test_every_token_is_its_own_solve(d: int, unit: bool, alpha: float, kind: str, native: bool) -> None:
    n = 150 if d < 64 else 90
    compare(draw(n, d, unit, gates(kind, n), alpha), 1e-5, 1e-4)


@pytest.mark.parametrize("kind", ["1", ".97", "mixed", "rare"])
@pytest.mark.parametrize("spread", [0.5, 4.0])  # powers of ten
def test_an_alpha_for_each_token(spread: float, kind: str, native: bool) -> None:
    n, d = 90, 16
    start = draw(n, d, False, gates(kind, n), 1.0)
    start["alpha"] = 10 ** (-spread * torch.rand(2, n))
    compare(start, 1e-5, 1e-4, alpha_per="token")
    if kind == "1":  # decays of ones, or none
        every = [start[name] for name in NAMES[:3]]
        out = causal_intention(*every, weight=start["weight"], alpha=start["alpha"], alpha_per="token")
        torch.testing.assert_close(out, called(start, alpha_per="token"))


@pytest.mark.parametrize("kind", ["1", ".9", "mixed"])
def test_an_alpha_for_each_channel(kind: str, native: bool) -> None:
    n, d = 90, 16
    start = draw(n, d, False, gates(kind, n), 1.0)
    start["alpha"] = 10 ** (-3 * torch.rand(2, d))
    compare(start, 1e-5, 1e-4, alpha_per="channel")


def nine(n: int, per_token: bool, values: bool) -> list[Tensor | None]:
    """Float64, with a state, decays of 0 and 1 among others."""
    d, k = 3, 2
    before = torch.randn(2, 4, d, dtype=D)
    decay = torch.rand(2, n, dtype=D)
    decay[0, 1], decay[0, 3], decay[1, 2], decay[1, 0], decay[1, -1] = 0.0, 1.0, 0.0, 1.0, 0.0
    return [
        *torch.randn(2, 2, n, d, dtype=D),
        torch.randn(2, n, k, dtype=D) if values else None,
        torch.rand(2, n, dtype=D) + 0.1,
        torch.rand(2, n, dtype=D) + 0.3 if per_token else torch.tensor([0.3, 1.0], dtype=D),
        None if per_token else torch.tensor([0.5, 0.8], dtype=D),
        before.mT @ before,
        torch.randn(2, d, k, dtype=D) if values else None,
        decay,
    ]


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("size", [3, 64])
def test_derivatives_at_a_reset(per_token: bool, values: bool, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of everything: first, second, and forward mode."""
    for module, name in ((by_roots, "LENGTH"), (gradients, "LENGTH")):
        monkeypatch.setattr(module, name, size)
    monkeypatch.setattr(forget, "BLOCKS", (size,))
    monkeypatch.setattr(forget, "AT_ONCE", 2)
    monkeypatch.setattr(sequence.checks, "decay", lambda _: None)  # steps of gradcheck go beyond 0 and 1
    every = nine(5, per_token, values)
    there = [i for i, x in enumerate(every) if x is not None]

    def call(*own: Tensor) -> Tensor:
        given: list[Tensor | None] = [None] * 9
        for i, x in zip(there, own, strict=True):
            given[i] = (x + x.mT) / 2 if i == 6 else x  # a state is symmetric, and gradcheck's small steps are not
        return causal(Tokens(*given))[0]  # type: ignore[arg-type]

    own = [x.clone().requires_grad_() for x in every if x is not None]
    assert torch.autograd.gradcheck(call, own)
    assert torch.autograd.gradgradcheck(call, [x[:1].detach().requires_grad_() for x in own])
    assert torch.autograd.gradcheck(call, own, check_forward_ad=True, check_backward_ad=False)


@pytest.mark.parametrize("per", ["head", "token", "channel"])
def test_transforms_at_a_reset(per: str) -> None:
    n, d = 5, 3
    alpha = torch.rand({"head": 1, "token": n, "channel": d}[per], dtype=D) + 0.3
    decay = torch.tensor([0.7, 0.0, 1.0, 0.0, 0.4], dtype=D)
    own = (*torch.randn(2, n, d, dtype=D), torch.randn(n, 2, dtype=D), torch.rand(n, dtype=D), alpha, decay)
    every = tuple(range(6))

    def call(*own: Tensor) -> Tensor:
        query, key, value, weight, alpha, decay = own
        alpha = alpha[0] if per == "head" else alpha
        return causal_intention(query, key, value, weight=weight, alpha=alpha, decay=decay, alpha_per=per).sin()

    def by_hand(*own: Tensor) -> Tensor:
        *rest, alpha, decay = (x[None] for x in own)
        alpha = {"head": alpha[0], "token": alpha, "channel": alpha[None]}[per]
        return loop(*rest, alpha, decay)[0].sin()

    f = torch.func
    first, second = f.jacrev(by_hand, every)(*own), f.jacrev(f.jacrev(lambda *x: by_hand(*x).sum(), every), every)(*own)
    torch.testing.assert_close(f.jacrev(call, every)(*own), first)
    torch.testing.assert_close(f.jacfwd(call, every)(*own), first)
    torch.testing.assert_close(f.hessian(lambda *x: call(*x).sum(), every)(*own), second)
    twice = [torch.stack([x, 0.9 * x]) for x in own]
    pair = (f.vmap(f.grad(lambda *x, g=g: g(*x).sum(), every))(*twice) for g in (call, by_hand))
    torch.testing.assert_close(*pair)
    third = (f.jacrev(f.jacrev(f.grad(lambda x, g=g: g(*own[:5], x).sum())))(decay) for g in (call, by_hand))
    torch.testing.assert_close(*third)


@pytest.mark.parametrize("block", [3, 16, 32])
@pytest.mark.parametrize("n", [1, 16, 33, 200])
def test_blocks_and_spans_do_not_show(n: int, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mild and hard ones, easy and not, in groups of sequences, against the slow way to the same gradients."""
    monkeypatch.setattr(forget, "BLOCKS", (block,))
    monkeypatch.setattr(forget, "AT_ONCE", 6)
    monkeypatch.setattr(forget, "SEQUENCES", 2)
    monkeypatch.setattr(forget, "FACTORED", 2)
    b, d, k = 5, 4, 3
    decay = torch.where(torch.rand(b, n) < 0.02, 0.0, 0.9 + 0.1 * torch.rand(b, n)).double()
    state = torch.randn(b, 6, d, dtype=D)
    tokens = Tokens(
        torch.randn(b, n, d),
        torch.randn(b, n, d) * (0.1 + torch.rand(b, n, 1)),
        torch.randn(b, n, k),
        torch.rand(b, n),
        torch.rand(b, n) + 0.2,
        None,
        state.mT @ state,
        torch.randn(b, d, k, dtype=D),
        decay,
    )
    wide = tokens.each(Tensor.double)
    assert wide.weight is not None
    assert wide.value is not None
    want = loop(*wide[:3], wide.weight, wide.alpha, decay, wide[6:8])
    grad = torch.randn_like(want)
    with library.off():
        out, _ = forget.solve(tokens)
        got = forget.pull(grad.float(), tokens)
        exact = sequence._pull(grad, wide, False, sequence._plain)
    torch.testing.assert_close(out.double(), want, rtol=1e-5, atol=1e-5)
    for x, y in zip(got, exact, strict=True):
        if x is not None and y is not None:
            assert x.shape == y.shape
            assert float((x.double() - y).norm() / y.norm()) < 1e-5


def test_a_strong_gate_costs_its_block_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    slow, each = [], forget._each_token
    monkeypatch.setattr(forget, "_each_token", lambda own, dtype: slow.append(len(own.key)) or each(own, dtype))
    start = draw(400, 8, True, gates("rare", 400), 1.0)
    with library.off():
        called(start)
    assert sum(slow) == 2


@pytest.mark.parametrize("alpha", [1.0, 1e-2])
@pytest.mark.parametrize(("gamma", "most"), [(0.4, 40), (0.05, 16), (0.0, 8)])
def test_where_all_forget_soon_no_token_has_a_factor_of_all_features(
    gamma: float, most: int, alpha: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unused(*_: object) -> None:
        raise AssertionError("a factor of all features")

    widths, last = set(), forget._by_last_tokens
    monkeypatch.setattr(
        forget, "_by_last_tokens", lambda own, few, dtype: widths.add(few.roots.shape[2]) or last(own, few, dtype)
    )
    monkeypatch.setattr(forget, "_each_token", unused)
    monkeypatch.setattr(forget, "_chebyshev", unused)
    with library.off():
        compare(draw(170, 24, False, torch.tensor(gamma), alpha), 1e-6, 1e-5)
    assert 0 < max(widths) <= most


def test_no_conjugate_gradients_and_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spectrum is known: decays of .99 need no more than 8 products."""
    products, bmm = [], torch.Tensor.baddbmm_
    monkeypatch.setattr(torch.Tensor, "baddbmm_", lambda self, *x, **y: products.append(1) or bmm(self, *x, **y))
    start = draw(32, 8, True, torch.tensor(0.99), 1.0)
    with library.off(), torch.no_grad():
        called(start)
    assert len(products) <= 8


@pytest.mark.parametrize("n", [40, 300])
def test_nothing_leaks_over_a_reset(n: int, native: bool) -> None:
    """Huge tokens before it change those after it by rounding alone; so do other values."""
    t = n // 2 + 1
    start = draw(n, 8, False, torch.tensor(0.95), 0.5)
    start["decay"][:, t] = 0.0
    want = called({name: x if name == "alpha" else x[:, t:] for name, x in start.items()})
    huge = {name: x.clone() for name, x in start.items()}
    for name in ("query", "key", "value"):
        huge[name][:, t - 3 : t] *= 1e19
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AccuracyWarning)  # of the huge tokens themselves
        for case in (start, huge):
            own = {name: x.clone().requires_grad_() for name, x in case.items()}
            out = called(own)[:, t:]
            torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-5)
            grads = torch.autograd.grad(out.sum(), [own[name] for name in ("query", "key", "value")])
            assert all((x[:, :t] == 0).all() for x in grads)


def test_what_is_not_finite_before_a_reset_spoils_its_sequence(native: bool) -> None:
    """As without forgetting: NaN, never a plausible number."""
    start = draw(60, 4, False, gates("rare", 60), 1.0)
    start["key"][0, 3] = torch.nan
    out = called(start)
    assert out[0].isnan().all()
    assert out[1].isfinite().all()


@pytest.mark.parametrize("per", ["head", "token", "channel"])
def test_a_state_over_every_cut_is_the_whole(per: str, native: bool) -> None:
    n, d = 24, 6
    start = draw(n, d, False, gates("mixed", n), 0.3)
    start["alpha"] = torch.rand(*{"head": (2,), "token": (2, n), "channel": (2, d)}[per]) + 0.1
    whole = called(start, alpha_per=per)
    for cut in range(n + 1):
        fixed = {} if per == "token" else {"alpha": start["alpha"], "alpha_per": per}
        state, outs = CausalState.empty(d, 5, (2,), **fixed), []
        for a, b in pairwise((0, cut, n)):
            part = {name: start[name][:, a:b] for name in NAMES if name != "alpha"}
            alpha = start["alpha"][:, a:b] if per == "token" else None
            out, state = state.prefill(**part, alpha=alpha)
            outs.append(out)
        torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-5, atol=1e-5)


def test_every_alpha_goes_with_steps_packing_and_files(tmp_path: object, native: bool) -> None:
    n, d = 20, 4
    start = draw(n, d, False, gates("mixed", n), 0.3)
    for per in ("token", "channel"):
        start["alpha"] = torch.rand(2, n if per == "token" else d) + 0.1
        fixed = {} if per == "token" else {"alpha": start["alpha"], "alpha_per": per}
        whole, state, outs = called(start, alpha_per=per), CausalState.empty(d, 5, (2,), **fixed), []
        for t in range(n):
            part = {name: start[name][:, t] for name in NAMES if name != "alpha" or per == "token"}
            out, state = state.step(**part)
            state = CausalState.from_state_dict(state.state_dict()).detach()
            outs.append(out)
        torch.testing.assert_close(torch.stack(outs, 1), whole, rtol=1e-5, atol=1e-5)
        more = {name: start[name][:, :2].flip(0) for name in NAMES[:3]}
        alpha = start["alpha"][:, :2].flip(0) if per == "token" else None
        swapped, _ = state.reorder(torch.tensor([1, 0]), dim=-1).prefill(**more, alpha=alpha)
        alpha = None if alpha is None else alpha.flip(0)
        straight, _ = state.prefill(**{name: x.flip(0) for name, x in more.items()}, alpha=alpha)
        torch.testing.assert_close(swapped.flip(0), straight)
        packed = called(start, alpha_per=per, cu_seqlens=torch.tensor([0, 7, 7, 9, n]))
        for a, b in ((0, 7), (7, 9), (9, n)):
            part = {name: x if name == "alpha" and per == "channel" else x[:, a:b] for name, x in start.items()}
            torch.testing.assert_close(packed[:, a:b], called(part, alpha_per=per), rtol=1e-5, atol=1e-5)


def test_wrong_alphas_are_named() -> None:
    points = torch.randn(3, 2, 5, 4)
    for per, size, named in (("token", 4, "N = 5"), ("channel", 5, "d = 4")):
        with pytest.raises(ValueError, match=named):
            causal_intention(*points, alpha=torch.ones(2, size), alpha_per=per)
        with pytest.raises(ValueError, match="ridge"):
            causal_intention(*points, alpha=torch.ones(2, 5), alpha_per=per, covariance="convex")
    with pytest.raises(ValueError, match="every channel"):
        causal_intention(*points, alpha=torch.tensor([1.0, 1, 0, 1]), alpha_per="channel")
    with pytest.raises(ValueError, match="alpha_per"):
        causal_intention(*points, alpha_per="value")
    with pytest.raises(ValueError, match="alpha_per"):
        CausalState.empty(4, 4, alpha_per="token")
    with pytest.raises(ValueError, match="d = 4"):
        CausalState.empty(4, 4, alpha=torch.ones(3), alpha_per="channel")
    with pytest.raises(ValueError, match=r"decay must be in \[0, 1\]"):
        causal_intention(*points, decay=torch.full((2, 5), -0.1))
    with pytest.raises(ValueError, match="alpha must be finite"):
        causal_intention(*points, alpha=-torch.ones(2, 5), alpha_per="token")


def test_an_alpha_of_zero_at_one_token_is_its_minimum_norm_fit() -> None:
    start = draw(12, 3, False, gates("mixed", 12), 1.0)
    start["alpha"] = torch.ones(2, 12)
    start["alpha"][0, 5] = 0.0
    out, plain = called(start, alpha_per="token"), called({**start, "alpha": torch.ones(2, 12)}, alpha_per="token")
    torch.testing.assert_close(out[1], plain[1])
    torch.testing.assert_close(out[0, :5], plain[0, :5], rtol=1e-4, atol=1e-5)
    assert out.isfinite().all()


@pytest.mark.parametrize("per", ["token", "channel"])
def test_compiled_is_the_same(per: str) -> None:
    start = draw(70, 8, False, gates("rare", 70), 1.0)
    start["alpha"] = torch.rand(2, 70 if per == "token" else 8) + 0.1

    def call(*own: Tensor) -> Tensor:
        return called(dict(zip(NAMES, own, strict=True)), alpha_per=per)

    own = [x.clone().requires_grad_() for x in start.values()]
    plain, quick = call(*own), torch.compile(call, fullgraph=True)(*own)
    torch.testing.assert_close(plain, quick)
    pairs = zip(*(torch.autograd.grad(x.square().sum(), own) for x in (plain, quick)), strict=True)
    for one, two in pairs:
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-4)  # keys are divided in another order
