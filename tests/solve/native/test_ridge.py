"""The compiled kernels against plain torch: every shape, layout and option, values and gradients."""

import itertools

import pytest
import torch
from torch import Tensor

from intention import functional as F
from intention.solve.factor import Factor, solve, wants_inverse
from intention.solve.ladder import FLOAT64
from intention.solve.native import ridge as native
from intention.solve.native.call import PLAIN, SOME_LEFT, SOME_REFINED
from intention.solve.native.library import library
from intention.solve.problem import Plan, Problem, fit, predict, refine
from intention.solve.ridge import by_route
from intention.solve.ridge.gradients import Mode, Needs, pullback
from intention.solve.transform import transform
from intention.solve.transform.transform import Factored

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")

TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}
SIZES = (1, 2, 3, 5, 8, 10, 16, 17, 31, 32, 33, 64, 65, 100, 129)
SHAPES = [  # N, M, d, k: every size on every side, and the shapes of the benchmarks
    *(tuple(SIZES[(i + step) % len(SIZES)] for step in (0, 4, 9, 13)) for i in range(len(SIZES))),
    *(tuple(SIZES[(i * 7 + step) % len(SIZES)] for step in (1, 11, 3, 6)) for i in range(len(SIZES))),
    *((10, 10, 8, 1), (25, 75, 64, 5), (128, 128, 64, 64), (10, 10, 32, 32), (7, 5, 2000, 3), (600, 70, 65, 130)),
]
OPTIONS = list(itertools.product((False, True), repeat=3))  # intercept, weight, gain
DTYPES = (torch.float32, torch.float64)


def make(shape: tuple[int, ...], dtype: torch.dtype, weight: bool, gain: bool, batch_size: int = 5) -> Problem:
    n, m, d, k = shape
    gen = torch.Generator().manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=gen, dtype=dtype)

    def uniform(*size: int) -> Tensor:
        return torch.rand(*size, generator=gen, dtype=dtype) + 0.1

    return Problem(
        normal(batch_size, m, d),
        normal(batch_size, n, d),
        normal(batch_size, n, k),
        uniform(batch_size, n) if weight else None,
        (uniform(batch_size) + 1) * max(n, d),  # well conditioned: differences are rounding
        uniform(batch_size) if gain else None,
    )


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_values_and_gradients_are_those_of_torch(shape, dtype):
    for dual, (intercept, weight, gain) in itertools.product((False, True), OPTIONS):
        if min(shape[0], shape[2]) > 512 or (intercept and shape[0] == 1):  # centred to nothing but rounding
            continue
        problem, plan = make(shape, dtype, weight, gain), Plan(dual, intercept, 0.7 if intercept else 1.0)
        wide = problem.take(None, torch.float64)
        fitted = fit(wide, plan, "cholesky")
        found = native.forward(problem, plan)
        if found is None:
            assert (shape[0] if dual else shape[2]) > 512
            continue
        close = TOLERANCE[dtype]
        assert found.status == PLAIN
        assert distance(found.out, predict(fitted, plan)) < close
        assert distance(found.coef, fitted.coef) < close
        assert distance(found.matrix, fitted.factor.matrix) < close
        assert distance(found.report[:, 1], fitted.factor.ratio) < close
        grad = torch.randn(found.out.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
        needs = Needs()
        for refined in (False, True):
            report = found.report.clone()
            report[:, 0] = 2 if refined else 0
            with torch.no_grad():
                grads, _ = native.backward(problem, plan, grad, found.coef, found.matrix, report, needs)  # pyright: ignore[reportGeneralTypeIssues]
            expected = pullback(
                *(wide, plan, grad.double(), lambda y, f=fitted: solve(f.factor, y), fitted.coef, needs),
                Mode(refined, False),
            )
            for name, a, b in zip(expected._fields, grads, expected, strict=True):
                sums = name in ("weight", "alpha", "gain", "alpha_terms")  # which cancel
                assert (a is None) == (b is None)
                assert a is None or distance(a, b) < close * (100 if sums else 5), name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(10, 10, 8, 1), (128, 40, 64, 64), (25, 75, 64, 5), (10, 10, 32, 32), (9, 33, 7, 2)])
def test_layouts(shape, dtype):
    """Heads behind points, rows of a wider table, storage that starts anywhere, shared keys, columns apart."""
    problem, plan = make(shape, dtype, True, True, 12), Plan(shape[0] < shape[2], False, 1.0)
    expected = native.forward(problem, plan)

    def heads(x: Tensor) -> Tensor:  # (B, H, N, d) as a view of (B, N, H, d)
        return x.unflatten(0, (3, 4)).transpose(1, 2).contiguous().transpose(1, 2)

    def five(x: Tensor) -> Tensor:
        return x.unflatten(0, (3, 2, 2)).transpose(1, 3).contiguous().transpose(1, 3)

    def table(x: Tensor) -> Tensor:
        return torch.cat([x, x, x], -1)[..., x.shape[-1] : 2 * x.shape[-1]]

    def shifted(x: Tensor) -> Tensor:
        return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)

    def columns(x: Tensor) -> Tensor:
        return x.mT.contiguous().mT

    for change in (heads, five, table, shifted, columns):
        moved = problem._replace(query=change(problem.query), key=change(problem.key), value=change(problem.value))
        found = native.forward(moved, plan)
        assert torch.equal(found.out.reshape(expected.out.shape), expected.out), change.__name__
        grad = change(torch.ones_like(expected.out))
        with torch.no_grad():
            needs = Needs(weight=False)
            a, _ = native.backward(moved, plan, grad, found.coef, found.matrix.clone(), found.report, needs)  # pyright: ignore[reportGeneralTypeIssues]
            b, _ = native.backward(  # pyright: ignore[reportGeneralTypeIssues]
                *(problem, plan, grad.reshape(expected.out.shape), expected.coef, expected.matrix),
                *(expected.report, needs),
            )
        for x, y in zip(a, b, strict=True):
            assert x is None or distance(x.reshape(y.shape), y) < TOLERANCE[dtype]


def test_shared_keys():
    """Each key serves its neighbours; gradients add up over them."""
    problem, plan = make((20, 6, 8, 3), torch.float64, True, False, 12), Plan(False, False, 1.0)
    few = problem._replace(key=problem.key[:4].clone(), value=problem.value[:4].clone())
    (out, coef, matrix, packed), plain = by_route.solve_batch(few, plan, "auto")
    wide = few.expanded()
    again, _ = by_route.solve_batch(wide, plan, "auto")
    torch.testing.assert_close(out, again[0], rtol=1e-12, atol=0)
    with torch.no_grad():
        known = by_route.Known(few, plan, coef, matrix, packed, plain)
        grads = by_route.backward_batch(out, known, "auto", Needs(gain=False))
        apart = by_route.backward_batch(out, known._replace(problem=wide), "auto", Needs(gain=False))
    torch.testing.assert_close(grads.key, apart.key.view(4, 3, 20, 8).sum(1), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(grads.value, apart.value.view(4, 3, 20, 3).sum(1), rtol=1e-12, atol=1e-12)


def test_threads_change_nothing():
    problem, plan = make((130, 100, 64, 40), torch.float32, False, False, 33), Plan(False, False, 1.0)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = native.forward(problem, plan)
        torch.set_num_threads(2)
        two = native.forward(problem, plan)
    finally:
        torch.set_num_threads(before)
    for a, b in zip(one[:4], two[:4], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("where", ["key", "value", "query"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("shape", [(40, 9, 8, 2), (9, 4, 30, 3), (60, 20, 20, 40)])
def test_what_is_not_finite_shows_where_torch_shows_it(where, bad, shape, monkeypatch):
    problem = make(shape, torch.float32, False, False)
    getattr(problem, where)[2, 1, 0] = bad
    q, k, v = problem[:3]
    out = F.intention(q, k, v, alpha=100.0)
    monkeypatch.setattr(by_route.native, "forward", lambda *_: None)
    expected = F.intention(q, k, v, alpha=100.0)
    assert torch.equal(torch.isfinite(out), torch.isfinite(expected))
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("shape", [(30, 8, 12, 2), (12, 8, 30, 2), (60, 20, 20, 40), (9, 20, 7, 1)])
def test_each_element_takes_the_route_of_torch(shape, monkeypatch):
    """Condition numbers from easy to singular in one batch."""
    problem = make(shape, torch.float32, False, False, 24)
    problem = problem._replace(
        key=problem.key * torch.logspace(0, -2, shape[2]) * torch.logspace(0, -2, shape[0]).unsqueeze(1),
        alpha=torch.cat([torch.logspace(3, -6, 23), torch.zeros(1)]),
    )
    problem.key[-1, :, 0], problem.key[-1, 0] = problem.key[-1, :, 1], problem.key[-1, 1]
    plan = Plan(shape[0] < shape[2], False, 1.0)
    assert native.forward(problem, plan).status == SOME_LEFT
    grad = torch.ones(24, shape[1], shape[3])
    with torch.no_grad():
        ours, plain = by_route.solve_batch(problem, plan, "auto")
        our_grads = by_route.backward_batch(
            grad, by_route.Known(problem, plan, *ours[1:], plain), "auto", Needs(weight=False, gain=False)
        )
        monkeypatch.setattr(by_route.native, "forward", lambda *_: None)
        monkeypatch.setattr(by_route.native, "backward", lambda *_: None)
        torchs, plain = by_route.solve_batch(problem, plan, "auto")
        grads = by_route.backward_batch(
            grad, by_route.Known(problem, plan, *torchs[1:], plain), "auto", Needs(weight=False, gain=False)
        )
    assert torch.equal(ours[3][:, 0], torchs[3][:, 0])
    assert (ours[3][:, 0] == 2).any() == (not plan.dual)
    assert (ours[3][:, 0] == 3).any()
    assert (ours[3][:, 0] == 4).any()
    torch.testing.assert_close(ours[0], torchs[0], rtol=1e-4, atol=1e-4)
    for a, b in zip(our_grads[:3], grads[:3], strict=True):
        for x, y in zip(a, b, strict=True):
            assert distance(x, y) < 1e-3


def hard(shape: tuple[int, ...], weight: bool, gain: bool, batch_size: int = 5) -> Problem:
    """Beyond float32; points of weight 0 among them."""
    problem = make(shape, torch.float32, weight, gain, batch_size)
    if problem.weight is not None:
        problem.weight[:, 1::5] = 0
    return problem._replace(
        key=problem.key * torch.logspace(0, -3, shape[2]) * torch.logspace(0, -2, shape[0]).unsqueeze(1),
        alpha=torch.logspace(-5, -7, batch_size),
    )


@pytest.mark.parametrize("shape", [(30, 8, 12, 2), (7, 11, 30, 3), (67, 31, 29, 53), (31, 13, 67, 40), (11, 5, 3, 1)])
@pytest.mark.parametrize("options", OPTIONS)
def test_float64_in_the_kernels(shape, options):
    """Answers and all gradients of float32 problems that need float64, against torch in float64."""
    intercept, weight, gain = options
    problem, plan = hard(shape, weight, gain), Plan(shape[0] < shape[2], intercept, 0.7)
    found = native.forward(problem, plan)
    assert found.status == SOME_REFINED
    assert (found.report[:, 0] == FLOAT64).all()
    wide = problem.take(None, torch.float64)
    fitted, _ = refine(fit(wide, plan, "cholesky"), plan)
    assert distance(found.out, predict(fitted, plan)) < 1e-6
    assert distance(found.report[:, 1], fitted.factor.ratio) < 1e-3
    grad = torch.randn(found.out.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        grads, _ = native.backward(problem, plan, grad, found.coef, found.matrix, found.report, Needs())  # pyright: ignore[reportGeneralTypeIssues]
    expected = pullback(
        *(wide, plan, grad.double(), lambda y: solve(fitted.factor, y), fitted.coef, Needs()), Mode(True, False)
    )
    for name, a, b in zip(expected._fields, grads, expected, strict=True):
        assert (a is None) == (b is None)
        assert a is None or distance(a, b) < 2e-6, name


@pytest.mark.parametrize("shape", [(31, 13, 17, 5), (17, 13, 31, 5)])
def test_float64_in_any_layout(shape):
    """Heads behind points, keys that serve their neighbours, and threads."""
    problem, plan = hard(shape, True, True, 12), Plan(shape[0] < shape[2], False, 1.0)
    few = problem._replace(key=problem.key[:4].clone(), value=problem.value[:4].clone())
    problem = few.expanded()

    def heads(x: Tensor) -> Tensor:  # (B, H, N, d) as a view of (B, N, H, d)
        return x.unflatten(0, (3, 4)).transpose(1, 2).contiguous().transpose(1, 2)

    moved = problem._replace(query=heads(problem.query), key=heads(problem.key), value=heads(problem.value))
    grad, answers, before = torch.ones(12, shape[1], shape[3]), [], torch.get_num_threads()
    for case, threads in ((problem, 1), (problem, 2), (few, 1), (moved, 1)):
        torch.set_num_threads(threads)
        try:
            found = native.forward(case, plan)
            upstream = heads(grad) if case is moved else grad
            with torch.no_grad():
                grads, _ = native.backward(case, plan, upstream, *found[1:4], Needs())
        finally:
            torch.set_num_threads(before)
        assert (found.report[:, 0] == FLOAT64).all()
        answers.append([found.out, *grads])
    for other in answers[1:]:
        for a, b in zip(answers[0], other, strict=True):
            assert torch.equal(a, b.reshape(a.shape))


@pytest.mark.parametrize("dual", [False, True])
def test_gradients_that_float32_loses(dual):
    """Those of weights are made in double, and that of alpha where it cancels; the fit itself is an easy one."""
    problem = make((23, 31, 12, 3) if not dual else (12, 31, 23, 3), torch.float32, True, False, 64)
    problem.weight[:, 2] = 0
    problem = problem._replace(alpha=torch.ones(64), value=problem.key[..., :3] + 1e-4 * problem.value)
    plan = Plan(dual, False, 1.0)
    found = native.forward(problem, plan)
    assert (found.report[:, 0] < 2).all()
    wide, grad = problem.take(None, torch.float64), torch.randn_like(found.out)
    fitted = fit(wide, plan, "cholesky")
    for needs in (Needs(weight=False), Needs()):
        with torch.no_grad():
            ours, _ = native.backward(problem, plan, grad, found.coef, found.matrix, found.report, needs)  # pyright: ignore[reportGeneralTypeIssues]
        expected = pullback(
            *(wide, plan, grad.double(), lambda y: solve(fitted.factor, y), fitted.coef, needs), Mode(False, False)
        )
        off = (ours.alpha.double() / expected.alpha - 1).abs()  # pyright: ignore[reportOperatorIssue]
        cancelled = expected.alpha.abs() < 0.05 * expected.alpha_terms  # pyright: ignore[reportOperatorIssue]
        assert cancelled.any()
        assert off[cancelled].max() < 1e-6
        assert not needs.weight or distance(ours.weight, expected.weight) < 1e-6


def test_refinement_alone_needs_no_ladder():
    problem = make((30, 8, 12, 2), torch.float32, False, False, 1)
    problem = problem._replace(alpha=torch.tensor([0.03]), key=problem.key * torch.logspace(0, -1.3, 12))
    found = native.forward(problem, Plan(False, False, 1.0))
    assert found.status == SOME_REFINED
    wide = problem.take(None, torch.float64)
    assert distance(found.out, predict(fit(wide, Plan(False, False, 1.0), "cholesky"), Plan(False, False, 1.0))) < 1e-6


@pytest.mark.parametrize("which", ["weight", "alpha", "gain"])
def test_values_that_are_not_allowed(which):
    problem = make((12, 5, 8, 2), torch.float32, True, True)
    getattr(problem, which)[3] = -1
    with pytest.raises(ValueError, match=r"weight|alpha|gain"):
        by_route.solve_batch(problem, Plan(False, False, 1.0), "auto", False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(20, 7, 6), (40, 30, 16), (9, 60, 33), (130, 128, 64), (5, 3, 100), (1, 1, 1)])
def test_rows_times_the_inverse(shape, dtype, monkeypatch):
    n, m, d = shape
    for weight, gain in itertools.product((False, True), repeat=2):
        p = make((n, m, d, 1), dtype, weight, gain, 6)
        points = Problem.of_points(p.query, p.key[:2], p.weight, p.alpha, p.gain)
        inverse = wants_inverse(d, m)
        ours, plain = transform.transform_rows(*points.points(), None, None, "auto", inverse, False)
        assert plain
        grad = torch.ones_like(p.query)
        with torch.no_grad():
            pulled = transform._pulled(grad, points, ours[0], Factored(*ours[1:], plain), "auto", inverse)
            with monkeypatch.context() as patch:
                patch.setattr(native, "rows_forward", lambda *_: None)
                patch.setattr(native, "rows_backward", lambda *_: None)
                torchs, plain = transform.transform_rows(*points.points(), None, None, "auto", inverse, False)
                factor = Factored(*torchs[1:], plain)
                expected = transform._pulled(grad, points, torchs[0], factor, "auto", inverse)
        for a, b in zip((*ours, *pulled), (*torchs, *expected), strict=True):
            assert (a is None) == (b is None)
            assert a is None or distance(a, b) < 50 * TOLERANCE[dtype]


def test_what_the_kernels_leave_to_torch():
    problem, plan = make((6, 5, 4, 3), torch.float32, False, False), Plan(False, False, 1.0)
    assert native.forward(problem, plan) is not None
    assert native.forward(problem.take(None, torch.bfloat16), plan) is None
    assert native.forward(problem._replace(query=problem.query.to("meta")), plan) is None
    assert native.forward(problem._replace(query=problem.query[:, :0]), plan) is None
    assert native.forward(problem._replace(alpha=problem.alpha.double()), plan) is None
    assert native.forward(problem._replace(key=torch._neg_view(problem.key)), plan) is None  # pyright: ignore[reportPrivateImportUsage]


def test_a_saved_factor_serves_torch():
    """Higher derivatives and other routes go on with it in torch."""
    for shape in ((20, 6, 12, 3), (20, 6, 12, 40)):
        problem, plan = make(shape, torch.float64, False, False), Plan(False, False, 1.0)
        found = native.forward(problem, plan)
        factor = Factor(found.matrix, wants_inverse(12, shape[3]), found.report[:, 1])
        rhs = problem.key.mT @ problem.value
        torch.testing.assert_close(solve(factor, rhs), found.coef, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("n", [3, 7, 19])
def test_constant_keys_with_weights_and_an_intercept_are_the_mean(n, dtype):
    """The rounding that centring leaves of a constant column is no direction, also where weights make the mean."""
    torch.manual_seed(0)
    key, value = torch.randn(41, 1, 1, dtype=dtype).expand(41, n, 1), torch.randn(41, n, 2, dtype=dtype)
    query, weight = torch.randn(41, 11, 1, dtype=dtype), torch.rand(41, n, dtype=dtype)
    weight[:, 0] = 0
    got = F.intention(query, key, value, alpha=0.0, weight=weight, intercept=True)
    want = (weight.unsqueeze(-2) @ value) / weight.sum(-1)[:, None, None]
    assert (got - want).abs().max() < 1e-5
