"""Masks, causality, dropout, empty contexts and values that are not numbers."""

import pytest
import torch

import reference
from intention import functional as F
from intention import naive
from intention._call import per_query
from intention.solve.causal import each_query, spans

CALLS = ["attention", "linear_attention", "intention", "sigma_intention"]
SOLVED = ["intention", "sigma_intention"]
TALL, WIDE = (7, 11, 3, 5), (3, 11, 7, 5)  # n, m, d, k


def draw(shape=TALL, lead=(2, 3), grad=False):
    n, m, d, k = shape
    return [torch.randn(*lead, *s, dtype=torch.float64, requires_grad=grad) for s in ((m, d), (n, d), (n, k))]


def agree(call, inputs, mask, causal=False, leaf=None, **extra):
    got = getattr(F, call)(*inputs, mask, is_causal=causal, scale=0.5, **extra)
    want = getattr(reference, call)(*inputs, mask=mask, causal=causal, scale=0.5, **extra)
    torch.testing.assert_close(got, want)
    leaves = [x for x in (*inputs, mask if leaf is None else leaf) if x is not None and x.requires_grad]
    upstream = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(want, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("mask_lead", [(), (1,), (3,), (2, 1), (2, 3)])
@pytest.mark.parametrize("rows", ["one", "expanded", "each"])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks(call, shape, mask_lead, rows, kind):
    n, m = shape[:2]
    size = m if rows == "each" else 1
    mask = torch.rand(*mask_lead, size, n) > 0.4
    mask[..., 0] = True
    if kind == "float":
        mask = torch.where(mask, torch.randn(mask.shape, dtype=torch.float64), -torch.inf).requires_grad_()
    inputs = draw(shape, grad=True)
    agree(call, inputs, mask.expand(*mask_lead, m, n) if rows == "expanded" else mask, leaf=mask)


@pytest.mark.parametrize("call", CALLS)
def test_one_dimensional_mask(call):
    mask = torch.tensor([True, False, True, True, False, True, True])
    agree(call, draw(grad=True), mask)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("mask_shape", [(1, 7), (6, 1, 7), (2, 1, 1, 7), (2, 6, 1, 7), (6, 11, 7), (11, 7), (11, 1)])
@pytest.mark.parametrize("kind", ["bool", "float"])
def test_masks_with_grouped_heads(call, mask_shape, kind):
    n, m, d, k = TALL
    q = torch.randn(2, 6, m, d, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 3, n, d, dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 3, n, k, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(mask_shape) > 0.4
    mask[..., 0] = True
    if kind == "float":
        mask = torch.where(mask, torch.randn(mask.shape, dtype=torch.float64), -torch.inf)
    got = getattr(F, call)(q, key, value, mask, enable_gqa=True, scale=0.5)
    want = getattr(reference, call)(q, key, value, mask=mask, gqa=True, scale=0.5)
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    for a, b in zip(
        torch.autograd.grad(got, [q, key, value], upstream),
        torch.autograd.grad(want, [q, key, value], upstream),
        strict=True,
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("lead", [(2,), (2, 3)])
def test_reports_of_grouped_heads(lead):
    q, k, v = torch.randn(*lead, 6, 11, 3), torch.randn(*lead, 3, 7, 3), torch.randn(*lead, 3, 7, 5)
    for call in SOLVED:
        f = getattr(F, call)
        assert f(q, k, v, enable_gqa=True, return_info=True)[1].route.shape == (*lead, 3)
        assert f(q, k, v, enable_gqa=True, alpha=torch.rand(6), return_info=True)[1].route.shape == (*lead, 6)
        assert f(q, k, v, enable_gqa=True, is_causal=True, return_info=True)[1].route.shape == (*lead, 6)


@pytest.mark.parametrize("level", [-120.0, 100.0])
@pytest.mark.parametrize("grad", [False, True])
def test_log_weights_reach_the_softmax_as_logs(level, grad):
    """exp of them would vanish or overflow in float32."""
    q, k, v = torch.randn(11, 3), torch.randn(7, 3), torch.randn(7, 5)
    mask = torch.full((7,), level) + torch.randn(7)
    got = F.sigma_intention(q, k, v, mask.requires_grad_(grad), covariance="convex", alpha=1, scale=3**-0.5)
    if level < 0:
        torch.testing.assert_close(got, F.attention(q, k, v, mask))
    else:  # Sigma itself needs exp(100) here: not a number, never a plausible one
        assert not torch.isfinite(got).any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_of_a_zero_weight_in_the_softmax(dtype):
    q, k, v = (x.to(dtype) for x in draw(lead=()))
    weight = torch.ones(7, dtype=torch.float64)
    weight[2] = 0
    exact = weight.clone().requires_grad_()
    want = reference.sigma_intention(q.double(), k.double(), v.double(), weight=exact)
    want = torch.autograd.grad(want.sum(), exact)[0]
    half = weight.to(dtype).requires_grad_()
    got = torch.autograd.grad(F.sigma_intention(q, k, v, weight=half).float().sum(), half)[0]
    assert (got.double() - want).norm() < max(4 * torch.finfo(dtype).eps, 1e-5) * want.norm()
    moved = torch.zeros(7, dtype=torch.float64)
    moved[2] = 1
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        f = lambda w: F.sigma_intention(q.double(), k.double(), v.double(), weight=w).sum()  # noqa: E731
        _, tangent = torch.func.jvp(f, (weight,), (moved,))
    assert (tangent - want[2]).abs() < 1e-6 * want.norm()


@pytest.mark.parametrize("call", CALLS)
def test_causal_queries_never_touch_what_they_cannot_see(call):
    """M < N: the keys beyond M may hold anything."""
    q, k, v = draw((9, 4, 3, 5))
    want = getattr(F, call)(q, k, v, is_causal=True)
    k[..., 4:, :] = torch.nan
    v[..., 4:, :] = torch.inf
    torch.testing.assert_close(getattr(F, call)(q, k, v, is_causal=True), want)


@pytest.mark.parametrize("call", CALLS)
def test_zero_and_minus_infinity_is_the_bool_mask(call):
    q, k, v = draw()
    mask = torch.rand(2, 1, 1, 7) > 0.4
    floats = torch.where(mask, 0.0, -torch.inf).double()
    torch.testing.assert_close(getattr(F, call)(q, k, v, floats), getattr(F, call)(q, k, v, mask))


@pytest.mark.parametrize("call", SOLVED)
def test_a_float_mask_is_a_log_weight(call):
    q, k, v = draw()
    mask = torch.randn(2, 3, 1, 7, dtype=torch.float64)
    torch.testing.assert_close(getattr(F, call)(q, k, v, mask), getattr(F, call)(q, k, v, weight=mask[..., 0, :].exp()))


@pytest.mark.parametrize("call", SOLVED)
def test_a_shared_mask_is_never_solved_query_by_query(call, monkeypatch):
    """Decided by shape and stride, so an expanded mask costs nothing extra."""

    def forbidden(*_):
        raise AssertionError("query by query")

    monkeypatch.setattr(F, "per_query", forbidden)
    q, k, v = draw()
    mask = torch.ones(2, 1, 1, 7, dtype=torch.bool)
    getattr(F, call)(q, k, v, mask)
    getattr(F, call)(q, k, v, mask.expand(2, 3, 11, 7))
    with pytest.raises(AssertionError, match="query by query"):
        getattr(F, call)(q, k, v, mask.expand(2, 3, 11, 7).contiguous())


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("shape", [TALL, WIDE, (7, 7, 3, 5), (5, 3, 4, 2)])
def test_causal(call, shape):
    """Top-left aligned for any M and N; the Gram of query t holds keys <= t only."""
    agree(call, draw(shape, grad=True), None, causal=True)


@pytest.mark.parametrize("call", SOLVED)
@pytest.mark.parametrize("intercept", [False, True])
def test_causal_with_shared_mask_and_weight(call, intercept):
    mask = torch.tensor([True, False, True, True, True, False, True])
    weight = torch.rand(3, 7, dtype=torch.float64, requires_grad=True)
    agree(call, draw(grad=True), mask, causal=True, weight=weight, intercept=intercept, alpha=0.3)


@pytest.mark.parametrize("call", CALLS)
def test_causal_with_a_shared_mask_for_all_calls(call):
    agree(call, draw(grad=True), torch.tensor([True, False, True, True, True, False, True]), causal=True)


@pytest.mark.parametrize("call", CALLS)
def test_the_future_does_not_leak(call):
    q, k, v = draw((7, 7, 3, 5))
    before = getattr(F, call)(q, k, v, is_causal=True)
    k[..., 4, :] += 1
    v[..., 4, :] += 1
    after = getattr(F, call)(q, k, v, is_causal=True)
    assert torch.equal(before[..., :4, :], after[..., :4, :])
    assert not torch.equal(before[..., 4:, :], after[..., 4:, :])


@pytest.mark.parametrize("call", CALLS)
def test_chunks_do_not_show(call, monkeypatch):
    q, k, v = draw((7, 7, 3, 5))
    mask = torch.rand(7, 7) > 0.3
    mask[:, 0] = True
    whole = [getattr(F, call)(q, k, v, is_causal=True), getattr(F, call)(q, k, v, mask)]
    for module in (per_query, each_query):
        monkeypatch.setattr(module, "CHUNK", 6 * 7 * 5 * 2)  # two queries at a time
    monkeypatch.setattr(spans, "FIRST", 2)
    for a, b in zip(whole, [getattr(F, call)(q, k, v, is_causal=True), getattr(F, call)(q, k, v, mask)], strict=True):
        torch.testing.assert_close(a, b)


def test_causal_and_a_mask_per_query_is_refused():
    q, k, v = draw((7, 7, 3, 5))
    for call in ("linear_attention", "intention", "sigma_intention", "attention"):
        with pytest.raises(ValueError, match="put the causal triangle into the mask"):
            getattr(F, call)(q, k, v, torch.ones(7, 7, dtype=torch.bool), is_causal=True)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("alpha", [0.0, 1e-6, 1.0])
@pytest.mark.parametrize("how", ["bool", "float", "per query", "weight", "no points"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [TALL, WIDE])
def test_an_empty_context_gives_zero(call, alpha, how, dtype, shape):
    """... in all four calls at any alpha, with gradients that are zero or finite, never NaN."""
    n, m = shape[:2]
    q, k, v = (x.to(dtype).requires_grad_() for x in draw(shape))
    extra = {"alpha": alpha} if call in SOLVED else {}
    mask = None
    if how == "bool":
        mask = torch.zeros(1, n, dtype=torch.bool)
    elif how == "float":
        mask = torch.full((1, n), -torch.inf, dtype=dtype)
    elif how == "per query":
        mask = torch.zeros(m, n, dtype=torch.bool)
    elif how == "weight":
        if call not in SOLVED:
            pytest.skip("no weight argument")
        extra["weight"] = torch.zeros(n, dtype=dtype, requires_grad=True)
    else:
        k, v = k[..., :0, :], v[..., :0, :]
    out = getattr(F, call)(q, k, v, mask, **extra)
    assert out.shape == (2, 3, m, shape[3])
    assert torch.equal(out, torch.zeros_like(out))
    leaves = [q, k, v, extra["weight"]] if "weight" in extra and alpha > 0 else [q, k, v]
    grads = torch.autograd.grad(out.sum(), leaves, allow_unused=True)
    assert all(g is None or torch.isfinite(g).all() for g in grads)


@pytest.mark.parametrize("call", CALLS)
def test_some_elements_of_a_batch_may_be_empty(call):
    q, k, v = (x.requires_grad_() for x in draw())
    mask = torch.ones(2, 3, 1, 7, dtype=torch.bool)
    mask[0, 1] = False
    out = getattr(F, call)(q, k, v, mask)
    assert torch.equal(out[0, 1], torch.zeros_like(out[0, 1]))
    torch.testing.assert_close(out[1], getattr(F, call)(q[1], k[1], v[1]))
    assert all(torch.isfinite(g).all() for g in torch.autograd.grad(out.sum(), [q, k, v]))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("rows", ["shared", "each"])
@pytest.mark.parametrize("causal", [False, True])
def test_masked_rows_may_hold_nan(call, rows, causal):
    q, k, v = draw()
    mask = torch.ones(1 if rows == "shared" else 11, 7, dtype=torch.bool)
    mask[:, [2, 5]] = False
    if causal and rows == "each":
        pytest.skip("refused")
    want = getattr(F, call)(q, k, v, mask, is_causal=causal)
    k[..., [2, 5], :] = torch.nan
    v[..., [2, 5], :] = torch.inf
    k.requires_grad_()
    got = getattr(F, call)(q, k, v, mask, is_causal=causal)
    torch.testing.assert_close(got, want)
    assert torch.isfinite(torch.autograd.grad(got.sum(), k)[0]).all()


@pytest.mark.parametrize("shape", [TALL, WIDE])
@pytest.mark.parametrize("solver", ["auto", "primal", "dual", "qr", "pinv", "float64"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_not_a_number_never_becomes_one(shape, solver, bad, dtype):
    """Bad keys spoil their batch element, bad values their columns, bad queries their rows; nothing else."""
    q, k, v = (x.to(dtype) for x in draw(shape, lead=(3,)))
    clean = F.intention(q, k, v, solver=solver)

    spoilt = k.clone()
    spoilt[1, 0, 0] = bad
    out = F.intention(q, spoilt, v, solver=solver)
    assert not torch.isfinite(out[1]).any()
    torch.testing.assert_close(out[[0, 2]], clean[[0, 2]])

    spoilt = v.clone()
    spoilt[1, 0, 0] = bad
    out = F.intention(q, k, spoilt, solver=solver)
    assert not torch.isfinite(out[1, :, 0]).any()
    torch.testing.assert_close(out[[0, 2]], clean[[0, 2]])
    torch.testing.assert_close(out[1, :, 1:], clean[1, :, 1:])

    spoilt = q.clone()
    spoilt[1, 0, 0] = bad
    out = F.intention(spoilt, k, v, solver=solver)
    assert not torch.isfinite(out[1, 0]).any()
    torch.testing.assert_close(out[1, 1:], clean[1, 1:])

    weight = torch.ones(3, shape[0], dtype=dtype)
    weight[1, 0] = torch.inf
    out = F.intention(q, k, v, weight=weight, solver=solver)
    assert not torch.isfinite(out[1]).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_sigma_intention_with_bad_keys(bad):
    q, k, v = draw(lead=(3,))
    clean = F.sigma_intention(q, k, v)
    k[1, 0, 0] = bad
    out = F.sigma_intention(q, k, v)
    assert not torch.isfinite(out[1]).any()
    torch.testing.assert_close(out[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize("call", ["linear_attention", "intention"])
def test_dropout_leaves_points_out(call):
    """Each point counts 0 or 1 / (1 - p); the mean of the counts is 1."""
    q = torch.eye(5, dtype=torch.float64)
    k = torch.eye(5, dtype=torch.float64).expand(4000, 5, 5)
    v = torch.eye(5, dtype=torch.float64).expand(4000, 5, 5)
    p = 0.25
    out = getattr(F, call)(q, k, v, dropout_p=p, **({"alpha": 1.0} if call == "intention" else {}))
    seen = out.diagonal(dim1=-2, dim2=-1)
    count = 1 / (1 - p)
    full = count if call == "linear_attention" else count / (count + 1)  # w = 1: K'WV = c I, (c + 1)^-1 c
    assert set(seen.unique().tolist()) <= {0.0, full}
    assert abs((seen == 0).double().mean().item() - p) < 0.02


@pytest.mark.parametrize("options", [{}, {"intercept": True}, {"covariance": "convex"}, {"is_causal": True}])
@pytest.mark.parametrize("weighted", [False, True])
def test_dropout_is_a_weight(options, weighted):
    """Whether it is done by weights or by the rows of keys and values."""
    q, k, v = draw()
    n = min(k.shape[-2], q.shape[-2]) if "is_causal" in options else k.shape[-2]  # what causal queries see
    own = torch.rand(*k.shape[:-1], dtype=k.dtype) if weighted else torch.ones(k.shape[:-1], dtype=k.dtype)
    torch.manual_seed(3)
    out = F.intention(q, k, v, dropout_p=0.5, weight=own if weighted else None, **options)
    torch.manual_seed(3)
    kept = torch.zeros_like(own)
    kept[..., :n] = torch.empty(*k.shape[:-2], n, dtype=k.dtype).bernoulli_(0.5) / 0.5
    torch.testing.assert_close(out, F.intention(q, k, v, weight=own * kept, **options))


@pytest.mark.parametrize("call", CALLS)
def test_dropout_zero_changes_nothing_and_seeds_repeat(call):
    q, k, v = draw()
    f = getattr(F, call)
    assert torch.equal(f(q, k, v, dropout_p=0.0), f(q, k, v))
    torch.manual_seed(3)
    first = f(q, k, v, dropout_p=0.5)
    torch.manual_seed(3)
    assert torch.equal(first, f(q, k, v, dropout_p=0.5))
    assert not torch.equal(first, f(q, k, v))


@pytest.mark.parametrize("alpha", [0.01, 1e-4])
@pytest.mark.parametrize("shape", [(8, 5, 16, 3), (13, 5, 3, 2)])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": True}, {"intercept": True}])
def test_a_weight_of_zero_leaves_a_point_out_of_the_softmax(alpha, shape, options):
    """Whether or not its derivative is wanted; scores of points that are not there may be anything."""
    n = shape[0]
    q, k, v = draw(shape, lead=())
    there = torch.arange(n) < n - 3
    options = dict(options)
    if options.pop("attn_mask", None):
        options["attn_mask"] = torch.randn(shape[1], n, dtype=torch.float64)
    weight = there.double()
    kept = {name: x[:, there] if name == "attn_mask" else x for name, x in options.items()}
    want = F.sigma_intention(q, k[there], v[there], alpha=alpha, **kept)
    for grad in (False, True):
        got = F.sigma_intention(q, k, v, alpha=alpha, weight=weight.clone().requires_grad_(grad), **options)
        torch.testing.assert_close(got, want)
    narrow = [x.float() for x in (q, k, v)]
    options = {name: x.float() if name == "attn_mask" else x for name, x in options.items()}
    got = F.sigma_intention(*narrow, alpha=alpha, weight=weight.float().requires_grad_(), **options)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_the_derivatives_of_a_weight_at_zero(causal):
    """sum w exp(s) v / sum w exp(s) has derivatives of any order at w = 0."""
    q, k, v = draw((7, 7, 3, 2), lead=())
    weight = torch.tensor([1.0, 0.0, 2.0, 0.0, 0.5, 1.0, 0.0], dtype=torch.float64)

    def loss(w):
        return F.sigma_intention(q, k, v, alpha=0.1, weight=w, is_causal=causal).square().sum()

    def formula(w):
        shown = torch.ones(7, 7, dtype=w.dtype).tril() if causal else torch.ones(7, 7, dtype=w.dtype)
        counts = (shown * w).unsqueeze(1)  # (query, 1, N)
        sigma = (k.mT * counts) @ k + 0.1 * torch.eye(3, dtype=w.dtype)
        return naive.sigma_intention(q.unsqueeze(1), k, v, sigma, counts.squeeze(1)).square().sum()

    torch.testing.assert_close(torch.func.grad(loss)(weight), torch.func.grad(formula)(weight))
    if not causal:
        torch.testing.assert_close(torch.func.hessian(loss)(weight), torch.func.hessian(formula)(weight))


@pytest.mark.parametrize("call", CALLS)
def test_a_leaf_of_stride_zero_gets_the_gradient_of_every_row(call):
    q, k, v = draw(lead=())
    row = torch.randn(1, 7, dtype=torch.float64)

    def slope(mask):
        return torch.autograd.grad(getattr(F, call)(q, k, v, mask).square().sum(), mask)[0]

    leaf = row.expand(11, 7).detach().requires_grad_()
    assert leaf.stride(0) == 0
    torch.testing.assert_close(slope(leaf), slope(row.expand(11, 7).clone().requires_grad_()))
    torch.testing.assert_close(slope(leaf).sum(0, keepdim=True), slope(row.clone().requires_grad_()))


@pytest.mark.parametrize("sizes", [(131, 131), (131, 97), (97, 131), (5, 3), (1, 1)])
@pytest.mark.parametrize("kind", [None, "bool", "float"])
@pytest.mark.parametrize("groups", [1, 3])
def test_causal_linear_attention_in_chunks(sizes, kind, groups):
    m, n = sizes
    q, k, v = draw((n, m, 5, 3), lead=(2, 2), grad=True)
    q = torch.randn(2, 2 * groups, m, 5, dtype=torch.float64, requires_grad=True)
    mask = None if kind is None else torch.randn(2, 1, 1, n, dtype=torch.float64)
    mask = mask > 0 if kind == "bool" and mask is not None else mask
    got = F.linear_attention(q, k, v, mask, is_causal=True, scale=0.5, enable_gqa=groups > 1)
    counts = 1.0 if mask is None else mask.double() if kind == "bool" else mask.exp()
    shared = [x.repeat_interleave(groups, 1) for x in (k, v)]
    want = 0.5 * ((q @ shared[0].mT).tril() * counts) @ shared[1]
    torch.testing.assert_close(got, want)
    upstream = torch.randn_like(want)
    torch.testing.assert_close(
        torch.autograd.grad(got, (q, k, v), upstream), torch.autograd.grad(want, (q, k, v), upstream)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [(11, 19), (7, 301)])
def test_the_slope_of_a_mask_within_classes_beside_a_small_alpha(size, dtype):
    """dL/dw_i = (k_i Z) v_i' - (x_i Z)(x_i W)', x = k - class mean, which does not cancel; a mask has w dL/dw."""
    n, d = size
    gen = torch.Generator().manual_seed(0)
    q, k, mask = (torch.randn(*x, generator=gen) for x in ((5, d), (n, d), (n,)))
    k, v, upstream = 20 * k, torch.eye(3)[torch.arange(n) % 3], torch.randn(5, 3, generator=gen)
    leaf = mask.to(dtype).requires_grad_()
    out = F.intention(*(x.to(dtype) for x in (q, k, v)), leaf.expand(5, n), alpha=1e-6, covariance="within")
    (got,) = torch.autograd.grad(out, leaf, upstream.to(dtype))
    q, k, v, weight, upstream = (x.double() for x in (q, k, v, mask.double().exp(), upstream))
    x = k - v @ ((v * weight[:, None]).mT @ k / (weight @ v)[:, None])
    _, s, vt = torch.linalg.svd(weight.sqrt()[:, None] * x)
    inverse = 1 / (torch.nn.functional.pad(s.square(), (0, d - len(s))) + 1e-6)
    w, z = ((vt.mT * inverse) @ (vt @ y) for y in (k.mT @ (weight[:, None] * v), q.mT @ upstream))
    want = weight * ((k @ z * v).sum(-1) - (x @ z * (x @ w)).sum(-1))
    torch.testing.assert_close(got.double(), want, rtol=0, atol=1e-4 * want.abs().max().item())
