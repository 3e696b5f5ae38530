"""The compiled causal solve against the same in torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from intention import causal_intention
from intention.solve import causal_batch
from intention.solve.causal import Tokens
from intention.solve.native import causal as native
from intention.solve.native import library

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
        pulled = causal_batch.pull_causal(grad, tokens)
        return [causal_batch.solve_causal(tokens)[0], *(x for x in pulled if x is not None)]

    assert native.forward(*tokens) is not None
    assert native.backward(grad, *tokens) is not None
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
    found, want = native.forward(*broken), native.forward(*clean)
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
    assert native.forward(query, key, value, None, torch.ones(b), None, None, None) is None
    assert causal_intention(query, key, value).shape == (b, n, k)


def test_what_the_kernels_do_not_take_is_left_to_torch() -> None:
    tokens = draw(1, 5, 3, 2, torch.float32, True, False)
    for other in (tokens.query.double(), tokens.query.to("meta"), torch.randn(1, 5, 3).neg_()._neg_view()):
        assert native.forward(*tokens._replace(query=other)) is None
    assert native.backward(torch.empty(1, 5, 2, device="meta"), *tokens) is None
