"""What tests of experiments share."""

from functools import partial

import pytest
import torch


@pytest.fixture
def normal():
    """Standard normal tensors in float64."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "mine.txt"
    path.write_text("All that is gold does not glitter, über alles. " * 23, encoding="utf-8")
    return str(path)
