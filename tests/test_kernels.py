"""Kernels against scikit-learn and integrals, the inverse root against its definition, features against the kernel."""

import json

import numpy as np
import pytest
import torch
from scipy.integrate import quad
from sklearn.kernel_approximation import Nystroem as SklearnNystroem
from sklearn.metrics import pairwise
from torch.autograd import gradcheck, gradgradcheck

import intention
from intention import _distances as distances
from intention import kernels
from intention.features import fourier, nystroem, restore_features
from intention.kernels import ArcCosine, Custom, Gaussian, Laplacian, Linear, Polynomial, as_kernel, restore
from intention.solve.matrix.roots import inverse_root

n, m, d, k = 7, 11, 3, 5
lead = (2, 1)
ALL = [Linear(), Polynomial(), Gaussian(0.3), Laplacian(0.3), ArcCosine(0), ArcCosine(1), ArcCosine(2)]
IDS = ["linear", "polynomial", "gaussian", "laplacian", "arccosine0", "arccosine1", "arccosine2"]
every_kernel = pytest.mark.parametrize("kernel", ALL, ids=IDS)


def rand(*shape, **kwargs):
    return torch.randn(*shape, dtype=torch.float64, **kwargs)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, atol=atol, rtol=0)


# ---- values


@pytest.mark.parametrize(
    ("kernel", "sklearn"),
    [
        (Linear(), pairwise.linear_kernel),
        (Polynomial(), pairwise.polynomial_kernel),
        (Polynomial(2, 0.7, 0.5), lambda x, y: pairwise.polynomial_kernel(x, y, degree=2, gamma=0.7, coef0=0.5)),
        (Gaussian(0.3), lambda x, y: pairwise.rbf_kernel(x, y, gamma=0.3)),
        (Laplacian(0.3), lambda x, y: pairwise.laplacian_kernel(x, y, gamma=0.3)),
    ],
)
def test_values_are_those_of_sklearn_and_leading_dimensions_broadcast(kernel, sklearn):
    x, y = rand(2, 1, n, d), rand(3, m, d)
    out = kernel(x, y)
    assert out.shape == (2, 3, n, m)
    for i in range(2):
        for j in range(3):
            close(out[i, j], torch.from_numpy(sklearn(x[i, 0].numpy(), y[j].numpy())))


@pytest.mark.parametrize("order", [0, 1, 2])
def test_arc_cosine_is_the_integral_over_all_half_planes(order):
    x, y = rand(n, 2), rand(m, 2)
    out = ArcCosine(order)(x, y)
    lengths = (x.norm(dim=-1)[:, None] * y.norm(dim=-1)) ** order
    factor = [1, 2, 8][order] / np.pi  # 2^n n! / pi, the radial part of 2 E[relu(w'x)^n relu(w'y)^n]
    for i in range(n):
        for j in range(m):
            cos = float(x[i] @ y[j] / (x[i].norm() * y[j].norm()))
            theta = np.arccos(cos)
            part = quad(lambda t, th=theta: (np.cos(t) * np.cos(t - th)) ** order, theta - np.pi / 2, np.pi / 2)[0]
            assert abs(float(out[i, j]) - float(lengths[i, j]) * factor * part) < 1e-11


def test_arc_cosine_closed_forms():
    x, y = rand(1, 2), rand(3, 2)
    x[:], y[:] = torch.tensor([1.0, 0.0]), torch.tensor([[0.0, 2.0], [3.0, 0.0], [-1.0, 0.0]])
    for order, wanted in enumerate(([0.5, 1.0, 0.0], [2 / np.pi, 3.0, 0.0], [2.0, 27.0, 0.0])):
        close(ArcCosine(order)(x, y), torch.tensor([wanted], dtype=torch.float64))


@every_kernel
def test_diagonal_and_symmetry_and_no_negative_eigenvalues(kernel):
    x = rand(*lead, m, d)
    x[0, 0, 3] = 0.0
    x[0, 0, 4] = x[0, 0, 5]
    out = kernel(x, x)
    close(kernel.diagonal(x), out.diagonal(0, -2, -1))
    if not isinstance(kernel, Linear | Polynomial):
        assert torch.equal(out, out.mT)
    assert torch.linalg.eigvalsh(out).min() > -1e-9 * out.abs().max()
    copy = kernel(x, x.clone())  # not the same object: to rounding, not to the last bit
    close(copy, out)


@pytest.mark.parametrize("kernel", [Polynomial(gamma=torch.rand(5) + 1), Gaussian(torch.rand(5) + 1)])
def test_diagonal_takes_the_leading_dimensions_of_gamma(kernel):
    x = rand(m, d)
    close(kernel.diagonal(x), kernel(x, x).diagonal(0, -2, -1))


def test_squared_distances_far_from_the_origin():
    x, y = rand(*lead, n, d) + 1e3, rand(*lead, m, d) + 1e3
    direct = (x.unsqueeze(-2) - y.unsqueeze(-3)).square().sum(-1)
    close(distances.squared_distance(x, y), direct)


def test_equal_points_are_at_distance_zero():
    x = rand(2, 113, 31) * 10  # enough features for rounding to show
    same, copy = distances.squared_distance(x, x), distances.squared_distance(x, x.clone())
    assert torch.equal(same, same.mT)
    assert (same.diagonal(0, -2, -1) == 0).all()
    assert (copy.diagonal(0, -2, -1) == 0).all()
    for order in range(3):
        out = ArcCosine(order)(x, x)
        assert torch.equal(out, out.mT)
    assert (ArcCosine(0)(x, x).diagonal(0, -2, -1) == 1).all()


def test_a_point_that_is_not_finite_stays_alone():
    x, y = rand(n, d), rand(m, d)
    y[4, 1], y[6, 0] = torch.nan, torch.inf
    for kernel in ALL:
        out = kernel(x, y)
        rest = [i for i in range(m) if i not in (4, 6)]
        close(out[:, rest], kernel(x, y[rest]))
        assert out[:, 4].isnan().all()


@every_kernel
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_lower_precision_and_autocast(kernel, dtype):
    x, y = rand(n, d).to(dtype), rand(m, d).to(dtype)
    exact = kernel(x.double(), y.double())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = kernel(x, y)
    assert out.dtype == dtype
    close(out.double() / exact.abs().max(), exact / exact.abs().max(), atol=4 * torch.finfo(dtype).eps)


# ---- derivatives


@every_kernel
def test_gradients(kernel):
    x, y = rand(2, n, d, requires_grad=True), rand(k, d, requires_grad=True)
    assert gradcheck(kernel, (x, y), check_forward_ad=True, check_batched_grad=True)
    assert gradgradcheck(kernel, (x, y))
    assert gradcheck(lambda x: kernel(x, x), (x,))
    if isinstance(kernel, Linear | Polynomial) or kernel.settings().get("order"):  # the others have a constant one
        assert gradcheck(kernel.diagonal, (x,))


@pytest.mark.parametrize("kind", [Polynomial, Gaussian, Laplacian])
def test_gradient_of_gamma(kind):
    x, y = rand(2, n, d), rand(2, m, d)
    gamma = (torch.rand(2, dtype=torch.float64) + 0.5).requires_grad_()
    assert gradcheck(lambda g: kind(gamma=g)(x, y), (gamma,))
    assert kind(gamma=torch.nn.Parameter(gamma.detach())).gamma.requires_grad
    assert len(list(kind(gamma=torch.nn.Parameter(gamma.detach())).parameters())) == 1
    out = kind(gamma=gamma)(x, y)
    for i in range(2):
        close(out[i], kind(gamma=gamma[i].item())(x[i], y[i]))


@every_kernel
def test_gradients_are_finite_at_equal_opposite_and_zero_points(kernel):
    base = rand(n, d)
    base[2] = 0.0
    y = torch.cat([base, -base, 2 * base]).requires_grad_()
    x = base.clone().requires_grad_()
    for out, inputs in ((kernel(x, y), (x, y)), (kernel(y, y), (y,)), (kernel.diagonal(x), (x,))):
        if out.requires_grad:
            assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("order", [1, 2])
def test_arc_cosine_gradient_is_exact_where_the_angle_is_zero(order):
    x = rand(n, d)
    y = (2 * x).requires_grad_()
    (grad,) = torch.autograd.grad(ArcCosine(order)(x, y).diagonal().sum(), y)
    # at theta = 0 k = J_n(0) / pi |x|^n |y|^n: in y along y; across it the derivative vanishes
    expected = x if order == 1 else 3 * 2 * x.square().sum(-1, keepdim=True) * (2 * x)
    close(grad, expected, atol=1e-8)


def test_gaussian_second_derivative_at_equal_points():
    x = rand(n, 31)  # by rounding, some of the distances come out below 0
    kernel = Gaussian(0.3)
    hessian = torch.func.hessian(lambda step: kernel(x, x + step).diagonal().sum())(
        torch.zeros(31, dtype=torch.float64)
    )
    close(hessian, -0.6 * n * torch.eye(31, dtype=torch.float64), atol=1e-10)


def test_absolute_distance_in_pieces(monkeypatch):
    x, y = rand(2, n, d, requires_grad=True), rand(2, m, d, requires_grad=True)
    whole = torch.autograd.grad(distances.absolute_distance(x, y).square().sum(), (x, y))
    monkeypatch.setattr(distances, "HELD", 2 * n * m * 2)  # two features at a time
    pieces = torch.autograd.grad(distances.absolute_distance(x, y).square().sum(), (x, y))
    for a, b in zip(whole, pieces, strict=True):
        close(a, b)
    assert gradcheck(distances.absolute_distance, (x, y), check_forward_ad=True)
    close(torch.func.vmap(distances.absolute_distance)(x, y), distances.absolute_distance(x, y))


# ---- gamma


@pytest.mark.parametrize(("kind", "p"), [(Gaussian, 2), (Laplacian, 1)])
def test_median_heuristic_per_leading_element(kind, p):
    key = rand(2, k, m, d) * torch.tensor([1.0, 10.0]).view(2, 1, 1, 1)
    gamma = kind().bind(key).gamma
    assert gamma.shape == (2, k)
    for i in range(2):
        for j in range(k):
            pairs = torch.pdist(key[i, j], p=p) ** p  # 55, so the median is one of them
            close(gamma[i, j] * pairs.median(), torch.ones((), dtype=torch.float64))
    close(kind()(key, key), kind(gamma)(key, key))


def test_median_heuristic_does_not_look_at_points_of_weight_zero():
    key, weight = rand(2, m, d), torch.ones(2, m, dtype=torch.float64)
    weight[0, 4:] = 0
    weight[1, ::2] = 0
    key[weight == 0] = torch.nan
    gamma = Gaussian().bind(key, weight).gamma
    for i in range(2):
        close(gamma[i], Gaussian().bind(key[i, weight[i] > 0]).gamma)


def test_median_heuristic_looks_at_1000_points(monkeypatch):
    monkeypatch.setattr(distances, "LOOKED_AT", n)
    key, weight = rand(m * n, d), (torch.arange(m * n) % 2).double()
    close(Gaussian().bind(key).gamma, Gaussian().bind(key[::m]).gamma)
    odd = key[1::2]
    at = torch.arange(n) * len(odd) // n
    close(Gaussian().bind(key, weight).gamma, Gaussian().bind(odd[at]).gamma)


@pytest.mark.parametrize("kind", [Gaussian, Laplacian])
def test_gamma_is_one_without_different_points(kind):
    one = torch.ones((), dtype=torch.float64)
    for key in (rand(1, d), rand(0, d), rand(1, 31).expand(113, 31) * 0.1 + 1e3):
        assert torch.equal(kind().bind(key).gamma, one)
    assert torch.equal(kind().bind(rand(m, d), torch.zeros(m)).gamma, one)


@pytest.mark.parametrize("kind", [Gaussian, Laplacian])
@pytest.mark.parametrize("gamma", [None, 0.3])
def test_learnable_gamma_starts_at_the_given_one_and_trains(kind, gamma):
    x, y = rand(n, d), rand(m, d)
    kernel = kind(gamma, learnable=True)
    assert torch.equal(kernel(x, y), kind(gamma)(x, y))
    assert [name for name, _ in kernel.named_parameters()] == ["log_gamma"]
    kernel(x, y).sum().backward()
    assert kernel.log_gamma.grad != 0
    torch.optim.SGD(kernel.parameters(), lr=0.1).step()
    close(kernel.bind(y).gamma, kind(gamma).bind(y).gamma * kernel.log_gamma.detach().double().exp())
    assert not torch.equal(kernel(x, y), kind(gamma)(x, y))


def test_a_bound_kernel_keeps_its_gamma():
    key, query = rand(2, m, d), rand(2, n, d)
    bound = Gaussian().bind(key)
    close(bound(query, query), Gaussian(bound.gamma)(query, query))
    close(bound(query[:, :1], key), bound(query, key)[:, :1])


# ---- own kernels, names, storing


def test_a_callable_is_a_kernel():
    x, y = rand(2, n, d), rand(2, m, d)
    kernel = as_kernel(lambda x, y: (1 + x @ y.mT) ** 2)
    close(kernel(x, y), Polynomial(2, 1.0)(x, y))
    close(kernel.diagonal(x), Polynomial(2, 1.0).diagonal(x))
    assert len(list(as_kernel(Custom(torch.nn.Bilinear(d, d, 1))).parameters())) == 2
    with pytest.raises(ValueError, match=r"must return a tensor of shape.*\(2, 7, 11\).*got \(2, 11, 7\)"):
        as_kernel(lambda x, y: y @ x.mT)(x, y)
    with pytest.raises(ValueError, match="got float"):
        as_kernel(lambda x, y: 1.0)(x, y)
    with pytest.raises(ValueError, match="cannot be stored"):
        kernel.bind(y).state()
    with pytest.raises(ValueError, match="a <lambda> cannot be stored"):
        nystroem(kernel, y, k).state()


def test_names():
    for name, kind in kernels.KINDS.items():
        assert type(as_kernel(name)) is kind
    kernel = Gaussian()
    assert as_kernel(kernel) is kernel


@pytest.mark.parametrize("kernel", [*ALL, Gaussian(), Laplacian(learnable=True), Polynomial(5, None, 0.1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restored_kernels_are_equal_to_the_last_bit(kernel, dtype):
    x, y = rand(2, n, d).to(dtype), rand(2, m, d).to(dtype)
    bound = kernel.bind(y)
    settings = json.loads(json.dumps(bound.settings()))
    again = restore(bound.name, settings, {key: t.clone() for key, t in bound.state().items()})
    assert torch.equal(again(x, y), bound(x, y))
    assert torch.equal(again.diagonal(x), bound.diagonal(x))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: as_kernel("rbf"), ValueError, "one of 'linear', 'polynomial', 'gaussian'.*got 'rbf'"),
        (lambda: as_kernel(3), TypeError, "one of 'linear'.*callable.*got int"),
        (lambda: as_kernel(Gaussian), TypeError, r"got the class Gaussian; use Gaussian\(\)"),
        (lambda: Gaussian(-0.5), ValueError, "gamma must be > 0 and finite, got -0.5; use gamma=None"),
        (lambda: Gaussian(torch.tensor([1.0, 0.0])), ValueError, r"got \[1.0, 0.0\]"),
        (lambda: Gaussian(torch.tensor(1)), TypeError, "floating-point"),
        (lambda: Laplacian("scale"), TypeError, "gamma must be a number, got str; use a tensor"),
        (lambda: Gaussian(torch.ones(3))(rand(2, n, d), rand(2, m, d)), ValueError, r"key \(2,\), gamma \(3,\)"),
        (lambda: Polynomial(0), ValueError, "degree must be a whole number >= 1, got 0"),
        (lambda: Polynomial(coef0=-1), ValueError, "coef0 must be finite and >= 0, got -1"),
        (lambda: ArcCosine(3), ValueError, "order must be 0, 1 or 2, got 3"),
        (lambda: Linear()(rand(n, d), rand(m, k)), ValueError, "same number of features"),
        (lambda: Linear()(rand(2, n, d), rand(3, m, d)), ValueError, "leading"),
        (lambda: Linear()(rand(n, d).int(), rand(m, d)), TypeError, "floating-point"),
        (lambda: Linear().bind(rand(m, d), torch.ones(n)), ValueError, "weight must have shape"),
        (lambda: restore("rbf", {}, {}), ValueError, "name must be one of"),
        (lambda: restore("gaussian", {}, {}), ValueError, r"has the entries \['gamma'\], got \[\]"),
        (lambda: nystroem("linear", rand(m, d), 12), ValueError, "between 1 and the number of keys N = 11, got 12"),
        (lambda: nystroem("linear", rand(m, d), 0), ValueError, "got 0"),
        (lambda: nystroem("linear", rand(m, d), 2.5), TypeError, "whole number, got float"),
        (lambda: nystroem("linear", rand(m, d), k, choose="best"), ValueError, "choose must be one of 'uniform'"),
        (
            lambda: fourier("linear", rand(m, d), k),
            ValueError,
            "'gaussian' or 'laplacian' kernel, got 'linear'",
        ),
        (lambda: fourier("gaussian", rand(m, d), 0), ValueError, "features must be >= 1, got 0"),
        (lambda: restore_features("fourier", {}, {}), ValueError, r"got none for \['omega', 'offset'\]"),
    ],
)
def test_errors(call, error, message):
    with pytest.raises(error, match=message):
        call()


# ---- the inverse root


def psd(*shape, rank=k):
    a = rand(*shape, k, rank)
    return a @ a.mT


def test_inverse_root_undoes_the_matrix_on_its_range():
    matrix, deficient = psd(2), psd(2, rank=3)
    root = inverse_root(matrix)
    close(root @ matrix @ root, torch.eye(k, dtype=torch.float64).expand(2, k, k), atol=1e-9)
    assert torch.equal(inverse_root(psd(2) * 0), torch.zeros(2, k, k, dtype=torch.float64))
    root = inverse_root(deficient)
    onto = torch.linalg.pinv(deficient) @ deficient
    close(root @ deficient @ root, onto, atol=1e-9)
    close(root @ onto, root, atol=1e-9)


def test_inverse_root_gradients():
    matrix = psd(2) + torch.eye(k, dtype=torch.float64)
    matrix[1] = torch.eye(k)
    matrix.requires_grad_()
    assert gradcheck(inverse_root, (matrix,), check_forward_ad=True, check_batched_grad=True)
    nearly = torch.eye(k, dtype=torch.float64) + 1e-9 * psd()
    assert gradcheck(inverse_root, (nearly.requires_grad_(),))
    close(torch.func.vmap(inverse_root)(matrix), inverse_root(matrix))


def test_inverse_root_gradient_along_changes_that_keep_the_rank():
    factor = rand(2, k, 3, requires_grad=True)
    assert gradcheck(lambda a: inverse_root(a @ a.mT, 1e-9), (factor,))


def test_inverse_root_isolates_what_is_not_finite():
    matrix = psd(3)
    clean = inverse_root(matrix)
    matrix[1, 2, 3] = torch.nan
    matrix.requires_grad_()
    out = inverse_root(matrix)
    assert out[1].isnan().all()
    assert torch.equal(out[::2], clean[::2])
    (grad,) = torch.autograd.grad(out[::2].sum(), matrix)
    assert grad[::2].isfinite().all()


def test_inverse_root_says_that_it_has_no_second_derivative():
    matrix = psd().requires_grad_()
    (grad,) = torch.autograd.grad(inverse_root(matrix).sum(), matrix, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated once"):
        grad.sum().backward()
    with pytest.raises(RuntimeError, match="differentiated once"):
        torch.func.hessian(lambda a: inverse_root(a).sum())(matrix.detach())


# ---- features


def gram(phi, x, y):
    return phi(x) @ phi(y).mT


@pytest.mark.parametrize("choose", ["uniform", "kmeans++"])
@pytest.mark.parametrize("kernel", [Gaussian(), Laplacian(0.3), ArcCosine(1), Polynomial()])
def test_nystroem_is_exact_on_the_landmarks_and_with_all_points(kernel, choose):
    key, query = rand(2, 1, m, d), rand(2, 3, n, d)
    bound = kernel.bind(key)
    phi = nystroem(kernel, key, k, choose=choose)
    z = phi.landmarks
    assert phi(query).shape == (2, 3, n, k)
    assert z.shape == (2, 1, k, d)
    close(gram(phi, z, z), bound(z, z), atol=1e-8)
    close(gram(phi, query, z), bound(query, z), atol=1e-8)
    phi = nystroem(bound, key, m, choose=choose)
    assert torch.equal(phi.landmarks, key)
    close(gram(phi, key, key), bound(key, key), atol=1e-8)


def test_nystroem_gram_is_that_of_sklearn():
    key, query = rand(m, d), rand(n, d)
    phi = nystroem(Gaussian(0.3), key, k)
    theirs = SklearnNystroem(kernel="rbf", gamma=0.3, n_components=k, random_state=0).fit(phi.landmarks.numpy())
    features = torch.from_numpy(theirs.transform(query.numpy()))
    close(gram(phi, query, query), features @ features.mT, atol=1e-9)


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-3), (torch.float16, 1e-2)])
def test_nystroem_drops_what_its_precision_cannot_tell_from_zero(dtype, atol):
    key, query = rand(113, d).to(dtype), rand(n, d).to(dtype)
    phi = nystroem(Gaussian(0.01), key, 113)  # nearly flat: most eigenvalues are rounding
    assert phi(query).dtype == dtype
    close(gram(phi, query, query).double(), Gaussian(0.01)(query.double(), query.double()), atol=atol)


@pytest.mark.parametrize("choose", ["uniform", "kmeans++"])
def test_landmarks_are_different_points_that_count(choose):
    key = torch.arange(float(m)).view(m, 1).expand(50, m, 1).contiguous()
    weight = torch.ones(50, m)
    weight[:, ::2] = 0
    assert (weight[0] > 0).sum() == k
    chosen = nystroem(Gaussian(1.0), key, k, weight, choose).landmarks[..., 0]
    assert torch.equal(chosen, torch.arange(1.0, m, 2).expand(50, k))
    more = nystroem(Gaussian(1.0), key, n, weight, choose).landmarks[..., 0]  # two points without weight fill up
    assert all(len(set(row)) == n and {1.0, 3, 5, 7, 9} < set(row) for row in more.tolist())
    some = nystroem(Gaussian(1.0), key, 3, None, choose).landmarks[..., 0]
    assert all(len(set(row)) == 3 for row in some.tolist())
    assert len({tuple(row) for row in some.tolist()}) > 10  # each leading element draws its own
    assert set(some.flatten().tolist()) == set(range(m))


def test_kmeans_visits_every_cluster_and_survives_copies():
    centres = torch.tensor([0.0, 1e3, 3e3, 9e3, 2e4])
    key = (centres.view(1, k, 1, 1) + torch.rand(31, k, n, 1)).flatten(1, 2)
    key = key.gather(1, torch.rand(31, k * n).argsort(-1).unsqueeze(-1))
    found = nystroem(Gaussian(1.0), key, k, choose="kmeans++").landmarks[..., 0].sort(-1).values
    assert (found - centres).abs().max() <= 1
    key, weight = torch.ones(31, m, 1), torch.zeros(31, m)
    key[:, n:], weight[:, :n] = 2.0, 1.0
    assert (nystroem(Gaussian(1.0), key, k, weight, "kmeans++").landmarks == 1).all()  # copies before weight 0
    same = nystroem(Gaussian(1.0), torch.ones(2, m, d), k, choose="kmeans++")
    close(gram(same, torch.ones(2, m, d), torch.ones(2, m, d)), torch.ones(2, m, m), atol=1e-5)


def test_kmeans_probabilities():
    key = torch.tensor([0.0, 1.0, 3.0]).view(3, 1).expand(20000, 3, 1)
    weight = torch.tensor([1.0, 2.0, 0.0])
    first = nystroem(Gaussian(1.0), key, 1, weight, "kmeans++").landmarks[:, 0, 0]
    assert abs(first.mean() - 2 / 3) < 0.02  # weights 1 : 2
    chosen = nystroem(Gaussian(1.0), key, 2, choose="kmeans++").landmarks[..., 0].sum(-1)
    # P{0,1}: from 0, 1 of 1 + 9; from 1, 1 of 1 + 4; from 3 never
    assert abs((chosen == 1).float().mean() - (1 / 10 + 1 / 5) / 3) < 0.01


def test_generators_repeat():
    key, query = rand(2, m, d), rand(n, d)
    for make in (
        lambda g: nystroem("gaussian", key, k, generator=g),
        lambda g: nystroem("gaussian", key, k, choose="kmeans++", generator=g),
        lambda g: fourier("gaussian", key, k, generator=g),
    ):
        a, b, c = (make(torch.Generator().manual_seed(seed))(query) for seed in (1, 1, 2))
        assert torch.equal(a, b)
        assert not torch.equal(a, c)


def test_gradients_flow_through_features():
    key, query = rand(2, m, d, requires_grad=True), rand(n, d, requires_grad=True)
    gamma = torch.tensor([0.3, 0.5], dtype=torch.float64, requires_grad=True)

    def through(make):
        return lambda q, x, g: make(Gaussian(g), x, torch.Generator().manual_seed(0))(q)

    assert gradcheck(through(lambda kernel, x, g: nystroem(kernel, x, k, generator=g)), (query, key, gamma))
    assert gradcheck(through(lambda kernel, x, g: fourier(kernel, x.detach(), k, g)), (query, key, gamma))


@pytest.mark.parametrize("kernel", [Gaussian(), Laplacian()])
def test_fourier_features_converge_to_the_kernel(kernel):
    key, query = rand(2, m, d) * torch.tensor([1.0, 10.0]).view(2, 1, 1), rand(2, n, d)
    bound = kernel.bind(key)
    for many in (100, 10000):
        phi = fourier(kernel, key, many)
        assert phi(query).shape == (2, n, many)
        error = (gram(phi, query, key) - bound(query, key)).abs().max()
        assert 0 < error < 5 / many**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_restored_features_are_equal_to_the_last_bit(dtype):
    key, query = rand(2, m, d).to(dtype), rand(2, n, d).to(dtype)
    made = [nystroem(kernel, key, k) for kernel in (*ALL, Gaussian(learnable=True))]
    for phi in (*made, fourier("gaussian", key, k), fourier("laplacian", key, k)):
        settings = json.loads(json.dumps(phi.settings()))
        again = restore_features(phi.name, settings, {name: t.clone() for name, t in phi.state().items()})
        assert torch.equal(again(query), phi(query))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_that_are_given_keep_their_precision(dtype):
    gamma = torch.tensor(0.1234567)
    head = intention.nn.Intention(
        kernel=kernels.Gaussian(gamma),
        embed_key=torch.nn.Linear(3, 3),
    ).to(dtype)
    assert torch.equal(head.kernel.gamma, gamma)
    assert head.embed_key.weight.dtype == dtype
    bound = intention.constraints.LinearConstraint(torch.full((3, 1), 0.1234567), 0.7654321).to(dtype)
    assert bound.normal.dtype == torch.float32
    assert bound.bound.item() == 0.7654321
    assert bound.double().normal.dtype == torch.float64
