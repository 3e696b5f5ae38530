"""The estimators against scikit-learn's own, its checks, and the equations of the least-squares SVM."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse
from sklearn.base import clone as cloned
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, DotProduct
from sklearn.kernel_approximation import Nystroem
from sklearn.kernel_ridge import KernelRidge
from sklearn.linear_model import LinearRegression, Ridge, RidgeClassifier, RidgeCV
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import parametrize_with_checks

from intention import features, kernels
from intention.sklearn import IntentionClassifier, IntentionRegressor

SHAPES = [(23, 3), (7, 13)]  # (n, d): more points than features, and fewer
SPACES = {
    "linear": {},
    "kernel": {"kernel": "gaussian", "gamma": 0.3},
    "nystroem": {"kernel": "gaussian", "gamma": 0.3, "features": "nystroem", "landmarks": 7, "random_state": 0},
    "fourier": {"kernel": "laplacian", "gamma": 0.3, "features": "fourier", "landmarks": 11, "random_state": 0},
}


def another(model) -> Any:
    """A clone; scikit-learn's own may also be a list of them."""
    return cloned(model)


def sample(n, d, k=None, m=11):
    rng = np.random.default_rng(0)
    x, query, weight = rng.normal(size=(n, d)) + 2, rng.normal(size=(m, d)) + 2, rng.random(n) + 0.1
    y = x @ rng.normal(size=(d, k or 1)) + rng.normal(size=(n, k or 1)) + 3
    return x, y if k else y[:, 0], query, weight


def close(got, want, tol=1e-8):
    assert np.shape(got) == np.shape(want)
    assert np.isfinite(want).all()
    assert np.linalg.norm(got - want) <= tol * np.linalg.norm(want), np.linalg.norm(got - want) / np.linalg.norm(want)


# -- scikit-learn's checks --------------------------------------------------------------------------------------------

SETTINGS = [
    {},
    {"alpha": "loo"},
    {"kernel": "gaussian"},
    {"kernel": "gaussian", "gamma": 0.3},
    {"kernel": "arccosine"},
    {"alpha": 0.01, "kernel": "gaussian", "gamma": 0.01, "features": "nystroem", "landmarks": 15},
]


def expected_failures(estimator):
    """Where a point of weight 2 is by design not two points of weight 1."""
    why = None
    if estimator.alpha == "loo":
        why = "leave-one-out leaves out a point with all its weight, but only one of two copies"
    elif estimator.features == "nystroem":
        why = "the landmarks are drawn among the points, and copies are points"
    return {} if why is None else {"check_sample_weight_equivalence_on_dense_data": why}


@parametrize_with_checks(
    [kind(**options) for kind in (IntentionRegressor, IntentionClassifier) for options in SETTINGS],
    expected_failed_checks=expected_failures,
    xfail_strict=True,
)
def test_the_checks_of_scikit_learn(estimator, check):
    check(estimator)


# -- regression -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("k", [None, 1, 5])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("weighted", [False, True])
def test_ridge(shape, k, fit_intercept, weighted):
    x, y, query, weight = sample(*shape, k)
    weight = weight if weighted else None
    want = Ridge(0.7, fit_intercept=fit_intercept, solver="svd").fit(x, y, weight)
    rows = y.shape[1:]  # a column (n, 1) stays one, as for LinearRegression; Ridge flattens it
    got = IntentionRegressor(0.7, fit_intercept=fit_intercept).fit(x, y, weight)
    close(got.predict(query), want.predict(query).reshape(-1, *rows))
    close(got.coef_, want.coef_.reshape(*rows, -1))
    close(got.intercept_ + 1, np.broadcast_to(want.intercept_, rows) + 1)
    assert got.alpha_ == 0.7
    assert (got.context_.key is None) == (shape[0] >= shape[1])  # sums where they are smaller than the points


def test_points_are_kept_where_sums_would_lose_digits():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(23, 3))
    x[:, 2] = x[:, 0] + 1e-6 * x[:, 2]  # nearly dependent: their products lose it, the points do not
    y = rng.normal(size=23)
    got = IntentionRegressor(0).fit(x, y)
    assert got.context_.key is not None
    close(got.predict(x), LinearRegression(tol=0).fit(x, y).predict(x))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [None, 5])
def test_kernel_ridge(weighted, k):
    x, y, query, weight = sample(17, 3, k)
    weight = weight if weighted else None
    named = {
        "linear": ("linear", {}),
        "gaussian": ("rbf", {"gamma": 0.4}),
        "laplacian": ("laplacian", {"gamma": 0.4}),
        "polynomial": ("polynomial", {"gamma": 0.4, "degree": 3, "coef0": 1.0}),
    }
    for name, (theirs, options) in named.items():
        want = KernelRidge(alpha=0.3, kernel=theirs, **options).fit(x, y, weight).predict(query)
        got = IntentionRegressor(0.3, False, kernel=name, gamma=options.get("gamma")).fit(x, y, weight)
        close(got.predict(query), want)
        assert not hasattr(got, "coef_")
    for own in (kernels.Gaussian(0.4), lambda a, b: torch.exp(-0.4 * torch.cdist(a, b).square())):
        want = KernelRidge(alpha=0.3, kernel="rbf", gamma=0.4).fit(x, y, weight).predict(query)
        close(IntentionRegressor(0.3, False, kernel=own).fit(x, y, weight).predict(query), want)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_cv(shape, weighted):
    x, y, query, weight = sample(*shape, 5)
    weight = weight if weighted else None
    grid = np.logspace(-3, 3, 13)
    want = RidgeCV(grid).fit(x, y, weight)
    for alpha in (grid, list(grid), tuple(grid)):
        got = IntentionRegressor(alpha).fit(x, y, weight)
        assert got.alpha_ == want.alpha_
        close(got.predict(query), want.predict(query))
    assert grid[0] < want.alpha_ < grid[-1]  # a choice, not an end of the grid
    finest = IntentionRegressor("loo").fit(x, y, weight)
    assert want.alpha_ / 5 < finest.alpha_ < 5 * want.alpha_  # pyright: ignore[reportOperatorIssue]


@pytest.mark.parametrize("m", [7, 23])
def test_nystroem_and_ridge_of_scikit_learn(m):
    x, y, query, weight = sample(23, 3, 5)
    theirs = Nystroem(kernel="rbf", gamma=0.8, n_components=m, random_state=0)
    pipeline = make_pipeline(theirs, Ridge(0.3, solver="svd")).fit(x, y, ridge__sample_weight=weight)
    phi = features.nystroem(kernels.Gaussian(0.8), torch.tensor(theirs.components_), landmarks=m)
    got = IntentionRegressor(0.3, features=phi).fit(x, y, weight)
    close(got.predict(query), pipeline.predict(query))
    if m == 23:
        for landmarks in (23, np.int64(23), 1000):  # more landmarks than points: all of them
            options = {"kernel": "gaussian", "gamma": 0.8, "features": "nystroem", "landmarks": landmarks}
            close(IntentionRegressor(0.3, **options).fit(x, y, weight).predict(query), pipeline.predict(query))


def test_random_state_decides_the_features():
    x, y, query, _ = sample(23, 3)
    for name in ("nystroem", "fourier"):
        model = IntentionRegressor(**SPACES[name])
        first, again = (another(model).fit(x, y).predict(query) for _ in range(2))
        assert np.array_equal(first, again)
        assert not np.allclose(first, another(model).set_params(random_state=1).fit(x, y).predict(query))


@pytest.mark.parametrize("k", [None, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_standard_deviations_are_those_of_a_gaussian_process(shape, k):
    x, y, query, _ = sample(*shape, k)
    for theirs, space in ((DotProduct(0.0, "fixed"), {}), (RBF(1.0, "fixed"), {"kernel": "gaussian", "gamma": 0.5})):
        want = GaussianProcessRegressor(theirs, alpha=0.7).fit(x, y).predict(query, return_std=True)
        got = IntentionRegressor(0.7, fit_intercept=False, **space).fit(x, y).predict(query, return_std=True)
        close(got[0], want[0])
        close(got[1], want[1])


@pytest.mark.parametrize("space", SPACES)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("k", [None, 5])
def test_partial_fit_in_chunks_is_one_fit(space, weighted, k):
    x, y, query, weight = sample(23, 3, k)
    options = dict(SPACES[space])
    if space == "nystroem":  # its landmarks are those of the first batch
        phi = features.nystroem(kernels.Gaussian(0.3), torch.tensor(x[:7]), landmarks=7)
        options = {"features": phi}
    whole = IntentionRegressor(0.7, **options).fit(x, y, weight if weighted else None)
    parts = IntentionRegressor(0.7, **options)
    sizes = []
    for at in (slice(0, 2), slice(2, 11), slice(11, 23)):
        parts.partial_fit(x[at], y[at], weight[at] if weighted else None)
        parts = pickle.loads(pickle.dumps(parts))
        sizes.append(parts.context_.key is None)
    for got, want in zip(parts.predict(query, True), whole.predict(query, True), strict=True):
        close(got, want, 1e-10)
    assert sizes == [space != "kernel"] * 3  # sums only
    if space == "linear":
        close(parts.coef_, whole.coef_, 1e-10)


@pytest.mark.parametrize("alpha", ["loo", [0.1, 1.0, 10.0]])
def test_partial_fit_keeps_what_the_first_batch_chose(alpha):
    x, y, query, _ = sample(23, 3)
    model = IntentionRegressor(alpha).fit(x[:11], y[:11])
    chosen = model.alpha_
    model.partial_fit(x[11:], y[11:])  # goes on after fit, too
    assert model.alpha_ == chosen != IntentionRegressor(alpha).fit(1e3 * x, 1e3 * y).alpha_
    close(model.predict(query), IntentionRegressor(chosen).fit(x, y).predict(query), 1e-10)
    landmarks = IntentionRegressor(kernel="gaussian", features="nystroem", landmarks=7).partial_fit(x[:11], y[:11])
    before = landmarks.context_.features
    assert landmarks.partial_fit(x[11:], y[11:]).context_.features is before


def test_partial_fit_goes_on_after_a_fit_that_kept_its_points():
    x, y, query, weight = sample(23, 13)
    model = IntentionRegressor(0.7).fit(x[:7], y[:7], weight[:7])
    assert model.context_.key is not None
    model.partial_fit(x[7:], y[7:], weight[7:])
    assert model.context_.key is None
    close(model.predict(query), IntentionRegressor(0.7).fit(x, y, weight).predict(query), 1e-10)


# -- classification ---------------------------------------------------------------------------------------------------


def labelled(classes, n=31, d=3):
    rng = np.random.default_rng(1)
    names = np.array(["red", "green", "blue", "grey"][:classes])
    at = np.concatenate([np.arange(classes), rng.integers(0, classes, n - classes)])
    x = rng.normal(size=(n, d)) + at[:, None] * np.array([1.0, -1.0, 0.5])
    return x, names[at], rng.normal(size=(11, d)) + 0.5, rng.random(n) + 0.1


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("class_weight", [None, "balanced", {"red": 3.0, "green": 0.5}])
@pytest.mark.parametrize("weighted", [False, True])
def test_ridge_classifier(classes, fit_intercept, class_weight, weighted):
    x, y, query, weight = labelled(classes)
    weight = weight if weighted else None
    options = {"fit_intercept": fit_intercept, "class_weight": class_weight}
    want = RidgeClassifier(0.7, solver="svd", **options).fit(x, y, weight)
    got = IntentionClassifier(0.7, **options).fit(x, y, weight)
    close(got.decision_function(query), want.decision_function(query))
    close(got.coef_, want.coef_.reshape(-1, 3))
    assert got.predict(query).tolist() == want.predict(query).tolist()  # pyright: ignore[reportAttributeAccessIssue]
    assert got.classes_.tolist() == want.classes_.tolist() == sorted(set(y))
    assert got.score(x, y) == want.score(x, y)


def suykens(gram, cross, y, gamma):
    """[0 y'; y Omega + I/gamma] [b; a] = [0; 1] with Omega = y y' k, then sum_i a_i y_i k(x, x_i) + b."""
    n = len(y)
    system = np.block([[np.zeros((1, 1)), y[None]], [y[:, None], np.outer(y, y) * gram + np.eye(n) / gamma]])
    b, *a = np.linalg.solve(system, np.concatenate([[0.0], np.ones(n)]))
    return cross @ (np.array(a) * y) + b


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("kernel", [None, "gaussian"])
def test_the_equations_of_suykens_and_vandewalle(classes, kernel):
    x, y, query, _ = labelled(classes)
    gram, cross = (x @ x.T, query @ x.T) if kernel is None else (rbf_kernel(z, x, gamma=0.3) for z in (x, query))
    model = IntentionClassifier(1 / 5, kernel=kernel, gamma=kernel and 0.3).fit(x, y)
    names = model.classes_[1:] if classes == 2 else model.classes_
    want = np.stack([suykens(gram, cross, np.where(y == name, 1.0, -1.0), gamma=5) for name in names], 1)
    close(model.decision_function(query), want[:, 0] if classes == 2 else want)
    largest = (want[:, 0] > 0).astype(int) if classes == 2 else want.argmax(1)
    assert model.predict(query).tolist() == model.classes_[largest].tolist()


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("space", ["linear", "kernel"])
@pytest.mark.parametrize("class_weight", [None, {"red": 3.0}])
def test_a_classifier_learns_in_chunks(classes, space, class_weight):
    x, y, query, weight = labelled(classes)
    order = np.argsort(y, kind="stable")  # the first chunk has one class only
    x, y, weight = x[order], y[order], weight[order]
    model = IntentionClassifier(0.7, class_weight=class_weight, **SPACES[space])
    whole, parts = another(model).fit(x, y, weight), another(model)
    assert len(set(y[:3])) == 1
    parts.partial_fit(x[:3], y[:3], np.unique(y), weight[:3])
    parts.partial_fit(x[3:17], y[3:17], sample_weight=weight[3:17])
    parts.partial_fit(x[17:], y[17:], np.unique(y), weight[17:])
    close(parts.decision_function(query), whole.decision_function(query), 1e-10)
    assert parts.predict(query).tolist() == whole.predict(query).tolist()


# -- the company it keeps ---------------------------------------------------------------------------------------------


def test_grids_pipelines_and_cross_validation():
    x, y, _, weight = sample(31, 3)
    pipeline = make_pipeline(StandardScaler(), IntentionRegressor(kernel="gaussian"))
    grid = {"intentionregressor__alpha": np.logspace(-3, 5, 3), "intentionregressor__gamma": [0.01, 10.0]}
    search = GridSearchCV(pipeline, grid, cv=3).fit(x, y, intentionregressor__sample_weight=weight)
    assert search.best_params_ == {"intentionregressor__alpha": 1e-3, "intentionregressor__gamma": 0.01}
    close(cross_val_score(IntentionRegressor(0.7), x, y), cross_val_score(Ridge(0.7, solver="svd"), x, y))
    x, y, *_ = labelled(4)
    close(cross_val_score(IntentionClassifier(), x, y, cv=2), cross_val_score(RidgeClassifier(), x, y, cv=2))


@pytest.mark.parametrize("space", SPACES)
def test_copies(space):
    x, y, query, _ = sample(23, 3)
    model = IntentionRegressor(**SPACES[space]).fit(x, y)
    want = model.predict(query)
    again = pickle.loads(pickle.dumps(model))
    assert np.array_equal(again.predict(query), want)
    assert again.alpha_ == model.alpha_
    fresh = another(model)
    assert not hasattr(fresh, "context_")
    assert np.array_equal(fresh.fit(x, y).predict(query), want)
    x[:] = 0  # the model has its own points
    assert np.array_equal(model.predict(query), want)


def test_coefficients_are_copies():
    x, y, query, _ = sample(23, 3)
    model = IntentionRegressor().fit(x, y)
    want = model.predict(query)
    model.coef_[:] = 0
    assert np.array_equal(model.predict(query), want)


class Module(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gamma = torch.nn.Parameter(torch.tensor(0.3, dtype=torch.float64))

    def forward(self, x, y):
        return torch.exp(-self.gamma * torch.cdist(x, y).square())


@pytest.mark.parametrize("kernel", [kernels.Gaussian(0.3, learnable=True), Module()])
def test_a_kernel_with_parameters_is_used_as_it_is(kernel):
    x, y, query, _ = sample(23, 3)
    model = IntentionRegressor(kernel=kernel).fit(x, y)
    close(model.predict(query), IntentionRegressor(kernel="gaussian", gamma=0.3).fit(x, y).predict(query), 1e-12)
    assert np.array_equal(copy.deepcopy(model).predict(query), model.predict(query))
    two = [IntentionClassifier(kernel=k, gamma=g).fit(x, y > y.mean()) for k, g in ((kernel, None), ("gaussian", 0.3))]
    close(two[0].decision_function(query), two[1].decision_function(query), 1e-12)


def test_messages():
    x, y, _, _ = sample(23, 3)
    with pytest.raises(ValueError, match=r"gamma=0.3 is for a kernel named .* got kernel=None; use gamma=None"):
        IntentionRegressor(gamma=0.3).fit(x, y)
    with pytest.raises(AttributeError, match="only a linear model has coef_; use kernel=None"):
        IntentionRegressor(kernel="gaussian").fit(x, y).coef_  # noqa: B018
    with pytest.raises(ValueError, match=r"y must have the shape \('n',\) of the first call, got \(23, 1\)"):
        IntentionRegressor().fit(x, y).partial_fit(x, y[:, None])
    with pytest.raises(TypeError, match="Sparse data was passed for y"):
        IntentionRegressor().fit(x, sparse.csr_array(y[:, None]))
    with pytest.raises(ValueError, match="landmarks must be between 1 and the number of keys N = 5, got 7"):
        IntentionRegressor(**SPACES["nystroem"]).partial_fit(x[:5], y[:5])
    with pytest.raises(ValueError, match="Negative values in data passed to `sample_weight`"):
        IntentionRegressor().fit(x, y, -np.ones(23))
    labels = np.where(y > y.mean(), "high", "low")
    with pytest.raises(ValueError, match=r"'balanced' needs all labels at once; give partial_fit a dict"):
        IntentionClassifier(class_weight="balanced").partial_fit(x, labels, ["high", "low"])
    with pytest.raises(ValueError, match="classes must be passed on the first call"):
        IntentionClassifier().partial_fit(x, labels)
    with pytest.raises(ValueError, match=r"not in classes: \['low'\]; name all on the first call"):
        IntentionClassifier().partial_fit(x, labels, ["high", "middle"])
    with pytest.raises(ValueError, match=r"at least 2 classes, got 1 class: \['one'\]"):
        IntentionClassifier().fit(x, ["one"] * 23)


def test_scikit_learn_is_an_extra():
    code = """
import sys
from typing import Any
import intention
assert "sklearn" not in sys.modules
sys.modules["sklearn"] = None
try:
    import intention.sklearn
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'scikit-learn>=1.6'" in done.stdout
