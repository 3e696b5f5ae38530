"""Seeded float64 draws for the claims of the paper."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor


@pytest.fixture
def normal() -> Callable[..., Tensor]:
    """normal(*shape): standard normal, float64, the same in every run of a test."""
    gen = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=gen, dtype=torch.float64)
