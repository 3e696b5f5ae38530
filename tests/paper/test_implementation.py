"""Section 3: the Intention module, primal and dual, feature maps; and the map as a Mahalanobis product (section 4)."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from sklearn.kernel_ridge import KernelRidge
from torch import Tensor
from torch.testing import assert_close

import intention
from intention import functional as F
from intention import naive

close = partial(assert_close, rtol=1e-10, atol=1e-10)  # a number rounded to float32 on its way would not pass

m, k = 11, 5


def eye(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


@pytest.mark.parametrize("alpha", [0.3, 2.0])
@pytest.mark.parametrize(("n", "d"), [(3, 7), (7, 3)])
def test_equation_least_squares_primal_is_dual(n, d, alpha, normal):
    """Claim: "Q (K'K)^-1 K'V = [QK'] (KK')^-1 V". With the same alpha I on both sides, which the printed dual lacks."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    primal = F.intention(query, key, value, alpha=alpha, solver="primal")
    close(primal, naive.intention(query, key, value, naive.sigma(key, alpha)))
    close(F.intention(query, key, value, alpha=alpha, solver="dual"), primal)
    close(naive.dual(query, key, value, alpha), primal)


@pytest.mark.parametrize(("n", "d"), [(3, 7), (7, 3)])
def test_equation_least_squares_without_alpha_is_the_pseudo_inverse(n, d, normal):
    """Claim: "we can use the Moore-Penrose pseudoinverse". At alpha = 0 one Gram is singular; K^+ serves both forms."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    minimum_norm = naive.pseudo(query, key, value)
    for solver in ("auto", "pinv", "dual" if n < d else "primal"):
        close(F.intention(query, key, value, alpha=0, solver=solver), minimum_norm)
    # (K'K)^+ K' = K' (KK')^+ = K^+
    close(query @ torch.linalg.pinv(key.mT @ key, hermitian=True) @ key.mT @ value, minimum_norm)
    close(query @ key.mT @ torch.linalg.pinv(key @ key.mT, hermitian=True) @ value, minimum_norm)


def test_definition_intention_module(normal):
    """Claim: "h_int := E_Q w(K, V), w := e_w[Sigma(E_K)^-1 E_K' E_V]". e_w is not specified: the identity."""
    n, d, width = 7, 3, 13
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    in_query, in_key, in_value = normal(d, width), normal(d, width), normal(k, 2)
    e_query, e_key, e_value = (query @ in_query).relu(), (key @ in_key).relu(), (value @ in_value).tanh()
    w = torch.linalg.inv(e_key.mT @ e_key + 0.7 * eye(width)) @ e_key.mT @ e_value
    close(F.intention(e_query, e_key, e_value, alpha=0.7), e_query @ w)


def test_claim_the_mapping_w_can_be_returned(normal):
    """Claim: "one can output [...] also the inferred mapping itself w(K, V)": the predictions at the unit vectors."""
    n, d = 7, 3
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    w = F.intention(eye(d), key, value, alpha=0.7)
    assert w.shape == (d, k)  # whatever N is
    close(query @ w, F.intention(query, key, value, alpha=0.7))
    residual = key.mT @ (value - key @ w)  # w is the minimiser: K'(V - Kw) = alpha w
    close(residual, 0.7 * w)


@pytest.mark.parametrize(("n", "d"), [(3, 7), (5, 5)])
def test_claim_self_intention_with_tied_keys_is_the_identity(n, d, normal):
    """Claim: "Self-Intention w(X, X, X)". Tied keys and queries, alpha = 0 and N <= d mix nothing at all."""
    key, value = normal(n, d), normal(n, k)
    close(F.intention(key, key, value, alpha=0), value)
    assert (F.intention(key, key, value, alpha=0.7) - value).abs().max() > 1e-2
    key, value = normal(d + 2, d), normal(d + 2, k)  # N > d: a projection, which does mix
    assert (F.intention(key, key, value, alpha=0) - value).abs().max() > 1e-2


def features(against: Tensor, within: Tensor) -> Tensor:
    """K(X, K) K(K, K)^(-1/2)"""
    values, vectors = torch.linalg.eigh(within)
    return against @ (vectors * values.rsqrt()) @ vectors.mT


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_equation_phi_features_give_the_dual(alpha, normal):
    """Claim: "phi(X) := XK'(KK')^(-1/2)" and the dual "are equivalent": with alpha too, where KK' is invertible."""
    n, d = 5, 7
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    phi_query, phi_key = features(query @ key.mT, key @ key.mT), features(key @ key.mT, key @ key.mT)
    close(F.intention(phi_query, phi_key, value, alpha=alpha), naive.dual(query, key, value, alpha))


def test_equation_kerneltrick_is_kernel_ridge(normal):
    """Claim: "phi_K(X) := K(X, K) K(K, K)^(-1/2)". That is kernel ridge; a Gaussian kernel needs a minus sign."""
    n, d, gamma, alpha = 7, 3, 0.4, 0.1
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    against, within = (torch.exp(-gamma * torch.cdist(x, key).square()) for x in (query, key))
    ours = F.intention(features(against, within), features(within, within), value, alpha=alpha)
    oracle = KernelRidge(alpha=alpha, kernel="rbf", gamma=gamma).fit(key.numpy(), value.numpy())
    close(ours, torch.from_numpy(oracle.predict(query.numpy())))
    # with the printed plus sign there is no square root to take
    assert torch.linalg.eigvalsh(torch.exp(gamma * torch.cdist(key, key).square())).min() < -1


def test_equation_kerneltrick_through_fit(normal):
    """The paper's phi_K, its kernel ridge, and Nystroem with every point a landmark: one prediction."""
    n, d, alpha = 7, 3, 0.1
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    kernel = intention.kernels.Gaussian(0.4)
    against, within = kernel(query, key), kernel(key, key)
    want = F.intention(features(against, within), features(within, within), value, alpha=alpha)
    close(intention.fit(key, value, alpha=alpha, kernel=kernel)(query), want)
    close(intention.fit(key, value, alpha=alpha, kernel=kernel, features="nystroem", landmarks=n)(query), want)


def test_claim_nystroem_costs_landmarks(normal):
    """Nystroem is ridge on m features: the sums that are kept are m x m, and it nears the kernel as m grows."""
    n, d = 60, 2
    query, key = normal(m, d), normal(n, d)
    value = key.square().sum(-1, keepdim=True).sin()
    kernel = intention.kernels.Gaussian(0.4)
    want = intention.fit(key, value, alpha=0.01, kernel=kernel)(query)
    errors = []
    for landmarks in (3, 20, 40):
        chosen = {"features": "nystroem", "landmarks": landmarks, "choose": "kmeans++"}
        seed = torch.Generator().manual_seed(0)
        ctx = intention.fit(key, value, alpha=0.01, kernel=kernel, keep_points=False, generator=seed, **chosen)
        assert ctx.stats.scatter.shape == (landmarks, landmarks)
        errors.append((ctx(query) - want).norm().item())
    assert errors[0] > 3 * errors[1] > 9 * errors[2]


def test_claim_intention_map_is_a_mahalanobis_product(normal):
    """Claim: "the Mahalanobis dot product <q_i, k_j>_Sigma where Sigma = K'K": q Sigma^-1 k', with the inverse."""
    n, d = 7, 3
    query, key = normal(m, d), normal(n, d)
    sigma = key.mT @ key
    weights = F.intention(query, key, eye(n), alpha=0)  # values that are unit vectors show the map itself

    def product(matrix: Tensor) -> Tensor:
        return torch.stack([torch.stack([q @ matrix @ x for x in key]) for q in query])

    close(weights, product(torch.linalg.inv(sigma)))
    assert (weights - product(sigma)).abs().max() > 1
