"""The compiled causal solve against the same in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from intention import causal_intention
from intention import functional as F
from intention.solve.causal import sequence, spans
from intention.solve.ladder import FLOAT64, PRIMAL
from intention.solve.native import causal as native
from intention.solve.native import library
from intention.solve.problem import Tokens

pytestmark = pytest.mark.skipif(library.library() is None, reason="there are no compiled kernels")

SIZES = [
    (2, 1, 3, 2),
    (2, 31, 5, 7),
    (1, 33, 16, 16),
    (3, 129, 17, 5),
    (2, 700, 12, 3),
    (2, 300, 64, 64),
    (1, 65, 33, 1),
]


def draw(b: int, n: int, d: int, k: int, dtype: torch.dtype, values: bool, everything: bool) -> Tokens:
    state = torch.randn(b, 4, d, dtype=torch.float64)
    return Tokens(
        torch.randn(b, n, d, dtype=dtype),
        torch.randn(b, n, d, dtype=dtype),
        torch.randn(b, n, k, dtype=dtype) if values else None,
        torch.rand(b, n, dtype=dtype) if everything else None,
        torch.rand(b, dtype=dtype) + 0.3,
        torch.rand(b, dtype=dtype) + 0.1 if everything else None,
        state.mT @ state if everything else None,
        torch.randn(b, d, k, dtype=torch.float64) if everything and values else None,
    )


def both(tokens: Tokens) -> tuple[list[Tensor], list[Tensor]]:
    """Answers and gradients of the kernels, and those of torch."""
    torch.manual_seed(1)
    grad = torch.randn_like(tokens.query if tokens.value is None else tokens.value)

    def found() -> list[Tensor]:
        pulled = spans.pull_causal(grad, tokens)
        return [sequence._in_chunks(tokens, False)[0], *(x for x in pulled if x is not None)]

    assert native.forward(tokens) is not None
    assert native.backward(grad, tokens) is not None
    with library.off():
        return_torch = found()
    return found(), return_torch


@pytest.mark.parametrize("everything", [True, False])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", SIZES)
def test_kernels_and_torch_agree(
    size: tuple[int, int, int, int], dtype: torch.dtype, values: bool, everything: bool
) -> None:
    for got, want in zip(*both(draw(*size, dtype, values, everything)), strict=True):
        error = float((got.double() - want.double()).norm() / want.double().norm())
        assert error < (1e-11 if dtype == torch.float64 else 1e-5)


@pytest.mark.parametrize("k", [0, 1, 5, 64])
@pytest.mark.parametrize("d", [1, 3, 17, 65, 200])
@pytest.mark.parametrize("n", [1, 15, 17, 31, 33, 127, 129])
def test_sizes_around_those_of_blocks(n: int, d: int, k: int) -> None:
    """Blocks of 16 tokens, registers of up to 16 numbers, chunks of 128; some tokens weigh nothing."""
    tokens = draw(2, n, d, k or 1, torch.float64, k > 0, n % 2 == 0 or d == 17)
    if tokens.weight is None:
        tokens = tokens._replace(weight=torch.rand(2, n, dtype=torch.float64))
    tokens.weight[:, ::3] = 0  # type: ignore[index]
    for got, want in zip(*both(tokens), strict=True):
        assert torch.allclose(got.double(), want.double(), rtol=1e-8, atol=1e-9 * float(want.abs().max()))


@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("at", [3, 20, 140])
def test_what_is_not_a_number_stays_so(at: int, where: str) -> None:
    """From its token on, or the report says that there is no factor; the blocks of tokens before it do not notice."""
    clean = draw(1, 200, 17, 5, torch.float32, True, False)
    broken = clean._replace(**{where: getattr(clean, where).clone()})
    getattr(broken, where)[0, at, 2] = torch.nan
    found, want = native.forward(broken), native.forward(clean)
    assert found is not None
    assert want is not None
    seen = found[0][0, at] if where == "query" else found[0][0, at:, 2]
    assert bool(seen.isnan().all()) or not bool(found[1].isfinite().all())
    before = min(at // 16 * 16, 128)  # what comes later may change the precision of a chunk
    assert torch.equal(found[0][0, :before], want[0][0, :before])


def test_odd_strides_and_places() -> None:
    """Every other row, columns apart, storage that starts anywhere: as the same numbers laid out plainly."""
    plain = draw(2, 70, 9, 5, torch.float32, True, True)

    def odd(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        room = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 3), torch.nan, dtype=x.dtype)
        room[..., 3::2] = x
        return room[..., 3::2]

    def shifted(x: Tensor | None) -> Tensor | None:
        if x is None:
            return None
        room = torch.empty(x.numel() + 1, dtype=x.dtype)
        room[1:] = x.flatten()
        return room[1:].view(x.shape)

    want = both(plain)[0]
    for change in (odd, shifted):
        for got, expected in zip(both(Tokens(*map(change, plain)))[0], want, strict=True):  # type: ignore[arg-type]
            assert torch.equal(got, expected)
    turned = [plain.query.mT.contiguous().mT, plain.key.transpose(0, 1).contiguous().transpose(0, 1)]
    for got, expected in zip(both(plain._replace(query=turned[0], key=turned[1]))[0], want, strict=True):
        assert torch.equal(got, expected)


def test_threads_do_not_show() -> None:
    tokens = draw(5, 600, 32, 32, torch.float32, True, False)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = both(tokens)[0]
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(both(tokens)[0], want, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", [(0, 5, 3, 2), (2, 0, 3, 2), (2, 5, 3, 0)])
def test_empty_tensors_are_left_to_torch(shape: tuple[int, int, int, int]) -> None:
    b, n, d, k = shape
    query, key, value = torch.randn(b, n, d), torch.randn(b, n, d), torch.randn(b, n, k)
    assert native.forward(Tokens(query, key, value, None, torch.ones(b), None, None, None)) is None
    assert causal_intention(query, key, value).shape == (b, n, k)


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    tokens = draw(1, 5, 3, 2, torch.float32, True, False)
    for other in (tokens.query.double(), tokens.query.to("meta"), torch.randn(1, 5, 3).neg_()._neg_view()):
        assert native.forward(tokens._replace(query=other)) is None
    assert native.backward(torch.empty(1, 5, 2, device="meta"), tokens) is None


# ------------------------------------------------------------------------------------------------------------- padding

PADDINGS = {  # of 331 tokens: which are left out
    "left": lambda t: t < 113,
    "right": lambda t: t >= 227,
    "middle": lambda t: (t >= 71) & (t < 205),
    "both": lambda t: (t < 67) | (t >= 300),
    "here and there": lambda t: t % 3 == 1,
    "all but one": lambda t: t != 131,
    "all": lambda t: t >= 0,
}


def padded(where: str, d: int, dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
    """Query, key and value with NaN where nothing is, and a mask (2, 1, 1, N); the second sequence is not padded."""
    own = [torch.randn(2, 1, 331, size, dtype=dtype) for size in (d, d, 5)]
    seen = torch.ones(2, 1, 1, 331, dtype=torch.bool)
    seen[0, 0, 0] = ~PADDINGS[where](torch.arange(331))
    for x in own[1:]:
        x[0, 0, ~seen[0, 0, 0]] = torch.nan
    return own, seen


def with_gradients(call: object, own: list[Tensor], *args: object, **kwargs: object) -> list[Tensor]:
    torch.manual_seed(2)
    moving = [x.clone().requires_grad_() for x in own]
    out = call(*moving, *args, **kwargs)  # type: ignore[operator]
    return [out.detach(), *torch.autograd.grad(out, moving, torch.randn_like(out, dtype=torch.float64).to(out.dtype))]


@pytest.mark.parametrize("where", PADDINGS)
@pytest.mark.parametrize(
    ("name", "d", "alpha"), [("intention", 17, 0.7), ("intention", 61, 0.1), ("sigma_intention", 17, 0.7)]
)
def test_padding_is_as_if_it_was_not_there(where: str, name: str, d: int, alpha: float) -> None:
    """Against one fit per query in float64, with the triangle written out; and the report is not that of a hard fit."""
    own, seen = padded(where, d, torch.float32)
    whole = seen & torch.ones(331, 331, dtype=torch.bool).tril()
    call = getattr(F, name)
    got = with_gradients(call, own, seen, is_causal=True, alpha=alpha)
    want = with_gradients(call, [x.double() for x in own], whole, alpha=alpha)
    for x, y in zip(got, want, strict=True):
        assert x.isfinite().all()
        assert float((x.double() - y).norm() / y.norm()) < 1e-5
    _, info = call(*own, seen, is_causal=True, alpha=alpha, return_info=True)
    _, plain = call(*(x.nan_to_num() for x in own), is_causal=True, alpha=alpha, return_info=True)
    assert bool((info.condition < 3 * plain.condition.max()).all())
    assert bool((info.error < 1e-5).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("values", [True, False])
@pytest.mark.parametrize("where", PADDINGS)
def test_padding_with_everything_else(where: str, values: bool, dtype: torch.dtype) -> None:
    """Weights of 0 beside gains, other weights and a state: as torch, in the gradient of a weight of 0 too."""
    tokens = draw(2, 331, 19, 3, dtype, values, True)
    tokens.weight[0, PADDINGS[where](torch.arange(331))] = 0  # type: ignore[index]
    for given in (tokens, tokens._replace(gram=None, cross=None)):
        for got, want in zip(*both(given), strict=True):
            error = float((got.double() - want.double()).norm() / want.double().norm())
            summed = want.dim() == 1  # the gradients of alpha and gain: sums of many terms of either sign
            assert error < (1e-11 if dtype == torch.float64 else 1e-4 if summed else 1e-5)


def test_padding_stays_in_chunks_and_in_float(monkeypatch: pytest.MonkeyPatch) -> None:
    """A third of padding at the left: not query by query, and what follows is fitted as if it came first."""
    monkeypatch.setattr(F, "per_query", None)
    monkeypatch.setattr(sequence, "_query_by_query", None)
    query, key, value = torch.randn(3, 1, 1024, 64).unbind()
    seen = torch.arange(1024) >= 352  # whole blocks: the same blocks are made without the padding
    got = F.intention(query, key, value, seen[None], is_causal=True)
    alone = F.intention(query[:, 352:], key[:, 352:], value[:, 352:], is_causal=True)
    assert torch.equal(got[:, 352:], alone)  # type: ignore[index]
    assert not got[:, :352].any()  # type: ignore[index]


def test_threads_do_not_show_with_padding() -> None:
    tokens = draw(5, 600, 32, 32, torch.float32, True, True)._replace(gram=None, cross=None)
    for i in range(5):
        tokens.weight[i, 100 * i : 100 * i + 170] = 0  # type: ignore[index]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = both(tokens)[0]
        torch.set_num_threads(3)
        assert all(torch.equal(a, b) for a, b in zip(both(tokens)[0], want, strict=True))
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("kind", ["iid", "low rank", "repeated", "unit"])
@pytest.mark.parametrize("d", [4, 31, 64, 67, 150])
def test_the_first_tokens_are_as_exact_as_the_later_ones(d: int, kind: str) -> None:
    """Float32 against float64: around as many tokens as features Sigma is at its worst."""
    query, key, value = torch.randn(2, 300, d), torch.randn(2, 300, d), torch.randn(2, 300, 3)
    if kind == "low rank":
        key = torch.randn(2, 300, 2) @ torch.randn(2, 2, d) + 1e-3 * key
    if kind == "repeated":
        key = key[:, torch.arange(300) % 5]
    if kind == "unit":
        key = torch.nn.functional.normalize(key, dim=-1)
    for alpha in (10.0, 1.0, 0.1, 1e-3):
        got = causal_intention(query, key, value, alpha=alpha)
        want = causal_intention(query.double(), key.double(), value.double(), alpha=float(torch.tensor(alpha)))
        size = want.norm(dim=-1).clamp_min(float(want.norm(dim=-1).mean()))
        assert float(((got.double() - want).norm(dim=-1) / size).max()) < 1e-5


@pytest.mark.parametrize("seed", [0, 1, 10])
def test_keys_that_come_back_cost_the_first_tokens_little(seed: int) -> None:
    """The hardest case above, in its worst draws: q E cancels, and in float one long sum rounds too much."""
    torch.manual_seed(seed)
    query, key, value = torch.randn(2, 300, 64), torch.randn(2, 300, 64), torch.randn(2, 300, 3)
    key = torch.randn(2, 300, 2) @ torch.randn(2, 2, 64) + 1e-3 * key
    got = causal_intention(query, key, value, alpha=10.0)
    want = causal_intention(query.double(), key.double(), value.double(), alpha=10.0)
    size = want.norm(dim=-1).clamp_min(float(want.norm(dim=-1).mean()))
    assert float(((got.double() - want).norm(dim=-1) / size).max()) < 8e-6


@pytest.mark.parametrize("at", [17, 40, 95])
def test_the_precision_of_the_first_tokens_is_their_own(at: int) -> None:
    """A large key makes the first chunk one for double; blocks before it stay what they are, bit for bit."""
    query, key, value = torch.randn(1, 300, 64), torch.randn(1, 300, 64), torch.randn(1, 300, 5)
    changed = key.clone()
    changed[0, at] *= 1e3
    before = at // 16 * 16
    outs = [causal_intention(query, x, value, alpha=1.0)[0, :before] for x in (key, changed)]
    assert torch.equal(*outs)


def test_the_report_of_the_first_tokens_tells_their_precision() -> None:
    tokens = draw(1, 96, 64, 5, torch.float32, True, False)
    for alpha, route in ((1.0, PRIMAL), (1e-3, FLOAT64)):
        found = native.forward(tokens._replace(alpha=torch.full((1,), alpha)))
        assert found is not None
        assert found[1][0, 0] == route
