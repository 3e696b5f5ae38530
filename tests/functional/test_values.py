"""Values and gradients of every call and option against the paper's formulas, in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

import reference
from intention import functional as F
from intention import naive

TALL, WIDE, SQUARE = (7, 11, 3, 5), (3, 11, 7, 5), (5, 7, 5, 3)  # n, m, d, k
DEEP = (23, 11, 19, 29)  # many value columns: the explicit inverse is used
SHAPES = [TALL, WIDE, SQUARE, DEEP]


def draw(shape, lead=(2,), grad=True, scale=1.0):
    n, m, d, k = shape
    return [
        (scale * torch.randn(*lead, *s, dtype=torch.float64)).requires_grad_(grad) for s in ((m, d), (n, d), (n, k))
    ]


def agree(got, want, leaves, tol=1e-9):
    """Values and all gradients agree, relative to the size of each."""
    assert got.shape == want.shape
    assert torch.isfinite(want).all()
    assert (got - want).norm() <= tol * want.norm()
    upstream = torch.randn_like(want)
    leaves = [x for x in leaves if x is not None]
    ours = torch.autograd.grad(got, leaves, upstream, retain_graph=True)
    theirs = torch.autograd.grad(want, leaves, upstream, retain_graph=True)
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert (a - b).norm() <= tol * b.norm() + 1e-11  # a gradient that is exactly 0 is noise in the reference


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
def test_values_and_gradients(shape, covariance, intercept, weighted, call):
    q, k, v = draw(shape)
    weight = torch.rand(2, shape[0], dtype=torch.float64).requires_grad_() if weighted else None
    alpha = torch.tensor([0.3, 0.8], dtype=torch.float64, requires_grad=True)
    options = {"alpha": alpha, "weight": weight, "intercept": intercept, "covariance": covariance, "scale": 0.7}
    got = getattr(F, call)(q, k, v, **options)
    want = getattr(reference, call)(q, k, v, **options)
    agree(got, want, [q, k, v, weight, alpha])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("solver", ["auto", "primal", "dual", "qr", "pinv", "float64"])
@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
def test_every_solver_agrees(shape, solver, call):
    q, k, v = draw(shape)
    alpha = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    got = getattr(F, call)(q, k, v, alpha=alpha, solver=solver)
    agree(got, getattr(reference, call)(q, k, v, alpha=alpha), [q, k, v, alpha])


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
@pytest.mark.parametrize("intercept", [False, True])
def test_zero_weights_have_the_right_gradient(shape, call, intercept):
    """Never differentiate sqrt(w): the gradient at a weight of 0 is finite and exact."""
    q, k, v = draw(shape)
    weight = torch.rand(2, shape[0], dtype=torch.float64)
    weight[:, 1] = 0
    weight.requires_grad_()
    got = getattr(F, call)(q, k, v, alpha=0.5, weight=weight, intercept=intercept)
    agree(got, getattr(reference, call)(q, k, v, alpha=0.5, weight=weight, intercept=intercept), [q, k, v, weight])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
def test_weight_zero_is_leaving_the_point_out(shape, call):
    q, k, v = draw(shape, grad=False)
    weight = torch.rand(2, shape[0], dtype=torch.float64)
    weight[:, 1] = 0
    kept = [i for i in range(shape[0]) if i != 1]
    got = getattr(F, call)(q, k, v, alpha=0.5, weight=weight)
    want = getattr(F, call)(q, k[:, kept], v[:, kept], alpha=0.5, weight=weight[:, kept])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
def test_integer_weights_are_repeated_points(call):
    q, k, v = draw(TALL, lead=(), grad=False)
    times = torch.tensor([1, 2, 1, 3, 1, 1, 2])
    got = getattr(F, call)(q, k, v, weight=times.double())
    want = getattr(F, call)(q, k.repeat_interleave(times, 0), v.repeat_interleave(times, 0))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("call", ["attention", "linear_attention"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_and_linear_attention(call, shape):
    q, k, v = draw(shape, lead=(2, 3))
    agree(getattr(F, call)(q, k, v, scale=0.7), getattr(reference, call)(q, k, v, scale=0.7), [q, k, v])


def test_default_scales():
    q, k, v = draw(TALL, lead=(), grad=False)
    torch.testing.assert_close(F.attention(q, k, v), naive.attention(q, k, v, 3**-0.5))
    torch.testing.assert_close(F.linear_attention(q, k, v), naive.linear_attention(q, k, v))
    torch.testing.assert_close(F.intention(q, k, v), naive.intention(q, k, v, naive.sigma(k, 1.0)))
    torch.testing.assert_close(F.sigma_intention(q, k, v), naive.sigma_intention(q, k, v, naive.sigma(k, 1.0)))
    half = naive.convex(k, 0.5)
    torch.testing.assert_close(F.intention(q, k, v, covariance="convex"), naive.intention(q, k, v, half))


CALLS = ["attention", "linear_attention", "intention", "sigma_intention"]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("lead_q", "lead_k", "lead_v"),
    [
        ((), (), ()),
        ((2, 3), (3,), (2, 1)),
        ((5,), (), ()),  # a context shared by a batch of queries
        ((), (5,), (5,)),  # a query shared by a batch of contexts
        ((2, 1, 3), (1, 4, 1), (4, 3)),
        ((2, 3, 4, 2), (2, 1, 4, 1), (1, 1, 4, 1)),
    ],
)
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_leading_dimensions_broadcast(call, lead_q, lead_k, lead_v, shape):
    n, m, d, k = shape
    query = torch.randn(*lead_q, m, d, dtype=torch.float64, requires_grad=True)
    key = torch.randn(*lead_k, n, d, dtype=torch.float64, requires_grad=True)
    value = torch.randn(*lead_v, n, k, dtype=torch.float64, requires_grad=True)
    agree(
        getattr(F, call)(query, key, value, scale=0.5),
        getattr(reference, call)(query, key, value, scale=0.5),
        [query, key, value],
    )


@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
@pytest.mark.parametrize("alpha_shape", [(), (1,), (3,), (2, 1), (2, 3)])
def test_alpha_per_head(call, alpha_shape):
    q, k, v = draw(TALL, lead=(2, 3))
    alpha = (0.1 + torch.rand(alpha_shape, dtype=torch.float64)).requires_grad_()
    agree(getattr(F, call)(q, k, v, alpha=alpha), getattr(reference, call)(q, k, v, alpha=alpha), [q, k, v, alpha])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lead", [(), (2,), (2, 2)])
def test_grouped_heads(call, lead):
    n, m, d, k = TALL
    query = torch.randn(*lead, 6, m, d, dtype=torch.float64, requires_grad=True)
    key = torch.randn(*lead, 3, n, d, dtype=torch.float64, requires_grad=True)
    value = torch.randn(*lead, 3, n, k, dtype=torch.float64, requires_grad=True)
    got = getattr(F, call)(query, key, value, enable_gqa=True, scale=0.5)
    agree(got, getattr(reference, call)(query, key, value, gqa=True, scale=0.5), [query, key, value])


@pytest.mark.parametrize("call", ["intention", "sigma_intention"])
def test_grouped_heads_with_alpha_and_weight_per_query_head(call):
    n, m, d, k = TALL
    q = torch.randn(2, 6, m, d, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 3, n, d, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 3, n, k, dtype=torch.float64, requires_grad=True)
    alpha = (0.1 + torch.rand(6, dtype=torch.float64)).requires_grad_()
    for heads in (1, 6):
        weight = torch.rand(2, heads, n, dtype=torch.float64, requires_grad=True)
        got = getattr(F, call)(q, key, value, enable_gqa=True, alpha=alpha, weight=weight)
        agree(
            got,
            getattr(reference, call)(q, key, value, gqa=True, alpha=alpha, weight=weight),
            [q, key, value, alpha, weight],
        )
    shared = torch.rand(2, 3, n, dtype=torch.float64)  # one per key head
    got = getattr(F, call)(q, key, value, enable_gqa=True, weight=shared)
    want = getattr(reference, call)(q, key, value, gqa=True, weight=shared.repeat_interleave(2, 1))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_scikit_learn_ridge(intercept, shape):
    q, k, v = draw(shape, lead=(), grad=False)
    weight = torch.rand(shape[0], dtype=torch.float64) + 0.1
    model = Ridge(alpha=0.3, fit_intercept=intercept, solver="svd").fit(k.numpy(), v.numpy(), weight.numpy())
    got = F.intention(q, k, v, alpha=0.3, weight=weight, intercept=intercept)
    torch.testing.assert_close(got, torch.from_numpy(model.predict(q.numpy())))


@pytest.mark.parametrize("shape", SHAPES)
def test_alpha_zero_is_the_pseudo_inverse(shape):
    q, k, v = draw(shape)
    agree(F.intention(q, k, v, alpha=0), naive.pseudo(q, k, v), [q, k, v], 1e-8)


@pytest.mark.parametrize("shape", [TALL, WIDE, SQUARE])
def test_alpha_zero_with_dependent_keys_is_the_minimum_norm_fit(shape):
    """Rank 2 keys: Sigma is singular; values and the constant-rank gradient are those of torch.linalg.pinv."""
    n, m, d, k = shape
    left = torch.randn(2, n, 2, dtype=torch.float64, requires_grad=True)
    right = torch.randn(2, 2, d, dtype=torch.float64, requires_grad=True)
    q = torch.randn(2, m, d, dtype=torch.float64, requires_grad=True)
    v = torch.randn(2, n, k, dtype=torch.float64, requires_grad=True)
    key = left @ right
    with pytest.warns(UserWarning, match="estimated relative error"):  # the rank is only known up to rounding
        F.intention(q.float(), key.float(), v.float(), alpha=0)
    got, info = F.intention(q, key, v, alpha=0, solver="pinv", return_info=True)
    assert (info.route == F.ROUTES.index("pinv")).all()
    agree(got, q @ torch.linalg.pinv(key, rtol=1e-10) @ v, [q, left, right, v], 1e-7)


def test_gradient_of_repeated_keys_at_alpha_zero():
    """Exactly repeated keys: the automatic route finds the pseudo-inverse by itself."""
    q, k, v = draw(WIDE, lead=(), grad=False)
    key = k[[0, 1, 1]].clone().requires_grad_()
    out, info = F.intention(q, key, v, alpha=0, return_info=True)
    assert F.ROUTES[info.route] == "pinv"
    torch.testing.assert_close(out, naive.pseudo(q, key, v))
    assert torch.isfinite(torch.autograd.grad(out.sum(), key)[0]).all()


def test_tied_self_intention_is_the_identity():
    x, v = torch.randn(3, 7, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    torch.testing.assert_close(F.intention(x, x, v, alpha=0), v)


def test_intercept_survives_a_large_mean():
    """Keys far from the origin: centring is done twice, so float32 does not lose the spread."""
    q, k, v = draw((40, 11, 3, 5), lead=(), grad=False)
    shift = 4096.0  # a power of two: the shifted float32 keys are exact
    k, q = k.float().double().mul(64).round().div(64), q.float().double().mul(64).round().div(64)
    want = reference.intention(q, k, v, intercept=True)
    got = F.intention((q + shift).float(), (k + shift).float(), v.float(), intercept=True)
    torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


small = st.integers(1, 6)


@settings(max_examples=150, deadline=None)
@given(
    n=small,
    m=small,
    d=small,
    k=small,
    heads=st.integers(1, 3),
    call=st.sampled_from(["intention", "sigma_intention"]),
    covariance=st.sampled_from(["ridge", "convex"]),
    intercept=st.booleans(),
    weighted=st.booleans(),
    mask=st.sampled_from(["none", "bool", "float", "per query"]),
    causal=st.booleans(),
    alpha=st.sampled_from([0.1, 0.5, 1.0]),
    seed=st.integers(0, 99),
)
def test_any_shape_and_option(n, m, d, k, heads, call, covariance, intercept, weighted, mask, causal, alpha, seed):
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=gen)

    q, key, v = (x.requires_grad_() for x in (normal(2, heads, m, d), normal(2, heads, n, d), normal(2, heads, n, k)))
    weight = normal(2, 1, n).square().requires_grad_() if weighted else None
    masks = {
        "none": None,
        "bool": torch.rand(2, 1, 1, n, generator=gen) > 0.3,
        "float": normal(heads, 1, n),
        "per query": torch.rand(m, n, generator=gen) > 0.3,
    }
    chosen = masks[mask]
    causal = causal and (mask != "per query" or m == 1)
    if chosen is not None and chosen.dtype == torch.bool:
        chosen = chosen.clone()
        chosen[..., 0] = True  # an empty context has its own test
    got = getattr(F, call)(
        q, key, v, chosen, is_causal=causal, alpha=alpha, weight=weight, intercept=intercept, covariance=covariance
    )
    want = getattr(reference, call)(
        q, key, v, mask=chosen, causal=causal, alpha=alpha, weight=weight, intercept=intercept, covariance=covariance
    )
    agree(got, want, [q, key, v, weight], 1e-7)


@pytest.mark.parametrize("sizes", [(2, 9), (5, 9), (9, 5), (7, 7)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(8))
def test_sigma_intention_of_repeated_keys_without_alpha(sizes, dtype, seed):
    """softmax(Q K^+) V: equal keys have equal shares, and gradients are finite."""
    torch.manual_seed(34 + seed)
    n, d = sizes
    rank = 1 + seed % (min(n, d) - 1)
    q, k, v = torch.randn(3, d, dtype=dtype), torch.randn(n, d, dtype=dtype), torch.randn(n, 2, dtype=dtype)
    k = k[torch.arange(n) % rank].requires_grad_()
    out = F.sigma_intention(q, k, v, alpha=0)
    wide = k.detach().double()
    distinct, copies = wide[:rank], torch.bincount(torch.arange(n) % rank, minlength=rank)
    inverse = torch.linalg.pinv(distinct)[:, torch.arange(n) % rank] / copies[torch.arange(n) % rank]  # K^+
    want = torch.softmax(q.double() @ inverse, -1) @ v.double()
    assert (out - want).norm() < 1e-5 * want.norm()
    if rank == 1:
        torch.testing.assert_close(out, v.mean(0).expand_as(out))
    (slope,) = torch.autograd.grad(out.sum(), k)
    assert torch.isfinite(slope).all()


def test_attention_keeps_the_leading_dimensions_of_the_keys():
    q, k, v = torch.randn(1, 4, 7, 2), torch.randn(1, 1, 4, 5, 2), torch.randn(1, 1, 4, 5, 3)
    assert F.attention(q, k, v).shape == F.intention(q, k, v).shape == (1, 1, 4, 7, 3)
    torch.testing.assert_close(F.attention(q, k, v), F.attention(q[None], k, v))
