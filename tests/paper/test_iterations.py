"""Section 2: linear attention is one gradient step on least squares, Intention is where the steps end."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch.testing import assert_close

from intention import functional as F

close = partial(assert_close, rtol=1e-10, atol=1e-10)  # a number rounded to float32 on its way would not pass

n, m, d, k = 7, 11, 3, 5


def gradient(key, value, w, alpha=0.0):
    """Of 1/2 |Kw - V|^2 + alpha/2 |w|^2, left to autograd so that it is not our formula again."""
    w = w.detach().requires_grad_()
    loss = 0.5 * (key @ w - value).square().sum() + 0.5 * alpha * w.square().sum()
    return torch.autograd.grad(loss, w)[0]


def test_claim_one_gradient_step_is_linear_attention(normal):
    """Claim: "Each layer of Attention becomes a single gradient update". From w = 0: eta times linear attention."""
    query, key, value, eta = normal(m, d), normal(n, d), normal(n, k), 0.37
    w = -eta * gradient(key, value, torch.zeros(d, k, dtype=torch.float64))
    close(query @ w, eta * F.linear_attention(query, key, value))


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_claim_intention_is_where_gradient_steps_end(alpha, normal):
    """Claim: "Intention layer as Attention behaviour in the limit, directly computing the minimum"."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    lipschitz = torch.linalg.matrix_norm(key, 2).square() + alpha
    w = torch.zeros(d, k, dtype=torch.float64)
    for _ in range(500):
        w = w - gradient(key, value, w, alpha) / lipschitz
    close(query @ w, F.intention(query, key, value, alpha=alpha))


def steps_needed(condition: float, step: float, start: float = 1000.0, goal: float = 0.1) -> int:
    """Steps until |w - w*|^2 <= goal, when K'K has eigenvalues 1 and `condition` and w* lies on the slow one."""
    key = torch.tensor([condition, 1.0], dtype=torch.float64).sqrt().diag()
    target = torch.tensor([[0.0], [start**0.5]], dtype=torch.float64)
    w, count = torch.zeros_like(target), 0
    while (w - target).square().sum() > goal:
        w, count = w - step * gradient(key, key @ target, w), count + 1
    return count


def test_claim_layers_to_reach_least_squares():
    """Claim: "roughly 6 x 4 = 24 stacked Transformer layers" for condition number 10, from a gap of d = 1000 to 0.1.

    24 belongs to the step 2/(L + mu), which shrinks the gap by ((c - 1)/(c + 1))^2 each time: 22.9 steps. The printed
    choice, "exactly one over the Lipschitz constant", shrinks it by (1 - 1/c)^2: 43.7 steps, so 44 layers.
    """
    condition, shrink = 10.0, math.log(1000 / 0.1)
    best = shrink / (2 * math.log((condition + 1) / (condition - 1)))
    printed = shrink / (2 * math.log(condition / (condition - 1)))
    assert round(best, 1) == 22.9
    assert round(printed, 1) == 43.7
    assert steps_needed(condition, 2 / (condition + 1)) == math.ceil(best) == 23
    assert steps_needed(condition, 1 / condition) == math.ceil(printed) == 44


def test_claim_one_layer_for_condition_near_one():
    """Claim: "to reduce it by 0.1 we would need just one step" at condition number 1.1. By 0.1 means times 0.1."""
    for step in (2 / 2.1, 1 / 1.1):
        assert steps_needed(1.1, step, start=1000.0, goal=100.0) == 1
    assert steps_needed(10.0, 1 / 10.0, start=1000.0, goal=100.0) > 1
