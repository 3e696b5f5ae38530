"""The threads of the compiled kernels: calls at the same time, more threads than before, a process that forks."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from intention import functional as F
from intention.solve.native.library import library

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")

# torch's own threads do not exist in a child, so there the kernels use theirs
FORKED = """
import os, torch
from concurrent.futures import ThreadPoolExecutor
from intention import functional as F
torch.set_num_threads(2)
inputs = [torch.randn(64, 100, 32) for _ in range(3)]
want = F.intention(*inputs).tolist()
child = os.fork()
if child == 0:
    def right(number):
        torch.set_num_threads(2 + number % 3)
        return all(F.intention(*inputs).tolist() == want for _ in range(5))
    with ThreadPoolExecutor(4) as pool:
        good = right(0) and all(pool.map(right, range(8)))
    os._exit(0 if good else 1)
assert os.waitpid(child, 0)[1] == 0
assert F.intention(*inputs).tolist() == want
"""


# the library is not loaded yet, but torch has its threads
FORKED_EARLY = """
import os, torch
from intention import functional as F
torch.set_num_threads(2)
torch.randn(400, 400) @ torch.randn(400, 400)
torch.randn(10**6).exp()
inputs = [torch.randn(64, 100, 32) for _ in range(3)]
child = os.fork()
if child == 0:
    F.intention(*inputs)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def test_any_number_of_threads_gives_the_same(threads):
    inputs = [torch.randn(60, 50, 40) for _ in range(3)]
    threads(1)
    want = F.intention(*inputs)
    for number in (2, 5, 3, 61, 2, 1):
        threads(number)
        assert torch.equal(F.intention(*inputs), want), number


def test_calls_at_the_same_time(threads):
    threads(2)
    batches = [[torch.randn(40 + i, 60, 32) for _ in range(3)] for i in range(6)]
    want = [F.intention(*inputs) for inputs in batches]

    def repeat(i):
        return all(torch.equal(F.intention(*batches[i]), want[i]) for _ in range(50))

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(repeat, range(6)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
@pytest.mark.parametrize("program", [FORKED, FORKED_EARLY], ids=["after a call", "before the first"])
def test_a_forked_process_has_threads_of_its_own(program):
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
