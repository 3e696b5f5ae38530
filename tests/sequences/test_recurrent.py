"""Linear attention and the delta rule with gates: chunks are the loop over tokens, resets and gradients included."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from intention.sequences import recurrent
from intention.sequences.recurrent import delta_stream, linear_stream

D = torch.float64


def draw(n: int, groups: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = torch.randn(2, 3, groups, n, 5), torch.randn(2, 3, 1, n, 5), torch.randn(2, 3, 1, n, 4)
    return query.to(D), torch.nn.functional.normalize(key, dim=-1).to(D), value.to(D)


def gates(n: int, strongest: float) -> tuple[Tensor, Tensor]:
    return torch.rand(2, 3, 1, n, dtype=D), 1 - (1 - strongest) * torch.rand(2, 3, 1, n, dtype=D)


def loop(
    rule: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gamma: Tensor, sums: Tensor
) -> tuple[Tensor, Tensor]:
    outs = []
    for t in range(k.shape[-2]):
        sums = gamma[..., t, None, None] * sums
        target = v[..., t, None, :] - (k[..., t, None, :] @ sums if rule == "delta" else 0)
        sums = sums + beta[..., t, None, None] * k[..., t, :, None] * target
        outs.append((q[..., t, None, :] @ sums).squeeze(-2))
    return torch.stack(outs, -2), sums


def stream(rule: str, q: Tensor, k: Tensor, v: Tensor, beta: Tensor, gamma: Tensor | None, memory: Tensor | None):
    if rule == "delta":
        return delta_stream(q, k, v, beta, memory, gamma)
    return linear_stream(q, k, v, memory, beta, gamma)


@pytest.mark.parametrize("rule", ["delta", "linear"])
@pytest.mark.parametrize("strongest", [1.0, 0.9, 0.01])
@pytest.mark.parametrize("groups", [1, 2])
def test_chunks_are_the_loop(rule: str, strongest: float, groups: int) -> None:
    q, k, v = draw(150, groups)
    beta, gamma = gates(150, strongest)
    if strongest < 1:
        gamma[..., [0, 70, 71, 128]] = 0.0  # resets, at borders of chunks too
    first = torch.randn(2, 3, 1, 5, 4, dtype=D)
    leaves = [x.requires_grad_() for x in (q, k, v, beta, gamma, first)]
    want, last = loop(rule, *leaves)
    got, sums = stream(rule, q, k, v, beta, gamma if strongest < 1 else None, first)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(sums, last)
    slopes = [torch.randn_like(want), torch.randn_like(last)]
    for name, a, b in zip(
        ("q", "k", "v", "beta", "gamma", "state"),
        torch.autograd.grad([got, sums], leaves, slopes, allow_unused=True),
        torch.autograd.grad([want, last], leaves, slopes),
        strict=True,
    ):
        if name == "gamma":  # a decay of 0 is a border, and one that is not passed has no slope
            if strongest < 1:
                torch.testing.assert_close(a * (gamma != 0), b * (gamma != 0))
        else:
            torch.testing.assert_close(a, b, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("rule", ["delta", "linear"])
def test_any_cut_is_the_whole(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recurrent, "CHUNK", 4)
    q, k, v = draw(11)
    beta, gamma = gates(11, 0.2)
    whole, last = stream(rule, q, k, v, beta, gamma, None)
    for cut in range(12):
        left, right = ([x[..., s, :] for x in (q, k, v)] + [x[..., s] for x in (beta, gamma)] for s in cuts(cut))
        first, memory = stream(rule, *left, None)
        second, end = stream(rule, *right, memory)
        torch.testing.assert_close(torch.cat([first, second], -2), whole)
        torch.testing.assert_close(end, last)


def cuts(cut: int) -> tuple[slice, slice]:
    return slice(cut), slice(cut, None)


@pytest.mark.parametrize("rule", ["delta", "linear"])
def test_float32_with_strong_decays(rule: str) -> None:
    """Totals of logarithms are of hundreds here, and rounded to float32 they would move what is left of neighbours."""
    q, k, v = draw(256)
    beta, gamma = gates(256, 0.9)
    gamma[..., :30] = 1e-30
    want, last = loop(rule, *(x.float().to(D) for x in (q, k, v, beta, gamma)), torch.zeros(2, 3, 1, 5, 4, dtype=D))
    got, sums = stream(rule, *(x.float() for x in (q, k, v, beta, gamma)), None)
    torch.testing.assert_close(got.to(D), want, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.to(D), last, rtol=1e-5, atol=1e-6)
