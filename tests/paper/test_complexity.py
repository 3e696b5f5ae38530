"""Section 3's theorem: Intention costs O(N^2 d), as attention does. Operations are counted, not timed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from intention import functional as F
from intention import naive
from intention.solve.native import library

aten = torch.ops.aten


def product(a: Tensor, b: Tensor) -> float:
    return 2 * a.numel() * b.shape[-1]  # 2 b m n k


FLOPS = {
    aten.mm: product,
    aten.bmm: product,
    aten.baddbmm: lambda _, a, b: product(a, b),
    aten.linalg_cholesky_ex: lambda a: a.numel() * a.shape[-1] / 3,  # n^3 / 3
    aten.cholesky_inverse: lambda a: a.numel() * a.shape[-1] * 2 / 3,  # 2 n^3 / 3
    aten.cholesky_solve: lambda b, _: 2 * b.numel() * b.shape[-2],  # 2 n^2 k
    aten._cholesky_solve_helper: lambda b, *_: 2 * b.numel() * b.shape[-2],
    aten.linalg_vector_norm: lambda a, *_: 2 * a.numel(),
    aten.sqrt: lambda a: a.numel(),
}
COSTLY = ("mm", "mv", "dot", "linalg", "cholesky", "solve", "attention", "svd", "qr")


class Cost(TorchDispatchMode):
    """Counts floating-point operations of matrix products and factors, and remembers the largest tensor made."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.largest = 0.0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket
        if name in FLOPS:
            self.flops += FLOPS[name](*args)
        else:  # what cannot be counted must not pass for free
            assert func.namespace == "aten", func
            assert not any(word in str(name) for word in COSTLY), func
        for x in tree_leaves(out):
            if isinstance(x, Tensor):  # storage, not shape: an expanded view holds nothing
                self.largest = max(self.largest, x.untyped_storage().nbytes() // x.element_size())
        return out


def cost(call, n: int, d: int) -> Cost:
    """Of self-attention or self-Intention: M = N and k = d. In torch: what compiled kernels do cannot be counted."""
    gen = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, n, d, generator=gen, dtype=torch.float64) for _ in range(3)]
    with Cost() as counted, torch.no_grad(), library.off():
        call(*inputs)
    assert counted.flops >= 2 * n * d * min(n, d)  # at least the smaller Gram matrix was seen
    return counted


def exponent(sizes, costs) -> float:
    """b of cost ~ size^b"""
    return float(np.polyfit(np.log(sizes), np.log(costs), 1)[0])


SIZES = (128, 256, 512, 1024)
FIXED = 16


@pytest.mark.parametrize(("axis", "theirs"), [("n", 2.0), ("d", 1.0)])
def test_theorem_complexity_exponents(axis, theirs):
    """Claim: "exactly the same as that of Attention and equals to O(N^2 d)". We read: at most that.

    Attention written out grows as N^2 and as d. Intention grows as N, since its d x d matrix does not grow, and as d.
    """

    def growth(call) -> float:
        costs = [cost(call, **{"n": FIXED, "d": FIXED, axis: size}).flops for size in SIZES]
        return exponent(SIZES, costs)

    assert growth(naive.attention) == pytest.approx(theirs, abs=1e-6)
    assert growth(F.intention) == pytest.approx(1.0, abs=0.05)
    assert growth(F.intention) <= theirs + 0.05


def test_theorem_complexity_constant():
    """The same claim at every shape: O(N^2 d) means at most a constant times attention's operations. 3 is enough."""
    ratios = {
        (n, d): cost(F.intention, n, d).flops / cost(naive.attention, n, d).flops
        for n in (8, 32, 128, 512)
        for d in (8, 32, 128, 512)
    }
    assert max(ratios.values()) < 3, ratios


def test_theorem_complexity_memory():
    """Claim: "Attention's quadratic memory complexity". Intention makes no M x N tensor: it is linear in N."""

    def growth(call) -> float:
        return exponent(SIZES, [cost(call, size, FIXED).largest for size in SIZES])

    assert growth(naive.attention) == pytest.approx(2.0, abs=1e-6)
    assert growth(F.intention) == pytest.approx(1.0, abs=0.05)
