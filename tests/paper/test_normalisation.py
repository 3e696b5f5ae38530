"""Appendix, "Normalisation": the variance of an entry of the Intention map for standard normal keys and queries."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from intention import functional as F

close = partial(assert_close, rtol=1e-10, atol=1e-10)  # a number rounded to float32 on its way would not pass

m, batch = 11, 4000


def intention_map(normal, n: int, d: int, **options) -> Tensor:
    """Values that are unit vectors show the map itself: (batch, M, N)."""
    values = torch.eye(n, dtype=torch.float64).expand(batch, n, n)
    return F.intention(normal(batch, m, d), normal(batch, n, d), values, **options)


@pytest.mark.parametrize(("n", "d"), [(5, 17), (7, 31), (1, 13)])
def test_normalisation_variance(n, d, normal):
    """Claim: "multiplying the whole computation by sqrt(d)". That is a limit: the variance is 1/(d - N - 1)."""
    z = intention_map(normal, n, d, alpha=0, solver="dual")
    assert z.square().mean().item() == pytest.approx(1 / (d - n - 1), rel=0.03)


def test_normalisation_variance_of_long_contexts(normal):
    """The claim's other side: for N > d + 1 the variance is d / (N (N - d - 1)), which sqrt(d) does not make 1."""
    n, d = 31, 7
    z = intention_map(normal, n, d, alpha=0, solver="primal")
    assert z.square().mean().item() == pytest.approx(d / (n * (n - d - 1)), rel=0.03)


def test_normalisation_factor_of_the_regulariser(normal):
    """Claim: "0.5 sqrt(d) QK'[sig(a) KK' + (1 - sig(a)) I]^-1". 0.5 is sig(0): the ridge map with alpha = 1."""
    n, d = 5, 17
    query, key, value = normal(m, d), normal(n, d), normal(n, 3)
    convex = F.intention(query, key, value, covariance="convex", alpha=0.5, scale=0.5 * d**0.5)
    close(convex, F.intention(query, key, value, alpha=1, scale=d**0.5))
