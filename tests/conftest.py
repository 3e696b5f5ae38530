import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
# the same examples for everybody; look for new ones with `pytest --hypothesis-profile default`
settings.register_profile("steady", derandomize=True)
settings.load_profile("steady")


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
