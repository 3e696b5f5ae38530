"""Every way torch has of differentiating, batching and compiling a call: values compared, not only shapes."""

import copy
import shutil
import warnings

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import reference
from intention import causal_intention, naive
from intention import functional as F
from intention.solve.native import library
from intention.solve.ridge import by_route, ridge

TALL, WIDE, DEEP = (5, 3, 2, 3), (2, 3, 5, 3), (5, 2, 4, 19)  # n, m, d, k; the last uses the explicit inverse
SHAPES = [TALL, WIDE, DEEP]


@pytest.fixture
def differentiable_softmax():
    """torch's fused attention has no second derivative and no forward mode; its math backend has both."""
    with sdpa_kernel(SDPBackend.MATH):
        yield


CALLS = ["intention", "sigma_intention"]


def draw(shape, lead=(2,), grad=True, dtype=torch.float64):
    n, m, d, k = shape
    return [torch.randn(*lead, *s, dtype=dtype, requires_grad=grad) for s in ((m, d), (n, d), (n, k))]


def options(shape, covariance="ridge", grad=True):
    alpha = torch.tensor([0.4, 0.7], dtype=torch.float64, requires_grad=grad)
    weight = torch.rand(2, shape[0], dtype=torch.float64)
    weight[:, 0] = 0
    return alpha, weight.requires_grad_(grad), covariance


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("intercept", [False, True])
def test_gradcheck_and_gradgradcheck(differentiable_softmax, call, shape, covariance, intercept):
    q, k, v = draw((*shape[:3], 2))
    alpha, weight, _ = options(shape)
    # one-sided differences at a weight of 0 would leave the domain
    weight = (weight.detach() + 0.2).requires_grad_()

    def f(q, k, v, alpha, weight):
        return getattr(F, call)(q, k, v, alpha=alpha, weight=weight, covariance=covariance, intercept=intercept)

    assert torch.autograd.gradcheck(f, (q, k, v, alpha, weight))
    assert torch.autograd.gradgradcheck(f, (q, k, v, alpha, weight))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
def test_gradgradcheck_without_weights(differentiable_softmax, call, shape):
    q, k, v = draw((*shape[:3], 2))
    alpha = options(shape)[0]
    f = getattr(F, call)
    assert torch.autograd.gradgradcheck(lambda q, k, v, a: f(q, k, v, alpha=a), (q, k, v, alpha))


@pytest.mark.parametrize("solver", ["primal", "dual", "qr", "float64"])
def test_gradgradcheck_of_named_solvers(solver):
    q, k, v = draw(TALL)
    alpha = options(TALL)[0]
    assert torch.autograd.gradgradcheck(
        lambda q, k, v, a: F.intention(q, k, v, alpha=a, solver=solver), (q, k, v, alpha)
    )


def higher_gradients(f, inputs):
    """First and second derivatives of sum(sin(f)), as one flat list."""
    first = torch.autograd.grad(f(*inputs).sin().sum(), inputs, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.cos().sum() for g in first), inputs)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("intercept", [False, True])
def test_double_backward_equals_naive_with_zero_weights(shape, intercept):
    q, k, v = draw(shape)
    alpha, weight, _ = options(shape)
    inputs = (q, k, v, alpha, weight)
    ours = higher_gradients(lambda q, k, v, a, w: F.intention(q, k, v, alpha=a, weight=w, intercept=intercept), inputs)
    theirs = higher_gradients(
        lambda q, k, v, a, w: reference.intention(q, k, v, alpha=a, weight=w, intercept=intercept), inputs
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_double_backward_in_float32_of_an_ill_conditioned_problem():
    """The differentiable path runs in float64 where the forward did."""
    left, right = (
        torch.linalg.qr(torch.randn(9, 4, dtype=torch.float64))[0],
        torch.linalg.qr(torch.randn(4, 4).double())[0],
    )
    k = (left * torch.logspace(0, -3, 4, dtype=torch.float64)) @ right
    k, q, v = (x.float().double().requires_grad_() for x in (k, torch.randn(3, 4), torch.randn(9, 2)))
    tangents = [torch.randn_like(x) for x in (q, k, v)]

    def twice(f, inputs):
        first = torch.autograd.grad(f(*inputs).square().sum(), inputs, create_graph=True)
        along = sum((g * t.to(g)).sum() for g, t in zip(first, tangents, strict=True))
        return [*first, *torch.autograd.grad(along, inputs)]

    exact = twice(lambda q, k, v: reference.intention(q, k, v, alpha=1e-5), (q, k, v))
    single = tuple(x.detach().float().requires_grad_() for x in (q, k, v))
    for a, b in zip(twice(lambda q, k, v: F.intention(q, k, v, alpha=1e-5), single), exact, strict=True):
        assert (a.double() - b).norm() < 1e-4 * b.norm()


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_vmap(call, shape, dtype):
    q, k, v = draw(shape, lead=(4, 2), grad=False, dtype=dtype)
    f = getattr(F, call)
    want = f(q, k, v, alpha=0.5)
    torch.testing.assert_close(vmap(lambda q, k, v: f(q, k, v, alpha=0.5))(q, k, v), want)
    shared = vmap(lambda q: f(q, k[0], v[0], alpha=0.5))(q)
    torch.testing.assert_close(shared, f(q, k[0], v[0], alpha=0.5))
    alphas = torch.tensor([0.1, 0.2, 0.3], dtype=dtype)
    torch.testing.assert_close(vmap(lambda a: f(q, k, v, alpha=a), out_dims=1)(alphas)[:, 1], f(q, k, v, alpha=0.2))
    nested = vmap(vmap(lambda q, k, v: f(q, k, v, alpha=0.5)))(q, k, v)
    torch.testing.assert_close(nested, want)


def test_vmap_over_problems_of_every_condition():
    """Inside vmap the ladder still sees each element."""
    scale = torch.logspace(0, -5, 6)
    k = torch.randn(6, 8, 3) * torch.stack([torch.ones(6), scale, scale], -1)[:, None]
    q, v = torch.randn(6, 4, 3), torch.randn(6, 8, 2)
    got, info = vmap(lambda q, k, v: F.intention(q, k, v, alpha=1e-9, return_info=True))(q, k, v)
    want = reference.intention(q.double(), k.double(), v.double(), alpha=1e-9)
    assert ((got.double() - want).norm(dim=(1, 2)) < 1e-4 * want.norm(dim=(1, 2))).all()
    assert info.route.unique().numel() > 1


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("intercept", [False, True])
def test_func_transforms_equal_naive(differentiable_softmax, call, shape, intercept):
    """grad, vjp, jvp, jacrev, jacfwd, hessian, and their compositions with vmap."""
    q, k, v = draw((*shape[:3], 2), lead=(), grad=False)
    alpha = torch.tensor(0.4, dtype=torch.float64)
    weight = torch.rand(shape[0], dtype=torch.float64) + 0.1

    def ours(q, k, v, alpha, weight):
        return getattr(F, call)(q, k, v, alpha=alpha, weight=weight, intercept=intercept)

    def theirs(q, k, v, alpha, weight):
        return getattr(reference, call)(q, k, v, alpha=alpha, weight=weight, intercept=intercept)

    inputs = (q, k, v, alpha, weight)
    every = tuple(range(5))
    tangents = tuple(torch.randn_like(x) for x in inputs)

    def same(transform, tol=1e-7):
        for a, b in zip(transform(ours), transform(theirs), strict=True):
            torch.testing.assert_close(a, b, rtol=tol, atol=tol)

    same(lambda f: grad(lambda *x: f(*x).sin().sum(), every)(*inputs))
    same(lambda f: jvp(f, inputs, tangents))
    same(lambda f: vjp(f, *inputs)[1](tangents[0][:, :1].expand(-1, 2).clone()))
    same(lambda f: jacrev(f, every)(*inputs))
    same(lambda f: jacfwd(f, every)(*inputs))
    stacked = tuple(torch.stack([x, x + 0.1]) for x in inputs)
    same(lambda f: vmap(grad(lambda *x: f(*x).sin().sum(), every))(*stacked))
    flat = hessian(lambda k, a: ours(q, k, v, a, weight).sin().sum(), (0, 1))(k, alpha)
    want = hessian(lambda k, a: theirs(q, k, v, a, weight).sin().sum(), (0, 1))(k, alpha)
    for row, expected in zip(flat, want, strict=True):
        for a, b in zip(row, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_forward_mode_duals():
    q, k, v = draw(TALL, lead=(), grad=False)
    tangent = torch.randn_like(k)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(k, tangent)
        moved = torch.autograd.forward_ad.unpack_dual(F.intention(q, dual, v, alpha=0.5)).tangent
    want = jvp(lambda k: reference.intention(q, k, v, alpha=0.5), (k,), (tangent,))[1]
    torch.testing.assert_close(moved, want)


def test_batched_gradients():
    """torch.autograd.grad(is_grads_batched=True) vmaps over the backward."""
    q, k, v = draw(TALL)
    out = F.intention(q, k, v, alpha=0.5)
    upstream = torch.randn(4, *out.shape, dtype=out.dtype)
    got = torch.autograd.grad(out, k, upstream, is_grads_batched=True, retain_graph=True)[0]
    want = torch.stack([torch.autograd.grad(out, k, g, retain_graph=True)[0] for g in upstream])
    torch.testing.assert_close(got, want)


def test_checkpoint():
    q, k, v = draw(TALL)
    out = checkpoint(lambda *x: F.intention(*x, alpha=0.5), q, k, v, use_reentrant=False)
    want = torch.autograd.grad(F.intention(q, k, v, alpha=0.5).sum(), k)[0]
    torch.testing.assert_close(torch.autograd.grad(out.sum(), k)[0], want)


def test_maml_style_inner_steps():
    """A gradient through gradient steps on the keys, as meta-learning takes it."""
    q, k, v = draw(TALL, lead=())
    target = torch.randn(3, 3, dtype=torch.float64)

    def outer(f, k):
        for _ in range(3):
            k = k - 0.1 * torch.autograd.grad((f(q, k, v) - target).square().mean(), k, create_graph=True)[0]
        return torch.autograd.grad((f(q, k, v) - target).square().mean(), v)[0]

    got = outer(lambda q, k, v: F.intention(q, k, v, alpha=0.3), k)
    torch.testing.assert_close(got, outer(lambda q, k, v: reference.intention(q, k, v, alpha=0.3), k))


@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_derivatives_of_a_singular_problem(shape):
    """alpha = 0 and repeated keys: first and second derivatives along changes that keep the rank."""
    n, m, d, k = shape
    base = torch.randn(1, d, dtype=torch.float64, requires_grad=True)
    q, v = torch.randn(m, d, dtype=torch.float64, requires_grad=True), torch.randn(n, k, dtype=torch.float64)
    v.requires_grad_()
    ours = higher_gradients(lambda b, q, v: F.intention(q, b.expand(n, d), v, alpha=0), (base, q, v))
    theirs = higher_gradients(lambda b, q, v: naive.pseudo(q, b.expand(n, d), v), (base, q, v))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("call", CALLS)
def test_forward_mode_of_a_singular_problem(differentiable_softmax, shape, call):
    """jvp and hessian at alpha = 0 and keys of rank 2."""
    n, m, d, k = 5, 3, (3 if shape == TALL else 7), 2
    left, right = torch.randn(n, 2, dtype=torch.float64), torch.randn(2, d, dtype=torch.float64)
    q, v = torch.randn(m, d, dtype=torch.float64), torch.randn(n, k, dtype=torch.float64)

    def ours(left, right, q, v):
        return getattr(F, call)(q, left @ right, v, alpha=0, solver="pinv" if call == "intention" else "auto")

    def theirs(left, right, q, v):
        pinv = torch.linalg.pinv(left @ right, rtol=1e-8)
        if call == "intention":
            return q @ pinv @ v
        return torch.softmax(q @ pinv @ pinv.mT @ (left @ right).mT, -1) @ v

    if call == "sigma_intention":  # an exact repetition, so that the automatic route sees the singularity
        left = left[:, :1] * torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    inputs = (left, right, q, v)
    tangents = tuple(torch.randn_like(x) for x in inputs)
    if call == "sigma_intention":
        tangents = (tangents[0] * torch.tensor([[1.0, 0.0]], dtype=torch.float64), *tangents[1:])
    for a, b in zip(jvp(ours, inputs, tangents), jvp(theirs, inputs, tangents), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    if call == "intention":
        got = hessian(lambda r: ours(left, r, q, v).sin().sum())(right)
        want = hessian(lambda r: theirs(left, r, q, v).sin().sum())(right)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)


def test_derivatives_of_a_singular_sigma_intention(differentiable_softmax):
    base, q = torch.randn(1, 4, dtype=torch.float64, requires_grad=True), torch.randn(3, 4, dtype=torch.float64)
    v, q = torch.randn(5, 2, dtype=torch.float64), q.requires_grad_()

    def naively(b, q):
        key = b * torch.arange(1.0, 6.0, dtype=torch.float64)[:, None]
        return torch.softmax(q @ torch.linalg.pinv(key.mT @ key, hermitian=False) @ key.mT, -1) @ v

    def ours(b, q):
        return F.sigma_intention(q, b * torch.arange(1.0, 6.0, dtype=torch.float64)[:, None], v, alpha=0)

    for a, b in zip(higher_gradients(ours, (base, q)), higher_gradients(naively, (base, q)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


# --- the compiled door ------------------------------------------------------------------------------------------------


def compiled(function, **kwargs):
    torch._dynamo.reset()
    return torch.compile(function, fullgraph=True, **kwargs)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [(11, 7, 3, 5), (3, 7, 11, 5)])
@pytest.mark.parametrize("full", [False, True])
def test_compile_fullgraph(call, shape, full):
    q, k, v = draw(shape, lead=(2, 3), dtype=torch.float32)
    extra = {"alpha": 0.5}
    if full:
        extra = {
            "alpha": torch.tensor([0.2, 0.5, 0.9], requires_grad=True),
            "weight": torch.rand(2, 1, shape[0], requires_grad=True),
            "intercept": True,
            "covariance": "convex",
        }
    leaves = [q, k, v] + [x for x in extra.values() if isinstance(x, torch.Tensor)]
    f = getattr(F, call)
    want = f(q, k, v, **extra)
    got = compiled(lambda q, k, v, extra: f(q, k, v, **extra), backend="aot_eager")(q, k, v, extra)
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(not any(map(shutil.which, ("c++", "g++", "clang++"))), reason="inductor needs a C++ compiler")
def test_compile_inductor_with_dynamic_shapes():
    q, k, v = draw((11, 7, 3, 5), lead=(2,), dtype=torch.float32)
    f = compiled(lambda q, k, v: F.intention(q * 2, k, v, alpha=0.5) + 1, dynamic=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # inductor's own
        out = f(q, k, v)
        torch.testing.assert_close(out, F.intention(q * 2, k, v, alpha=0.5) + 1)
        out.sum().backward()
        longer = draw((17, 5, 3, 5), lead=(4,), dtype=torch.float32)
        torch.testing.assert_close(f(*longer), F.intention(longer[0] * 2, *longer[1:], alpha=0.5) + 1)


def test_compile_keeps_the_accuracy_ladder():
    k = torch.randn(1, 9, 4) * torch.tensor([1.0, 1e-2, 1e-4, 1e-5])
    q, v = torch.randn(1, 5, 4), torch.randn(1, 9, 2)
    out, info = compiled(lambda *x: F.intention(*x, alpha=1e-9, return_info=True), backend="aot_eager")(q, k, v)
    assert F.ROUTES[info.route] == "float64"
    want = reference.intention(q.double(), k.double(), v.double(), alpha=1e-9)
    assert (out.double() - want).norm() < 1e-5 * want.norm()


@pytest.mark.parametrize("call", ["attention", "linear_attention", *CALLS])
@pytest.mark.parametrize("causal", [False, True])
def test_export(call, causal):
    class Net(torch.nn.Module):
        def forward(self, q, k, v):
            return getattr(F, call)(q, k, v, is_causal=causal)

    q, k, v = draw((11, 7, 3, 5), lead=(2, 3), grad=False, dtype=torch.float32)
    program = torch.export.export(Net(), (q, k, v))
    q, k, v = (x + 1 for x in (q, k, v))
    torch.testing.assert_close(program.module()(q, k, v), Net()(q, k, v))


def operator_arguments(name, dtype=torch.float64):
    q, k, v = draw((5, 3, 4, 2), dtype=dtype)
    weight, alpha = torch.rand(2, 5, dtype=dtype, requires_grad=True), torch.rand(2, dtype=dtype, requires_grad=True)
    gain = torch.rand(2, dtype=dtype, requires_grad=True)
    if name == "ridge":
        return [
            (q, k, v, None, alpha, None, False, False, 1.0, "auto", True),
            (q, k, v, weight, alpha, gain, True, True, 0.5, "auto", True),
            (q, k, v, weight, alpha, None, False, False, 1.0, "float64", False),
            (q, k.detach(), v, None, alpha.detach(), None, False, False, 1.0, "auto", False),
        ]
    if name == "plain":
        return [
            (q, k, v, None, 0.5, False, 1.0, True),
            (q, k.detach(), v, None, 0.5, True, 0.5, False),
            (*draw((3, 4, 5, 2), dtype=dtype), None, 0.0, False, 1.0, True),
            (q, k, v, (torch.arange(5) > 1).expand(2, 5), 0.5, False, 1.0, True),
        ]
    if name == "sigma":
        return [(q, k, v, alpha, None, True), (q, k, v.detach(), alpha, gain, False)]
    if name == "causal":
        q = torch.randn(2, 5, 4, dtype=dtype, requires_grad=True)
        return [
            (q, k, v, weight, alpha, gain, None, None, None, False, True),
            (q, k.detach(), None, None, alpha, None, None, None, torch.rand(2, 5, dtype=dtype), False, True),
        ]
    if name == "inverse":
        square = (k.mT @ k).detach().requires_grad_()
        return [(square, weight[:, :4].detach(), alpha, gain, False, 1e-16, True)]
    return [
        (q, k, None, alpha, None, None, None, "auto", False, False, True),
        (q, k, weight, alpha, gain, None, None, "auto", True, False, True),
        (q, k, weight.detach(), alpha, None, None, None, "auto", True, False, False),
    ]


OPERATORS = [(name, i) for name in ("ridge", "plain", "transform", "sigma", "causal", "inverse") for i in range(4)]


@pytest.mark.parametrize(("name", "case"), [(n, i) for n, i in OPERATORS if i < len(operator_arguments(n))])
def test_opcheck(name, case):
    torch.library.opcheck(getattr(torch.ops.intention, name).default, operator_arguments(name)[case])


@pytest.fixture
def backwards(monkeypatch):
    """What the compiled backward of a ridge fit is asked for, and how many elements are fitted again in float64."""
    asked, again, pull, redo = [], [], ridge.backward_batch, by_route._redo
    monkeypatch.setattr(ridge, "backward_batch", lambda *args: asked.append(args[-1]) or pull(*args))
    monkeypatch.setattr(by_route, "_redo", lambda *args: again.append(args[2]) or redo(*args))
    return asked, again


@pytest.mark.parametrize("shape", [(11, 7, 3, 5), (3, 7, 11, 5)])
def test_a_compiled_backward_computes_what_is_asked_for(shape, backwards):
    """alpha's gradient is a sum that may cancel and is then made again in float64: not where nobody asked for it."""
    asked, again = backwards
    f = compiled(lambda q, k, v, a: F.intention(q, k, v, alpha=a), backend="aot_eager")
    q, k, v = draw(shape, lead=(61,), dtype=torch.float32)
    fixed = torch.tensor(2.0)  # a number has no gradient to ask for
    torch.autograd.grad(f(q, k, v, fixed), [q, k, v], torch.randn(61, 7, 5))
    torch.autograd.grad(f(q, k.detach(), v, fixed), [q, v], torch.randn(61, 7, 5))
    assert asked == [(True, True, True, False, False, False), (True, False, True, False, False, False)]
    assert not again
    alpha = torch.full((61,), 2.0, requires_grad=True)
    upstream = torch.randn(61, 7, 5)
    with library.off():  # the kernels make alpha's gradient again by themselves
        (got,) = torch.autograd.grad(f(q.detach(), k.detach(), v.detach(), alpha), [alpha], upstream)
        assert asked[2:] == [(False, False, False, False, True, False)]
        found = [x.tolist() for x in again]
        again.clear()
        (want,) = torch.autograd.grad(F.intention(q.detach(), k.detach(), v.detach(), alpha=alpha), [alpha], upstream)
    assert found == [x.tolist() for x in again] != []
    assert torch.equal(got, want)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", ["plain", "alpha", "weight", "intercept", "causal", "convex", "constant keys"])
def test_compiled_equals_eager(call, wide, name):
    """The same numbers, and gradients of whatever requires one."""
    q, k, v = draw((5, 13, 11, 7) if wide else (13, 13, 5, 7), lead=(3,), dtype=torch.float32)
    if name == "causal":
        q = torch.randn(3, k.shape[1], k.shape[2], requires_grad=True)
    alpha = torch.tensor([0.5, 1.5, 2.0], requires_grad=True) if name == "alpha" else 0.7
    weight = torch.rand(3, k.shape[1], requires_grad=True) if name == "weight" else None
    fixed = {"is_causal": name == "causal", "intercept": name == "intercept"}
    fixed["covariance"] = "convex" if name == "convex" else "ridge"
    k.requires_grad_(name != "constant keys")
    leaves = [x for x in (q, k, v, alpha, weight) if isinstance(x, torch.Tensor) and x.requires_grad]

    def f(q, k, v, alpha, weight):
        return getattr(F, call)(q, k, v, alpha=alpha, weight=weight, **fixed)

    got, want = compiled(f, backend="aot_eager")(q, k, v, alpha, weight), f(q, k, v, alpha, weight)
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    pairs = zip(torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True)
    for a, b in pairs:
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_compiled_inference_keeps_nothing(call):
    """No gradient can be asked for: neither coefficients nor factor leave the operator."""
    q, k, v = draw((13, 7, 5, 3), lead=(2,), dtype=torch.float32)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    f = compiled(lambda q, k, v: getattr(F, call)(q, k, v, alpha=0.5), backend=backend)
    want = getattr(F, call)(q, k, v, alpha=0.5)
    torch.testing.assert_close(f(q, k, v), want)
    with torch.no_grad():
        torch.testing.assert_close(f(q, k, v), want)
    torch.testing.assert_close(f(q.detach(), k.detach(), v.detach()), want)
    calls = [node for graph in graphs for node in graph.graph.nodes if "intention" in str(node.target)]
    kept = [node.args[-1] for node in calls if "watched" not in str(node.target)]  # that one only looks at scores
    assert kept == [True, False, False]


@pytest.mark.parametrize("call", CALLS)
def test_gradient_of_a_program_exported_without_gradients(call):
    """It kept nothing for a backward, which therefore solves again."""

    class Net(torch.nn.Module):
        def forward(self, q, k, v):
            return getattr(F, call)(q, k, v, alpha=0.5)

    leaves = draw((13, 7, 5, 3), lead=(2,), dtype=torch.float32)
    with torch.no_grad():
        program = torch.export.export(Net(), tuple(x.detach() for x in leaves)).module()
    got = torch.autograd.grad(program(*leaves).square().sum(), leaves)
    for a, b in zip(got, torch.autograd.grad(Net()(*leaves).square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_compiled_causal_gradient_query_by_query():
    """alpha = 0: sequences that chunks cannot serve; their gradient is taken by autograd inside the operator."""
    leaves = draw((7, 7, 3, 2), lead=(2,))

    def f(*x):
        return F.intention(*x, alpha=0.0, is_causal=True)

    got = torch.autograd.grad(compiled(f, backend="aot_eager")(*leaves).square().sum(), leaves)
    for a, b in zip(got, torch.autograd.grad(f(*leaves).square().sum(), leaves), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("hard", [False, True])
def test_compiled_sigma_in_parts_and_on_the_ladder(threads, hard):
    """Queries split between threads, and an element that the kernel leaves to transform and attention."""
    q, k, v = draw((131, 134, 5, 3), lead=(1,), dtype=torch.float32)
    with torch.no_grad():
        k[..., 0] *= 0.03 if hard else 1

    def f(*x):
        return F.sigma_intention(*x, alpha=1e-2 if hard else 0.5, return_info=True)

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        want, info = f(q, k, v)
        got, told = compiled(f, backend="aot_eager")(q, k, v)
        upstream = torch.randn_like(want)
        pairs = zip(*(torch.autograd.grad(x, [q, k, v], upstream) for x in (got, want)), strict=True)
        assert info.route.bool().all() == hard
        torch.testing.assert_close(told, info)
        torch.testing.assert_close(got, want)
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("call", ["attention", "linear_attention", *CALLS])
def test_copies_and_strides(call):
    q, k, v = draw((11, 7, 3, 5), lead=(2, 3), grad=False)
    f = getattr(F, call)
    want = f(q, k, v)
    torch.testing.assert_close(f(*copy.deepcopy((q, k, v))), want)
    odd = [x.mT.contiguous().mT for x in (q, k, v)]
    sliced = [torch.cat([x, x], -1)[..., : x.shape[-1]] for x in (q, k, v)]
    turned = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in (q, k, v)]
    for inputs in (odd, sliced, turned):
        assert not inputs[0].is_contiguous()
        torch.testing.assert_close(f(*inputs), want)


def test_naive_is_not_part_of_the_face():
    import intention

    assert not hasattr(intention.functional, "naive")
    assert naive.intention.__module__ == "intention.naive"


def test_forward_mode_within_forward_mode_is_refused():
    """torch hands a Function's jvp values without the outer tangent: a second derivative would be silently wrong."""
    q, k, v = torch.randn(3, 7, 5, dtype=torch.float64)
    alpha = torch.tensor(0.3, dtype=torch.float64)
    for call in (F.intention, causal_intention):

        def value(a, call=call):
            return call(q, k, v, alpha=a).sin().sum()

        want = torch.func.jacrev(torch.func.jacrev(value))(alpha)
        torch.testing.assert_close(torch.func.hessian(value)(alpha), want)
        torch.testing.assert_close(torch.func.jacrev(torch.func.jacfwd(value))(alpha), want)
        with pytest.raises(RuntimeError, match=r"torch\.func\.hessian"):
            torch.func.jacfwd(torch.func.jacfwd(value))(alpha)
