"""Section 3, "Variants": which classical methods are Sigma_m^-1 X' y_m, and with which Sigma_m and y_m."""

from __future__ import annotations

from functools import partial

import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis, QuadraticDiscriminantAnalysis
from sklearn.linear_model import Ridge
from torch import Tensor
from torch.testing import assert_close

import intention
from intention import discriminant, naive
from intention import functional as F

close = partial(assert_close, rtol=1e-10, atol=1e-10)  # a number rounded to float32 on its way would not pass

n, m, d, k = 23, 11, 3, 5
C = 0.7


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def test_proposition_variants_ridge(normal):
    """Claim: "Sigma := X'X + C I, y_m := y" is ridge regression."""
    query, x, y = normal(m, d), normal(n, d), normal(n, k)
    oracle = Ridge(alpha=C, fit_intercept=False).fit(x.numpy(), y.numpy())
    close(F.intention(query, x, y, alpha=C), torch.from_numpy(oracle.predict(query.numpy())))


def test_proposition_variants_weighted_ridge(normal):
    """Claim: "Z_ii := sqrt(w_i)", the default form on ZX and Zy. In X'y_m as printed, y_m = Zy is one Z short."""
    query, x, y, w = normal(m, d), normal(n, d), normal(n, k), normal(n).square()
    w[:2] = 0  # a weight of 0 leaves the point out
    z = w.sqrt()[:, None]
    ours = F.intention(query, x, y, alpha=C, weight=w)
    close(ours, F.intention(query, z * x, z * y, alpha=C))
    close(ours, F.intention(query, x[2:], y[2:], alpha=C, weight=w[2:]))
    oracle = Ridge(alpha=C, fit_intercept=False).fit(x.numpy(), y.numpy(), sample_weight=w.numpy())
    close(ours, torch.from_numpy(oracle.predict(query.numpy())))
    printed = query @ torch.linalg.inv((z * x).mT @ (z * x) + C * eye(d)) @ x.mT @ (z * y)
    assert (printed - ours).abs().max() > 0.05


# --- LS-SVM -----------------------------------------------------------------------------------------------------------


def two_classes(normal) -> tuple[Tensor, Tensor]:
    """Correlated points away from the origin, 9 of class 1 and 14 of class 0."""
    y = torch.zeros(n, dtype=torch.float64)
    y[:9] = 1
    shift = torch.tensor([1.0, -0.5, 0.7], dtype=torch.float64)
    mix = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, -0.3], [0.0, 0.0, 0.8]], dtype=torch.float64)
    return normal(n, d) @ mix + y[:, None] * shift + torch.tensor([2.0, 3.0, -1.0], dtype=torch.float64), y


def suykens(query: Tensor, x: Tensor, labels: Tensor, c: float) -> Tensor:
    """[[0, y'], [y, Omega + c I]] [b; a] = [0; 1], Omega_ij = y_i y_j x_i x_j'; at q: sum_i a_i y_i q x_i' + b"""
    system = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    system[0, 1:] = system[1:, 0] = labels
    system[1:, 1:] = labels[:, None] * (x @ x.mT) * labels + c * eye(n)
    right = torch.ones(n + 1, dtype=torch.float64)
    right[0] = 0
    solution = torch.linalg.solve(system, right)
    return query @ x.mT @ (solution[1:] * labels) + solution[0]


def test_proposition_variants_ls_svm(normal):
    """Claim: "Sigma := X'X + C I_{d-1}, y_m := 2y - 1" is LS-SVM. That is `intercept=True`, and Suykens' KKT system."""
    x, y = two_classes(normal)
    query, labels = normal(m, d) + 1, 2 * y - 1
    for solver in ("auto", "primal", "dual"):
        ours = F.intention(query, x, labels[:, None], alpha=C, intercept=True, solver=solver)
        close(ours, naive.ls_svm(query, x, labels[:, None], C))
        close(ours[:, 0], suykens(query, x, labels, C))


def test_proposition_variants_weighted_ls_svm(normal):
    """Claim: "Analogous argument works for a weighted version of any of the following models"."""
    x, y = two_classes(normal)
    query, labels, w = normal(m, d) + 1, (2 * y - 1)[:, None], normal(n).square()
    ours = F.intention(query, x, labels, alpha=C, intercept=True, weight=w)
    close(ours, naive.ls_svm(query, x, labels, C, w))


def test_proposition_variants_default_intention_is_not_ls_svm(normal):
    """Claim: "our default Intention is equivalent to an LS-SVM". Not while it regularises the constant, or has none."""
    x, y = two_classes(normal)
    query, labels = normal(m, d) + 1, (2 * y - 1)[:, None]
    machine = suykens(query, x, labels[:, 0], 10 * C)[:, None]
    regularised = F.intention(naive.with_ones(query), naive.with_ones(x), labels, alpha=10 * C)
    plain = F.intention(query, x, labels, alpha=10 * C)
    assert (regularised - machine).abs().max() > 0.05
    assert (plain - machine).abs().max() > 0.1


# --- LDA and "QDA" ----------------------------------------------------------------------------------------------------


def alignment(w: Tensor, x: Tensor, y: Tensor) -> float:
    """|cos| between w and the direction that scikit-learn's LDA finds."""
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy()).coef_
    return torch.cosine_similarity(w.flatten(), torch.from_numpy(theirs).flatten(), 0).abs().item()


def printed_relabelling(y: Tensor) -> Tensor:
    """(N0 y + N1 (1 - y)) / N"""
    ones = y.sum()
    return ((n - ones) * y + ones * (1 - y))[:, None] / n


def class_means(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x[y == 0].mean(0), x[y == 1].mean(0)


def test_proposition_variants_lda(normal):
    """Claim: "Sigma := (X - mean)'(X - mean)" is LDA. With y_m := y - mean(y), whose X'y_m is a multiple of x1 - x0."""
    x, y = two_classes(normal)
    relabelled = (y - y.mean())[:, None]
    zero, one = class_means(x, y)
    close((x.mT @ relabelled)[:, 0], 9 * 14 / n * (one - zero))
    w = F.intention(eye(d), x - x.mean(0), relabelled, alpha=0)
    assert alignment(w, x, y) > 1 - 1e-10


def test_proposition_variants_lda_as_printed(normal):
    """Claim: "y_m := [N0 y + N1 (1 - y)] / N" is LDA. It gives the sum x1 + x0 and another direction."""
    x, y = two_classes(normal)
    relabelled = printed_relabelling(y)
    zero, one = class_means(x, y)
    close((x.mT @ relabelled)[:, 0], 9 * 14 / n * (one + zero))
    w = naive.intention(eye(d), x, relabelled, naive.sigma(x - x.mean(0), 0.0))
    assert alignment(w, x, y) < 0.9


def test_proposition_variants_qda_as_printed_is_lda(normal):
    """Claim: "Sigma := sum_k cov(X^k)" is QDA. It is one covariance for all classes: LDA's direction, up to scale."""
    x, y = two_classes(normal)
    zero, one = class_means(x, y)
    within = x - torch.where(y[:, None] == 1, one, zero)
    w = naive.intention(eye(d), x, (y - y.mean())[:, None], naive.sigma(within, 0.0))
    assert alignment(w, x, y) > 1 - 1e-10
    total = F.intention(eye(d), x - x.mean(0), (y - y.mean())[:, None], alpha=0)
    scale = w / total
    close(scale, scale[:1].expand(d, 1))
    assert scale[0] > 1.01  # the within-class scatter is the smaller one
    w = naive.intention(eye(d), x, printed_relabelling(y), naive.sigma(within, 0.0))
    assert alignment(w, x, y) < 0.9  # the relabelling is printed as for LDA


def test_proposition_variants_both_routes_are_one_classifier(normal):
    """LDA by the total and by the within-class covariance, with its threshold: scikit-learn's, on every query."""
    x, y = two_classes(normal)
    query = normal(m, d) + 2
    theirs = LinearDiscriminantAnalysis(solver="lsqr").fit(x.numpy(), y.numpy())
    for route in ("within", "total"):
        logits = discriminant.lda(x, y.long(), route=route)(query)
        close(logits[:, 1] - logits[:, 0], torch.from_numpy(theirs.decision_function(query.numpy())))


def test_covariance_within_is_the_printed_qda(normal):
    """covariance="within": the printed Sigma = sum_k cov(X^k), with the class sums X'y for one-hot y."""
    x, y = two_classes(normal)
    query, hot = normal(m, d), torch.stack([1 - y, y], -1)
    zero, one = class_means(x, y)
    within = x - torch.where(y[:, None] == 1, one, zero)
    want = naive.intention(query, x, hot, naive.sigma(within, C))
    close(F.intention(query, x, hot, alpha=C, covariance="within"), want)
    close(intention.fit(x, hot, alpha=C, covariance="within")(query), want)


def test_qda_has_a_covariance_per_class(normal):
    """Real QDA is quadratic in the query, which no Sigma^-1 X'y is."""
    x, y = two_classes(normal)
    x = torch.where(y[:, None] == 1, 0.3 * x, x)
    query = normal(m, d) + 2
    ours = discriminant.qda(x, y.long())
    theirs = QuadraticDiscriminantAnalysis().fit(x.numpy(), y.numpy())
    logits = ours(query)
    close(logits[:, 1] - logits[:, 0], torch.from_numpy(theirs.decision_function(query.numpy())))
    steps = torch.linspace(0, 1, 4, dtype=torch.float64)[:, None]
    line = ours(query[:1] + steps * (query[1:2] - query[:1]))
    gap = line[:, 1] - line[:, 0]
    assert (gap[2:] - 2 * gap[1:-1] + gap[:-2]).abs().min() > 1e-3  # a second difference: not linear
    assert (gap[3] - 3 * gap[2] + 3 * gap[1] - gap[0]).abs() < 1e-8  # no third: quadratic


def test_kernelised_variants_are_the_variants_on_features(normal):
    """Claim: "we can also easily construct kernelised versions of each of these variants"."""
    x, y = two_classes(normal)
    x, query = x[:, :2] / 3, normal(m, 2)
    kernel = intention.kernels.Polynomial(degree=2, gamma=1.0, coef0=1.0)  # (1 + x.y)^2

    def phi(z: Tensor) -> Tensor:
        a, b = (2**0.5 * z).unbind(-1)
        return torch.stack([torch.ones_like(a), a, b, a * a / 2, b * b / 2, a * b / 2**0.5], -1)

    close(phi(query) @ phi(x).mT, kernel(query, x))
    labels = (2 * y - 1)[:, None]
    for option in ({}, {"intercept": True}, {"weight": normal(n).square()}):
        ours = intention.fit(x, labels, alpha=C, kernel=kernel, **option)(query)
        close(ours, F.intention(phi(query), phi(x), labels, alpha=C, **option))
    for make in (discriminant.ls_svm, discriminant.lda, discriminant.qda):
        ours, plain = make(x, y.long(), alpha=C, kernel=kernel)(query), make(phi(x), y.long(), alpha=C)(phi(query))
        close(ours[:, 1] - ours[:, 0], plain[:, 1] - plain[:, 0])


def test_claim_constraints_need_more_than_one_pass(normal):
    """Claim: w* - ZC(C'ZC)^-1(C'w* - c) over the violated constraints. With Z = Sigma^-1, alpha included, it is optimal
    for one constraint; for several it is often neither optimal nor feasible.
    """
    ctx = intention.fit(normal(200, n, d), normal(200, n, 1), alpha=C)
    share = {}
    for p in (1, 5):
        c = normal(200, d, p)
        bound = c.mT @ normal(200, d, 1) * 0.5  # some w satisfies all of them with equality
        once, exact = intention.constraints.one_pass(ctx, c, bound), ctx.constrain(c, bound).w
        assert (c.mT @ exact - bound).min() > -1e-8
        share[p] = ((once - exact).norm(dim=(-2, -1)) < 1e-8).double().mean().item()
    assert share[1] == 1
    assert share[5] < 0.5
