"""Memory and import: what a call may hold at once, and what `import intention` may cost."""

import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from intention import functional as F


class Peak(TorchDispatchMode):
    """The largest tensor that any operation makes."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in torch.utils._pytree.tree_leaves(out):
            if isinstance(x, torch.Tensor):
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


def peak_bytes(function):
    """Most bytes alive at once during a call, from torch's own allocation events."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as prof:
        function()
    alive = peak = 0
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    for event in sorted(events, key=lambda e: e.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    assert peak > 0
    return peak


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("options", [{}, {"intercept": True}, {"weight": True}])
def test_memory_at_65536_points(grad, options):
    """No M x N tensor; peak extra below 3 x (inputs + output) in float32 for the plain call, forward and backward."""
    n, d = 65536, 64
    q, k, v = (torch.randn(n, d, requires_grad=grad) for _ in range(3))
    options = dict(options)
    if "weight" in options:
        options["weight"] = torch.rand(n)
    unit = 4 * n * d * 4

    def call():
        out = F.intention(q, k, v, **options)
        if grad:
            torch.autograd.grad(out, [q, k, v], torch.ones_like(out))

    with Peak() as made:
        call()
    assert made.largest <= n * d
    assert peak_bytes(call) < 3 * unit


def test_linear_attention_makes_no_square_matrix():
    q, k, v = (torch.randn(4096, 16) for _ in range(3))
    with Peak() as made:
        F.linear_attention(q, k, v)
    assert made.largest <= 4096 * 16


def test_import_needs_torch_alone_and_little_time():
    """Nothing beyond torch and its own imports, and no torch.compile machinery loaded for eager users."""
    code = (
        "import sys, torch; before = set(sys.modules); import intention; "
        "print(sorted({m.split('.')[0] for m in set(sys.modules) - before} - set(sys.stdlib_module_names)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert set(eval(found)) <= {"intention", "torch"}


@pytest.mark.parametrize("masked", [False, True])
def test_causal_linear_attention_makes_no_matrix_of_tokens(masked):
    """O(N) time and memory: no tensor is larger than the inputs, one chunk aside."""
    n, d = 16384, 16
    q, k, v = (torch.randn(1, n, d) for _ in range(3))
    mask = (torch.arange(n) % 3 > 0).expand(1, 1, n) if masked else None
    with Peak() as made:
        F.linear_attention(q, k, v, mask, is_causal=True)
    assert made.largest <= 64 * n
