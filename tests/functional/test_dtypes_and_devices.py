"""Precision, autocast, threads, and that no tensor is ever made on the wrong device."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import reference
from intention import functional as F
from intention.nn import MultiheadIntention
from intention.nn.multihead import Heads
from intention.sequences.state import sigma_stream
from intention.solve import ladder
from intention.solve.native import library
from intention.solve.problem import Plan, Problem
from intention.solve.ridge import by_route, ridge
from intention.solve.ridge.gradients import Needs
from intention.solve.transform import transform

CALLS = ["attention", "linear_attention", "intention", "sigma_intention"]
SOLVED = ["intention", "sigma_intention"]
TALL, WIDE = (40, 11, 6, 5), (6, 11, 40, 5)  # n, m, d, k


def draw(shape=TALL, lead=(2, 3), dtype=torch.float32, **kwargs):
    n, m, d, k = shape
    return [torch.randn(*lead, *s, dtype=dtype, **kwargs) for s in ((m, d), (n, d), (n, k))]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("causal", [False, True])
def test_output_has_the_dtype_of_the_input(call, dtype, shape, causal):
    q, k, v = draw(shape, dtype=dtype, requires_grad=True)
    out = getattr(F, call)(q, k, v, is_causal=causal)
    assert out.dtype == dtype
    out.float().sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == dtype
    assert torch.isfinite(k.grad).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_half_inputs_are_solved_in_float32(dtype, shape):
    """Only the inputs and the output are rounded."""
    q, k, v = draw(shape, dtype=dtype)
    want = reference.intention(q.double(), k.double(), v.double())
    assert torch.equal(F.intention(q, k, v), F.intention(q.float(), k.float(), v.float()).to(dtype))
    assert (F.intention(q, k, v).double() - want).norm() < torch.finfo(dtype).eps * want.norm()


def test_mixed_precisions_are_promoted():
    q, k, v = draw()
    assert F.intention(q.bfloat16(), k, v.half()).dtype == torch.float32
    assert F.intention(q.bfloat16(), k.half(), v.half()).dtype == torch.float32
    assert F.intention(q, k.double(), v).dtype == torch.float64


@pytest.mark.parametrize("call", SOLVED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_autocast_never_touches_the_gram(call, dtype, shape):
    """In half precision K'K is wrong by a factor; forward and backward switch autocast off for themselves."""
    q, k, v = draw(shape, requires_grad=True)
    f = getattr(F, call)
    want = f(q, k, v)
    expected = torch.autograd.grad(want.sum(), [q, k, v])
    with torch.autocast("cpu", dtype=dtype):
        got = f(q, k, v)
        inside = torch.autograd.grad(got.float().sum(), [q, k, v], retain_graph=True)
    outside = torch.autograd.grad(got.float().sum(), [q, k, v])
    if call == "intention":
        assert torch.equal(got, want)
        for a, b, c in zip(inside, outside, expected, strict=True):
            assert torch.equal(a, c)
            assert torch.equal(b, c)
    else:  # the softmax itself is torch's and obeys autocast
        torch.testing.assert_close(got.float(), want, rtol=0.05, atol=0.05)


def test_training_under_autocast_stays_finite():
    net = torch.nn.Linear(6, 6)
    q, k, v = draw()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(5):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.intention(net(q), net(k), v, alpha=0.1).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        assert torch.isfinite(loss)
        assert all(torch.isfinite(p.grad).all() for p in net.parameters())


@pytest.mark.parametrize("call", CALLS)
def test_threads_do_not_matter(call):
    q, k, v = draw((64, 50, 16, 32), lead=(4, 4))
    outs = []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            outs.append(getattr(F, call)(q, k, v))
    finally:
        torch.set_num_threads(1)
    torch.testing.assert_close(*outs)


class NoMeta(TorchDispatchMode):
    """Fails as soon as an operation makes a tensor on the meta device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                assert x.device.type != "meta", f"{func} made a tensor on the default device"
        return out


def everything(call, shape):
    """Every option once: (positional, keyword) arguments."""
    n, m = shape[:2]
    q, k, v = draw(shape)
    yield (q, k, v), {}
    yield (q, k, v, torch.rand(2, 1, 1, n) > 0.3), {}
    yield (q, k, v, torch.randn(m, n)), {}
    yield (q, k, v), {"is_causal": True}
    yield (q, k, v, torch.rand(1, n) > 0.3), {"is_causal": True}
    yield (q, k[:, :1], v[:, :1]), {"enable_gqa": True}
    yield (q, k[..., :0, :], v[..., :0, :]), {}
    yield (q, k, v), {"dropout_p": 0.2}
    if call in SOLVED:
        alpha, weight = torch.rand(3), torch.rand(2, 1, n)
        for solver in ("auto", "primal", "dual", "qr", "pinv", "float64"):
            yield (q, k, v), {"solver": solver, "return_info": True}
            yield (q, k, v), {"solver": solver, "alpha": alpha, "weight": weight, "intercept": True}
        yield (q, k, v), {"covariance": "convex", "alpha": 0.3, "intercept": True}
        yield (q, k * torch.logspace(0, -6, shape[2]), v), {"alpha": 1e-8}
        yield (q, k, v), {"is_causal": True, "intercept": True, "return_info": True}


@pytest.mark.filterwarnings("ignore::intention.AccuracyWarning")
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [(9, 5, 4, 3), (4, 5, 9, 3), (9, 5, 4, 30)])
def test_no_tensor_is_made_on_the_default_device(call, shape):
    """The real code on CPU with "meta" as the default device: a factory call without device= would show."""
    for args, kwargs in everything(call, shape):
        leaves = [x.detach().requires_grad_() for x in args[:3]]
        with torch.device("meta"), NoMeta():
            out = getattr(F, call)(*leaves, *args[3:], **kwargs)
            out = out[0] if isinstance(out, tuple) else out
            grads = torch.autograd.grad(out.sum(), leaves, create_graph=call == "intention")
            if call == "intention":
                torch.autograd.grad(grads[1].square().sum(), leaves, allow_unused=True)
        assert out.device.type == "cpu"


def test_the_device_test_can_fail():
    with torch.device("meta"), NoMeta(), pytest.raises(AssertionError, match="default device"):
        torch.zeros(2)


NAMED = ["primal", "dual", "qr", "pinv", "float64"]
SIZES = [(9, 5, 4, 3), (4, 5, 9, 3), (9, 5, 4, 30)]


@pytest.mark.parametrize("call", SOLVED)
@pytest.mark.parametrize("solver", NAMED)
@pytest.mark.parametrize("shape", SIZES)
def test_named_solvers_stay_on_the_device_and_never_read_the_host(call, solver, shape):
    """Fake CUDA tensors: a read of the host or a tensor on another device raises."""
    n, m, d, k = shape
    with FakeTensorMode():
        q, key, v = (torch.empty(2, 3, *s, device="cuda") for s in ((m, d), (n, d), (n, k)))
        alpha, weight = torch.empty(3, device="cuda"), torch.empty(2, 1, n, device="cuda")
        for extra in ({}, {"alpha": alpha, "weight": weight, "intercept": True}, {"covariance": "convex"}):
            out, info = getattr(F, call)(q, key, v, solver=solver, return_info=True, **extra)
            assert out.device.type == info.error.device.type == "cuda"
            assert out.shape == (2, 3, m, k)
        for mask, causal in ((None, True), (torch.empty(m, n, device="cuda"), False)):
            assert getattr(F, call)(q, key, v, mask, is_causal=causal, solver=solver).device.type == "cuda"


@pytest.mark.parametrize("solver", NAMED)
@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("intercept", [False, True])
def test_named_backwards_stay_on_the_device(solver, shape, intercept):
    """Called directly: without a GPU torch's autograd engine crashes on fake CUDA tensors."""
    n, m, d, k = shape
    with FakeTensorMode():
        q, key, v = (torch.empty(6, *s, device="cuda") for s in ((m, d), (n, d), (n, k)))
        problem = Problem(q, key, v, torch.empty(6, n, device="cuda"), torch.empty(6, device="cuda"), None)
        plan = Plan(dual=solver == "dual" or (solver != "primal" and n < d), intercept=intercept, scale=0.5)
        (out, coef, matrix, packed), plain = by_route.solve_batch(problem, plan, solver)
        known = by_route.Known(problem, plan, coef, matrix, packed, plain)
        grads = by_route.backward_batch(out, known, solver, Needs(gain=False))
        for x, g in zip(problem[:5], grads[:5], strict=True):
            assert g.device.type == "cuda"
            assert g.shape == x.shape
        inner = "cholesky" if solver in ("primal", "dual") else solver
        (moved, matrix, packed), plain = transform.transform_rows(*problem.points(), None, None, inner, False, False)
        factor = transform.Factored(matrix, packed, plain)
        pulled = transform._pulled(moved, problem, moved, factor, inner, False)
        for x, g in zip(problem.points()[:4], pulled[:4], strict=True):
            assert g.device.type == "cuda"
            assert g.shape == x.shape


@pytest.mark.parametrize("call", ["attention", "linear_attention"])
def test_the_attentions_stay_on_the_device(call):
    with FakeTensorMode():
        q, k, v = (torch.empty(2, 3, n, 4, device="cuda") for n in (5, 9, 9))
        for mask, causal in ((None, False), (None, True), (torch.empty(5, 9, device="cuda"), False)):
            out = getattr(F, call)(q, k, v, mask, is_causal=causal)
            assert out.device.type == "cuda"


def test_a_device_without_float64_falls_back_to_qr(monkeypatch):
    """MPS has no float64; its branch is taken here by switching float64 off on the CPU."""
    for module in (by_route, ladder, ridge, transform):
        monkeypatch.setattr(module, "has_float64", lambda device: False)
    q, k, v = torch.randn(5, 4), torch.randn(9, 4) * torch.logspace(0, -2, 4), torch.randn(9, 2)
    k.requires_grad_()
    with library.off():  # no kernel ever sees a tensor of such a device
        out, info = F.intention(q, k, v, alpha=1e-6, return_info=True)
    assert F.ROUTES[info.route] == "qr"
    exact = k.detach().double().requires_grad_()
    want = reference.intention(q.double(), exact, v.double(), alpha=1e-6)
    assert (out.double() - want).norm() < 1e-3 * want.norm()
    with library.off():
        got = torch.autograd.grad(out.sum(), k)[0]
    assert (got.double() - torch.autograd.grad(want.sum(), exact)[0]).norm() < 1e-2 * got.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"is_causal": True},
        {"mask": True},
        {"weight": True},
        {"intercept": True},
        {"intercept": True, "is_causal": True},
        {"covariance": "within"},
        {"covariance": "within", "is_causal": True},
        {"covariance": lambda key, value, weight: key.mT @ key + torch.eye(13, dtype=key.dtype)},
    ],
)
@pytest.mark.parametrize("shape", [(29, 29, 13, 3), (11, 11, 13, 3)])
@pytest.mark.parametrize("grad", [False, True])
def test_scores_are_never_in_half_precision(dtype, options, shape, grad):
    """Half inputs and autocast: what is wrong is the rounding of the output."""
    q, k, v = draw(shape, lead=(3,), dtype=dtype)
    n, options = shape[0], dict(options)
    if options.get("covariance") == "within":
        v = torch.eye(3, dtype=dtype)[torch.arange(n) % 3].expand(3, n, 3)
    if options.pop("mask", None):
        options["attn_mask"] = torch.rand(n, n) < 0.6
    if options.pop("weight", None):
        options["weight"] = (torch.rand(n) * (torch.arange(n) % 3 > 0)).requires_grad_(grad)
    want = F.sigma_intention(q.double(), k.double(), v.double(), alpha=0.01, **options)
    q, k = q.requires_grad_(grad), k.requires_grad_(grad)
    out = F.sigma_intention(q, k, v, alpha=0.01, **options)
    torch.testing.assert_close(out, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    with torch.autocast("cpu", dtype):
        out = F.sigma_intention(query=q.float(), key=k.float(), value=v.float(), alpha=0.01, **options)
    assert out.dtype == torch.float32
    assert (out - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("causal", [False, True])
def test_linear_attention_is_not_in_half_precision_under_autocast(causal):
    q, k, v = draw((29, 29, 13, 3))
    want = F.linear_attention(q, k, v, is_causal=causal)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(F.linear_attention(q, k, v, is_causal=causal), want)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rows", [1, 17])
def test_masks_of_another_precision(call, dtype, rows):
    """torch's own attention reads a float32 mask beside float64 queries as something else."""
    q, k, v = draw((17, 17, 8, 8), (3, 1), dtype)  # as many values as features: the fused kernel of torch
    mask = torch.randn(rows, 17)
    want = getattr(F, call)(q, k, v, mask.to(dtype), scale=0.5)
    for other in (torch.float32, torch.float64):
        torch.testing.assert_close(getattr(F, call)(q, k, v, mask.to(other), scale=0.5), want)
    want = getattr(reference, call)(q.double(), k.double(), v.double(), mask=mask.double(), scale=0.5)
    torch.testing.assert_close(getattr(F, call)(q, k, v, mask, scale=0.5).double(), want, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_sigma_stream_in_half_precision(dtype):
    q, k, v = draw((31, 31, 13, 3), dtype=dtype)
    wide = [x.double() for x in (q, k, v)]
    want, _ = sigma_stream(*wide, torch.tensor(0.01), "ridge", None, None)
    first, memory = sigma_stream(*(x[..., :23, :] for x in (q, k, v)), torch.tensor(0.01), "ridge", None, None)
    last, _ = sigma_stream(*(x[..., 23:, :] for x in (q, k, v)), torch.tensor(0.01), "ridge", None, memory)
    out = torch.cat([first, last], -2)
    torch.testing.assert_close(out, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("scale", ["variance", "attention"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("streamed", [False, True])
def test_the_scale_of_a_layer_does_not_round_its_queries(scale, dtype, streamed):
    """What a layer of heads makes of half-precision projections is wrong by the rounding of its output."""
    layer = MultiheadIntention(52, 4, batch_first=True, softmax=True, alpha=0.01, scale=scale)
    x, heads = torch.zeros(2, 29, 52), [8 * h.to(dtype) for h in torch.randn(3, 2, 4, 29, 13)]
    if streamed:
        out, want = (layer.advance(x, h, None, 0)[0] for h in (heads, [h.double() for h in heads]))
    else:
        out, want = (layer.mix(Heads(*h, None, 0.0, False)) for h in (heads, [h.double() for h in heads]))
    assert out.dtype == dtype
    torch.testing.assert_close(out, want.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-5)
