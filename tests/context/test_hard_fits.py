"""Contexts where it is easy to be silently wrong: scales, leverages of 1, cancelling sums, a broken batch element."""

import warnings

import mpmath  # of sympy, which torch needs
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import intention
from fuzz import oracle
from intention import functional as F
from intention.context import leave_one_out
from intention.context.points import Sums
from intention.discriminant import lda, ls_svm, qda
from intention.solve.matrix.inverse import inverse

D = torch.float64


def randn(*shape):
    return torch.randn(*shape, dtype=D)


def off(got, want):
    return ((got - want).norm() / want.norm()).item()


def certified(call, want, tol=1e-6):
    """The answer is right, or a warning or an exception says that it may not be."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            got = call()
        except ValueError:
            return
    assert off(got, want) < tol or any(issubclass(w.category, intention.AccuracyWarning) for w in caught), off(
        got, want
    )


@pytest.mark.parametrize("scales", [[1e8, 1.0, 0.1], [1.0, 1e-9, 1.0], [1e-12, 1.0, 1e6]])
@pytest.mark.parametrize("intercept", [False, True])
def test_the_scale_of_a_column_does_not_matter(scales, intercept):
    scale = torch.tensor(scales, dtype=D)
    key = randn(50, 3)
    value, query = key @ torch.ones(3, 1, dtype=D), randn(7, 3)
    want = query @ torch.ones(3, 1, dtype=D)
    ctx = intention.fit(key * scale, value, alpha=0, intercept=intercept)
    for keep in (ctx, ctx.without_points()):
        assert off(keep(query * scale), want) < 1e-8
    noisy = intention.fit(key * scale, value + randn(50, 1), alpha=0, intercept=intercept)
    plain = intention.fit(key, value + noisy.value - value, alpha=0, intercept=intercept)  # pyright: ignore[reportOperatorIssue]
    assert off(noisy.leave_one_out(), plain.leave_one_out()) < 1e-8
    labels = (key[:, 1] + 0.5 * randn(50) > 0).long()
    assert (lda(key * scale, labels).predict(key * scale) == lda(key, labels).predict(key)).all()


def test_a_singular_fit_of_different_scales_is_right_or_says_so():
    key = randn(50, 3) * torch.tensor([1.0, 1.0, 1e-9], dtype=D)
    key = torch.cat([key, key[:, :1]], -1)  # and singular, too
    value = key @ torch.tensor([[1.0], [1.0], [1e9], [1.0]], dtype=D)
    ctx = intention.fit(key, value, alpha=0)
    certified(lambda: ctx(key), value)
    certified(lambda: ctx.without_points()(key), value)


@pytest.mark.parametrize("apart", [1e-5, 1e-7, 1e-9])
@pytest.mark.parametrize("alpha", [0.0, 1e-12])
@pytest.mark.parametrize("grad", [False, True])
def test_columns_that_nearly_depend_on_each_other(apart, alpha, grad):
    key, value = randn(23, 3), randn(23, 1)
    key[:, 2] = key[:, 0] + apart * key[:, 2]
    u, s, _ = torch.linalg.svd(key, full_matrices=False)
    want = u @ ((s.square() / (s.square() + alpha))[:, None] * (u.mT @ value))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if grad else "error")  # the derivatives may be doubtful, the values are not
        got = intention.fit(key.requires_grad_(grad), value, alpha=alpha)(key)
    assert off(got.detach(), want) < 1e-15 / apart + 1e-8


# --- leave-one-out where the leverage is 1 ---------------------------------------------------------------------------


def by_hand(key, value, query_at, **options):
    rest = [j for j in range(len(key)) if j != query_at]
    without = intention.fit(key[rest], value[rest], **options)
    return value[query_at] - without(key[query_at : query_at + 1])[0]


def brute_force(key, value, **options):
    return torch.stack([by_hand(key, value, i, **options) for i in range(len(key))])


def dummy_column():
    key = randn(9, 3)
    key[:, 2] = 0
    key[4, 2] = 1.5
    return key


HARD = {
    "as many points as features": (lambda: randn(4, 4), {"alpha": 0.0}),
    "as many points as features, intercept": (lambda: randn(4, 4), {"alpha": 0.0, "intercept": True}),
    "a column of one point": (dummy_column, {"alpha": 0.0}),
    "a column of one point, tiny alpha": (dummy_column, {"alpha": 1e-13}),
    "twice the same point": (lambda: randn(1, 5).repeat(2, 1), {"alpha": 0.0}),
    "a far point": (lambda: torch.cat([1e5 * randn(1, 3), randn(29, 3)]), {"alpha": 1e-3}),
    "a far point, intercept": (
        lambda: torch.cat([1e6 * randn(1, 3), randn(29, 3)]),
        {"alpha": 1e-3, "intercept": True},
    ),
    "convex, few points": (lambda: randn(4, 7), {"alpha": 1e-8, "covariance": "convex"}),
    "convex, few points, intercept": (lambda: randn(4, 7), {"alpha": 1e-8, "covariance": "convex", "intercept": True}),
    "convex without alpha": (lambda: randn(4, 7), {"alpha": 0.0, "covariance": "convex"}),
    "one point, intercept": (lambda: randn(1, 3), {"alpha": 0.3, "intercept": True}),
    "one point of one feature, intercept": (lambda: randn(1, 1), {"alpha": 0.3, "intercept": True}),
}


@pytest.mark.parametrize("name", HARD)
def test_leave_one_out_where_a_point_is_alone(name):
    make, options = HARD[name]
    key = make()
    value = randn(len(key), 2)
    ctx = intention.fit(key, value, **options)
    assert off(ctx.leave_one_out(), brute_force(key, value, **options)) < 1e-5
    batch = intention.fit(torch.stack([key, randn(*key.shape)]), torch.stack([value, value]), **options)
    assert off(batch.leave_one_out()[0], brute_force(key, value, **options)) < 1e-5


def test_leverage_of_the_minimum_norm_fit():
    x = randn(1, 5)
    ctx = intention.fit(torch.cat([x, x]), randn(2, 1), alpha=0)
    assert torch.allclose(ctx.leverage(), torch.full((2,), 0.5, dtype=D))
    assert torch.allclose(intention.fit(randn(3, 5), randn(3, 1), alpha=0).leverage(), torch.ones(3, dtype=D))


@pytest.mark.parametrize("shape", [(5, 9), (5, 5), (12, 4)])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
@pytest.mark.parametrize("intercept", [False, True])
def test_a_grid_with_extremes_chooses_by_the_true_errors(shape, covariance, intercept):
    grid = [0.0, 1e-10, 1e-3, 0.1, 0.9]
    key, value = randn(20, *shape), randn(20, shape[0], 1)
    chosen = intention.fit(key, value, alpha=grid, covariance=covariance, intercept=intercept).alpha
    errors = []
    for alpha in grid:
        options = {"alpha": alpha, "covariance": covariance, "intercept": intercept}
        errors.append(
            torch.stack([brute_force(k, v, **options).square().sum() for k, v in zip(key, value, strict=True)])
        )
    errors = torch.stack(errors, -1)
    taken = errors.gather(-1, torch.tensor([[grid.index(a)] for a in chosen.tolist()])).squeeze(-1)
    known = errors[:, 1:] if shape[0] <= shape[1] else errors  # alpha = 0 is not looked at with so few points
    assert (taken <= known.amin(-1) * (1 + 1e-5)).all()


# --- variance ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", [1e-4, 1e-8, 1e-12])
def test_variance_does_not_cancel(alpha):
    key = randn(3, 6)
    query = torch.cat([randn(4, 3) @ key, randn(2, 6)])  # in the span of the keys, and anywhere
    u, s, v = torch.linalg.svd(key)
    weights = query @ v.mT
    spectrum = torch.cat([s.square(), torch.zeros(3, dtype=D)])
    want = (weights.square() * alpha / (spectrum + alpha)).sum(-1)
    ctx = intention.fit(key, randn(3, 1), alpha=alpha)
    assert ((ctx.variance(query) - want).abs() / want).max() < 1e-6
    del u


def test_variance_of_a_kernel_is_right_or_says_so():
    key, query = randn(12, 2), randn(3, 2)
    query = torch.cat([query, key[:3]])
    kernel = intention.kernels.Gaussian(2.0)
    for alpha in (1e-3, 1e-6, 1e-9, 1e-12):
        gram, cross = kernel(key, key), kernel(query, key)
        values, vectors = torch.linalg.eigh(gram)
        x = cross @ vectors  # k(q,q) - x (l + a)^-1 x' in two parts that do not cancel for q among the keys
        want = 1 - (x.square() / (values + alpha)).sum(-1)
        want[3:] = (alpha * (vectors[:3].square() * values / (values + alpha))).sum(-1)
        ctx = intention.fit(key, randn(12, 1), alpha=alpha, kernel=kernel)
        certified(lambda ctx=ctx: ctx.variance(query)[3:], want[3:], 1e-3)


def test_variance_without_alpha_is_what_no_point_reaches():
    key, query = randn(3, 5), randn(4, 5)
    want = (query - query @ torch.linalg.pinv(key) @ key).square().sum(-1)
    ctx = intention.fit(key, randn(3, 1), alpha=0)
    for kind in (ctx, ctx.without_points(), intention.fit(key.repeat(2, 1), randn(6, 1), alpha=0)):
        assert torch.allclose(kind.variance(query), want)


@pytest.mark.parametrize("shape", [(11, 3), (3, 11)])
def test_variance_of_the_convex_covariance_is_that_of_its_ridge(shape):
    key, value, query = randn(*shape), randn(shape[0], 1), randn(5, shape[1])
    convex = intention.fit(key, value, alpha=0.2, covariance="convex", intercept=True)
    ridge = intention.fit(key, value, alpha=0.25, intercept=True)
    for noise in (False, True):
        assert torch.allclose(convex.variance(query, noise), ridge.variance(query, noise))


def test_leading_dimensions_of_the_values_are_those_of_the_variance():
    ctx = intention.fit(randn(11, 3), randn(5, 11, 2))
    assert ctx.variance(randn(7, 3)).shape == (5, 7)


# --- sums -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1e4, 1e6, 1e8])
def test_an_outlier_that_came_and_went(size):
    key, value, query = randn(20, 3), randn(20, 1), randn(5, 3)
    far = torch.full((1, 3), size, dtype=D), torch.ones(1, 1, dtype=D)
    want = intention.fit(key, value)(query)
    ctx = intention.fit(key, value)
    assert off(ctx.add(*far).remove(*far)(query), want) < 1e-9
    certified(lambda: ctx.without_points().add(*far).remove(*far)(query), want, 1e-4)


@pytest.mark.parametrize("apart", [1e4, 1e7, 1e8])
def test_classes_far_apart(apart):
    labels = torch.arange(40) % 2
    key, hot = randn(40, 3), torch.nn.functional.one_hot(labels).to(D)
    moved = key + apart * labels[:, None]
    x = moved - hot @ (hot.mT @ moved / 20)
    want = torch.linalg.solve(x.mT @ x + torch.eye(3, dtype=D), moved.mT @ hot)
    ctx = intention.fit(moved, hot, covariance="within")
    assert off(ctx.w, want) < 1e-6
    query = randn(5, 3)
    assert off(F.intention(query, moved, hot, covariance="within"), query @ want) < 1e-6
    certified(lambda: ctx.without_points().w, want, 1e-4)


def test_foreign_points_cannot_be_removed_from_sums():
    ctx = intention.fit(randn(5, 2), randn(5, 1), keep_points=False)
    for foreign in (randn(5, 2) + 1e3, randn(5, 2)):
        with pytest.raises(ValueError, match="cannot have been in the context"):
            ctx.remove(foreign, randn(5, 1))
    with pytest.raises(ValueError, match="cannot have been in the context"):  # more than there are, all at the mean
        ctx.remove(ctx.stats.mean_key.expand(7, 2), randn(7, 1))
    left, impossible = Sums.of(randn(5, 2), randn(5, 1)).remove(Sums.of(torch.zeros(6, 2, dtype=D), randn(6, 1)))
    assert impossible
    assert left.total < 0


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_lda_far_from_the_origin(offset):
    torch.manual_seed(1)
    labels = torch.arange(40) % 3
    key = (randn(40, 3) + 2 * torch.nn.functional.one_hot(labels).to(D) + offset).float()
    near = key.double() - offset
    for route in ("within", "total"):
        got, want = lda(key, labels, route=route), lda(near, labels, route=route)
        assert (got.predict(key) == want.predict(near)).all()
        a, b = got(key).double(), want(near)
        assert off(a[:, 1:] - a[:, :1], b[:, 1:] - b[:, :1]) < 1e-5


# --- kernels and matrices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("apart", [1e4, 1e7, 1e9])
def test_a_gaussian_kernel_of_clusters_far_apart(apart):
    key = torch.cat([randn(10, 2), randn(10, 2) + apart])
    exact = torch.exp(-0.5 * (key[:, None] - key[None]).square().sum(-1))
    assert (intention.kernels.Gaussian(0.5)(key, key) - exact).abs().max() < 1e-8
    single = key.float() if apart < 1e5 else None
    if single is not None:
        exact = torch.exp(-0.5 * (single[:, None] - single[None]).square().sum(-1))
        assert (intention.kernels.Gaussian(0.5)(single, single) - exact).abs().max() < 1e-4


def test_what_is_not_positive_semidefinite_is_refused():
    key, value = randn(10, 3), randn(10, 1)
    with pytest.raises(ValueError, match="positive semidefinite, got an eigenvalue -"):
        intention.fit(key, value, alpha=0.1, kernel=lambda x, y: torch.tanh(x @ y.mT - 1))(key)
    with pytest.raises(ValueError, match="positive semidefinite"):
        intention.fit(key, value, covariance=lambda k, v, w: -5 * torch.eye(3, dtype=D)).w  # noqa: B018


def test_kernel_contexts_have_no_weights():
    ctx = intention.fit(randn(10, 3), randn(10, 1), kernel="gaussian", intercept=True)
    for ask in (lambda: ctx.intercept, lambda: ctx.solve_sigma(randn(3, 1)), ctx.free_w):
        with pytest.raises(ValueError, match="has no w in the space of the keys"):
            ask()
    with pytest.raises(ValueError, match="has no w"):
        intention.constraints.one_pass(ctx, torch.eye(3, dtype=D), 0.0)


# --- classifiers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(9, 2), (5, 11)])
def test_each_head_has_its_own_alpha(size):
    n, d = size
    key, labels, query = randn(2, n, d), torch.arange(n) % 2, randn(2, 7, d)
    alpha, shrinkage = torch.tensor([0.1, 5.0], dtype=D), torch.tensor([0.2, 0.7], dtype=D)
    for make in (lda, qda):
        both = make(key, labels, alpha=alpha, shrinkage=shrinkage)(query)
        for i in range(2):
            one = make(key[i], labels, alpha=alpha[i], shrinkage=shrinkage[i])(query[i])
            assert off(both[i], one) < 1e-9


def test_a_weight_of_one_changes_nothing():
    key, labels, query = randn(2, 15, 2), torch.arange(15) % 3, randn(2, 7, 2)
    ones = torch.ones(2, 15, dtype=D)
    for make in (lda, qda, ls_svm):
        for kernel in (None, "gaussian"):
            options = {"alpha": 0.3, "kernel": kernel}
            assert off(make(key, labels, weight=ones, **options)(query), make(key, labels, **options)(query)) < 1e-9


def test_what_classifiers_refuse():
    key, labels = randn(9, 2), torch.tensor([0, 2, 0, 2, 0, 2, 0, 2, 0])
    thirds = torch.full((3,), 1 / 3, dtype=D)
    for make in (lda, qda):
        with pytest.raises(ValueError, match="0 for classes without points"):
            make(key, labels, priors=thirds, alpha=0.1)
        with pytest.raises(ValueError, match="ddof = 20 leaves nothing"):
            make(key, labels // 2, ddof=20)
        with pytest.raises(ValueError, match="alpha must be finite and >= 0, got -1"):
            make(key, labels // 2, alpha=-1.0)
    with pytest.raises(ValueError, match="labels are empty"):
        lda(key[:0], labels[:0])
    assert ls_svm(key, labels > 0)(key).shape == (9, 2)  # bool labels


# --- broken elements of a batch ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"kernel": "gaussian"}, {"alpha": "loo"}, {"alpha": [0.1, 1.0], "intercept": True}]
)
@pytest.mark.parametrize("shape", [(11, 3), (4, 9)])
def test_a_broken_element_stays_alone(options, shape):
    key, value, query = randn(3, *shape), randn(3, shape[0], 1), randn(3, 5, shape[1])
    key[1, 0, 0] = torch.nan
    ctx = intention.fit(key, value, **options)
    alone = intention.fit(key[[0, 2]], value[[0, 2]], **options)
    assert torch.isnan(ctx(query)[1]).all()
    assert off(ctx(query)[[0, 2]], alone(query[[0, 2]])) < 1e-10
    assert torch.isnan(ctx.variance(query)[1]).all()
    assert off(ctx.leave_one_out()[[0, 2]], alone.leave_one_out()) < 1e-10


def test_a_broken_element_does_not_lift_the_constraints_of_others():
    key = randn(2, 20, 3)
    value = -key.sum(-1, keepdim=True)
    key[0, 0, 0] = torch.nan
    w = intention.fit(key, value).constrain(torch.eye(3, dtype=D), 0.0).w
    assert torch.isnan(w[0]).all()
    assert w[1].abs().max() < 1e-9


def test_classifiers_with_a_broken_element():
    key, labels, query = randn(2, 11, 3), torch.arange(11) % 2, randn(2, 5, 3)
    key[0, 0, 0] = torch.nan
    for make in (lda, qda):
        for options in ({"shrinkage": 0.1}, {"alpha": 0.1}):
            logits = make(key, labels, **options)(query)
            assert torch.isnan(logits[0]).all()
            assert off(logits[1], make(key[1], labels, **options)(query[1])) < 1e-10


# --- constraints ------------------------------------------------------------------------------------------------------


def test_bounds_that_are_not_finite():
    key = randn(20, 3).abs()
    ctx = intention.fit(key, -key.sum(-1, keepdim=True))
    eye = torch.eye(3, dtype=D)
    loose = ctx.constrain(eye, torch.tensor([0.0, 0.0, -torch.inf], dtype=D)).w
    assert off(loose, ctx.constrain(eye[:, :2], 0.0).w) < 1e-10
    for bound in (torch.inf, torch.nan):
        with pytest.raises(ValueError, match="c must be finite"):
            ctx.constrain(eye, torch.tensor([0.0, 0.0, bound], dtype=D))
    with pytest.raises(ValueError, match="c must be finite"):
        ctx.constrain(eye, torch.tensor([0.0, 0.0, -torch.inf], dtype=D), "eq")
    assert ctx.constrain(eye[:, :0], torch.zeros(0, dtype=D)) is ctx


def test_constraints_without_alpha():
    key = randn(50, 3)
    value = key @ torch.tensor([[1.0], [-1.0], [0.5]], dtype=D)
    from scipy.optimize import nnls

    want = torch.from_numpy(nnls(key.numpy(), value[:, 0].numpy())[0])[:, None]
    got = intention.fit(key, value, alpha=0).constrain(torch.eye(3, dtype=D), 0.0).w
    assert off(got, want) < 1e-9
    for few in (randn(2, 3), randn(1, 3).repeat(5, 1)):
        with pytest.raises(ValueError, match="use alpha > 0"):
            intention.fit(few, randn(len(few), 1), alpha=0).constrain(torch.eye(3, dtype=D), 0.0).w  # noqa: B018


@pytest.mark.parametrize("alpha", [1e-6, 1e-10, 1e-12, 1e-14])
def test_constraints_of_few_points_hold_or_say_so(alpha):
    key = randn(3, 6)
    ctx = intention.fit(key, randn(3, 1), alpha=alpha)
    level = torch.full((2, 1), 5.0, dtype=D)
    certified(lambda: key[:2] @ ctx.constrain(key[:2].mT, 5.0, "eq").w, level, 1e-3)


# --- derivatives and the rest -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(7, 3), (3, 7)])
@pytest.mark.parametrize("intercept", [False, True])
def test_slopes_at_a_weight_of_zero(shape, intercept):
    n, d = shape
    key, value, query = randn(n, d), randn(n, 1), randn(2, d)
    weight = torch.rand(n, dtype=D) + 0.5
    weight[1] = 0
    weight.requires_grad_()

    def answers(w):
        ctx = intention.fit(key, value, 0.3, w, intercept)
        return torch.cat([ctx.leverage(), ctx.variance(query), ctx.leave_one_out().flatten(), ctx(query).flatten()])

    slopes = torch.autograd.functional.jacobian(answers, weight)[:, 1]
    step = torch.zeros(n, dtype=D)
    step[1] = 1e-6
    with torch.no_grad():
        want = (answers(weight + step) - answers(weight)) / 1e-6
    assert off(slopes, want) < 1e-4


def test_the_inverse_and_its_derivatives():
    """(c S + alpha W^-1)^-1 with all its derivatives: forward, backward, twice; and where it is a pseudo-inverse."""
    x = randn(2, 7, 4)
    s, alpha, gain = x.mT @ x, torch.rand(2, dtype=D) + 0.1, torch.rand(2, dtype=D) + 0.1
    weight = torch.rand(2, 4, dtype=D) + 0.1

    def f(s, w, a, g):
        out, logdet, _ = inverse((s + s.mT) / 2, a, g, w)
        return out, logdet

    wants = [None if x is None else x.requires_grad_() for x in (s.clone(), weight, alpha, gain)]
    for w in (None, wants[1]):
        for g in (None, wants[3]):
            args = (wants[0], w, wants[2], g)
            assert torch.autograd.gradcheck(f, args, check_forward_ad=True)
            assert torch.autograd.gradgradcheck(f, args)
            out, logdet = f(*args)
            full = (1 if g is None else g[:, None, None]) * s
            full = full + alpha[:, None, None] * (torch.eye(4, dtype=D) if w is None else torch.diag_embed(1 / w))
            assert off(out.detach(), torch.linalg.inv(full).detach()) < 1e-10
            if w is None:
                assert off(logdet.detach(), torch.logdet(full).detach()) < 1e-10
    thin, zero = randn(2, 3, 5).requires_grad_(), torch.zeros(2, dtype=D)
    heavy = (torch.rand(2, 5, dtype=D) + 0.2).requires_grad_()
    assert off(inverse(thin.mT @ thin, zero)[0], torch.linalg.pinv(thin.mT @ thin, hermitian=True)) < 1e-9
    assert torch.autograd.gradcheck(lambda x: inverse(x.mT @ x, zero)[0], (thin,), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(lambda x: inverse(x.mT @ x, zero)[0], (thin,))
    assert torch.autograd.gradcheck(lambda x, w: inverse(x.mT @ x, zero, None, w)[0], (thin, heavy))


def test_answers_that_are_doubtful_are_said_to_be():
    key = randn(40, 3)
    key[:, 2] = key[:, 0] + 1e-7 * randn(40)
    value = randn(40, 1)
    ctx = intention.fit(key, value, alpha=1e-16)
    with pytest.warns(intention.AccuracyWarning):
        ctx.variance(key)
    with mpmath.workdps(50):  # what needs no warning is right
        points, targets = mpmath.matrix(key.tolist()), mpmath.matrix(value.tolist())
        inverse = (points.T * points + mpmath.mpf(1e-16) * mpmath.eye(3)) ** -1
        hat = points * inverse * points.T
        leverage = [hat[i, i] for i in range(40)]
        left = targets - hat * targets
        errors = torch.tensor([float(left[i] / (1 - leverage[i])) for i in range(40)], dtype=D)
    torch.testing.assert_close(
        ctx.leverage(), torch.tensor([float(x) for x in leverage], dtype=D), rtol=1e-6, atol=1e-8
    )
    torch.testing.assert_close(ctx.leave_one_out().squeeze(-1), errors, rtol=1e-6, atol=1e-8)


def test_many_features_and_few_points_stay_small():
    """25 points in 8192 dimensions: nothing of size 8192 x 8192 (512 MiB) is ever made."""
    key, value = torch.randn(25, 8192), torch.nn.functional.one_hot(torch.arange(25) % 5).float()
    query = torch.randn(3, 8192)
    peak = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            peak.extend(x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor))
            return out

    labels = value.argmax(-1)
    with Watch():
        for options in ({}, {"intercept": True}, {"alpha": "loo"}, {"covariance": "within"}, {"covariance": "convex"}):
            ctx = intention.fit(key, value, **options)
            ctx(query), ctx.variance(query), ctx.add(query, value[:3]).remove(key[:2], value[:2])(query)  # pyright: ignore[reportUnusedExpression]
            ctx.merge(ctx)(query)
            ctx.constrain(torch.randn(8192, 2), 0.0).w  # noqa: B018
        lda(key, labels, shrinkage=0.1)(query)
        qda(key, labels, alpha=0.1)(query)
        F.intention(query, key, value, covariance="within")
    assert max(peak) < 25 * 8192 * 10


def test_an_empty_batch():
    ctx = intention.fit(randn(0, 20, 3), randn(0, 20, 1))
    query = randn(0, 5, 3)
    assert ctx(query).shape == (0, 5, 1)
    assert ctx.variance(query).shape == (0, 5)
    assert ctx.leave_one_out().shape == (0, 20, 1)


def test_the_words_of_errors():
    key, value = randn(7, 3), randn(7, 2)
    ctx = intention.fit(key, value)
    for call, kind, words in [
        (lambda: intention.fit(key.numpy(), value), TypeError, "key must be a torch.Tensor, got ndarray"),
        (lambda: intention.fit(key.long(), value), TypeError, "key must have a floating-point dtype"),
        (lambda: intention.fit(randn(3, 7, 3), value)(randn(2, 5, 3)), ValueError, r"query \(2,\), context \(3,\)"),
        (lambda: intention.fit(randn(3, 7, 3), value).add(randn(2, 1, 3), randn(1, 2)), ValueError, "must broadcast"),
        (lambda: ctx.without_points().add(key, randn(7, 4)), ValueError, "k = 2 values"),
        (
            lambda: intention.fit(key, value, features=lambda x: x, keep_points=False).add(key, randn(7, 4)),
            ValueError,
            "k",
        ),
    ]:
        with pytest.raises(kind, match=words):
            call()
    assert ctx.add(key.float(), value.float()).dtype == D
    assert intention.fit(key.float(), value.float()).add(key, value).dtype == D


def test_weights_with_more_leading_dimensions_than_keys():
    key, value, weight, query = randn(7, 3), randn(7, 2), torch.rand(4, 7, dtype=D) + 0.1, randn(5, 3)
    ctx = intention.fit(key, value, weight=weight)
    less = ctx.remove(key[:2], value[:2])
    assert off(less(query), intention.fit(key[2:], value[2:], weight=weight[:, 2:])(query)) < 1e-9
    faded = intention.fit(key, value).forget(torch.tensor([0.5, 0.9], dtype=D))
    assert faded(query).shape == (2, 5, 2)
    assert faded.remove(key[:1], value[:1])(query).shape == (2, 5, 2)


def test_a_head_holds_its_alpha():
    head = intention.nn.Intention(alpha=torch.tensor(0.3))
    assert "alpha" in dict(head.named_buffers())
    assert intention.constraints.LinearConstraint(torch.eye(2), [0.0, 1.0]).bound.tolist() == [0.0, 1.0]


# --- more of the same -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1.0, 1e2, 1e3])
@pytest.mark.parametrize("alpha", [1.0, 1e-4])
def test_kernels_within_classes_are_right_or_say_so(scale, alpha):
    labels = torch.arange(60) % 2
    hot = torch.nn.functional.one_hot(labels).to(D)
    key, query = scale * randn(60, 3), scale * randn(4, 3)
    want = intention.fit(key, hot, alpha, covariance="within")(query)
    certified(lambda: intention.fit(key, hot, alpha, covariance="within", kernel="linear")(query), want, 1e-3)
    plain = lda(key, labels, alpha=alpha)(query)
    gap = (plain[:, 1] - plain[:, 0])[:, None]

    def kernel_gap():
        logits = lda(key, labels, alpha=alpha, kernel="linear")(query)
        return (logits[:, 1] - logits[:, 0])[:, None]

    certified(kernel_gap, gap, 1e-3)


@pytest.mark.parametrize("apart", [1.0, 1e2, 1e4, 1e5, 1e6, 1e7])
def test_the_total_route_is_equal_or_refused(apart):
    labels = torch.arange(60) % 3
    key = randn(60, 3) + apart * torch.nn.functional.one_hot(labels).to(D)
    want = lda(key, labels)(key)
    certified(lambda: lda(key, labels, route="total")(key), want, 1e-4)
    if apart < 1e3:
        assert off(lda(key, labels, route="total")(key), want) < 1e-8


@pytest.mark.parametrize("alpha", [1e-1, 1e-4, 1e-6, 0.0])
def test_a_kernel_in_float32_knows_its_rounding(alpha):
    torch.manual_seed(0)
    key, value, query = torch.randn(50, 2), torch.randn(50, 1), torch.randn(5, 2)

    def own(x, y):
        return (1 + x @ y.mT) ** 2

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        want = intention.fit(key.double(), value.double(), alpha, kernel=own)(query.double())
    certified(lambda: intention.fit(key, value, alpha, kernel=own)(query), want, 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        intention.fit(key, value, 1.0, kernel=own)(query)  # nothing to say of an ordinary fit


@pytest.mark.parametrize("offset", [1.0, 1e4, 1e6, 1e7])
def test_a_kernel_is_centred_or_says_so(offset):
    key, value, query = randn(30, 3) + offset, randn(30, 1), randn(5, 3) + offset
    plain = intention.fit(key, value, intercept=True)
    certified(lambda: intention.fit(key, value, intercept=True, kernel="linear")(query), plain(query), 1e-3)


def test_single_refits_know_the_features_and_kernels_of_their_element():
    maps = torch.stack([torch.eye(3, dtype=D), torch.tensor([[1.0, 1, 0], [0, 1, 1], [0, 0, 1]], dtype=D)])
    key = torch.randint(-3, 4, (2, 9, 3)).to(D)
    key[0, :, 1:] = 0
    key[0, :, 0] = torch.arange(1, 10)
    key[0, 0, 1] = key[0, 1, 2] = 1
    value = randn(2, 9, 1)
    got = intention.fit(key, value, alpha=0, features=lambda x: x @ maps).leave_one_out()
    for i in range(2):
        assert off(got[i], brute_force(key[i] @ maps[i], value[i], alpha=0)) < 1e-8
    lonely = {"intercept": True, "kernel": "gaussian", "features": "nystroem", "landmarks": 1}
    one = randn(2, 3, 1, 1)
    assert off(intention.fit(randn(2, 3, 1, 3), one, **lonely).leave_one_out(), one) < 1e-12
    gamma = torch.tensor([0.5, 2.0], dtype=D)
    twice = randn(2, 3, 2).repeat(1, 2, 1)
    ctx = intention.fit(twice, randn(2, 6, 1), alpha=0, kernel=intention.kernels.Gaussian(gamma))
    for i in range(2):
        kernel = intention.kernels.Gaussian(gamma[i])
        assert off(ctx.leave_one_out()[i], brute_force(twice[i], ctx.value[i], alpha=0, kernel=kernel)) < 1e-6


@pytest.mark.parametrize("size", [1e8, 1e12, 1e16])
def test_an_outlier_of_the_values_that_came_and_went(size):
    key, value, query = randn(30, 3), randn(30, 1), randn(5, 3)
    far = randn(1, 3), torch.full((1, 1), size, dtype=D)
    assert off(intention.fit(key, value).add(*far).remove(*far)(query), intention.fit(key, value)(query)) < 1e-6


@pytest.mark.parametrize("heavy", [1e3, 1e6, 1e9])
def test_leave_one_out_of_a_point_with_nearly_all_the_weight(heavy):
    key, value, weight = randn(9, 2), randn(9, 1), torch.ones(9, dtype=D)
    weight[0] = heavy
    kernel = intention.kernels.Gaussian(0.5)
    got = intention.fit(key, value, 0.5, weight, intercept=True, kernel=kernel).leave_one_out()
    without = intention.fit(key[1:], value[1:], 0.5, weight[1:], intercept=True, kernel=kernel)
    assert off(got[:1], value[:1] - without(key[:1])) < 1e-5


@pytest.mark.parametrize("alpha", [1e-8, 1e-11, 1e-13])
def test_kernel_qda_is_right_or_says_so(alpha):
    key, labels, query = randn(60, 3), torch.arange(60) % 2, randn(4, 3)
    plain = qda(key, labels, alpha=alpha)(query)

    def gap():
        logits = qda(key, labels, alpha=alpha, kernel="linear")(query)
        return (logits[:, 1] - logits[:, 0])[:, None]

    certified(gap, (plain[:, 1] - plain[:, 0])[:, None], 1e-3)


@pytest.mark.parametrize(("shape", "options"), [
    ((2, 2), {}),
    ((4, 4), {}),
    ((3, 3), {"intercept": True}),
    ((2, 5), {"intercept": True}),
    ((3, 5), {"covariance": "convex"}),
    ((4, 3), {"covariance": "convex", "intercept": True}),
])  # fmt: skip
def test_gradients_of_leave_one_out_without_alpha(shape, options):
    key, value = randn(*shape).requires_grad_(), randn(shape[0], 1)
    (slope,) = torch.autograd.grad(intention.fit(key, value, alpha=0, **options).leave_one_out().sum(), key)
    (want,) = torch.autograd.grad(brute_force(key, value, alpha=0, **options).sum(), key)
    assert (slope - want).norm() <= 1e-5 * want.norm() + 1e-12  # with 2 points and an intercept it is 0


def test_forward_mode_of_a_weighted_minimum_norm_fit():
    key, value = randn(3, 2).repeat(2, 1), randn(6, 1)
    weight, step = torch.rand(6, dtype=D) + 0.3, randn(6)

    def f(w):
        return intention.fit(key, value, 0, w, kernel="linear")(key[:2])

    _, tangent = torch.func.jvp(f, (weight,), (step,))  # pyright: ignore[reportAssignmentType]
    want = (f(weight + 1e-6 * step) - f(weight - 1e-6 * step)) / 2e-6
    assert off(tangent, want) < 1e-5


@pytest.mark.parametrize("n", [3, 5, 12])
@pytest.mark.parametrize("offset", [0.0, 1e4])
def test_sums_can_lose_their_points_one_by_one(n, offset):
    key, value = randn(n, 3) + offset, randn(n, 2)
    ctx = intention.fit(key, value, intercept=True, keep_points=False)
    for i in range(n):
        ctx = ctx.remove(key[i : i + 1], value[i : i + 1])
    assert ctx(randn(4, 3)).abs().max() == 0


def test_leading_dimensions_of_gamma_and_weights_of_another_dtype():
    kernel = intention.kernels.Gaussian(torch.tensor([0.5, 1.0, 2.0], dtype=D))
    ctx = intention.fit(randn(7, 2), randn(7, 1), 0.1, kernel=kernel)
    assert ctx(randn(5, 2)).shape == (3, 5, 1)
    assert ctx.variance(randn(5, 2)).shape == (3, 5)
    key, value = torch.randn(7, 2), torch.randn(7, 1)
    left = intention.fit(key, value).forget(0.9).remove(key[:1], value[:1], torch.full((1,), 0.9))
    assert left.key.shape[-2] == 6


def test_the_default_grid_is_around_the_mean_eigenvalue():
    key = torch.diag_embed(torch.full((4,), 3.0, dtype=D)).repeat(2, 1)  # K'K = 18 I
    grid = leave_one_out._default_grid(torch.full((4,), 18.0, dtype=D), 8, "ridge")
    assert torch.allclose(grid, 18 * torch.logspace(-6, 3, 28, dtype=D))
    assert float(intention.fit(key, randn(8, 1), alpha="loo").alpha) in grid.tolist()
    assert torch.allclose(leave_one_out._default_grid(torch.full((4,), 18.0, dtype=D), 2, "ridge"), 2 * grid)


def test_qda_of_few_points_with_shrinkage_is_the_plain_formula():
    """The classes shrink to different sizes, so the directions that no point has count differently, too."""
    labels = torch.arange(8) % 2
    key, query = randn(8, 11) * (1 + 3 * labels[:, None]), randn(5, 11)
    logits = qda(key, labels, shrinkage=0.3)(query)
    for c in range(2):
        mine = key[labels == c]
        cov = torch.cov(mine.T, correction=0)
        cov = 0.7 * cov + 0.3 * cov.diagonal().mean() * torch.eye(11, dtype=D)
        r = query - mine.mean(0)
        want = (
            -0.5 * ((r @ torch.linalg.inv(cov)) * r).sum(-1)
            - 0.5 * torch.logdet(cov)
            + torch.tensor(0.5, dtype=D).log()
        )
        assert off(logits[:, c], want) < 1e-9


def test_kernels_of_classifiers_see_the_weights():
    key, labels, query = randn(12, 2), torch.arange(12) % 2, randn(5, 2)
    times = torch.tensor([1, 2, 3, 1, 0, 2, 1, 3, 2, 1, 1, 2])
    again = torch.arange(12).repeat_interleave(times)
    for make in (lda, qda, ls_svm):  # gamma by the median of the weighted pairs
        a = make(key, labels, alpha=0.5, weight=times.to(D), kernel="gaussian")(query)
        b = make(key[again], labels[again], alpha=0.5, kernel="gaussian")(query)
        assert off(a[:, 1] - a[:, 0], b[:, 1] - b[:, 0]) < 1e-9


def test_the_convex_fit_of_dependent_columns():
    key, value = randn(23, 3), randn(23, 1)
    key[:, 2] = key[:, 0] + 1e-9 * key[:, 2]
    u, s, _ = torch.linalg.svd(key, full_matrices=False)
    alpha = 1e-10
    want = u @ ((s.square() / ((1 - alpha) * s.square() + alpha))[:, None] * (u.mT @ value))
    assert off(intention.fit(key, value, alpha=alpha, covariance="convex")(key), want) < 1e-6
    half = intention.fit(1e-12 * key, value, alpha=0.5, covariance="convex")
    assert off(half.w, 2e-12 * key.mT @ value) < 1e-8


def test_the_convex_fit_of_large_dependent_columns():
    key, value = randn(23, 3), randn(23, 1)
    key[:, 2] = key[:, 0] + 1e-9 * key[:, 2]
    key = 1e7 * key
    u, s, _ = torch.linalg.svd(key, full_matrices=False)
    want = u @ ((s.square() / (0.5 * s.square() + 0.5))[:, None] * (u.mT @ value))
    ctx = intention.fit(key, value, alpha=0.5, covariance="convex")
    assert F.ROUTES[ctx.describe().route] == "pinv"  # the points were looked at again
    assert off(ctx(key), want) < 1e-6


def test_a_grid_does_not_choose_what_it_cannot_know():
    key = randn(20, 3, 7).repeat(1, 2, 1)  # every point twice: at alpha = 0 the closed form does not hold
    assert (intention.fit(key, randn(20, 6, 1), alpha=[0.0, 1.0]).alpha == 1).all()


def test_a_state_without_its_weights_is_not_whole():
    state = intention.fit(randn(5, 2), randn(5, 1), weight=torch.rand(5)).state_dict()
    del state["weight"]
    with pytest.raises(ValueError, match="not the whole state"):
        intention.Context.from_state_dict(state)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"weight": torch.ones(23)}, {"intercept": True}])
@pytest.mark.parametrize("n", [23, 11])
def test_a_scale_does_not_round_the_queries_before_they_meet_sigma(n, options):
    """Keys far from 0 and a small alpha: eps |q| |Sigma^-1 k| is many times a score."""
    key, value = (randn(n, 17) + 9e3).float(), randn(n, 5).float()
    query = (randn(13, n) @ key.double() / n**0.5).float()
    count = torch.ones(13, n, dtype=D).tril() if "is_causal" in options else torch.ones(13, n, dtype=D)
    passed = options | ({"weight": options["weight"][:n]} if "weight" in options else {})
    rest = {"scale": 0.7, "intercept": "intercept" in options}
    for name in ("sigma_intention", "intention"):
        wide = [x.double() for x in (query, key, value)]
        want = oracle.each(getattr(oracle, name), *wide, count, torch.tensor(1e-4, dtype=D).expand(()), **rest)
        assert off(getattr(F, name)(query, key, value, alpha=1e-4, scale=0.7, **passed), want) < 1e-5


@pytest.mark.parametrize("scale", [-0.7, 0.0, 1e-30, 0.7, 1e4])
def test_every_scale_of_the_scores(scale):
    query, key, value, alpha = randn(3, 5, 7), randn(3, 11, 7), randn(3, 11, 2), torch.tensor(0.1, dtype=D)
    leaves = [x.requires_grad_() for x in (query, key, value, alpha)]
    got = F.sigma_intention(query, key, value, alpha=alpha, scale=scale)
    want = oracle.sigma_intention(query, key, value, torch.ones(3, 11, dtype=D), alpha.expand(3), scale=scale)
    torch.testing.assert_close(got, want)
    for a, b in zip(*(torch.autograd.grad(x.square().sum(), leaves) for x in (got, want)), strict=True):
        torch.testing.assert_close(a, b)


def test_points_of_a_class_that_lie_far_from_0():
    """Fewer points than features: a Gram of the keys as they are has rounded away what lies between a class's."""
    n, d = 23, 41
    key = torch.logspace(0, -6, n, dtype=D).unsqueeze(-1) * torch.linalg.qr(randn(d, n))[0].mT
    key, query, alpha = torch.linalg.qr(randn(n, n))[0] @ key + 2e2, randn(5, d), torch.tensor(1e-6, dtype=D)
    value = torch.nn.functional.one_hot(torch.arange(n) % 3).to(D)
    leaves = [x.requires_grad_() for x in (query, key, alpha)]
    got = F.intention(query, key, value, alpha=alpha, covariance="within")
    want = oracle.intention(query, key, value, torch.ones(n, dtype=D), alpha, covariance="within")
    assert off(got, want) < 1e-6
    upstream = randn(5, 3)
    for a, b in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (got, want)), strict=True):
        assert off(a, b) < 1e-5


def test_a_kernel_centred_far_from_some_of_its_points():
    """Points far away move the mean of a kernel by far more than what the others have."""
    key, value, query = randn(20, 13) / 3, randn(20, 4), randn(9, 13) / 3
    context = intention.fit(key, value, alpha=1.0, intercept=True, kernel=intention.kernels.Polynomial(2, gamma=0.5))
    far = context.add(1200 + randn(5, 13), randn(5, 4))
    with pytest.warns(intention.AccuracyWarning):
        far(query)
