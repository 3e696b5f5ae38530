"""A fitted context against scikit-learn, brute force and refits."""

import warnings

import numpy as np
import pytest
import torch
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LinearRegression, Ridge, RidgeCV

import intention
from fuzz import oracle
from intention import functional as F
from intention import naive

D = torch.float64
SHAPES = [(2, 23, 3, 5), (3, 7, 13, 2)]  # (batch, n, d, k): more points than features, and fewer


def sample(b, n, d, k, offset=0.0):
    key, query = torch.randn(b, n, d, dtype=D) + offset, torch.randn(b, 11, d, dtype=D) + offset
    return key, torch.randn(b, n, k, dtype=D) + offset, query


def close(got, want, tol=1e-8):
    want = torch.as_tensor(np.asarray(want), dtype=D)
    assert got.shape == want.shape
    assert torch.isfinite(want).all()
    assert (got - want).norm() <= tol * want.norm(), ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("alpha", [1e-3, 1.0, 30.0])
def test_ridge_of_scikit_learn(shape, intercept, weighted, alpha):
    key, value, query = sample(*shape, offset=2.0)
    weight = torch.rand(shape[:2], dtype=D) if weighted else None
    ctx = intention.fit(key, value, alpha=alpha, weight=weight, intercept=intercept)
    for keep in (ctx, ctx.without_points()):
        for i in range(shape[0]):
            model = Ridge(alpha, fit_intercept=intercept, solver="svd")
            model.fit(key[i].numpy(), value[i].numpy(), None if weight is None else weight[i].numpy())
            close(keep.w[i], model.coef_.T)
            close(keep(query)[i], model.predict(query[i].numpy()))
            close(keep.intercept[i] + 1, np.broadcast_to(model.intercept_, shape[3:]) + 1)


def test_weighted_least_squares():
    key, value, query = sample(2, 23, 3, 5)
    weight = torch.rand(2, 23, dtype=D)
    ctx = intention.fit(key, value, alpha=0, weight=weight, intercept=True)
    for i in range(2):
        model = LinearRegression().fit(key[i].numpy(), value[i].numpy(), weight[i].numpy())
        close(ctx(query)[i], model.predict(query[i].numpy()))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_cv_chooses_alpha_and_has_these_leave_one_out_errors(shape, intercept, weighted):
    b, n, d, k = shape
    key, _, _ = sample(*shape)
    noise = torch.tensor([0.3, 5.0, 1.0], dtype=D)[:b, None, None]
    value = key @ torch.randn(b, d, k, dtype=D) + noise * torch.randn(b, n, k, dtype=D) + 1
    grid = [float(a) for a in np.logspace(-3, 3, 13)]
    weight = torch.rand(b, n, dtype=D) + 0.1 if weighted else None
    ctx = intention.fit(key, value, alpha=grid, weight=weight, intercept=intercept)
    chosen = []
    for i in range(b):
        model = RidgeCV(grid, fit_intercept=intercept, store_cv_results=True)
        model.fit(key[i].numpy(), value[i].numpy(), None if weight is None else weight[i].numpy())
        chosen.append(model.alpha_)
        at = grid.index(model.alpha_)
        root = 1.0 if weight is None else weight[i].sqrt()[:, None]
        close((root * ctx.leave_one_out()[i]).square(), model.cv_results_[..., at])
    assert ctx.alpha.tolist() == chosen
    assert len(set(chosen)) > 1  # each element chooses its own


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("kernel", [None, "gaussian"])
@pytest.mark.parametrize("weighted", [False, True])
def test_leave_one_out_is_leaving_each_out(shape, intercept, covariance, kernel, weighted):
    key, value, _ = sample(*shape)
    weight = torch.rand(shape[:2], dtype=D) if weighted else None
    if weighted:
        weight[:, 2] = 0
    bound = None if kernel is None else intention.fit(key, value, kernel=kernel).kernel
    options = {"alpha": 0.3, "intercept": intercept, "covariance": covariance, "kernel": bound}
    got = intention.fit(key, value, weight=weight, **options).leave_one_out()
    for j in range(shape[1]):
        rest = [i for i in range(shape[1]) if i != j]
        less = None if weight is None else weight[:, rest]
        without = intention.fit(key[:, rest], value[:, rest], weight=less, **options)
        close(got[:, j : j + 1], value[:, j : j + 1] - without(key[:, j : j + 1]), 1e-9)


def test_leave_one_out_of_the_minimum_norm_fit():
    key, value, _ = sample(3, 7, 13, 2)
    for intercept in (False, True):
        got = intention.fit(key, value, alpha=0, intercept=intercept).leave_one_out()
        for j in range(7):
            rest = [i for i in range(7) if i != j]
            without = intention.fit(key[:, rest], value[:, rest], alpha=0, intercept=intercept)
            close(got[:, j : j + 1], value[:, j : j + 1] - without(key[:, j : j + 1]), 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("weighted", [False, True])
def test_leverage_is_the_derivative_of_a_fitted_value(shape, intercept, covariance, weighted):
    key, value, _ = sample(*shape)
    weight = torch.rand(shape[:2], dtype=D) if weighted else None
    value.requires_grad_()
    ctx = intention.fit(key, value, alpha=0.3, weight=weight, intercept=intercept, covariance=covariance)
    fitted = ctx(key)[..., 0]
    for j in range(shape[1]):
        (slope,) = torch.autograd.grad(fitted[:, j].sum(), value, retain_graph=True)
        close(ctx.leverage()[:, j].detach(), slope[:, j, 0], 1e-10)


@pytest.mark.parametrize("shape", SHAPES)
def test_gaussian_process_with_a_linear_kernel(shape):
    key, value, query = sample(*shape)
    ctx = intention.fit(key, value, alpha=0.7)
    for keep in (ctx, ctx.without_points()):
        for i in range(shape[0]):
            model = GaussianProcessRegressor(DotProduct(0.0, "fixed"), alpha=0.7).fit(key[i].numpy(), value[i].numpy())
            mean, std = model.predict(query[i].numpy(), return_std=True)
            close(keep(query)[i], mean)
            close(keep.variance(query)[i].sqrt(), std[:, 0])
            close(keep.variance(query, noise=True)[i], std[:, 0] ** 2 + 0.7)


def test_gaussian_process_with_a_gaussian_kernel():
    key, value, query = sample(2, 11, 3, 5)
    ctx = intention.fit(key, value, alpha=0.7, kernel=intention.kernels.Gaussian(0.5))
    for i in range(2):
        model = GaussianProcessRegressor(RBF(1.0, "fixed"), alpha=0.7).fit(key[i].numpy(), value[i].numpy())
        mean, std = model.predict(query[i].numpy(), return_std=True)
        close(ctx(query)[i], mean)
        close(ctx.variance(query)[i].sqrt(), std[:, 0])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("kernel", [None, "linear"])
def test_variance_with_an_intercept_is_a_flat_prior_on_a_constant(shape, kernel):
    key, value, query = sample(*shape)
    ctx = intention.fit(key, value, alpha=0.7, intercept=True, kernel=kernel)
    huge = 1e4  # a constant feature of prior variance huge^2
    wide = [huge * torch.ones_like(x[..., :1]) for x in (key, query)]
    lifted = intention.fit(torch.cat([key, wide[0]], -1), value, alpha=0.7, keep_points=False)  # the d x d form
    close(ctx.variance(query), lifted.variance(torch.cat([query, wide[1]], -1)), 1e-6)


def test_kernel_ridge_of_scikit_learn():
    key, value, query = sample(2, 17, 3, 5)
    weight = torch.rand(2, 17, dtype=D)
    named = {
        "linear": ("linear", {}),
        "rbf": (intention.kernels.Gaussian(0.4), {"gamma": 0.4}),
        "laplacian": (intention.kernels.Laplacian(0.4), {"gamma": 0.4}),
        "polynomial": (intention.kernels.Polynomial(3, 0.4, 1.0), {"gamma": 0.4, "degree": 3, "coef0": 1.0}),
    }
    for name, (kernel, options) in named.items():
        for w in (None, weight):
            ctx = intention.fit(key, value, alpha=0.3, weight=w, kernel=kernel)
            for i in range(2):
                model = KernelRidge(alpha=0.3, kernel=name, **options)
                model.fit(key[i].numpy(), value[i].numpy(), None if w is None else w[i].numpy())
                close(ctx(query)[i], model.predict(query[i].numpy()))


def test_a_linear_kernel_is_the_plain_fit():
    for shape in SHAPES:
        key, value, query = sample(*shape, offset=1.0)
        weight = torch.rand(shape[:2], dtype=D)
        for covariance in ("ridge", "convex"):
            for intercept in (False, True):
                options = {"alpha": 0.4, "weight": weight, "intercept": intercept, "covariance": covariance}
                plain, kernel = (intention.fit(key, value, kernel=k, **options) for k in (None, "linear"))
                close(kernel(query), plain(query), 1e-9)
                close(kernel.variance(query), plain.variance(query), 1e-9)
                close(kernel.leave_one_out(), plain.leave_one_out(), 1e-9)
                close(kernel.leverage(), plain.leverage(), 1e-9)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("covariance", ["ridge", "convex", "within", "callable"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
def test_a_context_is_the_functional_call(shape, covariance, intercept, weighted):
    key, value, query = sample(*shape)
    if covariance == "within":
        value = torch.nn.functional.one_hot(torch.arange(shape[1]) % shape[3], shape[3]).to(D).expand_as(value)
    if covariance == "callable":
        covariance = _robust
    weight = torch.rand(shape[:2], dtype=D) if weighted else None
    options = {"alpha": 0.3, "weight": weight, "intercept": intercept, "covariance": covariance}
    want = F.intention(query, key, value, **options)
    ctx = intention.fit(key, value, **options)
    close(ctx(query), want, 1e-10)
    close(ctx.without_points()(query), want, 1e-10)
    if intercept:
        close(query @ ctx.w + ctx.intercept.unsqueeze(-2), want, 1e-10)


def _robust(key, value, weight):
    return key.mT @ (key / (1 + key.square().sum(-1, keepdim=True)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("covariance", ["ridge", "convex", "within"])
@pytest.mark.parametrize("kernel", [None, "gaussian", "median gaussian", "median laplacian", "nystroem"])
@pytest.mark.parametrize("intercept", [False, True])
def test_integer_weights_are_repeated_points(shape, covariance, kernel, intercept):
    b, n, _, k = shape
    key, value, query = sample(*shape)
    if covariance == "within":
        value = torch.nn.functional.one_hot(torch.arange(n) % k, k).to(D).expand_as(value)
    times = torch.arange(n) % 3  # 0, 1, 2, 0, ...
    again = torch.arange(n).repeat_interleave(times)
    space = {}
    if kernel == "gaussian":
        space = {"kernel": intention.kernels.Gaussian(0.5)}
    elif kernel and kernel.startswith("median"):
        space = {"kernel": kernel.split()[1]}
    elif kernel == "nystroem":
        space = {"features": intention.features.nystroem(intention.kernels.Gaussian(0.5), key, landmarks=5)}
    options = {"alpha": 0.3, "covariance": covariance, "intercept": intercept, **space}
    weighed = intention.fit(key, value, weight=times.to(D).expand(b, n), **options)
    repeated = intention.fit(key[:, again], value[:, again], **options)
    close(weighed(query), repeated(query), 1e-9)
    close(weighed.variance(query), repeated.variance(query), 1e-9)


def test_functional_calls_are_the_naive_formulas():
    key, value, query = sample(2, 17, 3, 4)
    labels = torch.nn.functional.one_hot(torch.arange(17) % 4, 4).to(D).expand_as(value)
    means = (labels.mT @ key) / labels.sum(-2).unsqueeze(-1)
    x = key - labels @ means
    sigma = naive.sigma(x, 0.3)
    close(F.intention(query, key, labels, alpha=0.3, covariance="within"), naive.intention(query, key, labels, sigma))
    got = F.sigma_intention(query, key, labels, alpha=0.3, covariance="within")
    close(got, naive.sigma_intention(query, key, labels, sigma))
    sigma = _robust(key, value, None) + 0.3 * torch.eye(3, dtype=D)
    close(F.intention(query, key, value, alpha=0.3, covariance=_robust), naive.intention(query, key, value, sigma))


def test_loo_without_a_grid_finds_a_good_alpha():
    torch.manual_seed(3)
    key, query = torch.randn(4, 30, 20, dtype=D), torch.randn(4, 500, 20, dtype=D)
    w = torch.randn(4, 20, 1, dtype=D)
    value = key @ w + 3 * torch.randn(4, 30, 1, dtype=D)
    chosen = intention.fit(key, value, alpha="loo")

    def error(ctx):
        return (ctx(query) - query @ w).square().mean((-2, -1))

    tiny, huge = (intention.fit(key, value, alpha=a) for a in (1e-6, 1e6))
    assert (error(chosen) < error(tiny)).all()
    assert (error(chosen) < error(huge)).all()
    scaled = intention.fit(1e3 * key, value, alpha="loo")  # the grid follows the scale of the keys
    torch.testing.assert_close(scaled.alpha, 1e6 * chosen.alpha)
    convex = intention.fit(key, value, alpha="loo", covariance="convex")
    assert ((convex.alpha > 0) & (convex.alpha < 1)).all()


def test_a_grid_member_that_is_a_tensor_gets_the_gradient():
    key, value, query = sample(2, 23, 3, 5)
    members = [torch.tensor(a, dtype=D, requires_grad=True) for a in (0.1, 10.0, 1e6)]
    ctx = intention.fit(key, value, alpha=members)
    ctx(query).square().sum().backward()
    chosen = {int(members.index(m)) for m in members if m.grad is not None and m.grad != 0}
    assert chosen == {[0.1, 10.0, 1e6].index(a) for a in ctx.alpha.tolist()}


@pytest.mark.parametrize("shape", [(2, 5, 3, 2), (2, 4, 5, 2)])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("kernel", [None, "gaussian", "nystroem"])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_everything_is_differentiable(shape, intercept, kernel, covariance):
    key, value, query = (x.requires_grad_() for x in sample(*shape))
    weight = (torch.rand(shape[:2], dtype=D) + 0.2).requires_grad_()
    alpha = torch.tensor([0.3, 0.7], dtype=D, requires_grad=True)
    space = {"kernel": None if kernel is None else intention.kernels.Gaussian(0.5)}
    if kernel == "nystroem":
        space |= {"features": "nystroem", "landmarks": 3}

    def answers(key, value, query, weight, alpha):
        generator = torch.Generator().manual_seed(0)
        ctx = intention.fit(
            key, value, alpha, weight, intercept, covariance, keep_points=True, generator=generator, **space
        )
        return ctx(query), ctx.variance(query), ctx.leave_one_out(), ctx.leverage()

    assert torch.autograd.gradcheck(answers, (key, value, query, weight, alpha), atol=1e-6)
    if kernel != "nystroem":
        assert torch.autograd.gradgradcheck(lambda *x: answers(*x)[0], (key, value, query, weight, alpha), atol=1e-6)


@pytest.mark.parametrize("kernel", [None, "gaussian"])
def test_the_slope_at_a_weight_of_0(kernel):
    for shape in SHAPES:
        key, value, query = sample(*shape)
        weight = torch.rand(shape[:2], dtype=D)
        weight[:, 1] = 0
        weight.requires_grad_()

        def total(w, key=key, value=value, query=query):
            return intention.fit(key, value, 0.3, w, True, kernel=kernel and intention.kernels.Gaussian(0.4))(
                query
            ).sum()

        (slope,) = torch.autograd.grad(total(weight), weight)
        step = torch.zeros_like(weight)
        step[:, 1] = 1e-6
        want = (total(weight + step) - total(weight)) / 1e-6
        assert abs(slope[:, 1].sum() - want) < 1e-4 * abs(want)


def test_alpha_can_be_trained_on_leave_one_out_errors():
    torch.manual_seed(1)
    key = torch.randn(30, 20, dtype=D)
    value = key @ torch.randn(20, 1, dtype=D) + 3 * torch.randn(30, 1, dtype=D)
    theta = torch.zeros((), dtype=D, requires_grad=True)
    optimiser = torch.optim.Adam([theta], 0.2)
    for _ in range(150):
        optimiser.zero_grad()
        loss = intention.fit(key, value, alpha=theta.exp()).leave_one_out().square().mean()
        loss.backward()
        optimiser.step()
    grid = [float(a) for a in torch.logspace(-2, 3, 200)]
    best = intention.fit(key, value, alpha=grid).alpha
    assert abs(theta.exp() / best - 1) < 0.06  # the step of the grid


def test_torch_func_and_compile():
    key, value, query = sample(3, 11, 4, 2)

    def predict(key, value, query):
        return intention.fit(key, value, alpha=0.5, intercept=True)(query)

    close(torch.vmap(predict)(key, value, query), predict(key, value, query), 1e-12)
    slope = torch.func.grad(lambda k: predict(k, value, query).sum())(key)
    key.requires_grad_()
    close(slope, torch.autograd.grad(predict(key, value, query).sum(), key)[0], 1e-12)
    compiled = torch.compile(predict, fullgraph=True)
    close(compiled(key, value, query).detach(), predict(key, value, query).detach(), 1e-12)
    close(torch.autograd.grad(compiled(key, value, query).sum(), key)[0], slope, 1e-12)


@pytest.mark.parametrize("alpha", [0.0, 1e-9, 1e-4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_ill_conditioned_points_are_looked_at_again(alpha, dtype):
    torch.manual_seed(0)
    basis = torch.randn(20, 6, dtype=D)
    key = (basis @ torch.diag(torch.tensor([1, 1, 1, 1e-3, 1e-6, 1e-7], dtype=D))).to(dtype)
    value, query = torch.randn(20, 2, dtype=D), torch.randn(5, 6, dtype=D)
    ctx = intention.fit(key, value, alpha=alpha)
    exact = key.double()
    u, s, vt = torch.linalg.svd(exact, full_matrices=False)
    want = vt.mT @ ((s / (s.square() + alpha))[:, None] * (u.mT @ value))
    close(ctx(query), query @ want, 1e-6 if dtype == torch.float64 else 1e-5)
    assert ctx.describe().error.max() < 1e-3


def test_sums_that_cannot_tell_say_so():
    key = torch.randn(30, 2, dtype=D)
    key = torch.cat([key, key[:, :1] + 1e-8 * torch.randn(30, 1, dtype=D)], -1)
    ctx = intention.fit(key, torch.randn(30, 1, dtype=D), alpha=1e-14, keep_points=False)
    with pytest.warns(intention.AccuracyWarning, match="estimated relative error"):
        ctx(torch.randn(2, 3, dtype=D))


def test_a_fit_of_nothing_is_zero():
    query = torch.randn(2, 5, 3)
    for alpha in (0.0, 1.0):
        for options in ({}, {"intercept": True}, {"keep_points": False}):
            ctx = intention.fit(torch.empty(2, 0, 3), torch.empty(2, 0, 4), alpha=alpha, **options)
            assert torch.equal(ctx(query), torch.zeros(2, 5, 4))
    ctx = intention.fit(torch.randn(2, 7, 3), torch.randn(2, 7, 4), weight=torch.zeros(2, 7), intercept=True)
    assert torch.equal(ctx(query), torch.zeros(2, 5, 4))


@pytest.mark.parametrize("alpha", ["loo", [0.1, 1.0]])
@pytest.mark.parametrize("options", [{}, {"intercept": True}, {"kernel": "gaussian"}, {"covariance": "convex"}])
def test_leave_one_out_of_nothing_says_so(alpha, options):
    with pytest.raises(ValueError, match=r"needs at least one point .* got N = 0; give a number"):
        intention.fit(torch.empty(2, 0, 3), torch.empty(2, 0, 4), alpha=alpha, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precisions_are_computed_in_float64(dtype):
    key, value, query = (x.to(dtype) for x in sample(2, 23, 3, 5))
    ctx = intention.fit(key, value, alpha=1e-3, intercept=True)
    want = intention.fit(key.double(), value.double(), alpha=1e-3, intercept=True)(query.double())
    assert ctx(query).dtype == ctx.w.dtype == ctx.variance(query).dtype == dtype
    assert torch.equal(ctx(query), want.to(dtype))
    with torch.autocast("cpu", torch.bfloat16):
        again = intention.fit(key, value, alpha=1e-3, intercept=True)(query)
    assert torch.equal(again, ctx(query))


def test_leading_dimensions_broadcast():
    key, value, query = torch.randn(5, 1, 11, 3), torch.randn(7, 11, 2), torch.randn(5, 7, 13, 3)
    ctx = intention.fit(key, value, alpha=torch.rand(7) + 0.1, weight=torch.rand(5, 1, 11), intercept=True)
    assert ctx(query).shape == (5, 7, 13, 2)
    assert ctx.variance(query).shape == (5, 7, 13)
    assert ctx.leave_one_out().shape == (5, 7, 11, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ctx(torch.randn(13, 3)).shape == (5, 7, 13, 2)


def test_what_was_looked_at_without_gradients_still_has_them():
    key, value, query = sample(2, 11, 3, 2)
    key.requires_grad_()
    for kernel in (None, "gaussian"):
        ctx = intention.fit(key, value, alpha=0.3, intercept=True, kernel=kernel)
        with torch.no_grad():
            quiet = ctx(query)
        with torch.inference_mode():
            assert torch.equal(ctx(query), quiet)
        out = ctx(query)
        assert out.requires_grad
        assert torch.equal(out, quiet)
        assert torch.autograd.grad(out.sum(), key)[0].norm() > 0


def test_what_was_fitted_without_gradients_has_those_of_alpha():
    key, value, query = sample(2, 11, 3, 2)
    alpha = torch.tensor(0.3, dtype=D, requires_grad=True)
    watched = intention.fit(key, value, alpha, covariance="convex")
    with torch.no_grad():
        ctx = intention.fit(key, value, alpha, covariance="convex")
    want, got = (torch.autograd.grad(x(query).square().sum(), alpha)[0] for x in (watched, ctx))
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("covariance", ["within", "callable"])
def test_covariances_of_their_own_in_torch_func_and_compile(shape, covariance):
    key, value, query = sample(*shape)
    value = torch.nn.functional.one_hot(torch.arange(shape[1]) % shape[3], shape[3]).to(D).expand_as(value)
    chosen = _robust if covariance == "callable" else covariance

    def call(key, value, query):
        return F.intention(query, key, value, alpha=0.5, covariance=chosen, intercept=True)

    def use(key, value, query):
        return intention.fit(key, value, alpha=0.5, covariance=chosen, intercept=True)(query)

    want = call(key, value, query)
    for f in (call, use):
        close(f(key, value, query), want, 1e-10)
        close(torch.vmap(f)(key, value, query), want, 1e-10)
        # traced to the end; inductor, half a minute a graph, compiles the largest of them below
        close(torch.compile(f, fullgraph=True, backend="aot_eager")(key, value, query), want, 1e-10)
    key.requires_grad_()
    (slope,) = torch.autograd.grad(call(key, value, query).square().sum(), key)
    close(torch.func.grad(lambda k: call(k, value, query).square().sum())(key.detach()), slope, 1e-10)
    compiled = torch.compile(call, fullgraph=True)
    got = compiled(key, value, query)
    close(got, want, 1e-10)
    close(torch.autograd.grad(got.square().sum(), key)[0], slope, 1e-10)
    assert torch.autograd.gradcheck(call, (key, value, query))


def minimum_norm(key, value, weight, query):
    """One formula: the pseudo-inverse of centred points; the rounding of the keys as they came is no direction."""
    root = torch.ones_like(key[:, :1]) if weight is None else weight.sqrt().unsqueeze(-1)
    share = root.square() / root.square().sum()
    mean_key, mean_value = (share * key).sum(0), (share * value).sum(0)
    x = root * (key - mean_key)
    x = x - root * (root * x).sum(0) / root.square().sum()
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    noise = 4 * torch.finfo(D).eps * vt.abs() @ (root * key).norm(dim=0)
    kept = s > torch.maximum(noise, 1e-14 * s.max())
    w = vt.mT @ (torch.where(kept, 1 / s, 0.0).unsqueeze(-1) * (u.mT @ (root * (value - mean_value))))
    return w, (query - mean_key) @ w + mean_value


@pytest.mark.parametrize("kept", ["points", "sums", "added", "gradient"])
@pytest.mark.parametrize("shape", [(23, 5), (3, 7), (7, 7), (2, 3)])
@pytest.mark.parametrize("offset", [0.0, 1e4, 1e6])
@pytest.mark.parametrize("weighted", [False, True])
def test_rounding_of_a_mean_is_no_direction(kept, shape, offset, weighted):
    """alpha = 0 with an intercept: constant, repeated and summed columns, and points that do not count."""
    (n, d), gen = shape, torch.Generator().manual_seed(31)
    key = torch.randn(n, d, generator=gen, dtype=D) + offset
    key[:, 0], key[:, 2] = 0.1, key[:, 1]
    value, query = torch.randn(n, 2, generator=gen, dtype=D), torch.randn(5, d, generator=gen, dtype=D) + offset
    weight = torch.rand(n, generator=gen, dtype=D) if weighted else None
    if weight is not None:
        weight[1] = 0
        key[1, 0] = 7.0  # not constant, were it there
    options = {"alpha": 0, "weight": weight, "intercept": True}
    w, want = minimum_norm(key, value, weight, query)
    if kept == "gradient":
        key = key.requires_grad_()
    if kept == "added":
        parts = [None, None] if weight is None else [weight[:1], weight[1:]]
        ctx = intention.fit(key[:1], value[:1], **options | {"weight": parts[0]}).add(key[1:], value[1:], parts[1])
    else:
        ctx = intention.fit(key, value, **options, keep_points=kept != "sums")
    close(ctx(query), want.detach(), 1e-6)
    assert (ctx.w - w).abs().max() < 1e-6 * (1e-3 + w.abs().max())
    assert (ctx.w[0] == 0).all()
    if kept == "gradient":
        (grad,) = torch.autograd.grad(ctx(query).sum(), key)
        (also,) = torch.autograd.grad(F.intention(query, key, value, **options).sum(), key)
        close(grad, also, 1e-6)


@pytest.mark.parametrize("constant", [1.0, 0.1, 1e5 / 3])
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_nothing_but_a_constant(constant, dtype):
    key, value = torch.full((19, 1), constant, dtype=dtype), torch.randn(19, 2, dtype=dtype)
    for n in (0, 5):
        ctx = intention.fit(key[n:], value[n:], alpha=0, intercept=True).add(key[:n], value[:n])
        for fitted in (ctx, ctx.without_points(), ctx.remove(key[:3], value[:3]).add(key[:3], value[:3])):
            assert (fitted.w == 0).all()
            torch.testing.assert_close(fitted(key[:1]), value.mean(0, keepdim=True))
        left = ctx.without_points().remove(key[:3], value[:3])  # points that are there
        torch.testing.assert_close(left(key[:1]), value[3:].mean(0, keepdim=True))
        assert (left.remove(key[3:], value[3:])(key[:1]) == 0).all()


@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("n", "d"), [(5, 11), (11, 5)])
@pytest.mark.parametrize("offset", [1.0, 1e4, 1e5])
def test_leverage_and_variance_do_not_cancel(covariance, intercept, weighted, n, d, offset):
    """Far from 0, from the singular values of the points: sums of positive numbers."""
    gen = torch.Generator().manual_seed(11)
    key, value = torch.randn(n, d, generator=gen, dtype=D) + offset, torch.randn(n, 2, generator=gen, dtype=D)
    query = torch.randn(7, d, generator=gen, dtype=D) + offset
    weight = torch.rand(n, generator=gen, dtype=D) if weighted else None
    mass = torch.ones(n, dtype=D) if weight is None else weight
    if weight is not None:
        weight[2] = 0
    alpha = 0.5
    ctx = intention.fit(key, value, alpha, weight, intercept, covariance)
    mean = (mass.unsqueeze(-1) * key).sum(0) / mass.sum() if intercept else torch.zeros(d, dtype=D)
    gain = 1 - alpha if covariance == "convex" else 1.0
    u, s, vt = torch.linalg.svd(mass.sqrt().unsqueeze(-1) * (key - mean), full_matrices=True)
    s = torch.cat([s, s.new_zeros(d - len(s))])
    sigma, r = gain * s.square() + alpha, min(n, d)
    leverage = u[:, :r].square() @ (s.square() / sigma)[:r] + (mass / mass.sum() if intercept else 0.0)
    variance = ((query - mean) @ vt.mT).square() @ (alpha / sigma) + (alpha / gain / mass.sum() if intercept else 0.0)
    close(ctx.leverage(), leverage, 1e-5)
    close(ctx.variance(query), variance, 1e-5)


def test_sums_after_a_removal_may_be_singular():
    """What is left has fewer directions than the keys; rounding in the others is neither an error nor a direction."""
    gen = torch.Generator().manual_seed(3)
    for offset, n in ((0.0, 1), (1e3, 2), (1e3, 3)):
        key, value = torch.randn(n, 5, generator=gen, dtype=D) + offset, torch.randn(n, 2, generator=gen, dtype=D)
        more = torch.randn(3, 5, generator=gen, dtype=D) + offset, torch.randn(3, 2, generator=gen, dtype=D)
        sums = intention.fit(key, value, alpha=0, intercept=True, keep_points=False)
        close(sums.add(*more).remove(*more)(key), value, 1e-6)


@pytest.mark.parametrize("gone", [0.0, 0.05])
@pytest.mark.parametrize(("dtype", "shift"), [(torch.float32, 0.01), (D, 0.1)])
def test_slopes_of_few_points_far_from_zero(dtype, shift, gone):
    """Where the products of the points hold the prediction, but not what its derivatives are made of."""
    torch.manual_seed(0)
    n, d, m = 5, 11, 3
    key, query = 200 + shift * torch.randn(n, d, dtype=dtype), 200 + torch.randn(m, d, dtype=dtype)
    value, weight = torch.randn(n, 2, dtype=dtype), torch.tensor([1.0, 0.7, gone, 0.4, 1.0], dtype=dtype)
    leaves = [x.requires_grad_() for x in (query, key, value, weight)]
    alpha = torch.tensor(1e-3 if dtype == torch.float32 else 1e-6, dtype=D)
    exact = [x.detach().double().requires_grad_() for x in leaves]
    first = fit_in_two(*leaves[1:], alpha)(leaves[0])
    want = oracle.intention(*exact, alpha)
    close(first.detach(), want.detach(), 1e-6)
    slopes = [torch.autograd.grad(x.sum(), y) for x, y in ((first, leaves), (want, exact))]
    for got, right in zip(*slopes, strict=True):
        close(got, right, 1e-5)


def fit_in_two(key, value, weight, alpha):
    """The last point comes later."""
    ctx = intention.fit(key[:-1], value[:-1], alpha, weight[:-1])
    return ctx.add(key[-1:], value[-1:], weight[-1:])


def test_slopes_of_sums_that_cannot_tell_say_so():
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 7, dtype=D), 14 * torch.randn(5, 7, dtype=D), torch.randn(5, 2, dtype=D)
    alpha = torch.tensor(1e-6, dtype=D)
    intention.fit(key, value, alpha, keep_points=False)(query)  # the prediction is right, and nothing is said
    with pytest.warns(intention.AccuracyWarning, match="derivatives of sums alone.*keep_points=True"):
        intention.fit(key, value, alpha.clone().requires_grad_(), keep_points=False)(query)
    far = (key + 1e3).requires_grad_()
    with pytest.warns(intention.AccuracyWarning, match="derivatives of sums alone"):
        intention.fit(far, value, alpha, keep_points=False)(query)
    some = key.mT.clone().requires_grad_()  # (7, 5): nothing that alpha alone holds
    intention.fit(some, query.mT, alpha.clone().requires_grad_(), keep_points=False)(value.mT[:, :5]).sum().backward()


@pytest.mark.parametrize("intercept", [False, True])
def test_a_class_of_one_point_that_counts_nothing_in_sums(intercept):
    """It would be the mean of its class: the scatter within does not see it come."""
    torch.manual_seed(0)
    key, query = torch.randn(7, 3, dtype=D), torch.randn(5, 3, dtype=D)
    value = torch.nn.functional.one_hot(torch.tensor([0, 1, 0, 1, 0, 1, 2])).double()
    weight = torch.tensor([1.0, 0.5, 1, 1, 0.7, 1, 0], dtype=D)
    options = {"alpha": 0.1, "covariance": "within", "intercept": intercept}

    def slope(keep):
        w = weight.clone().requires_grad_()
        out = intention.fit(key, value, weight=w, keep_points=keep, **options)(query)
        return torch.autograd.grad(out.square().sum(), w)[0]

    close(slope(False), slope(True), 1e-10)


@pytest.mark.parametrize("intercept", [False, True])
def test_leverage_of_nearly_dependent_columns(intercept):
    """The products of the keys take the narrow direction for rounding; the keys have it."""
    torch.manual_seed(0)
    key, value = 13 * torch.randn(19, 3), torch.randn(19, 2)
    key = torch.cat([key, key[:, :1] + 4e-6 * torch.randn(19, 1)], -1)
    ctx = intention.fit(key, value, alpha=0, intercept=intercept)
    rows = torch.cat([key.double(), torch.ones(19, int(intercept), dtype=D)], -1)
    u = torch.linalg.qr(rows)[0]
    leverage = u.square().sum(-1)
    close(ctx.leverage(), leverage, 1e-5)
    rest = value.double() - u @ (u.mT @ value.double())
    close(ctx.leave_one_out(), rest / (1 - leverage)[:, None], 1e-5)


def test_leverages_of_points_that_nearly_coincide():
    """Fewer points than features and alpha = 0: each is met exactly, however close they are."""
    torch.manual_seed(0)
    key = torch.randn(1, 6, dtype=D) + torch.tensor([[0.0], [1e-9]], dtype=D) * torch.randn(2, 6, dtype=D)
    ctx = intention.fit(key, torch.randn(2, 1, dtype=D), alpha=0)
    torch.testing.assert_close(ctx.leverage(), torch.ones(2, dtype=D))
