"""The compiled solve that forgets, against a loop over tokens in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from intention.solve.ladder import FLOAT64, SEQUENCE_ERROR
from intention.solve.native import causal as native
from intention.solve.native.library import available
from intention.solve.problem import Tokens

D = torch.float64
pytestmark = pytest.mark.skipif(not available(), reason="there is no compiled library")


def loop(
    query: Tensor,
    key: Tensor,
    value: Tensor | None,
    weight: Tensor | None,
    alpha: Tensor,
    gain: Tensor | None,
    gram: Tensor | None,
    cross: Tensor | None,
    decay: Tensor,
) -> Tensor:
    batch, n, d = key.shape
    told = key if value is None else value
    gram = key.new_zeros(batch, d, d) if gram is None else gram
    cross = key.new_zeros(batch, d, told.shape[2]) if cross is None else cross
    outs = []
    for t in range(n):
        fade, k = decay[:, t, None, None], key[:, t, :, None]
        count = 1.0 if weight is None else weight[:, t, None, None]
        gram, cross = fade * gram + count * k @ k.mT, fade * cross + count * k @ told[:, t, None]
        ridge = (alpha if alpha.dim() == 1 else alpha[:, t]).view(-1, 1, 1) * torch.eye(d, dtype=key.dtype)
        sigma = (1.0 if gain is None else gain.view(-1, 1, 1)) * gram + ridge
        right = torch.eye(d, dtype=key.dtype) if value is None else cross
        outs.append(query[:, t, None] @ torch.linalg.solve(sigma, right))
    return torch.cat(outs, 1)


def draw(batch: int, n: int, d: int, k: int, *, state: bool = False, gain: bool = False) -> list[Any]:
    query, key, value = torch.randn(batch, n, d), torch.randn(batch, n, d), torch.randn(batch, n, k)
    weight, alpha, decay = torch.rand(batch, n), 0.5 + torch.rand(batch, n), torch.rand(batch, n).sqrt()
    decay[:, n // 3], decay[:, n // 2] = 0.0, 1.0
    points = torch.randn(batch, 2 * d, d, dtype=D)
    before = (points.mT @ points, torch.randn(batch, d, k, dtype=D)) if state else (None, None)
    return [query, key, value, weight, alpha, 0.2 + torch.rand(batch) if gain else None, *before, decay]


def wide(tensors: list[Any]) -> list[Any]:
    return [None if x is None else x.double() for x in tensors]


def forward(*tokens: Any) -> tuple[Tensor, Tensor]:
    found = native.forget_forward(Tokens(*tokens))
    assert found is not None
    return found


def backward(grad: Tensor, *tokens: Any, gates: bool = True) -> tuple[Any, ...]:
    found = native.forget_backward(grad, Tokens(*tokens), gates=gates)
    assert found is not None
    return found


SHAPES = [
    (3, 20, 4, 3),
    (1, 300, 8, 4),  # one sequence is cut into parts
    (5, 130, 16, 1),
    (33, 40, 7, 5),
    (2, 33, 64, 64),
    (1, 12, 1, 1),
    (2, 20, 100, 3),
    (1, 9, 128, 2),
]


@pytest.mark.parametrize("dtype", [torch.float32, D])
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_and_gradients_are_those_of_the_loop(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for state, gain in ((False, False), (True, False), (False, True), (True, True)):
        tensors = draw(*shape, state=state, gain=gain)
        leaves = [None if x is None else x.requires_grad_() for x in wide(tensors)]
        want, grad = loop(*leaves), torch.randn(*shape[:2], shape[3])
        slopes = iter(torch.autograd.grad((want * grad).sum(), [x for x in leaves if x is not None]))
        given = [x if x is None or i in (6, 7) else x.to(dtype) for i, x in enumerate(tensors)]
        out, packed = forward(*given)
        value, slope = (
            (2e-6, 2e-5) if dtype == torch.float32 else (1e-13, 1e-11)
        )  # alpha: eps times the condition squared
        assert (out - want).abs().max() < value * want.abs().max()
        assert (packed[:, 2] < 1e-4).all()
        found = backward(grad.to(dtype), *given)
        for i, (x, got) in enumerate(zip(leaves, found, strict=True)):
            if x is None:
                assert got is None
                continue
            right = next(slopes)
            right = (right + right.mT) / 2 if i == 6 else right
            assert (got.double() - right).abs().max() < slope * right.abs().max(), i


@pytest.mark.parametrize("alpha", [1.0, 1e-2, 1e-4])
@pytest.mark.parametrize("shape", [(3, 150, 64, 8), (1, 300, 32, 4), (9, 70, 60, 3)])
def test_where_few_tokens_are_left_answers_and_gradients_are_those_of_the_loop(
    shape: tuple[int, ...], alpha: float
) -> None:
    """A few keys beside a smaller alpha: float32 does not serve, and a factor of these keys does in the place of d."""
    for state in (False, True):
        tensors = draw(*shape, state=state, gain=state)
        tensors[3][:, ::7] = 0.0
        tensors[4] = tensors[4] * alpha
        tensors[8] = 0.15 * tensors[8] + 0.01
        tensors[8][:, shape[1] // 3] = 0.0
        leaves = [None if x is None else x.requires_grad_() for x in wide(tensors)]
        want, grad = loop(*leaves), torch.randn(*shape[:2], shape[3])
        there = [x for x in leaves if x is not None]
        slopes = iter(torch.autograd.grad((want * grad).sum(), there))
        out, packed = forward(*tensors)
        assert (out - want).abs().max() < 5e-7 * want.abs().max()
        assert (packed[:, 0] == FLOAT64).all()
        assert (packed[:, 2] < 1e-5).all()
        for i, (x, got) in enumerate(zip(leaves, backward(grad, *tensors), strict=True)):
            if x is None:
                continue
            right = next(slopes)
            right = (right + right.mT) / 2 if i == 6 else right
            assert (got.double() - right).abs().max() < 2e-5 * right.abs().max(), i


@pytest.mark.parametrize("shape", SHAPES[:5])
def test_without_values_answers_are_transformed_queries(shape: tuple[int, ...]) -> None:
    tensors = draw(*shape)
    tensors[2] = None
    out, _ = forward(*tensors)
    want = loop(*wide(tensors))
    assert (out - want).abs().max() < 1e-5 * want.abs().max()


@pytest.mark.parametrize("alpha", [0.5, 1e-6])  # in float32, and in double
@pytest.mark.parametrize("shape", [(3, 37, 5, 2), (2, 67, 31, 17), (17, 33, 64, 3), (1, 261, 13, 7)])
def test_rows_of_any_length_with_resets_and_tokens_that_weigh_nothing(shape: tuple[int, ...], alpha: float) -> None:
    """Resets at the ends of pieces and inside, tails of one token, a gain and a state."""
    tensors = draw(*shape, state=True, gain=True)
    weight, decay, n = tensors[3], tensors[8], shape[1]
    weight[:, ::3], decay[:, 31], decay[:, 32], decay[0, n - 1] = 0.0, 0.0, 0.0, 0.0
    tensors[4] = torch.full((shape[0],), alpha)
    leaves = [x.requires_grad_() for x in wide(tensors)]
    want, grad = loop(*leaves), torch.randn(*shape[:2], shape[3])
    slopes = torch.autograd.grad((want * grad).sum(), leaves)
    out, _ = forward(*tensors)
    assert (out - want).abs().max() < 1e-5 * want.abs().max()
    if alpha < 0.1:
        return  # slopes of such sequences are made elsewhere
    for i, (x, right) in enumerate(zip(backward(grad, *tensors), slopes, strict=True)):
        right = (right + right.mT) / 2 if i == 6 else right
        assert (x.double() - right).abs().max() < 1e-4 * right.abs().max(), i


@pytest.mark.parametrize("shape", SHAPES[:4])
def test_without_slopes_of_decays_the_others_are_the_same(shape: tuple[int, ...]) -> None:
    tensors, grad = draw(*shape, state=True, gain=True), torch.randn(*shape[:2], shape[3])
    *every, to_decay = backward(grad, *tensors)
    *rest, nothing = backward(grad, *tensors, gates=False)
    assert nothing is None
    assert to_decay.abs().max() > 0
    for x, y in zip(every, rest, strict=True):
        assert torch.equal(x, y)


def test_threads_and_parts_change_nothing_but_rounding() -> None:
    tensors, before = draw(6, 400, 16, 8), torch.get_num_threads()
    grad = torch.randn(6, 400, 8)
    found = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append((*forward(*tensors)[:1], *backward(grad, *tensors)))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        for x, y in zip(found[0], other, strict=True):
            if x is not None:
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5 * float(y.abs().max()))


@pytest.mark.parametrize("alpha", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("decay", [1.0, 0.99, 0.5, 0.05, 0.01])
@pytest.mark.parametrize("unit", [False, True])
def test_what_float32_does_not_serve_is_done_in_double(alpha: float, decay: float, unit: bool) -> None:
    tensors = draw(4, 70, 16, 5)
    query, key, value = tensors[:3]
    if unit:
        key = key / key.norm(dim=-1, keepdim=True)
    given = [query, key, value, None, torch.full((4,), alpha), None, None, None, torch.full((4, 70), decay)]
    want = loop(*wide(given))
    out, packed = forward(*given)
    assert (out - want).abs().max() < 1e-5 * want.abs().max()
    assert alpha > 1e-2 or (packed[:, 0] == FLOAT64).all()


def test_a_hard_sequence_leaves_its_neighbours_alone() -> None:
    """The others of its registers: as exact as without it, whatever it holds."""
    tensors = draw(8, 50, 6, 3)
    alone = forward(*tensors)[0]
    for spoil in (0.0, 1e-30):
        alpha = tensors[4].clone()
        alpha[2] = spoil
        out = forward(*tensors[:4], alpha, *tensors[5:])[0]
        rest = [i for i in range(8) if i != 2]
        torch.testing.assert_close(out[rest], alone[rest], rtol=1e-4, atol=1e-5)
    key = tensors[1].clone()
    key[2, 5] = torch.nan
    out = forward(tensors[0], key, *tensors[2:])[0]
    assert out[2, 5:].isnan().any()
    torch.testing.assert_close(out[rest], alone[rest], rtol=1e-4, atol=1e-5)


def test_an_error_that_float32_may_have_is_below_the_one_that_is_refused() -> None:
    """Else sequences that the kernels have served would be fitted once more, token by token."""
    assert native.EASY + torch.finfo(torch.float32).eps < SEQUENCE_ERROR
