"""The gradients of the fused sigma-Intention against torch in float64: every shape, layout and order."""

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from intention.functional import sigma_intention
from intention.solve.native import library
from intention.solve.transform import fused as door
from solve.native.test_sigma import DTYPES, DUAL_SHAPES, HARD, SHAPES, distance, hard, make, written_out

pytestmark = pytest.mark.skipif(library.library() is None, reason="no compiled kernels")

TOLERANCE = {torch.float32: 3e-6, torch.float64: 2e-14}
SCALAR = {torch.float32: 1e-4, torch.float64: 1e-12}  # gradients of alpha are sums of terms of both signs


@pytest.fixture
def pulled(monkeypatch) -> list[bool]:
    """One entry per call of the backward kernel: whether it served."""
    calls: list[bool] = []
    original = door.native.backward

    def backward(*args):
        found = original(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(door.native, "backward", backward)
    return calls


def gradients(inputs: list[Tensor], upstream: Tensor, **options: object) -> list[Tensor]:
    """Of query, key, value and whatever else in `options` requires one."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = sigma_intention(*leaves, **options)  # type: ignore[arg-type]
    others = [x for x in options.values() if isinstance(x, Tensor) and x.requires_grad]
    return list(torch.autograd.grad(out, [*leaves, *others], upstream))  # type: ignore[arg-type]


def expected(inputs: list[Tensor], upstream: Tensor, **options: object) -> list[Tensor]:
    wide = {k: x.detach().double().requires_grad_() if isinstance(x, Tensor) else x for k, x in options.items()}
    with library.off():
        return gradients([x.double() for x in inputs], upstream.double(), **wide)


def same(found: list[Tensor], wanted: list[Tensor], dtype: torch.dtype) -> None:
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert a.shape == b.shape
        assert a.dtype == dtype
        assert distance(a, b) < (TOLERANCE if i < 3 else SCALAR)[dtype], i


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_are_those_of_torch(shape, dtype, pulled):
    inputs = make(*shape, dtype)
    upstream = torch.randn(3, shape[1], shape[3], dtype=dtype)
    found = gradients(inputs, upstream)
    assert pulled == [True]
    wanted = expected(inputs, upstream)
    if shape[0] == 1:  # one key: the share is 1 whatever the score
        found, wanted = found[2:], wanted[2:]
    for a, b in zip(found, wanted, strict=True):
        assert distance(a, b) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("shape", [(40, 9, 8, 5), (300, 70, 17, 64), (200, 130, 64, 1)])
def test_alpha_and_gain(shape, covariance, dtype, pulled):
    inputs = make(*shape, dtype)
    alpha = torch.tensor([0.4, 0.6, 0.8], dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, shape[1], shape[3], dtype=dtype)
    options = {"alpha": alpha, "covariance": covariance, "scale": 0.7}
    found = gradients(inputs, upstream, **options)
    assert pulled == [True]
    same(found, expected(inputs, upstream, **options), dtype)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (3,), (0, 1), (0, 2), (2, 3), (1, 3)])
def test_only_what_is_asked_for(wanted, pulled):
    q, k, v = make(150, 70, 12, 7)
    everything = [q, k, v, torch.tensor([0.4, 0.6, 0.8])]
    upstream = torch.randn(3, 70, 7)
    whole = gradients(everything[:3], upstream, alpha=everything[3].clone().requires_grad_())
    some = [x.detach().clone().requires_grad_(i in wanted) for i, x in enumerate(everything)]
    out = sigma_intention(*some[:3], alpha=some[3])
    found = torch.autograd.grad(out, [some[i] for i in wanted], upstream)
    assert pulled == [True, True]
    for i, g in zip(wanted, found, strict=True):
        torch.testing.assert_close(g, whole[i], rtol=1e-5, atol=1e-6)


def test_leading_dimensions(pulled):
    q, k, v = make(40, 20, 6, 5, lead=(2, 4))
    upstream = torch.randn(2, 4, 20, 5)
    for key, value, gqa in (
        (k[:1], v[:1], False),
        (k[:, :1], v, False),
        (k[0], v[0], False),
        (k[:, :2], v[:, :2], True),
    ):
        inputs = [q, key, value]
        found = gradients(inputs, upstream, enable_gqa=gqa)
        same(found, expected(inputs, upstream, enable_gqa=gqa), torch.float32)
    inputs = [q[0, 0], k[0, 0], v[0, 0]]
    same(gradients(inputs, upstream[0, 0]), expected(inputs, upstream[0, 0]), torch.float32)
    assert pulled == [True] * 5


@pytest.mark.parametrize("shape", [(40, 9, 8, 5), (300, 70, 17, 64), (200, 130, 64, 1)])
def test_layouts(shape, pulled):
    """Heads behind points, rows of a wider table, storage that starts anywhere, columns apart, one value for all."""
    inputs = make(*shape, lead=(2, 3))
    upstream = torch.randn(2, 3, shape[1], shape[3])
    whole = gradients(inputs, upstream)
    for change in (
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]],
        lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
        lambda x: x.mT.contiguous().mT,
    ):
        same(gradients([change(x) for x in inputs], change(upstream)), whole, torch.float32)
    ones = torch.ones(()).expand_as(upstream)
    same(gradients(inputs, ones), gradients(inputs, ones.clone()), torch.float32)
    assert pulled == [True] * 7


@pytest.mark.parametrize("batch", [1, 2, 3, 9])
@pytest.mark.parametrize("queries", [128, 129, 300])
def test_threads_change_nothing(batch, queries):
    """Where there are fewer elements than threads, their queries are split."""
    inputs = make(200, queries, 17, 5, lead=(batch,))
    upstream, alpha = torch.randn(batch, queries, 5), torch.full((batch,), 0.6, requires_grad=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = gradients(inputs, upstream, alpha=alpha)
        torch.set_num_threads(2)
        two = gradients(inputs, upstream, alpha=alpha)
    finally:
        torch.set_num_threads(before)
    same(two, one, torch.float32)


def test_every_order(pulled):
    """Derivatives of the gradients are taken in torch; its own fused attention has none."""
    inputs = [x.requires_grad_() for x in make(20, 9, 5, 3, torch.float64, lead=(2,))]
    alpha = torch.tensor([0.5, 0.8], dtype=torch.float64, requires_grad=True)

    def call(q, k, v, a):
        return sigma_intention(q, k, v, alpha=a)

    assert torch.autograd.gradcheck(call, (*inputs, alpha), fast_mode=True)
    assert any(pulled)
    assert torch.autograd.gradgradcheck(call, (*inputs, alpha), fast_mode=True)


def test_batched_gradients():
    inputs = [x.requires_grad_() for x in make(20, 9, 5, 3, torch.float64, lead=(2,))]
    out = sigma_intention(*inputs)
    many = torch.randn(4, *out.shape, dtype=torch.float64)
    together = torch.autograd.grad(out, inputs, many, is_grads_batched=True, retain_graph=True)
    for i in range(4):
        for a, b in zip(together, torch.autograd.grad(out, inputs, many[i], retain_graph=True), strict=True):
            torch.testing.assert_close(a[i], b)


def test_a_graph_can_be_used_twice_and_checkpointed(pulled):
    inputs = [x.requires_grad_() for x in make(100, 70, 12, 7)]
    out = sigma_intention(*inputs)
    first = torch.autograd.grad(out.square().sum(), inputs, retain_graph=True)
    again = torch.autograd.grad(out.square().sum(), inputs)
    saved = torch.autograd.grad(checkpoint(sigma_intention, *inputs, use_reentrant=False).square().sum(), inputs)
    assert pulled == [True] * 3
    for a, b, c in zip(first, again, saved, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)


def test_an_input_that_was_changed_is_noticed():
    q, k, v = (x.requires_grad_() for x in make(40, 20, 8, 5))
    shifted = k + 0
    out = sigma_intention(q, shifted, v)
    with torch.no_grad():
        shifted.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_hard_fits_are_done_in_double(pulled):
    q, k, v = make(60, 20, 12, 4, lead=(5,))
    k = k * torch.logspace(0, -2, 12)
    alpha = torch.tensor([1.0, 1.0, 1.0, 2e-3, 1.0], requires_grad=True)
    upstream = torch.randn(5, 20, 4)
    found, wanted = gradients([q, k, v], upstream, alpha=alpha), expected([q, k, v], upstream, alpha=alpha)
    assert pulled == [True]
    for a, b in zip(found, wanted, strict=True):
        assert distance(a, b) < 1e-4


def of_the_formula(inputs: list[Tensor], upstream: Tensor, alpha: Tensor, **options: object) -> list[Tensor]:
    leaves = [x.detach().double().requires_grad_() for x in (*inputs, alpha)]
    out = written_out(*leaves, **options)  # type: ignore[arg-type]
    return list(torch.autograd.grad(out, leaves, upstream.double()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("shape", DUAL_SHAPES)
def test_fewer_points_than_features(shape, covariance, dtype, pulled):
    inputs = make(*shape, dtype)
    alpha = torch.tensor([0.4, 0.6, 0.8], dtype=dtype, requires_grad=True)
    upstream = torch.randn(3, shape[1], shape[3], dtype=dtype)
    found = gradients(inputs, upstream, alpha=alpha, covariance=covariance, scale=0.7)
    assert pulled == [True]
    wanted = of_the_formula(inputs, upstream, alpha, covariance=covariance, scale=0.7)
    if shape[0] == 1:  # one key: the share is 1 whatever the score
        found, wanted = found[2:3], wanted[2:3]
    same(found, wanted, dtype)


@pytest.mark.parametrize("alpha", [1e-6, 1e-4, 1e-2, 0.1])
@pytest.mark.parametrize(("n", "d", "kind"), HARD)
def test_hard_conditions(n, d, kind, alpha, pulled):
    inputs = hard(n, d, kind)
    each = alpha * torch.tensor([1.0, 1.5, 2.0])
    upstream = torch.randn(3, 23, 5)
    found = gradients(inputs, upstream, alpha=each.requires_grad_())
    assert pulled == [True]
    for i, (a, b) in enumerate(zip(found, of_the_formula(inputs, upstream, each), strict=True)):
        assert distance(a, b) < 3e-5, i


@pytest.mark.parametrize("alpha", [1e-2, 1e-5, 1e-8])
def test_hard_conditions_of_float64(alpha, pulled):
    for n, d in ((19, 17), (13, 17)):
        inputs = [x.double() for x in hard(n, d, "lengths")]
        each, upstream = torch.full((3,), alpha, dtype=torch.float64), torch.randn(3, 23, 5, dtype=torch.float64)
        found = gradients(inputs, upstream, alpha=each.requires_grad_())
        for i, (a, b) in enumerate(zip(found, of_the_formula(inputs, upstream, each), strict=True)):
            assert distance(a, b) < 1e-6, i
    assert pulled == [True] * 2


@pytest.mark.parametrize("n", [200, 29])
def test_hard_parts_of_a_split_element(n, pulled):
    inputs = make(n, 300, 31, 5, lead=(1,))
    inputs[0][:, 150:] *= 1e2
    alpha, upstream = torch.tensor([0.6], requires_grad=True), torch.randn(1, 300, 5)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = gradients(inputs, upstream, alpha=alpha)
    finally:
        torch.set_num_threads(before)
    assert pulled == [True]
    same(found, of_the_formula(inputs, upstream, alpha), torch.float32)


@pytest.mark.parametrize("n", [19, 11])
def test_every_order_of_hard_fits(n):
    """In float32 with what double made: second derivatives must know that, too."""
    inputs = hard(n, 17, "full", lead=(2,))
    alpha = torch.tensor([1e-3, 2e-3])

    def second(call, *leaves: Tensor) -> list[Tensor]:
        leaves = tuple(x.detach().requires_grad_() for x in leaves)
        first = torch.autograd.grad(call(*leaves).square().sum(), leaves, create_graph=True)
        return list(
            torch.autograd.grad(sum((g * torch.linspace(-1, 1, g.numel()).view(g.shape)).sum() for g in first), leaves)
        )  # type: ignore[arg-type]

    found = second(lambda q, k, v, a: sigma_intention(q, k, v, alpha=a), *inputs, alpha)
    wanted = second(written_out, *(x.double() for x in (*inputs, alpha)))
    for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert distance(a, b) < 1e-5, i


@pytest.mark.parametrize("shape", [(5, 7, 11, 3), (20, 9, 5, 3)])
def test_transforms(shape):
    q, k, v = make(*shape, torch.float64, lead=(2,))
    upstream = torch.randn(2, shape[1], shape[3], dtype=torch.float64)
    alpha = torch.tensor([0.5, 0.8], dtype=torch.float64)
    wanted = of_the_formula([q, k, v], upstream, alpha)

    def loss(*args: Tensor) -> Tensor:
        return (sigma_intention(*args[:3], alpha=args[3]) * upstream).sum()

    for a, b in zip(torch.func.grad(loss, (0, 1, 2, 3))(q, k, v, alpha), wanted, strict=True):
        assert distance(a, b) < 1e-12
    assert torch.autograd.gradgradcheck(
        lambda *x: sigma_intention(*x[:3], alpha=x[3]),
        [x.detach().requires_grad_() for x in (q, k, v, alpha)],
        fast_mode=True,
    )


@pytest.mark.parametrize("where", ["query", "value", "upstream"])
def test_what_is_not_finite_stays_in_its_element(where):
    q, k, v = make(300, 70, 17, 20)
    upstream = torch.randn(3, 70, 20)
    {"query": q, "value": v, "upstream": upstream}[where][1, 2, 0] = torch.nan
    for g in gradients([q, k, v], upstream):
        assert torch.isfinite(g[[0, 2]]).all()
    assert not torch.isfinite(gradients([q, k, v], upstream)[1][1]).all()


@pytest.mark.parametrize("size", [0.0, 30.0, 1e3])
def test_shares_near_zero_and_one(size, pulled):
    inputs = make(300, 70, 16, 5, size=size)
    upstream = torch.randn(3, 70, 5)
    found, wanted = gradients(inputs, upstream), expected(inputs, upstream)
    assert pulled == [True]
    for a, b in zip(found, wanted, strict=True):
        assert (a - b).norm() < max(1e-5, 3e-7 * size) * b.norm() + 1e-6
