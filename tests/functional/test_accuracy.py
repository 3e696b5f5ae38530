"""Never silently wrong: the fuzz, the ladder, the warning and what return_info tells."""

import warnings
from contextlib import nullcontext
from functools import partial

import mpmath  # of sympy, which torch needs
import pytest
import torch

import fuzzing
import intention
import reference
from fuzz import oracle
from intention import functional as F
from intention.solve.factor import LIMITS, Limits
from intention.solve.native import library

ROUTE = {name: i for i, name in enumerate(F.ROUTES)}


@pytest.mark.parametrize("part", range(4))
def test_fuzz_of_predictions(part):
    """A seeded part of `python tests/fuzzing.py --count 5000`."""
    errors, silent, raised, _, routes = fuzzing.survey(250, grad=False, start=250 * part)
    assert not silent
    assert not raised
    assert (torch.tensor(errors["prediction"]) < 1e-5).double().mean() >= 0.99
    assert {"primal", "dual", "refined", "float64"} <= set(routes)


@pytest.mark.parametrize("part", range(4))
def test_fuzz_of_gradients(part):
    """A seeded part of `python tests/fuzzing.py --count 5000 --grad`."""
    errors, silent, raised, _, _ = fuzzing.survey(250, grad=True, start=250 * part)
    assert not silent
    assert not raised
    for values in errors.values():
        assert (torch.tensor(values) < 1e-4).double().mean() >= 0.99


def test_the_fuzz_can_fail(monkeypatch):
    """Accepting every factor, as a check of LAPACK's info alone does, is caught."""
    for dual in (False, True):
        monkeypatch.setitem(LIMITS, (torch.float32, dual), Limits(1e30, 1e30, 1.0))
    _, silent, _, _, _ = fuzzing.survey(250, grad=False)
    assert silent


@pytest.mark.parametrize(("seed", "start"), [(552, 0), (1329, 0), (1541, 0), (2715, 200_000), (1858, 200_000)])
def test_the_plain_factor_is_left_before_it_shows(seed, start):
    """Ratios of 100 to 200: their factor leaves 1e-5 to 7e-5."""
    assert fuzzing.run_case(fuzzing.make_case(start + seed, False), False).errors["prediction"] < 1e-5


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize(("n", "alpha"), [(48, 0.1), (60, 1.0), (64, 1.0), (72, 1.0)])
def test_noise_needs_no_refinement(n, alpha, native):
    """The largest eigenvalue of noise is less than half of its bound: where that would decide, it is estimated."""
    query, key, value = torch.randn(3, 32, n, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    with nullcontext() if native else library.off():
        out, info = F.intention(query, key, value, alpha=alpha, return_info=True)
    assert (info.route <= ROUTE["dual"]).all()
    exact = reference.intention(*(x.double() for x in (query, key, value)), alpha=alpha)
    assert (out - exact).norm(dim=(-2, -1)).max() < 1e-5 * exact.norm(dim=(-2, -1)).min()


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("lonely", [1.0, 30.0])
def test_the_estimate_of_the_largest_eigenvalue_is_not_too_small(native, lonely):
    """Keys with a mean, beside one large feature that has nothing to do with the largest eigenvalue."""
    key = torch.randn(40, 64, 33, generator=torch.Generator().manual_seed(0)) + 1
    key[..., 0] = lonely * torch.randn(40, 64, generator=torch.Generator().manual_seed(1))
    with nullcontext() if native else library.off():
        _, info = F.intention(key[:, :1], key, key[..., :32], alpha=0.1, return_info=True)
    gram = key.double().mT @ key.double() + 0.1 * torch.eye(33, dtype=torch.float64)
    grown = torch.linalg.inv(gram).diagonal(0, -2, -1).amax(-1)
    ratio = info.condition / (torch.linalg.matrix_norm(gram, 2) * grown)
    assert (info.condition > 80).all()
    assert ratio.min() > 0.999
    assert ratio.max() < 1.3


def conditioned(condition, n=20, d=6, m=5, k=3, batch=1):
    left = torch.linalg.qr(torch.randn(batch, n, d, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(batch, d, d, dtype=torch.float64))[0]
    key = (left * condition ** -torch.linspace(0, 1, d, dtype=torch.float64)) @ right
    return [x.float() for x in (torch.randn(batch, m, d), key, torch.randn(batch, n, k))]


@pytest.mark.parametrize("dual", [False, True])
def test_a_mixed_batch_takes_every_route(dual):
    """Each element by the route it needs, values and gradients, and the report says which."""
    parts = [conditioned(c, n=6 if dual else 20) for c in (1.5, 20.0 if dual else 30.0, 300.0, 1e5)]
    q, k, v = (torch.cat(x) for x in zip(*parts, strict=True))
    if dual:  # the same keys and queries in more dimensions than points
        wide = torch.linalg.qr(torch.randn(9, 9))[0][:6]
        q, k = q @ wide, k @ wide
    leaves = [q, k, v, torch.full((4,), 1e-9)]
    for x in leaves:
        x.requires_grad_()
    out, info = F.intention(*leaves[:3], alpha=leaves[3], return_info=True)
    low = ["dual", "float64"] if dual else ["primal", "refined"]
    assert [F.ROUTES[r] for r in info.route] == [*low, "float64", "float64"]
    assert (info.condition[1:] > info.condition[:-1]).all()
    assert (info.error < 1e-3).all()
    upstream = torch.randn_like(out)
    got = torch.autograd.grad(out, leaves, upstream)
    for i in range(4):
        q, k, v, alpha = (x[i].detach().double() for x in leaves)
        case = fuzzing.Case(q, k, v, torch.ones(len(k), dtype=torch.float64), alpha.item(), upstream[i].double(), "")
        assert fuzzing.relative(out[i].detach(), fuzzing.oracle(case)) < 1e-5
        for ours, exact in zip(got, fuzzing.oracle_gradients(case), strict=False):
            assert fuzzing.relative(ours[i], exact) < 1e-4


@pytest.mark.parametrize("columns", [1, 40])
@pytest.mark.parametrize(("dtype", "sizes"), [(torch.float32, range(2, 20)), (torch.float64, (24, 28))])
def test_growth_along_a_triangular_factor(dtype, sizes, columns):
    """Keys Q R with -1 above the diagonal of R: every pivot is 1 and the condition grows as 4^d."""
    for d in sizes:
        upper = torch.eye(d, dtype=torch.float64) - torch.ones(d, d, dtype=torch.float64).triu(1)
        key = (torch.linalg.qr(torch.randn(40, d, dtype=torch.float64))[0] @ upper).to(dtype)
        q, v = torch.randn(5, d, dtype=dtype), torch.randn(40, columns, dtype=dtype)
        out = F.intention(q, key, v, alpha=0)
        case = fuzzing.Case(q.double(), key.double(), v.double(), torch.ones(40), 0.0, out, "")
        assert fuzzing.relative(out, fuzzing.oracle(case)) < 1e-5


@pytest.mark.parametrize("alpha", [1.0, 1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("shape", [(10, 200), (200, 10)])
def test_differentiable_gradients_with_weights(alpha, shape):
    """create_graph=True takes another path: its first derivatives are as good, and so is forward mode."""
    n, d = shape
    q, k, v, w = torch.randn(5, d), torch.randn(n, d), torch.randn(n, 3), torch.rand(n) * 0.2 + 0.9
    upstream = torch.randn(5, 3)
    case = fuzzing.Case(*(x.double() for x in (q, k, v, w)), alpha, upstream.double(), "")
    exact = fuzzing.oracle_gradients(case)
    leaves = [x.requires_grad_() for x in (q, k, v, torch.tensor(alpha), w)]
    out = F.intention(q, k, v, alpha=leaves[3], weight=w)
    for got, want in zip(torch.autograd.grad(out, leaves, upstream, create_graph=True), exact, strict=True):
        assert fuzzing.relative(got.detach(), want) < 1e-4
    tangents = [torch.randn_like(x) * 0.1 for x in leaves]
    tangents[3] = tangents[3] * 0
    _, moved = torch.func.jvp(  # pyright: ignore[reportAssignmentType]
        lambda q, k, v, a, w: F.intention(q, k, v, alpha=a, weight=w),
        tuple(x.detach() for x in leaves),
        tuple(tangents),
    )
    want = sum((t.double() * g).sum() for t, g in zip(tangents, exact, strict=True))
    scale = sum((t.double() * g).abs().sum() for t, g in zip(tangents, exact, strict=True))
    assert ((moved * upstream).double().sum() - want).abs() < 1e-4 * scale


@pytest.mark.parametrize("size", [1.0, 1e3, 1e5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_weight_gradient_at_small_relative_alpha(size, dtype):
    q, k, v, w = torch.randn(5, 20), torch.randn(10, 20) * size, torch.randn(10, 3), torch.rand(10) + 0.1
    g = torch.randn(5, 3)
    case = fuzzing.Case(*(x.double() for x in (q, k, v, w)), float(torch.tensor(1e-6)), g.double(), "")
    weight = w.to(dtype).requires_grad_()
    out = F.intention(q.to(dtype), k.to(dtype), v.to(dtype), weight=weight, alpha=case.alpha)
    got = torch.autograd.grad(out, weight, g.to(dtype))[0]
    assert fuzzing.relative(got, fuzzing.oracle_gradients(case)[4]) < 1e-5


def test_a_query_that_is_not_a_number_does_not_hide_the_others():
    q, k, v = conditioned(1e9)
    q[0, 0] = torch.nan
    with pytest.warns(intention.AccuracyWarning):
        _, info = F.intention(q, k, v, alpha=0, return_info=True)
    assert F.ROUTES[info.route] == "pinv"


def test_the_warning_names_the_callers_line():
    q, k, v = conditioned(1e9)
    with pytest.warns(intention.AccuracyWarning) as caught:
        F.intention(q, k, v, alpha=0)
    assert caught[0].filename == __file__


def test_sigma_intention_reports_each_element():
    q, k, v = (torch.cat(x) for x in zip(conditioned(2.0), conditioned(100.0), strict=True))
    _, info = F.sigma_intention(q, k, v, alpha=1e-6, scale=1e-3, return_info=True)
    assert [F.ROUTES[r] for r in info.route] == ["primal", "float64"]
    assert 1 < info.condition[0] < 30 < info.condition[1]


def test_report_of_an_easy_and_a_hard_element():
    q, k, v = conditioned(2.0)
    _, info = F.intention(q, k, v, alpha=0.1, return_info=True)
    assert isinstance(info, F.Info)
    assert info.route.dtype == torch.int8
    assert F.ROUTES[info.route] == "primal"
    assert 1 <= info.condition.item() < 30
    assert info.error.item() < 1e-5
    _, hard = F.intention(*conditioned(1e4), alpha=1e-10, return_info=True)
    assert F.ROUTES[hard.route] == "float64"
    assert hard.condition.item() > 1e6
    assert info.route.shape == (1,)
    _, batched = F.intention(*(x.expand(2, 3, *x.shape[1:]) for x in (q, k, v)), return_info=True)
    assert batched.error.shape == (2, 3)


def test_condition_is_bounded():
    """The largest eigenvalue from above, by m + s sqrt(n - 1); that of the inverse from below, by a mean of all n."""
    for c in (2.0, 10.0, 100.0, 1e4):
        q, k, v = conditioned(c)
        _, info = F.intention(q, k, v, alpha=1e-9, return_info=True)
        values = torch.linalg.eigvalsh(k[0].double().mT @ k[0].double() + 1e-9 * torch.eye(6))
        above = values.mean() + values.std(correction=0) * 5**0.5
        assert values[-1] / values[0] / 6 <= info.condition.item() * 1.01
        assert info.condition.item() <= above / values[0] * 1.01


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("mean", [1.0, 2.0, 4.0])
@pytest.mark.parametrize(("n", "d"), [(131, 61), (401, 197), (31, 61)])
def test_the_error_of_keys_far_from_the_origin_is_honest(n, d, mean, native):
    """One direction of Sigma grows with d: no entry of its diagonal shows that."""
    q, k, v = torch.randn(7, d), torch.randn(n, d) + mean, torch.randn(n, 3)
    with nullcontext() if native else library.off():
        out, info = F.intention(q, k, v, return_info=True)
    want = reference.intention(q.double(), k.double(), v.double())
    error = (out.double() - want).norm() / want.norm()
    assert error < 1e-5
    assert error < info.error


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("columns", [3, 40])
@pytest.mark.parametrize(("n", "d"), [(7, 13), (29, 61)])
def test_points_left_out_do_not_raise_the_condition(n, d, columns, native):
    """Their rows of K~K~' + alpha I are those of alpha I; the answer is that of the others."""
    q, k, v = torch.randn(5, d), torch.randn(n, d), torch.randn(n, columns)
    weight = torch.rand(n) + 0.5
    weight[2::3] = 0
    there = weight > 0
    with nullcontext() if native else library.off():
        out, info = F.intention(q, k, v, weight=weight, alpha=1e-4, return_info=True)
        few, expected = F.intention(q, k[there], v[there], weight=weight[there], alpha=1e-4, return_info=True)
        none = F.intention(q, k, v, weight=torch.zeros(n), alpha=1e-4, return_info=True)
    assert F.ROUTES[info.route] == "dual"
    assert abs(info.condition / expected.condition - 1) < (0.5 if n == 29 and columns == 3 else 1e-4)  # one is probed
    torch.testing.assert_close(out, few, rtol=1e-4, atol=1e-5)
    assert none[0].count_nonzero() == 0
    assert none[1].condition == 1


def test_warning_when_the_rounding_of_the_keys_decides():
    q, k, v = conditioned(1e9)
    with pytest.warns(
        intention.AccuracyWarning, match=r"estimated relative error .* in 1 of 1 problems .*larger alpha"
    ):
        out, info = F.intention(q, k, v, alpha=0, return_info=True)
    assert info.error.item() > 1e-3
    assert torch.isfinite(out).all()


def test_the_warning_can_be_filtered_and_made_an_error():
    q, k, v = conditioned(1e9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", intention.AccuracyWarning)
        F.intention(q, k, v, alpha=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error", intention.AccuracyWarning)
        with pytest.raises(intention.AccuracyWarning):
            F.intention(q, k, v, alpha=0)


@pytest.mark.parametrize("d", [3, 8, 24, 40])
def test_the_minimum_norm_fit_of_points_that_do_not_span(d):
    """The last pivot of such a Gram is rounding of either sign; where it is positive, a factor in float64 exists."""
    gen = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(100, n, k, generator=gen) for n, k in ((5, d), (d + 2, d), (d + 2, 2)))
    key[:, d - 1 :] = 0
    out, info = F.intention(query, key, value, alpha=0.0, return_info=True)
    want = query.double() @ torch.linalg.pinv(key.double()) @ value.double()
    assert (info.route == ROUTE["pinv"]).all()
    assert ((out - want).norm(dim=(-2, -1)) < 1e-6 * want.norm(dim=(-2, -1))).all()


def test_pinv_drops_directions_below_rounding():
    """What the warning advises: low-rank float32 keys behave like torch.linalg.pinv in float32."""
    base = torch.randn(12, 2) @ torch.randn(2, 6)
    q, v = torch.randn(5, 2) @ torch.randn(2, 6), torch.randn(12, 3)
    out = F.intention(q, base, v, alpha=0, solver="pinv")
    want = q.double() @ torch.linalg.pinv(base.double(), rtol=1e-5) @ v.double()
    assert (out.double() - want).norm() < 1e-4 * want.norm()


def test_float64_inputs_climb_to_the_svd():
    left = torch.linalg.qr(torch.randn(12, 5, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(5, 5, dtype=torch.float64))[0]
    k = (left * torch.logspace(0, -8, 5, dtype=torch.float64)) @ right
    q, v = torch.randn(4, 5, dtype=torch.float64), torch.randn(12, 2, dtype=torch.float64)
    out, info = F.intention(q, k, v, alpha=0, return_info=True)
    assert F.ROUTES[info.route] == "pinv"
    u, s, vt = torch.linalg.svd(k, full_matrices=False)
    want = q @ vt.mT @ ((u.mT @ v) / s[:, None])
    assert (out - want).norm() < 1e-6 * want.norm()


@pytest.mark.parametrize(("solver", "tolerance"), [("float64", 1e-6), ("qr", 1e-2), ("pinv", 1e-2)])
def test_named_routes_on_an_ill_conditioned_problem(solver, tolerance):
    """QR and SVD never square the condition; in float32 that still leaves about eps * cond(K)."""
    q, k, v = conditioned(1e3)
    want = reference.intention(q.double(), k.double(), v.double(), alpha=1e-9)
    out, info = F.intention(q, k, v, alpha=1e-9, solver=solver, return_info=True)
    assert F.ROUTES[info.route] == solver
    assert (out.double() - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize("solver", ["primal", "dual", "qr"])
def test_a_named_solver_that_fails_gives_nan(solver):
    q, v = torch.randn(5, 4), torch.randn(4, 3)
    singular = torch.zeros(4, 4)
    assert F.intention(q, singular, v, alpha=0, solver=solver).isnan().all()


def test_the_smaller_gram_is_used():
    """N < d runs in the dual: also the more accurate choice (25 points in 8192 dimensions must run)."""
    q, k, v = torch.randn(2, 8192), torch.randn(25, 8192), torch.randn(25, 5)
    _, info = F.intention(q, k, v, return_info=True)
    assert F.ROUTES[info.route] == "dual"
    q, k, v = torch.randn(3, 1000), torch.randn(10, 1000), torch.randn(10, 2)
    want = reference.intention(q.double(), k.double(), v.double(), alpha=1e-4)
    assert (F.intention(q, k, v, alpha=1e-4).double() - want).norm() < 1e-5 * want.norm()
    assert (F.intention(q, k, v, alpha=1e-4, solver="primal").double() - want).norm() > 1e-3 * want.norm()


@pytest.mark.parametrize("scale", [1e-25, 1e-10, 1e12, 1e25])
def test_extreme_scales(scale):
    """Gram matrices that under- or overflow in float32 are redone in float64."""
    q, k, v = (x.float() for x in (torch.randn(5, 3), torch.randn(9, 3), torch.randn(9, 2)))
    out = F.intention(q, (k * scale).float(), v, alpha=0)
    want = reference.intention(q.double(), (k * scale).float().double(), v.double(), alpha=0.0)
    assert (out.double() - want).norm() < 1e-5 * want.norm()


def test_sigma_intention_says_when_its_scores_are_lost():
    q, k, v = conditioned(1e8)
    for call in (F.sigma_intention, torch.compile(F.sigma_intention, backend="eager", fullgraph=True)):
        with pytest.warns(intention.AccuracyWarning):
            call(q, k, v, alpha=0)


def exact_sigma_intention(q, k, v, alpha):
    """softmax(Q (K'K + alpha I)^-1 K') V of matrices, with 60 digits."""
    with mpmath.workdps(60):
        q, k = (mpmath.matrix(x.double().tolist()) for x in (q, k))
        scores = q * mpmath.inverse(k.T * k + alpha * mpmath.eye(k.cols)) * k.T
        rows = [[scores[i, j] - max(scores[i, :]) for j in range(k.rows)] for i in range(q.rows)]
        shares = torch.tensor([[float(mpmath.exp(x)) for x in row] for row in rows], dtype=torch.float64)
    return shares / shares.sum(-1, keepdim=True) @ v.double()


@pytest.mark.parametrize(
    ("condition", "alpha", "size"), [(1e6, 0, 1.0), (1e6, 0, 1e-6), (1e5, 1e-9, 1e-5), (3e3, 1e-6, 1.0)]
)
@pytest.mark.parametrize("weighted", [False, True])
def test_sigma_intention_of_large_scores(condition, alpha, size, weighted):
    """Q Sigma^-1 rounded to float32 would move the scores by up to 1e5."""
    q, k, v = conditioned(condition)
    q = q * size
    weight = torch.ones(1, 20, requires_grad=True) if weighted else None
    out, info = F.sigma_intention(q, k, v, alpha=alpha, weight=weight, return_info=True)
    want = exact_sigma_intention(q[0], k[0], v[0], alpha)
    assert (out[0].double() - want).norm() < 1e-5 * want.norm()
    assert info.error < 1e-3


@pytest.mark.parametrize("option", ["causal", "masked", "within", "weight", "intercept", "dual"])
def test_sigma_intention_checks_the_rounding_of_its_scores(option):
    """Each route alike: where float32 would not do the call runs in float64, values and gradients."""
    n, d = (11, 13) if option == "dual" else (29, 13)
    q, k, v = torch.randn(2, n, d), torch.randn(2, n, d), torch.randn(2, n, 3)
    options: dict = {"alpha": 1e-6}
    if option in ("causal", "within"):
        options["is_causal"] = True
    if option == "masked":
        options["attn_mask"] = torch.rand(n, n) < 0.3
    if option == "within":
        options["covariance"], v = "within", torch.eye(3)[torch.arange(n) % 3].expand(2, n, 3)
    if option == "weight":
        options["weight"] = (torch.arange(n) < 7).float()
    if option == "intercept":
        options["intercept"], k = True, k + 50
    if option in ("intercept", "dual"):
        q = q * 1e4
    q.requires_grad_(), k.requires_grad_()  # pyright: ignore[reportUnusedExpression]
    out, info = F.sigma_intention(q, k, v, return_info=True, **options)
    wide = [x.detach().double().requires_grad_() for x in (q, k)]
    want = F.sigma_intention(*wide, v.double(), **options)
    assert (out - want).norm() < 1e-6 * want.norm()
    assert info.error.dtype == torch.float32
    assert info.error.amax() < 1e-6
    assert info.route.amin() >= F.ROUTES.index("float64")
    g = torch.randn_like(out)
    grads = torch.autograd.grad(out, (q, k), g)
    for grad, right in zip(grads, torch.autograd.grad(want, wide, g.double()), strict=True):
        assert (grad - right).norm() < 1e-5 * right.norm()


def test_the_rounding_of_scores_is_seen_inside_transforms():
    q, k, v = torch.randn(3, 5, 13), torch.randn(3, 7, 13), torch.randn(3, 7, 2)
    weight = torch.ones(7)  # with weights the primal form is used
    call = partial(F.sigma_intention, alpha=1e-6, weight=weight)
    want = call(q.double(), k.double(), v.double())
    assert (torch.func.vmap(call)(q, k, v) - want).norm() < 1e-6 * want.norm()
    slope = torch.func.vmap(torch.func.grad(lambda *x: call(*x).square().sum()))
    right = slope(q.double(), k.double(), v.double())
    assert (slope(q, k, v) - right).norm() < 1e-5 * right.norm()


def test_sigma_intention_of_ill_conditioned_keys():
    q, k, v = conditioned(300.0)
    out, info = F.sigma_intention(q, k, v, alpha=1e-6, scale=1e-3, return_info=True)
    want = reference.sigma_intention(q.double(), k.double(), v.double(), alpha=1e-6, scale=1e-3)
    assert F.ROUTES[info.route] == "float64"
    assert (out.double() - want).norm() < 1e-4 * want.norm()


@pytest.mark.parametrize("alpha", [1e-2, 1e-4, 1e-6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1.0, 1e-6])
def test_gradients_of_causal_sigma_intention_with_few_keys(alpha, dtype, size):
    """Fewer tokens than dimensions: Q Sigma^-1 is 1 / alpha where no key is, and what cancels is not 1 / alpha^2."""
    q, k, v = torch.randn(2, 5, 13), 3 * torch.randn(2, 5, 13), torch.randn(2, 5, 2)
    weight = torch.tensor([1.0, 2.0, 0.5, 0.25, 1.0])
    own = [x.to(dtype).requires_grad_() for x in (size * q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in own]
    rows = []
    for t in range(1, 6):  # the dual form: the scores are Q K'(W K K' + alpha I)^-1
        seen, w = wide[1][:, :t], weight[:t].double()
        gram = w.unsqueeze(-1) * (seen @ seen.mT) + alpha * torch.eye(t, dtype=torch.float64)
        scores = torch.linalg.solve(gram, wide[0][:, t - 1 : t] @ seen.mT, left=False)
        rows.append(torch.softmax(scores + w.log(), -1) @ wide[2][:, :t])
    want = torch.cat(rows, 1)
    out = F.sigma_intention(*own, weight=weight.to(dtype), alpha=alpha, is_causal=True)
    assert (out - want).norm() < 1e-5 * want.norm()
    g = torch.randn_like(want).to(dtype)
    grads = torch.autograd.grad(out, own, g)
    for grad, right in zip(grads, torch.autograd.grad(want, wide, g.double()), strict=True):
        assert (grad - right).norm() < 1e-5 * right.norm()


def along_the_keys(query, key, value, count, alpha, centre):
    """softmax(Q Sigma^-1 K') V for counts (M, N), N < d, by the SVD of the keys: nothing that no key has takes part."""
    key = key.expand(count.shape[0], *key.shape)
    if centre:
        key = key - oracle.mean(key, count)
    _, s, vt = torch.linalg.svd(key * count.sqrt().unsqueeze(-1), full_matrices=False)
    inverse = torch.where(s > 1e-13 * s.amax(-1, keepdim=True), 1 / (s.square() + alpha), 0.0)
    moved = (vt @ query.unsqueeze(-1)).squeeze(-1) * inverse
    scores = ((key @ vt.mT) * moved.unsqueeze(-2)).sum(-1)
    odds = torch.where(count > 0, scores + torch.where(count > 0, count, 1.0).log(), -torch.inf)
    return torch.softmax(odds, -1) @ value


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("alpha", [1e-3, 1e-6, 1e-8])
@pytest.mark.parametrize("kind", ["weight", "attn_mask", "is_causal", "intercept", "both"])
def test_the_gradient_of_a_small_alpha_where_keys_leave_most_of_a_query_unseen(kind, alpha, dtype):
    """<Q Sigma^-1, g Sigma^-1> is Q / alpha times the rounding of g / alpha along what no key has."""
    n, m, d, k = 5, 7, 11, 3
    query, key, value, upstream = (torch.randn(s, dtype=dtype) for s in ((m, d), (n, d), (n, k), (m, k)))
    key = key + (0 if kind == "both" else 30)
    count, options = torch.ones(m, n, dtype=torch.float64), {}
    if kind == "weight":
        options["weight"] = torch.tensor([1.0, 0.0, 0.3, 0.7, 1.0], dtype=dtype)
        count = count * options["weight"].double()
    if kind == "attn_mask":
        options["attn_mask"] = torch.randn(m, n, dtype=dtype)
        count = count * options["attn_mask"].double().exp()
    if kind in ("is_causal", "both"):
        options["is_causal"], count = True, count.tril()
    if kind in ("intercept", "both"):
        options["intercept"] = True
    ours = torch.tensor(alpha, dtype=dtype, requires_grad=True)
    (got,) = torch.autograd.grad(F.sigma_intention(query, key, value, alpha=ours, **options), ours, upstream)
    exact = ours.detach().double().requires_grad_()
    wide = [x.double() for x in (query, key, value)]
    out = along_the_keys(*wide, count, exact, "intercept" in options)
    (want,) = torch.autograd.grad(out, exact, upstream.double())
    assert abs(got.double() / want - 1) < 1e-4


@pytest.mark.parametrize("shape", [(6, 12), (23, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_without_alpha_that_nobody_can_know_are_said_to_be(shape, dtype):
    """Sigma^+ of keys of condition 1e8 has one of 1e16: its scores are large and rounding decides them."""
    gen = torch.Generator().manual_seed(0)
    rank = min(shape)
    left, right = (torch.linalg.qr(torch.randn(n, rank, generator=gen, dtype=torch.float64))[0] for n in shape)
    key = 0.1 * (left * torch.logspace(0, -8, rank, dtype=torch.float64)) @ right.mT
    query, value = torch.randn(7, shape[1], generator=gen), torch.randn(shape[0], 3, generator=gen)
    with pytest.warns(intention.AccuracyWarning):
        F.sigma_intention(query.to(dtype), key.to(dtype), value.to(dtype), alpha=0)
