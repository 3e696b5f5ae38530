"""Causal Intention in chunks: every token's answer is that of its own prefix, in value, gradient and precision."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

import intention
from intention import causal_intention
from intention import functional as F
from intention._call import softmax
from intention.solve.causal import by_roots, forget, gradients, sequence, spans
from intention.solve.causal.sequence import causal
from intention.solve.problem import Tokens

D = torch.float64
KINDS = ("iid", "low rank", "unit", "repeated")


def keys(kind: str, n: int, d: int, batch: int = 2) -> Tensor:
    x = torch.randn(batch, n, d)
    if kind == "low rank":
        return torch.randn(batch, n, 3) @ torch.randn(batch, 3, d) + 1e-3 * x
    if kind == "unit":
        return torch.nn.functional.normalize(x, dim=-1)
    return x[:, torch.arange(n) % 5] if kind == "repeated" else x


def prefix_solves(
    query: Tensor, key: Tensor, value: Tensor, alpha: float, at: list[int], gamma: Tensor | None = None
) -> Tensor:
    """The answers of the tokens `at`, each by a float64 solve of its own prefix."""
    alpha = float(torch.tensor(alpha, dtype=key.dtype))  # what the tokens' precision makes of it
    query, key, value = query.double(), key.double(), value.double()
    total = torch.zeros(key.shape[:2], dtype=D) if gamma is None else gamma.double().log().cumsum(1)
    eye = torch.eye(key.shape[-1], dtype=D)
    outs = []
    for t in at:
        k, v = key[:, : t + 1], value[:, : t + 1]
        w = (total[:, t : t + 1] - total[:, : t + 1]).exp().unsqueeze(-1)
        outs.append(query[:, t : t + 1] @ torch.linalg.solve(k.mT @ (w * k) + alpha * eye, k.mT @ (w * v)))
    return torch.cat(outs, 1)


def relative(got: Tensor, want: Tensor) -> float:
    """The largest error of a token's answer, relative to that answer or to the typical one."""
    size = torch.maximum(want.norm(dim=-1), want.norm(dim=-1).mean())
    return float(((got.double() - want).norm(dim=-1) / size).max())


@pytest.mark.parametrize("fading", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("alpha", "tolerance"), [(1.0, 1e-5), (0.1, 1e-5), (1e-3, 1e-4)])
def test_every_token_is_the_solve_of_its_prefix(kind: str, alpha: float, tolerance: float, fading: bool) -> None:
    """float32, 4096 tokens: 1e-5 for alpha >= 0.1, 1e-4 for alpha >= 1e-3."""
    n, d = 4096, 16
    query, key, value = torch.randn(2, n, d), keys(kind, n, d), torch.randn(2, n, 4)
    gamma = 0.97 + 0.03 * torch.rand(2, n) if fading else None
    at = [0, 1, 2, 7, d - 1, d, 63, 64, 65, 127, 128, 1000, 2047, 2048, 4000, n - 1]
    out = causal_intention(query, key, value, alpha=alpha, decay=gamma)
    assert relative(out[:, at], prefix_solves(query, key, value, alpha, at, gamma)) < tolerance


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alpha", [1.0, 0.1, 1e-3])
@pytest.mark.parametrize("fading", [False, True])
def test_float32_gradients_are_those_of_float64(kind: str, alpha: float, fading: bool) -> None:
    n, d = 300, 12
    tensors = [torch.randn(2, n, d), keys(kind, n, d), torch.randn(2, n, 3), torch.full((2,), alpha)]
    if fading:
        tensors.append(0.95 + 0.05 * torch.rand(2, n))
    grad = torch.randn(2, n, 3)

    def grads(dtype: torch.dtype) -> tuple[Tensor, ...]:
        own = [x.to(dtype).requires_grad_() for x in tensors]
        out = causal_intention(*own[:3], alpha=own[3], decay=own[4] if fading else None)
        return torch.autograd.grad(out, own, grad.to(dtype))

    for got, want in zip(grads(torch.float32), grads(D), strict=True):
        assert float((got.double() - want).norm() / want.norm()) < 1e-4


def token_by_token(tokens: Tokens) -> Tensor:
    """Every fit written out: its matrix and its right side from sums over the tokens it sees."""
    query, key, value, weight, alpha, gain, gram, cross, decay = tokens
    n, d = key.shape[1:]
    sums = key.new_zeros(len(key), d, d) if gram is None else gram
    told = None if value is None else key.new_zeros(len(key), d, value.shape[2]) if cross is None else cross
    outs = []
    for t in range(n):
        left = 1.0 if decay is None else decay[:, t].view(-1, 1, 1)
        counted = key[:, t, :, None] if weight is None else weight[:, t, None, None] * key[:, t, :, None]
        sums = left * sums + counted * key[:, t, None]
        sigma = sums if gain is None else gain.view(-1, 1, 1) * sums
        ridge = (alpha[:, t] if alpha.dim() > 1 else alpha).view(-1, 1, 1)
        out = query[:, t : t + 1] @ torch.linalg.inv(sigma + ridge * torch.eye(d, dtype=D))
        if value is not None:
            assert told is not None
            told = left * told + counted * value[:, t, None]
            out = out @ told
        outs.append(out)
    return torch.cat(outs, 1)


def everything(n: int = 11, d: int = 3, k: int = 2, gamma: float | None = None) -> list[Tensor | None]:
    """The nine tensors of a causal solve, float64, with a weight of 0 and a state."""
    before = torch.randn(2, 4, d, dtype=D)
    weight = torch.rand(2, n, dtype=D) + 0.1
    return [
        torch.randn(2, n, d, dtype=D),
        torch.randn(2, n, d, dtype=D),
        torch.randn(2, n, k, dtype=D),
        weight,
        torch.tensor([0.3, 1.0], dtype=D),
        torch.tensor([0.5, 0.8], dtype=D),
        before.mT @ before,
        torch.randn(2, d, k, dtype=D),
        None if gamma is None else gamma * (0.9 + 0.1 * torch.rand(2, n, dtype=D)),
    ]


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("batch", [1, 2])
def test_blocks_chunks_and_spans_do_not_show(batch: int, values: bool) -> None:
    """With weights, gains and a state, at lengths where something is cut, against one token after the other."""
    for n in (1, 31, 33, 129, 700):
        nine = [None if x is None else x[:batch] for x in everything(n)]
        if not values:
            nine[2] = nine[7] = None
        tokens = Tokens(*nine)  # type: ignore[arg-type]
        want = token_by_token(tokens)
        out = sequence._in_chunks(tokens, False)[0]
        torch.testing.assert_close(out, want, atol=1e-10, rtol=1e-9)
        own = Tokens(*(x if x is None else x.clone().requires_grad_() for x in tokens))  # type: ignore[arg-type]
        assert own.gram is not None
        answers = token_by_token(own._replace(gram=(own.gram + own.gram.mT) / 2))
        grad = torch.randn_like(answers)
        slopes = torch.autograd.grad(answers, [x for x in own if x is not None], grad)
        pulled = spans.pull_causal(grad, tokens)
        assert pulled.gram is not None
        pulled = pulled._replace(gram=(pulled.gram + pulled.gram.mT) / 2)  # that of a matrix which stays symmetric
        for got, expected in zip([x for x in pulled if x is not None], slopes, strict=True):
            torch.testing.assert_close(got, expected, atol=1e-8, rtol=1e-7)


@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 3, 0)])
def test_empty_tensors(shape: tuple[int, int, int, int]) -> None:
    b, n, d, k = shape
    own = [torch.randn(b, n, size, requires_grad=True) for size in (d, d, k)]
    out = causal_intention(*own, alpha=torch.ones(b, requires_grad=True))
    assert out.shape == (b, n, k)
    grads = torch.autograd.grad(out.sum(), own)
    assert all(grad.shape == x.shape for grad, x in zip(grads, own, strict=True))


def solved(there: list[int], *own: Tensor) -> Tensor:
    nine: list[Tensor | None] = [None] * 9
    for i, x in zip(there, own, strict=True):
        nine[i] = x
    if nine[6] is not None:
        nine[6] = (nine[6] + nine[6].mT) / 2  # a state is symmetric, and gradcheck's small steps are not
    return causal(Tokens(*nine))[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("gamma", [None, 0.9])
def test_every_transform_of_torch(covariance: str, gamma: float | None) -> None:
    """Of queries, keys, values, weights, alpha (from which a gain is made) and decays, against autograd by hand."""
    n, d, k = 5, 3, 2
    decays = [] if gamma is None else [torch.full((n,), gamma, dtype=D)]
    alpha = torch.tensor(0.3, dtype=D)
    own = (*torch.randn(2, n, d, dtype=D), torch.randn(n, k, dtype=D), alpha, torch.rand(n, dtype=D), *decays)
    every = tuple(range(len(own)))

    def call(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, *decay: Tensor) -> Tensor:
        out = causal_intention(q, k, v, alpha=a, covariance=covariance, weight=w, decay=decay[0] if decay else None)
        return out.sin()

    def by_hand(q: Tensor, k: Tensor, v: Tensor, a: Tensor, w: Tensor, *decay: Tensor) -> Tensor:
        gain = (1 - a)[None] if covariance == "convex" else None
        fades = decay[0][None] if decay else None
        return token_by_token(Tokens(q[None], k[None], v[None], w[None], a[None], gain, None, None, fades))[0].sin()

    def close(got: object, want: object) -> None:
        pairs = zip(*(tree_leaves(x) for x in (got, want)), strict=True)
        for one, two in pairs:
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)

    f = torch.func
    first = f.jacrev(by_hand, every)(*own)
    close(f.jacrev(call, every)(*own), first)
    close(f.jacfwd(call, every)(*own), first)
    tangents = tuple(torch.randn_like(x) for x in own)
    close(f.jvp(call, own, tangents), f.jvp(by_hand, own, tangents))
    second = f.jacrev(f.grad(lambda *x: by_hand(*x).sum(), every), every)(*own)
    close(f.hessian(lambda *x: call(*x).sum(), every)(*own), second)
    close(f.jacrev(f.grad(lambda *x: call(*x).sum(), every), every)(*own), second)
    thrice = (f.grad(f.grad(f.grad(lambda *x, g=g: g(*x).sum(), 3), 3), 3)(*own) for g in (call, by_hand))
    close(*thrice)
    twice = [torch.stack([x, 0.9 * x]) for x in own]
    close(f.vmap(call)(*twice), torch.stack([by_hand(*own), by_hand(*(0.9 * x for x in own))]))
    close(*(f.vmap(f.grad(lambda *x, g=g: g(*x).sum(), every))(*twice) for g in (call, by_hand)))
    leaves = [x.clone().requires_grad_() for x in own]
    grads = torch.randn(7, n, k, dtype=D)
    close(*(torch.autograd.grad(g(*leaves), leaves, grads, is_grads_batched=True) for g in (call, by_hand)))
    close(
        torch.autograd.grad(call(*leaves).sum(), leaves, create_graph=True),
        f.grad(lambda *x: by_hand(*x).sum(), every)(*own),
    )
    close(torch.autograd.functional.hessian(lambda *x: call(*x).sum(), own, vectorize=True), second)


@pytest.mark.parametrize("alpha", [0.0, 1e-9])
def test_transforms_of_what_chunks_do_not_serve(alpha: float) -> None:
    query, key, value = torch.randn(3, 2, 5, 3, dtype=D)

    def call(k: Tensor) -> Tensor:
        return causal_intention(query, k, value, alpha=alpha)

    want = torch.autograd.functional.jacobian(call, key)
    torch.testing.assert_close(torch.func.jacrev(call)(key), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.jacfwd(call)(key), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.func.vmap(call, 0)(torch.stack([key, key]))[1], call(key))


@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("gamma", [None, 0.97, 0.01])  # chunks; blocks that forget; factors of each token
def test_derivatives(gamma: float | None, values: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of queries, keys, values, weights, alpha, gain, state and decays: first, second, and forward mode."""
    for module, name in ((spans, "FIRST"), (by_roots, "LENGTH"), (gradients, "LENGTH")):
        monkeypatch.setattr(module, name, 3)  # several chunks
    monkeypatch.setattr(forget, "BLOCKS", (3,))
    nine = everything(5, gamma=gamma)
    if not values:
        nine[2] = nine[7] = None
    there = [i for i, x in enumerate(nine) if x is not None]
    own = [nine[i].clone().requires_grad_() for i in there]  # type: ignore[union-attr]

    def call(*own: Tensor) -> Tensor:
        return solved(there, *own)

    assert torch.autograd.gradcheck(call, own)
    assert torch.autograd.gradgradcheck(call, [x[:1].detach().requires_grad_() for x in own])
    assert torch.autograd.gradcheck(call, own, check_forward_ad=True, check_backward_ad=False)
    twice = [torch.stack([x, x]) for x in own]
    torch.testing.assert_close(torch.func.vmap(call)(*twice)[1], call(*own))


def test_a_weight_of_zero_has_a_gradient() -> None:
    nine = everything()
    nine[3][:, 5] = 0  # type: ignore[index]
    there = [i for i, x in enumerate(nine) if x is not None]
    own = [nine[i].clone().requires_grad_() for i in there]  # type: ignore[union-attr]
    (got,) = torch.autograd.grad(solved(there, *own).square().sum(), own[3])
    assert torch.isfinite(got).all()
    assert (got[:, 5] != 0).all()
    step = torch.zeros_like(own[3])
    step[:, 5] = 1e-6
    moved = [x.detach() for x in own]
    moved[3] = moved[3] + step
    slope = (solved(there, *moved).square().sum() - solved(there, *[x.detach() for x in own]).square().sum()) / 1e-6
    torch.testing.assert_close(got[:, 5].sum(), slope, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_the_future_does_not_leak(call: str, dtype: torch.dtype) -> None:
    """What comes after token t changes no bit of its answer, nor of its gradients."""
    n, t = 200, 130
    start = [torch.randn(2, n, 8, dtype=dtype) for _ in range(3)]
    other = [torch.cat([x[:, : t + 1], torch.randn(2, n - t - 1, 8, dtype=dtype)], 1) for x in start]
    found = []
    for tensors in (start, other):
        own = [x.clone().requires_grad_() for x in tensors]
        out = getattr(F, call)(*own, is_causal=True, alpha=0.5)[:, : t + 1]
        found.append([out, *torch.autograd.grad(out.square().sum(), own)])
    for one, two in zip(*found, strict=True):
        assert torch.equal(one[:, : t + 1], two[:, : t + 1])
    assert all((slope[:, t + 1 :] == 0).all() for slope in found[0][1:])


@pytest.mark.parametrize("masked", [False, True])
def test_only_the_first_tokens_of_sigma_intention_need_float64(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is unseen of their queries is q / alpha, whose rounding the scores feel; the rest is left in float32."""
    wide, counted = [], softmax.counted_softmax

    def watched(query: Tensor, *args: object) -> Tensor:
        if query.dtype == D:
            wide.append(query.shape[-2])
        return counted(query, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(softmax, "counted_softmax", watched)
    start = [torch.randn(2, 256, 64) for _ in range(3)]
    mask = torch.arange(256)[None] % 7 != 3 if masked else None
    found = []
    for dtype in (torch.float32, D):
        own = [x.to(dtype).requires_grad_() for x in start]
        out, info = F.sigma_intention(*own, mask, is_causal=True, alpha=1.0, return_info=True)
        found.append([out, *torch.autograd.grad(out.square().sum(), own)])
        if dtype == torch.float32:
            assert wide == [96]
            assert bool((info.error < 1e-5).all())
            assert bool((info.route == F.ROUTES.index("float64")).all())
    for got, want in zip(*found, strict=True):
        error = (got.double() - want).norm(dim=-1) / want.norm(dim=-1).mean()
        assert float(error.max().detach()) < 5e-6


def test_a_small_alpha_learns_without_factors_of_single_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its gradient may cancel in the first tokens alone; where keys stay in a plane, in all of them."""
    torch.manual_seed(4)
    *start, told = (torch.randn(1, 8192, 16) for _ in range(4))
    plane = torch.randn(1, 8192, 2) @ torch.randn(1, 2, 16)
    found, slow = [], sequence._pull
    for always in (False, True):
        own = [*(x.clone().requires_grad_() for x in start), torch.full((1,), 1e-4, requires_grad=True)]
        if always:
            monkeypatch.setattr(sequence, "_pull", slow)
            monkeypatch.setattr(sequence, "_lost", lambda _, tokens: torch.ones_like(tokens.alpha, dtype=torch.bool))
        else:
            monkeypatch.setattr(sequence, "_pull", None)
        out = causal_intention(*own[:3], alpha=own[3])
        found.append(torch.autograd.grad(out, own, told))
    for got, want in zip(*found, strict=True):
        assert float((got - want).norm() / want.norm()) < 1e-5
    monkeypatch.undo()
    alpha = torch.full((1,), 1e-6)
    tokens = Tokens(start[0], plane, start[2], None, alpha, None, None, None)
    assert bool(sequence._lost((start[0], None, None, None, torch.ones(1), None, None, None, None), tokens).all())


def test_a_huge_token_does_not_spoil_those_before_it() -> None:
    query, key, value = torch.randn(3, 1, 64, 8, dtype=D)
    key[:, 40] *= 1e5
    at = list(range(40))
    out = causal_intention(query, key, value, alpha=0.1)
    torch.testing.assert_close(out[:, :40], prefix_solves(query, key, value, 0.1, at), rtol=1e-9, atol=1e-9)


def test_beyond_float64_queries_are_solved_one_by_one() -> None:
    """alpha = 0 is the minimum-norm fit of every prefix; other sequences of the batch stay in chunks."""
    query, key, value = torch.randn(3, 2, 40, 12)
    alphas = torch.tensor([0.0, 1.0])
    out = causal_intention(query, key, value, alpha=alphas)
    for t in (0, 5, 11, 30, 39):
        want = F.intention(query[:, t : t + 1], key[:, : t + 1], value[:, : t + 1], alpha=alphas)
        torch.testing.assert_close(out[:, t : t + 1], want, rtol=1e-3, atol=1e-4)
    own = [x.double().requires_grad_() for x in (query, key, value)]
    a = torch.autograd.grad(causal_intention(*own, alpha=alphas.double()).square().sum(), own)
    b = torch.autograd.grad(F.intention(*own, is_causal=True, alpha=alphas.double(), solver="pinv").square().sum(), own)
    for got, want in zip(a, b, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))


def test_what_cannot_be_reached_is_said() -> None:
    query, key, value = torch.randn(3, 1, 40, 12)
    with pytest.warns(intention.AccuracyWarning, match="larger alpha"):
        causal_intention(query, key, value, alpha=1e-14)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_keys_that_are_not_finite_spoil_their_sequence(bad: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """As elsewhere: NaN, never a plausible number, and not by the slow way."""
    monkeypatch.setattr(sequence, "each_query", None)
    query, key, value = torch.randn(3, 2, 100, 4)
    key[0, 70] = bad
    out = causal_intention(query, key, value, alpha=1.0)
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1:], causal_intention(query[1:], key[1:], value[1:], alpha=1.0))


def test_wrong_values_are_named() -> None:
    query, key, value = torch.randn(3, 2, 10, 4)
    with pytest.raises(ValueError, match="alpha"):
        causal_intention(query, key, value, alpha=torch.tensor([1.0, -0.5]))
    with pytest.raises(ValueError, match="weight"):
        causal_intention(query, key, value, weight=torch.full((2, 10), -1.0))
    with pytest.raises(ValueError, match="decay must be in"):
        causal_intention(query, key, value, decay=torch.full((2, 10), 1.5))
    with pytest.raises(ValueError, match="decay must be"):
        causal_intention(query, key, value, decay=torch.ones(2, 9))
    with pytest.raises(ValueError, match="a query, a key and a value"):
        causal_intention(query[:, :9], key, value)
    with pytest.raises(ValueError, match="cu_seqlens"):
        causal_intention(query, key, value, cu_seqlens=torch.tensor([0, 5]))
    with pytest.raises(ValueError, match="covariance"):
        causal_intention(query, key, value, covariance="within")


def test_state_and_hard_sequences_do_not_mix() -> None:
    state = intention.CausalState.empty(4, 2, (1,), alpha=0.0)
    with pytest.raises(ValueError, match="larger alpha"):
        state.prefill(torch.randn(1, 3, 4), torch.randn(1, 3, 4), torch.randn(1, 3, 2))


def test_compiled_is_the_same() -> None:
    query, key, value = torch.randn(3, 2, 100, 8)
    gamma = torch.full((2, 100), 0.95)

    def both(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return causal_intention(q, k, v, alpha=0.5), causal_intention(q, k, v, alpha=0.5, decay=gamma)

    own = [x.clone().requires_grad_() for x in (query, key, value)]
    plain, quick = both(*own), torch.compile(both, fullgraph=True)(*own)
    for a, b in zip(plain, quick, strict=True):
        torch.testing.assert_close(a, b)
    one = torch.autograd.grad(sum(x.square().sum() for x in plain), own)  # type: ignore[arg-type]
    two = torch.autograd.grad(sum(x.square().sum() for x in quick), own)  # type: ignore[arg-type]
    for a, b in zip(one, two, strict=True):
        torch.testing.assert_close(a, b)


def test_no_tensor_grows_with_the_square_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor of forward and backward has a few numbers per token and feature."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else [out]:
                if isinstance(x, Tensor):
                    largest = max(largest, x.numel())
            return out

    n, d = 4096, 16
    own = [torch.randn(1, n, d, requires_grad=True) for _ in range(3)]
    with Watch():
        causal_intention(*own, alpha=1.0).sum().backward()
    assert largest <= n * 64  # a chunk's 64 x 64 scores; N x d x d would be 4 times, N x N 64 times as many
    assert own[1].grad is not None


def test_low_rank_keys_do_not_go_query_by_query(monkeypatch: pytest.MonkeyPatch) -> None:
    """A condition that sums in float64 do not serve: right, in time that grows with the tokens alone."""
    monkeypatch.setattr(sequence, "each_query", None)
    n, d, rank = 1009, 7, 2
    basis, _ = torch.linalg.qr(torch.randn(d, rank, dtype=D))
    inner, query, value = (torch.randn(1, n, size, dtype=D) for size in (rank, d, 3))
    own = [x.requires_grad_() for x in (query, inner, value, torch.tensor(1e-6, dtype=D))]
    out = causal_intention(query, inner @ basis.mT, value, alpha=own[3])
    want = causal_intention(query @ basis, inner, value, alpha=own[3])
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    grad = torch.randn_like(out)
    for got, expected in zip(*(torch.autograd.grad(x, own[:3], grad) for x in (out, want)), strict=True):
        assert float((got - expected).norm() / expected.norm()) < 1e-5


def test_only_chunks_with_new_directions_go_token_by_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Low-rank keys: the first; and those at which a direction comes that none before had."""
    slow, read = [], by_roots._read_tokens
    monkeypatch.setattr(by_roots, "_read_tokens", lambda *args: slow.append(args[2].shape[:-2].numel()) or read(*args))
    n, d = 2003, 17
    inner, query, value = torch.randn(1, n, 3), torch.randn(1, n, d), torch.randn(1, n, 2)
    inner[:, :1201, 2] = 0.0
    key = 10 * inner @ torch.linalg.qr(torch.randn(d, 3)).Q.mT
    at = [0, 1, 37, 1200, 1201, 1202, n - 1]
    out = causal_intention(query, key, value, alpha=1e-6)
    want = torch.cat(
        [F.intention(*(x[:, : t + 1].double() for x in (query, key, value)), alpha=1e-6)[:, t:] for t in at], 1
    )
    assert sum(slow) == 2
    torch.testing.assert_close(out[:, at].double(), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("gamma", [None, 0.95])
@pytest.mark.parametrize(("alpha", "tolerance"), [(1e-4, 1e-6), (1e-6, 1e-6), (1e-8, 1e-5)])
def test_gradients_beside_a_small_alpha(alpha: float, tolerance: float, gamma: float | None) -> None:
    """Of everything, with fewer tokens than features, against fits of each query by its float mask."""
    n, d = 19, 61
    fade = torch.full((n,), gamma or 1.0, dtype=D)
    own = [torch.randn(n, d, dtype=D), torch.randn(n, d, dtype=D), torch.randn(n, 3, dtype=D)]
    own = [x.requires_grad_() for x in (*own, torch.tensor(alpha, dtype=D), torch.rand(n, dtype=D) + 0.1, fade)]
    query, key, value, a, weight, fade = own
    out = causal_intention(query, key, value, alpha=a, weight=weight, decay=None if gamma is None else fade)
    total = fade.log().cumsum(0)
    gap = (total.unsqueeze(-1) - total).masked_fill(torch.ones(n, n).triu(1).bool(), -torch.inf)
    want = F.intention(query, key, value, gap, alpha=a, weight=weight)
    torch.testing.assert_close(out, want, rtol=1e-6, atol=1e-6)
    wanted, grad = own if gamma else own[:5], torch.randn_like(out)
    for got, expected in zip(*(torch.autograd.grad(x, wanted, grad) for x in (out, want)), strict=True):
        assert float((got - expected).norm() / expected.norm()) < tolerance


@pytest.mark.parametrize("size", [0.6, 23.0])  # in chunks, and token by token
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_the_gradient_of_alpha_with_a_state(size: float, covariance: str) -> None:
    """Fewer tokens than features: what of W_t g_t is not along the keys would meet 1 / alpha."""
    n, d, first = 11, 29, 5
    query, key, value = torch.randn(n, d), size * torch.randn(n, d), torch.randn(n, 3)
    alpha, grad = torch.tensor(1e-6, requires_grad=True), torch.randn(n, 3)
    state = intention.CausalState.empty(d, 3, alpha=alpha, covariance=covariance)
    one, state = state.prefill(query[:first], key[:first], value[:first])
    two, state = state.prefill(query[first:], key[first:], value[first:])
    (got,) = torch.autograd.grad(torch.cat([one, two]), alpha, grad)
    a = alpha.detach().double().requires_grad_()
    q, k, v = query.double(), key.double(), value.double()
    gram, share, want = k @ k.mT, 1 - a if covariance == "convex" else 1.0, 0.0
    for t in range(1, n + 1):
        inner = share * gram[:t, :t] + a * torch.eye(t, dtype=D)
        want = want + (q[t - 1] @ k[:t].mT @ torch.linalg.solve(inner, v[:t]) * grad[t - 1].double()).sum()
    torch.testing.assert_close(got.double(), torch.autograd.grad(want, a)[0], rtol=1e-4, atol=0.0)


def test_transforms_of_a_state() -> None:
    """Pieces with a state between them, under torch.func, against the whole."""
    n, d, k = 5, 3, 2
    own = (*torch.randn(2, n, d, dtype=D), torch.randn(n, k, dtype=D), torch.tensor(0.3, dtype=D))
    own = (*own, torch.rand(n, dtype=D), 0.6 + 0.3 * torch.rand(n, dtype=D))
    every = tuple(range(6))

    def whole(q: Tensor, key: Tensor, v: Tensor, a: Tensor, w: Tensor, g: Tensor) -> Tensor:
        return causal_intention(q, key, v, alpha=a, covariance="convex", weight=w, decay=g).sin()

    def pieces(q: Tensor, key: Tensor, v: Tensor, a: Tensor, w: Tensor, g: Tensor) -> Tensor:
        state = intention.CausalState.empty(d, k, alpha=a, covariance="convex")
        one, state = state.prefill(q[:2], key[:2], v[:2], weight=w[:2], decay=g[:2])
        two, state = state.prefill(q[2:], key[2:], v[2:], weight=w[2:], decay=g[2:])
        return torch.cat([one, two]).sin()

    f = torch.func
    first = f.jacrev(whole, every)(*own)
    torch.testing.assert_close(f.jacrev(pieces, every)(*own), first)
    torch.testing.assert_close(f.jacfwd(pieces, every)(*own), first)
    torch.testing.assert_close(*(f.hessian(lambda *x, g=g: g(*x).sum(), every)(*own) for g in (pieces, whole)))
    twice = [torch.stack([x, 0.9 * x]) for x in own]
    both = (f.vmap(f.grad(lambda *x, g=g: g(*x).sum(), every))(*twice) for g in (pieces, whole))
    torch.testing.assert_close(*both)


def test_transforms_of_a_language_model() -> None:
    """Gradients per sequence, and products with the Hessian."""
    model = intention.nn.InformerLM(11, 8, 2, 1).double()
    own = {name: x.detach() for name, x in model.named_parameters()}
    tokens = torch.randint(0, 11, (3, 7))
    f = torch.func

    def loss(own: dict[str, Tensor], tokens: Tensor) -> Tensor:
        logits, _ = f.functional_call(model, own, (tokens[None],))
        return torch.nn.functional.cross_entropy(logits[0, :-1], tokens[1:])

    each = f.vmap(f.grad(loss), (None, 0))(own, tokens)
    leaves = {name: x.clone().requires_grad_() for name, x in own.items()}
    want = torch.autograd.grad(loss(leaves, tokens[1]), list(leaves.values()), create_graph=True)
    torch.testing.assert_close([x[1] for x in each.values()], [x.detach() for x in want])
    along = {name: torch.randn_like(x) for name, x in own.items()}
    moved = f.jvp(lambda x: f.grad(loss)(x, tokens[1]), (own,), (along,))[1]
    slope = sum((x * y).sum() for x, y in zip(want, along.values(), strict=True))
    torch.testing.assert_close(list(moved.values()), list(torch.autograd.grad(slope, list(leaves.values()))))
