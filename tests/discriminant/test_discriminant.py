"""LS-SVM, LDA and QDA against scikit-learn, Suykens' KKT system and the paper's own (printed) formulas."""

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis

import intention
from intention.discriminant import lda, ls_svm, qda

D = torch.float64
PRIORS = {2: [0.2, 0.8], 5: [0.1, 0.3, 0.25, 0.05, 0.3]}


def sample(classes, b=3, n=41, d=3, m=17, seed=0, dtype=D):
    gen = torch.Generator().manual_seed(seed)
    labels = torch.cat(
        [torch.arange(classes).repeat(2 if n < 20 else 5), torch.randint(0, classes, (n,), generator=gen)]
    )
    labels = torch.stack([labels[torch.randperm(len(labels), generator=gen)] for _ in range(b)])
    centres = 1.5 * torch.randn(b, classes, d, generator=gen, dtype=dtype)
    spread = torch.rand(b, classes, d, generator=gen, dtype=dtype) + 0.5
    mixed = torch.eye(d, dtype=dtype) + 0.3 * torch.randn(d, d, generator=gen, dtype=dtype)
    noise = torch.randn(b, labels.shape[1], d, generator=gen, dtype=dtype) @ mixed
    at = labels.unsqueeze(-1).expand(*labels.shape, d)
    key = centres.gather(1, at) + noise * spread.gather(1, at) + 2
    return key, labels, 2 * torch.randn(b, m, d, generator=gen, dtype=dtype) + 2


def decision(logits, classes):
    """Another origin of the keys adds a number to all logits of a query, so they are compared around their mean."""
    logits = torch.as_tensor(logits)
    if classes == 2:
        return logits if logits.dim() < 2 else logits[..., 1] - logits[..., 0]
    return logits - logits.mean(-1, keepdim=True)


def close(got, want, tol=1e-8):
    want = torch.as_tensor(np.asarray(want), dtype=D)
    assert got.shape == want.shape
    assert torch.isfinite(want).all()
    assert (got - want).norm() <= tol * want.norm(), ((got - want).norm() / want.norm()).item()


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shrinkage", [0.0, 0.3])
@pytest.mark.parametrize("route", ["within", "total"])
@pytest.mark.parametrize("size", [(41, 3), (7, 29)])
def test_lda_of_scikit_learn(classes, given, shrinkage, route, size):
    n, d = size
    if n < d and shrinkage == 0:
        pytest.skip("singular: the pseudo-inverse has its own test")
    key, labels, query = sample(classes, n=n, d=d)
    priors = PRIORS[classes] if given else None
    model = lda(
        key, labels, shrinkage=shrinkage, priors=None if priors is None else torch.tensor(priors, dtype=D), route=route
    )
    logits = model(query)
    for i in range(len(key)):
        theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=shrinkage or None, priors=priors)
        theirs.fit(key[i].numpy(), labels[i].numpy())
        close(decision(logits[i], classes), decision(theirs.decision_function(query[i].numpy()), classes))
        assert model.predict(query)[i].tolist() == theirs.predict(query[i].numpy()).tolist()
        close(logits[i].softmax(-1), theirs.predict_proba(query[i].numpy()))


def test_lda_with_a_singular_covariance_is_the_minimum_norm_solution():
    key, labels, query = sample(2, n=7, d=29)
    logits = lda(key, labels)(query)
    for i in range(len(key)):
        theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(key[i].numpy(), labels[i].numpy())
        close(decision(logits[i], 2), theirs.decision_function(query[i].numpy()), 1e-6)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shrinkage", [None, 0.3])
def test_qda_of_scikit_learn(classes, given, shrinkage):
    key, labels, query = sample(classes)
    priors = PRIORS[classes] if given else None
    model = qda(
        key, labels, shrinkage=shrinkage or 0.0, priors=None if priors is None else torch.tensor(priors, dtype=D)
    )
    logits = model(query)
    for i in range(len(key)):
        solver = "svd" if shrinkage is None else "eigen"
        theirs = QuadraticDiscriminantAnalysis(solver=solver, shrinkage=shrinkage, priors=priors)
        theirs.fit(key[i].numpy(), labels[i].numpy())
        close(decision(logits[i], classes), decision(theirs.decision_function(query[i].numpy()), classes))
        assert model.predict(query)[i].tolist() == theirs.predict(query[i].numpy()).tolist()


def test_ddof_is_the_divisor():
    key, labels, query = sample(3)
    n = key.shape[-2]
    plain, other = lda(key, labels), lda(key, labels, ddof=3)  # S * N / (N - 3)
    log_prior = torch.stack([(labels == c).double().mean(-1) for c in range(3)], -1).log().unsqueeze(-2)
    close(other(query) - log_prior, (plain(query) - log_prior) * (n - 3) / n)
    at = labels[0] == 1
    cov = torch.cov(key[0][at].T, correction=1)
    r = query[0] - key[0][at].mean(0)
    want = -0.5 * ((r @ torch.linalg.inv(cov)) * r).sum(-1) - 0.5 * torch.logdet(cov) + at.double().mean().log()
    close(qda(key, labels, ddof=1)(query)[0, :, 1], want)


@pytest.mark.parametrize("classes", [2, 5])
@pytest.mark.parametrize("kernel", [None, "gaussian"])
@pytest.mark.parametrize("size", [(41, 3), (7, 29)])
def test_ls_svm_is_the_kkt_system_of_suykens(classes, kernel, size):
    key, labels, query = sample(classes, n=size[0], d=size[1])
    weight = torch.rand(labels.shape, dtype=D, generator=torch.Generator().manual_seed(1)) + 0.1
    kernel = intention.kernels.Gaussian(0.2) if kernel else intention.kernels.Linear()
    logits = ls_svm(key, labels, alpha=0.7, weight=weight, kernel=kernel if kernel.name != "linear" else None)(query)
    for i in range(len(key)):
        n = key.shape[1]
        gram = kernel(key[i], key[i]).numpy()
        system = np.block([[np.zeros((1, 1)), np.ones((1, n))], [np.ones((n, 1)), gram + np.diag(0.7 / weight[i])]])
        for c in range(classes):
            y = np.where(labels[i].numpy() == c, 1.0, -1.0)
            solution = np.linalg.solve(system, np.concatenate([[0.0], y]))
            close(logits[i, :, c], kernel(query[i], key[i]).numpy() @ solution[1:] + solution[0])


@pytest.mark.parametrize("classes", [2, 5])
def test_kernel_forms_with_a_linear_kernel_are_the_plain_ones(classes):
    for size in ((41, 3), (7, 29)):
        key, labels, query = sample(classes, n=size[0], d=size[1])
        weight = torch.rand(labels.shape, dtype=D)
        for route in ("within", "total"):
            plain, kernel = (
                lda(key, labels, alpha=0.4, weight=weight, route=route, kernel=k) for k in (None, "linear")
            )
            close(decision(kernel(query), classes), decision(plain(query), classes))
        plain, kernel = (qda(key, labels, alpha=0.4, weight=weight, kernel=k) for k in (None, "linear"))
        a, b = kernel(query), plain(query)  # the same up to a constant per query: a kernel's space has no dimension
        close(a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True))


@pytest.mark.parametrize("make", [lda, qda, ls_svm])
@pytest.mark.parametrize("kernel", [None, "gaussian", "polynomial"])
@pytest.mark.parametrize("size", [(23, 3), (7, 29)])
def test_integer_weights_are_repeated_points(make, kernel, size):
    key, labels, query = sample(3, n=size[0], d=size[1])
    times = torch.arange(labels.shape[1]) % 3
    times[:6] = 2
    again = torch.arange(labels.shape[1]).repeat_interleave(times)
    bound = {
        "gaussian": intention.kernels.Gaussian(0.2),
        "polynomial": intention.kernels.Polynomial(2, 0.1),
        None: None,
    }
    options = {"alpha": 0.5, "kernel": bound[kernel]}
    a = make(key, labels, weight=times.to(D).expand(labels.shape), **options)(query)
    b = make(key[:, again], labels[:, again], **options)(query)
    close(a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True))


@pytest.mark.parametrize("make", [lda, qda])
def test_kernel_forms_are_the_plain_ones_on_explicit_features(make):
    key, labels, query = sample(3, n=7, d=2)
    poly = intention.kernels.Polynomial(2, 1.0, 1.0)

    def phi(x):  # (1 + x.y)^2
        a, b = x.unbind(-1)
        root = 2**0.5
        return torch.stack([torch.ones_like(a), root * a, root * b, a * a, b * b, root * a * b], -1)

    a = make(key, labels, alpha=0.3, kernel=poly)(query)
    b = make(phi(key), labels, alpha=0.3)(phi(query))
    close(a - a.mean(-1, keepdim=True), b - b.mean(-1, keepdim=True))


@pytest.mark.parametrize("make", [lda, qda, ls_svm])
@pytest.mark.parametrize("kernel", [None, "gaussian"])
@pytest.mark.parametrize("size", [(7, 3), (3, 13)])
def test_logits_are_differentiable(make, kernel, size):
    key, labels, query = sample(2, b=2, n=size[0], d=size[1], m=3)
    weight = (torch.rand(labels.shape, dtype=D) + 0.2).requires_grad_()
    alpha = torch.tensor(0.6, dtype=D, requires_grad=True)
    kernel = kernel and intention.kernels.Gaussian(0.2)

    def logits(key, query, weight, alpha):
        return make(key, labels, alpha=alpha, weight=weight, kernel=kernel)(query)

    args = (key.requires_grad_(), query.requires_grad_(), weight, alpha)
    assert torch.autograd.gradcheck(logits, args, atol=1e-6)


def test_thresholds_and_priors_of_ls_svm():
    key, labels, query = sample(2)
    for make in (lda, qda, ls_svm):
        plain, moved = make(key, labels), make(key, labels, threshold=0.5)
        close(decision(moved(query), 2), decision(plain(query), 2) - 0.5)
        each = make(key, labels, threshold=torch.tensor([0.1, 0.6]))
        close(decision(each(query), 2), decision(plain(query), 2) - 0.5, 1e-6)
    priors = torch.tensor([0.2, 0.8], dtype=D)
    share = torch.stack([(labels == c).double().mean(-1) for c in range(2)], -1)
    weight = torch.where(labels == 1, (0.8 / share[:, 1])[:, None], (0.2 / share[:, 0])[:, None])
    close(ls_svm(key, labels, priors=priors)(query), ls_svm(key, labels, weight=weight)(query))


def test_one_hot_values_and_labels_are_the_same_and_dtypes_are_kept():
    key, labels, query = sample(3, dtype=torch.float32)
    for make in (lda, qda, ls_svm):
        a = make(key, labels)(query)
        b = make(key, torch.nn.functional.one_hot(labels).float())(query)
        assert torch.equal(a, b)
        assert a.dtype == torch.float32


def test_a_class_without_points_is_never_chosen():
    key, labels, query = sample(3)
    wide = torch.nn.functional.one_hot(labels, 4).to(D)
    logits = lda(key, wide)(query)
    assert (logits[..., 3] == -torch.inf).all()
    close(logits[..., :3], lda(key, labels)(query))
    key.requires_grad_()
    lda(key, wide)(query)[..., :3].sum().backward()
    assert torch.isfinite(key.grad).all()


def test_errors():
    key, labels, _ = sample(3)
    small, few, _ = sample(3, n=7, d=29)
    for call, kind, reason in [
        (lambda: lda(key, labels, route="between"), ValueError, "route must be one of"),
        (lambda: lda(key, labels, priors=torch.tensor([0.5, 0.6, 0.1])), ValueError, "sum to 1"),
        (lambda: lda(key, labels, priors=torch.tensor([0.5, 0.5])), ValueError, "C = 3 classes"),
        (lambda: lda(key, labels, priors=[0.5, 0.3, 0.2]), TypeError, "use torch.tensor"),
        (lambda: lda(key, labels, shrinkage=1.5), ValueError, r"shrinkage must be in \[0, 1\]"),
        (lambda: lda(key, labels, kernel="gaussian"), ValueError, "needs alpha > 0"),
        (lambda: qda(small, few), ValueError, "singular"),
        (lambda: lda(key, torch.zeros_like(labels)), ValueError, "at least 2 classes"),
        (lambda: lda(key, torch.rand(3, key.shape[1], 3)), ValueError, "one-hot"),
        (lambda: lda(key, labels, threshold=1.0), ValueError, "2 classes, got 3"),
        (lambda: lda(key, labels)(key[..., :2]), ValueError, "d = 3 features"),
    ]:
        with pytest.raises(kind, match=reason):
            call()


@pytest.mark.parametrize("alpha", [0.0, 0.1])
@pytest.mark.parametrize("size", [(6, 8), (11, 3), (7, 13)])
def test_both_routes_agree_or_one_says_so(alpha, size):
    (n, d), gen = size, torch.Generator().manual_seed(5)
    key, query = torch.randn(n, d, generator=gen, dtype=D), torch.randn(5, d, generator=gen, dtype=D)
    labels = torch.arange(n) % 2
    if n < d and alpha == 0:  # no class varies along the difference of the means
        with pytest.raises(ValueError, match=r"fewer points than features.*route='within'"):
            lda(key, labels, route="total")
        return
    one, two = (lda(key, labels, alpha=alpha, route=route)(query) for route in ("within", "total"))
    close(decision(two, 2), decision(one, 2))
    leaking = torch.cat([key, labels.to(D).unsqueeze(-1)], -1)  # a feature that no class varies in
    if alpha == 0:
        with pytest.raises(ValueError, match="none of them varies"):
            lda(leaking, labels, route="total")


def test_labels_are_integers():
    key, labels = torch.randn(2, 11, 3), torch.arange(11) % 3
    for classify in (lda, qda, ls_svm):
        with pytest.raises(TypeError, match=r"labels \(..., N\) must be integers, got torch.float32 .*labels.long\(\)"):
            classify(key, labels.float())
    with pytest.raises(TypeError, match=r"value must have a floating-point dtype, got torch.int64.*one_hot\(value, "):
        intention.fit(key, labels.expand(2, 11))


@pytest.mark.parametrize("make", [lambda *x: lda(*x), lambda *x: lda(*x, priors=torch.tensor([0.2, 0.3, 0.5]))])
@pytest.mark.parametrize("d", [1, 5])
def test_a_feature_that_is_constant_within_every_class_is_no_direction(make, d):
    """Minimum norm is 0 there: alpha = 0 would divide by the rounding of the means."""
    gen = torch.Generator().manual_seed(0)
    labels = torch.arange(21) % 3
    rest, query = torch.randn(21, d - 1, generator=gen, dtype=D), torch.randn(7, d, generator=gen, dtype=D)
    key = torch.cat([torch.tensor([7.1, 2.3, 9.4], dtype=D)[labels].unsqueeze(-1), rest], -1)
    want = make(rest, labels)(query[:, 1:]) if d > 1 else make(torch.zeros(21, 1, dtype=D), labels)(query)
    torch.testing.assert_close(make(key, labels)(query), want)


def test_a_class_that_does_not_vary_has_no_covariance_to_invert():
    key = torch.tensor([7.1, 2.3, 9.4], dtype=D)[torch.arange(13) % 3].unsqueeze(-1)
    with pytest.raises(ValueError, match="singular"):
        qda(key, torch.arange(13) % 3)


@pytest.mark.parametrize("shrinkage", [0.1, 1.0])
def test_shrinkage_of_classes_of_one_point_adds_nothing(shrinkage):
    """S = 0 has no trace: the logits are those of the pseudo-inverse, log priors."""
    gen = torch.Generator().manual_seed(0)
    key, query = torch.randn(3, 7, generator=gen, dtype=D), torch.randn(5, 7, generator=gen, dtype=D)
    prior = torch.tensor([0.2, 0.3, 0.5], dtype=D)
    got = lda(key, torch.arange(3), shrinkage=shrinkage, priors=prior)(query)
    torch.testing.assert_close(got, prior.log().expand(5, 3))
    with pytest.raises(ValueError, match="in which none of them varies"):
        lda(key, torch.arange(3), shrinkage=0.1, route="total")


def test_the_slope_of_a_weight_of_0_in_qda_of_few_points():
    torch.manual_seed(0)
    key, query, labels = torch.randn(5, 7, dtype=D), torch.randn(3, 7, dtype=D), torch.tensor([0, 1, 0, 1, 0])
    weight = torch.tensor([1.0, 1, 1, 1, 0], dtype=D, requires_grad=True)

    def total(w):
        return qda(key, labels, alpha=0.1, weight=w)(query).sum()

    (slope,) = torch.autograd.grad(total(weight), weight)
    step = 1e-6 * torch.tensor([0.0, 0, 0, 0, 1], dtype=D)
    with torch.no_grad():
        want = (total(weight + step) - total(weight)) / 1e-6
    assert abs(slope[4] - want) < 1e-4 * abs(want)


def test_slopes_of_the_total_route_are_right_or_refused():
    """Classes so far apart that the logits still hold, and their derivatives no longer."""
    torch.manual_seed(0)
    labels, query = torch.arange(17) % 2, torch.randn(5, 3, dtype=D)
    near = torch.randn(17, 3, dtype=D)
    for apart in (1.0, 1e1, 1e2, 1e3, 1e4):
        key = (near + apart * labels[:, None]).requires_grad_()
        want = torch.autograd.grad(lda(key, labels)(query).square().sum(), key)[0]
        try:
            logits = lda(key, labels, route="total")(query)
        except ValueError:
            assert apart > 1e1
            continue
        got = torch.autograd.grad(logits.square().sum(), key)[0]
        assert (got - want).norm() < 1e-3 * want.norm()
