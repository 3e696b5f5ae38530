"""Section 2: attention and linear attention as limits of the two Intentions; the convex covariance reaches them."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch.testing import assert_close

from intention import functional as F
from intention import naive

close = partial(assert_close, rtol=1e-10, atol=1e-10)  # a number rounded to float32 on its way would not pass

n, m, d, k = 7, 11, 3, 5


def draw(normal):
    return normal(m, d), normal(n, d), normal(n, k)


def error_rates(call, limit):
    """How many times smaller the distance to the limit gets per decade of alpha."""
    errors = torch.stack([(call(alpha) - limit).abs().max() for alpha in (1e3, 1e4, 1e5, 1e6)])
    return errors[:-1] / errors[1:]


def test_theorem_linatt(normal):
    """Claim: "converges to a Linear Attention module up to a rescaling of queries": by alpha, with error O(1/alpha)."""
    inputs = draw(normal)
    limit = F.linear_attention(*inputs)
    close(limit, naive.linear_attention(*inputs))
    rates = error_rates(lambda alpha: F.intention(*inputs, alpha=alpha, scale=alpha), limit)
    assert ((rates > 8) & (rates < 12)).all(), rates


def test_theorem_linatt_queries_rescaled(normal):
    """Claim: "f_int(K, V, alpha Q)". Queries times alpha and scale=alpha are the same thing."""
    query, key, value = draw(normal)
    alpha = 1e3
    ours = F.intention(query, key, value, alpha=alpha, scale=alpha)
    close(ours, F.intention(alpha * query, key, value, alpha=alpha))


def test_theorem_linatt_without_rescaling(normal):
    """The other side of the claim: without the rescaling the limit of Intention is 0."""
    inputs = draw(normal)
    rates = error_rates(lambda alpha: F.intention(*inputs, alpha=alpha), torch.zeros(m, k, dtype=torch.float64))
    assert ((rates > 8) & (rates < 12)).all(), rates


def test_theorem_sigmaint(normal):
    """Claim: "a sigma-Intention module converges to an Attention module up to a rescaling of queries": by alpha."""
    inputs = draw(normal)
    limit = F.attention(*inputs, scale=1.0)
    close(limit, naive.attention(*inputs))
    rates = error_rates(lambda alpha: F.sigma_intention(*inputs, alpha=alpha, scale=alpha), limit)
    assert ((rates > 8) & (rates < 12)).all(), rates


def test_theorem_sigmaint_without_rescaling(normal):
    """The other side of the claim: without the rescaling the limit of sigma-Intention is the plain mean of V."""
    query, key, value = draw(normal)
    mean = value.mean(0).expand(m, k)
    rates = error_rates(lambda alpha: F.sigma_intention(query, key, value, alpha=alpha), mean)
    assert ((rates > 8) & (rates < 12)).all(), rates


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_equation_sigma_intention(alpha, normal):
    """Claim: "f_sigma-int(K, V, Q) = sigma(Q [K'K + alpha I]^-1 K') V"."""
    query, key, value = draw(normal)
    scores = query @ torch.linalg.inv(key.mT @ key + alpha * torch.eye(d, dtype=torch.float64)) @ key.mT
    close(F.sigma_intention(query, key, value, alpha=alpha), scores.softmax(1) @ value)


def test_convex_covariance_ends_in_attention(normal):
    """(1 - lambda) K'K + lambda I at lambda = 1: attention and linear attention, with no limit and no rescaling."""
    inputs = draw(normal)
    ours = F.sigma_intention(*inputs, covariance="convex", alpha=1, scale=d**-0.5)
    close(ours, F.attention(*inputs))
    ours = F.intention(*inputs, covariance="convex", alpha=1)
    close(ours, F.linear_attention(*inputs))


@pytest.mark.parametrize("lam", [0.1, 0.5, 0.9])
def test_convex_covariance_is_ridge_rescaled(lam, normal):
    """[(1 - lambda) K'K + lambda I]^-1 = [K'K + lambda / (1 - lambda) I]^-1 / (1 - lambda)"""
    query, key, value = draw(normal)
    ours = F.intention(query, key, value, covariance="convex", alpha=lam)
    close(ours, F.intention(query, key, value, alpha=lam / (1 - lam), scale=1 / (1 - lam)))
    close(ours, naive.intention(query, key, value, naive.convex(key, lam)))


@pytest.mark.parametrize("lam", [0.1, 0.5, 1.0])
def test_equation_informer_blocks(lam, normal):
    """Claim: "E_Q E_K'[(1 - alpha) E_K E_K' + alpha I]^-1 E_V", also with a softmax: the dual of the convex form."""
    query, key, value = draw(normal)
    printed = query @ key.mT @ torch.linalg.inv((1 - lam) * key @ key.mT + lam * torch.eye(n, dtype=torch.float64))
    close(F.intention(query, key, value, covariance="convex", alpha=lam), printed @ value)
    close(F.sigma_intention(query, key, value, covariance="convex", alpha=lam), printed.softmax(1) @ value)
