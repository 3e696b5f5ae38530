"""Section 2: the spaces KVQ, attention, Transformer and Intention, and what lies in which."""

from __future__ import annotations

import itertools
import math
from functools import partial

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from intention import functional as F
from intention import naive

close = partial(assert_close, rtol=1e-10, atol=1e-10)  # a number rounded to float32 on its way would not pass

n, m, d, k, h = 7, 11, 3, 5, 13


def mlp(*sizes: int, seed: int = 0):
    """A fixed MLP: tanh between its layers, constants added so that it is not an odd function."""
    gen = torch.Generator().manual_seed(seed)
    layers = [torch.randn(a, b, generator=gen, dtype=torch.float64) / a**0.5 for a, b in itertools.pairwise(sizes)]

    def forward(x: Tensor) -> Tensor:
        for layer in layers[:-1]:
            x = torch.tanh(x @ layer + 0.3)
        return x @ layers[-1]

    return forward


def neural_process(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return naive.neural_process(query, key, value, mlp(d + k, 17, h), mlp(d + h, 17, k, seed=1))


MODELS = {
    "attention": F.attention,
    "linear_attention": F.linear_attention,
    "intention": F.intention,
    "sigma_intention": F.sigma_intention,
    "erf": naive.erf,
    "neural_process": neural_process,
}


def generators(size: int) -> list[Tensor]:
    """A cycle and a swap: products of these two are all the permutations there are."""
    swap = torch.arange(size)
    swap[:2] = swap[:2].flip(0)
    return [torch.arange(size).roll(1), swap]


def asymmetry(f, query: Tensor, key: Tensor, value: Tensor) -> float:
    """|f(rho1 K, rho1 V, rho2 Q) - rho2 f(K, V, Q)|, 0 in KVQ"""
    still = f(query, key, value)
    pairs = itertools.product(generators(len(key)), generators(len(query)))
    gaps = [f(query[rho2], key[rho1], value[rho1]) - still[rho2] for rho1, rho2 in pairs]
    return torch.stack(gaps).abs().max().item()


@pytest.mark.parametrize("name", MODELS)
def test_definition_kvq_space(name, normal):
    """Claim: "f(rho1 K, rho1 V, rho2 Q) = rho2 f(K, V, Q)", a set of pairs and a set of queries, in no order."""
    f, query, key, value = MODELS[name], normal(m, d), normal(n, d), normal(n, k)
    assert f(query, key, value).shape == (m, k)
    assert asymmetry(f, query, key, value) < 1e-12
    # the pairs matter: values that change hands change the answer
    assert (f(query, key, value.roll(1, 0)) - f(query, key, value)).abs().max() > 1e-2


def test_definition_attention_space(normal):
    """Claim: "functions of form sigma(Q theta1 K') V theta2". No 1/sqrt(d) is printed, so scale=1."""
    query, key, value, theta1, theta2 = normal(m, d), normal(n, d), normal(n, k), normal(d, d), normal(k, k)
    scores = (query @ theta1 @ key.mT).exp()
    formula = scores / scores.sum(1, keepdim=True) @ value @ theta2
    close(F.attention(query @ theta1, key, value @ theta2, scale=1.0), formula)


# --- Transformer space ------------------------------------------------------------------------------------------------


def separate(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """X = [K; V; Q], one row each, with room for three role codes."""
    rows = len(key) + len(value) + len(query)
    x = torch.zeros(rows, d + k + 3, dtype=query.dtype)
    x[:n, :d], x[n : 2 * n, d : d + k], x[2 * n :, :d] = key, value, query
    return x


def paired(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """X = [(K, V); Q]: a key and its value share a row, as in the proof about Neural Processes."""
    x = torch.zeros(len(key) + len(query), d + k + 3, dtype=query.dtype)
    x[:n, :d], x[:n, d : d + k], x[n:, :d] = key, value, query
    return x


def positions(x: Tensor) -> Tensor:
    """Sines of the row's number, one frequency per column."""
    rows, width = x.shape
    steps, rates = torch.arange(rows, dtype=x.dtype), torch.logspace(0, -1, width, dtype=x.dtype)
    return torch.sin(steps[:, None] * rates)


def roles(x: Tensor) -> Tensor:
    """A one-hot code of what a row is: key or pair, value, query."""
    rows = x.shape[0]
    role = torch.zeros(rows, dtype=torch.long)
    role[n:-m], role[-m:] = 1, 2
    return torch.nn.functional.one_hot(role + d + k, d + k + 3).to(x.dtype)


def transformer(rows, code):
    """Two layers of e_o(X + f_att(X, X, X)), fixed weights; the last M rows are the predictions."""
    width = d + k + 3
    layers = [(mlp(width, width, seed=s), mlp(width, 17, width, seed=9 + s)) for s in (1, 2)]

    def forward(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        x = rows(query, key, value)
        x = x + code(x)
        for theta, outer in layers:
            x = outer(x + F.attention(theta(x), x, x, scale=1.0))
        return x[-m:, :k]

    return forward


@pytest.mark.parametrize("rows", [separate, paired])
def test_definition_transformer_space_positions_leave_kvq(rows, normal):
    """Claim: "H_trans is a subset of H_KVQ". False as printed, for X is "enriched with positional encoding"."""
    assert asymmetry(transformer(rows, positions), normal(m, d), normal(n, d), normal(n, k)) > 1e-2


@pytest.mark.parametrize("rows", [separate, paired])
def test_definition_transformer_space_roles_stay_in_kvq(rows, normal):
    """Claim: "H_trans is a subset of H_KVQ". Read with a code of the row's role in place of its position."""
    assert asymmetry(transformer(rows, roles), normal(m, d), normal(n, d), normal(n, k)) < 1e-12


def test_definition_transformer_space_pairs_need_a_shared_row(normal):
    """Claim: "X = [K; V; Q]". Without positions, rows of their own forget which value belongs to which key."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    apart, together = transformer(separate, roles), transformer(paired, roles)
    close(apart(query, key, value.roll(1, 0)), apart(query, key, value))
    assert (together(query, key, value.roll(1, 0)) - together(query, key, value)).abs().max() > 1e-3


# --- what attention can and cannot represent --------------------------------------------------------------------------


def test_proposition_erf_in_kvq_but_not_attention(normal):
    """Claim: "f_erf in H_KVQ without H_att". For N = 1 a softmax is 1 whatever K is: no need of Liouville."""
    query, key, value, theta1, theta2 = normal(m, d), normal(1, d), normal(1, k), normal(d, d), normal(k, k)

    def attention(key: Tensor) -> Tensor:
        return F.attention(query @ theta1, key, value @ theta2, scale=1.0)

    close(attention(key), (value @ theta2).expand(m, k))
    close(attention(-3 * key), attention(key))
    for f in (naive.erf, F.intention):  # both see the key, so neither is attention
        assert (f(query, -3 * key, value) - f(query, key, value)).abs().max() > 0.1
    one, kappa = torch.ones(1, 1, dtype=torch.float64), 0.7
    close(naive.erf(one, kappa * one, one).item(), math.erf(kappa))
    assert asymmetry(naive.erf, query, normal(n, d), normal(n, k)) < 1e-12


def test_proposition_attention_cannot_represent_neural_process(normal):
    """Claim: "Attention is a linear operator with respect to V and NP is not"."""
    query, key, value, other = normal(m, d), normal(n, d), normal(n, k), normal(n, k)

    def nonlinearity(f) -> float:
        mixed = f(query, key, 2 * value - 3 * other)
        return (mixed - 2 * f(query, key, value) + 3 * f(query, key, other)).abs().max().item()

    assert nonlinearity(F.attention) < 1e-12
    assert nonlinearity(neural_process) > 0.1


def test_proposition_transformer_represents_neural_process(normal):
    """Claim: "A Transformer can exactly represent NP": keys of ones, a skip connection, room for both halves in e_o."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    inner, outer = mlp(d + k, 17, h), mlp(d + h, 17, k, seed=1)
    embedded = inner(torch.cat([key, value], 1))  # e_c([K_i; V_i])
    x = torch.cat([query, query.new_zeros(m, h)], 1)  # Q occupies the first half
    values = torch.cat([query.new_zeros(n, d), embedded], 1)  # e_c the latter
    attended = F.attention(x, torch.ones_like(values), values)  # equal scores: the mean of e_c
    close(attended[:, d:], embedded.mean(0).expand(m, h))
    close(outer(x + attended), naive.neural_process(query, key, value, inner, outer))


KAPPAS = torch.logspace(0, -8, 9, dtype=torch.float64)


def column(x: Tensor) -> Tensor:
    """A batch of problems with N = M = d = k = 1."""
    return x[:, None, None]


def test_theorem_least_squares_not_representable():
    """Claim: "Neither [...] can represent least squares fit", as 1/kappa is unbounded. This needs alpha = 0."""
    one = column(torch.ones_like(KAPPAS))
    fit = F.intention(one, column(KAPPAS), one, alpha=0)
    close(fit, column(1 / KAPPAS))
    assert fit.max() > 1e7
    close(F.attention(one, column(KAPPAS), one), one)
    # "ill defined for kappa = 0": we take the fit of minimum norm
    assert F.intention(one[:1], 0 * one[:1], one[:1], alpha=0).item() == 0


def test_theorem_least_squares_jumps_where_attention_is_continuous(normal):
    """Claim: "both Attention's and Transformer's computation is well defined". At K = 0 only least squares jumps."""
    query, key, value = normal(m, d), normal(n, d), normal(n, k)
    small = 1e-8

    def jump(f) -> float:
        return (f(query, small * key, value) - f(query, -small * key, value)).abs().max().item()

    assert jump(lambda *x: F.intention(*x, alpha=0)) > 1 / small
    assert jump(F.attention) < 100 * small
    assert jump(transformer(paired, roles)) < 100 * small
    out = F.attention(query, 1e3 * key, value)
    assert (out >= value.amin(0) - 1e-12).all()
    assert (out <= value.amax(0) + 1e-12).all()


@pytest.mark.parametrize("alpha", [1e-4, 0.3, 7.0])
def test_theorem_least_squares_bounded_with_alpha(alpha):
    """The other side of the claim: with alpha > 0 the fit is at most 1 / (2 sqrt(alpha)), at kappa = sqrt(alpha)."""
    bound = 1 / (2 * alpha**0.5)
    kappas = torch.cat([KAPPAS, torch.logspace(0, 3, 99, dtype=torch.float64), KAPPAS.new_tensor([alpha**0.5])])
    one = column(torch.ones_like(kappas))
    fit = F.intention(one, column(kappas), one, alpha=alpha)
    close(fit, column(kappas / (kappas**2 + alpha)))
    assert fit.max() <= bound * (1 + 1e-12)
    close(fit[-1].item(), bound)


@pytest.mark.parametrize("alpha", [0.0, 0.7])
def test_definition_intention_space(alpha, normal):
    """Claim: "functions of form Q theta1 [(K theta2)'(K theta2) + alpha I]^-1 (K theta2)' V theta3"."""
    query, key, value, width = normal(m, 2), normal(n, 4), normal(n, h), d
    theta1, theta2, theta3 = normal(2, width), normal(4, width), normal(h, k)
    moved = key @ theta2
    covariance = moved.mT @ moved + alpha * torch.eye(width, dtype=torch.float64)
    formula = query @ theta1 @ torch.linalg.inv(covariance) @ moved.mT @ value @ theta3
    close(F.intention(query @ theta1, moved, value @ theta3, alpha=alpha), formula)
