"""Bad input gets an error that names what came, what was wanted and the remedy."""

import re

import pytest
import torch

import intention
from intention import functional as F

CALLS = ["attention", "linear_attention", "intention", "sigma_intention"]
SOLVED = ["intention", "sigma_intention"]


def draw(n=7, m=11, d=3, k=5, lead=(2,), **kwargs):
    return [torch.randn(*lead, *s, **kwargs) for s in ((m, d), (n, d), (n, k))]


def says(error, *parts):
    return pytest.raises(error, match=".*".join(re.escape(p) for p in parts))


@pytest.mark.parametrize("call", CALLS)
def test_shapes_that_do_not_fit(call):
    f = getattr(F, call)
    q, k, v = draw()
    with says(ValueError, "same number of features d", "2x11x2", "2x7x3"):
        f(q[..., :2], k, v)
    with says(ValueError, "same number of points N", "2x7x3", "2x6x5"):
        f(q, k, v[:, :6])
    with says(ValueError, "must broadcast", "(2,)", "(3,)"):
        f(q, *draw(lead=(3,))[1:])
    with says(ValueError, "at least 2 dimensions", "(3,)"):
        f(q[0, 0], k, v)
    with says(ValueError, "at least one feature", "(2, 7, 0)"):
        f(q[..., :0], k[..., :0], v)


@pytest.mark.parametrize("call", CALLS)
def test_dtypes_and_types(call):
    f = getattr(F, call)
    q, k, v = draw()
    with says(TypeError, "key", "floating-point", "int64", "key.float()"):
        f(q, k.long(), v)
    with says(TypeError, "value", "floating-point", "complex64", "real and imaginary"):
        f(q, k, v.to(torch.complex64))
    for mask in (None, torch.ones(1, k.shape[-2], dtype=torch.bool)):
        with says(TypeError, "query must be a torch.Tensor", "list"):
            f([[1.0]], k, v, mask)
        with says(ValueError, "at least 2 dimensions", "(3,)"):
            f(q[0, 0], k, v, mask)


@pytest.mark.parametrize("call", CALLS)
def test_mixed_devices(call):
    q, k, v = draw()
    with says(ValueError, "value is on meta", "cpu", ".to(device)"):
        getattr(F, call)(q, k, v.to("meta"))


@pytest.mark.parametrize("call", SOLVED)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_alpha(call, grad, dtype):
    f = getattr(F, call)
    q, k, v = draw(dtype=dtype, requires_grad=grad)
    for bad in (-0.5, float("nan"), float("inf")):
        with says(ValueError, "alpha must be finite and >= 0", str(bad), "alpha=0 for the minimum-norm fit"):
            f(q, k, v, alpha=bad)
    for bad in (-0.5, float("nan")):
        with says(ValueError, "alpha must be finite and >= 0", str(bad)):
            f(q, k, v, alpha=torch.tensor([1.0, bad], dtype=dtype))
    with says(ValueError, "alpha must broadcast to the leading dimensions (2,)", "(3,)"):
        f(q, k, v, alpha=torch.ones(3, dtype=dtype))
    with says(TypeError, "alpha must have a floating-point dtype", "int64"):
        f(q, k, v, alpha=torch.tensor(1))
    with says(ValueError, "[0, 1]", "1.5", "sigmoid"):
        f(q, k, v, alpha=1.5, covariance="convex")
    with says(ValueError, "[0, 1]", "1.5", "sigmoid"):
        f(q, k, v, alpha=torch.tensor(1.5, dtype=dtype), covariance="convex")


@pytest.mark.parametrize("call", SOLVED)
def test_weight(call):
    f = getattr(F, call)
    q, k, v = draw()
    weight = torch.ones(2, 7)
    weight[1, 3] = -0.5
    with says(ValueError, "weight must be >= 0", "-0.5", "leaves a point out"):
        f(q, k, v, weight=weight)
    weight[1, 3] = torch.nan
    with says(ValueError, "weight must be >= 0", "nan"):
        f(q, k, v, weight=weight)
    with says(ValueError, "weight must have shape (..., N) with N = 7", "(2, 6)"):
        f(q, k, v, weight=torch.ones(2, 6))
    with says(TypeError, "weight must have a floating-point dtype", "bool", "attn_mask"):
        f(q, k, v, weight=torch.ones(2, 7, dtype=torch.bool))
    with says(ValueError, "must broadcast", "(2,)", "(3,)"):
        f(q, k, v, weight=torch.ones(3, 7))
    with says(ValueError, "weight is on meta"):
        f(q, k, v, weight=torch.ones(2, 7, device="meta"))


@pytest.mark.parametrize("call", CALLS)
def test_mask(call):
    f = getattr(F, call)
    q, k, v = draw()
    with says(TypeError, "attn_mask must be bool", "int64", "mask.bool()"):
        f(q, k, v, torch.ones(11, 7, dtype=torch.long))
    with says(ValueError, "attn_mask must broadcast to (2, 11, 7)", "(7, 11)"):
        f(q, k, v, torch.ones(7, 11, dtype=torch.bool))
    with says(ValueError, "attn_mask is on meta"):
        f(q, k, v, torch.ones(11, 7, dtype=torch.bool, device="meta"))
    with says(TypeError, "attn_mask must be a torch.Tensor", "list"):
        f(q, k, v, [True])


@pytest.mark.parametrize("call", SOLVED)
def test_names(call):
    f = getattr(F, call)
    q, k, v = draw()
    with says(ValueError, "solver must be one of 'auto', 'primal'", "'chol'"):
        f(q, k, v, solver="chol")
    with says(ValueError, "covariance must be one of 'ridge', 'convex'", "'full'"):
        f(q, k, v, covariance="full")


@pytest.mark.parametrize("call", ["linear_attention", "intention"])
@pytest.mark.parametrize("p", [-0.1, 1.0, 1.5])
def test_dropout(call, p):
    with says(ValueError, "dropout_p must be in [0, 1)", str(p)):
        getattr(F, call)(*draw(), dropout_p=p)


@pytest.mark.parametrize("call", CALLS)
def test_grouped_heads(call):
    f = getattr(F, call)
    q = torch.randn(2, 6, 11, 3)
    with says(ValueError, "multiple of key heads", "6", "4"):
        f(q, torch.randn(2, 4, 7, 3), torch.randn(2, 4, 7, 5), enable_gqa=True)
    with says(ValueError, "key has 3 heads and value 2"):
        f(q, torch.randn(2, 3, 7, 3), torch.randn(2, 2, 7, 5), enable_gqa=True)
    with says(ValueError, "enable_gqa=True"):
        f(q, torch.randn(2, 3, 7, 3), torch.randn(2, 3, 7, 5))
    with says(ValueError, "needs a head dimension"):
        f(q[0, 0], torch.randn(7, 3), torch.randn(7, 5), enable_gqa=True)


@pytest.mark.parametrize("solver", ["primal", "dual", "qr", "pinv", "float64"])
def test_a_named_solver_gives_nan_where_a_value_is_bad(solver):
    """It never reads the host, so it cannot raise."""
    q, k, v = draw()
    good = F.intention(q, k, v, alpha=1.0, solver=solver)
    for extra in ({"alpha": torch.tensor([1.0, -2000.0])}, {"weight": torch.tensor([[1.0], [-1.0]]).expand(2, 7)}):
        out = F.intention(q, k, v, solver=solver, **extra)
        assert out[1].isnan().all()
        torch.testing.assert_close(out[0], good[0])


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("sizes", [{"n": 0}, {"m": 0}, {"k": 0}, {"n": 0, "m": 0}, {"lead": (0,)}])
@pytest.mark.parametrize("grad", [False, True])
def test_empty_tensors(call, sizes, grad):
    shape = {"n": 7, "m": 11, "d": 3, "k": 5, "lead": (2,), **sizes}
    q, k, v = draw(**shape, requires_grad=grad)
    out = getattr(F, call)(q, k, v)
    assert out.shape == (*shape["lead"], shape["m"], shape["k"])
    assert torch.equal(out, torch.zeros_like(out))
    if call in SOLVED:
        _, info = getattr(F, call)(q, k, v, return_info=True)
        assert info.route.shape == shape["lead"]
    if grad:
        assert all(torch.equal(g, torch.zeros_like(g)) for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("call", SOLVED)
@pytest.mark.parametrize("bad", [[0.1, 0.2], "0.1", True])
def test_alpha_of_another_type(call, bad):
    with says(TypeError, "alpha must be a number", type(bad).__name__, "torch.as_tensor"):
        getattr(F, call)(*draw(), alpha=bad)


@pytest.mark.parametrize("call", ["linear_attention", *SOLVED])
def test_scale(call):
    f = getattr(F, call)
    for bad in (torch.rand(2), torch.tensor(1.0, requires_grad=True), "a"):
        with says(TypeError, "scale must be a number", "multiply the queries"):
            f(*draw(), scale=bad)
    q, k, v = draw()
    assert torch.equal(f(q, k, v, scale=torch.tensor(0.5)), f(q, k, v, scale=0.5))


@pytest.mark.parametrize("call", CALLS)
def test_probability_of_another_kind(call):
    with says(ValueError, "dropout_p must be in [0, 1)", "-1.0"):
        getattr(F, call)(*draw(), dropout_p=-1.0)
    with says(TypeError, "dropout_p must be a number", "str"):
        getattr(F, call)(*draw(), dropout_p="x")


def test_the_usual_padding_mask_gets_its_remedy():
    q, k, v = draw(lead=(4, 2))
    with says(ValueError, "got (4, 7)", "mask[:, None, None, :]"):
        F.intention(q, k, v, torch.ones(4, 7, dtype=torch.bool))


@pytest.mark.parametrize("call", CALLS)
def test_labels_as_values(call):
    q, k, _ = draw()
    labels = torch.arange(7) % 3
    with says(TypeError, "value", "floating-point", "int64", "one_hot(value, C)", "value.float()"):
        getattr(F, call)(q, k, labels)
    with says(TypeError, "value", "int64", "one_hot(value, C)"):
        intention.fit(k, labels)


@pytest.mark.parametrize("call", SOLVED)
def test_a_number_as_weight(call):
    q, k, v = draw()
    with says(TypeError, "weight must be a torch.Tensor (..., N)", "got float", "torch.full((7,), w)"):
        getattr(F, call)(q, k, v, weight=1.0)


@pytest.mark.parametrize("call", SOLVED)
def test_weights_of_grouped_heads(call):
    q, k, v = torch.randn(2, 6, 11, 3), torch.randn(2, 2, 7, 3), torch.randn(2, 2, 7, 5)
    for heads in (1, 2, 6):
        assert getattr(F, call)(q, k, v, weight=torch.rand(2, heads, 7), enable_gqa=True).shape == (2, 6, 11, 5)
    with says(ValueError, "query head (6)", "key head (2)", "got shape (2, 3, 7)"):
        getattr(F, call)(q, k, v, weight=torch.rand(2, 3, 7), enable_gqa=True)
    with says(ValueError, "must broadcast", "(2,)", "(3,)"):
        getattr(F, call)(q, k, v, weight=torch.rand(3, 2, 7), enable_gqa=True)
