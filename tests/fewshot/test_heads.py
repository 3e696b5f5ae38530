"""Heads against scikit-learn and against themselves: weights are repetitions, gradients are slopes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.neighbors import NearestCentroid
from torch import Tensor, nn

from intention import kernels
from intention.fewshot import LDA, QDA, Kernel, Logistic, LsSvm, Maml, Matching, Process, Prototypes, SigmaIntention
from intention.nn import LearnableAlpha

B, N, M, D, C = 2, 23, 7, 5, 3


def data(seed: int = 0, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    """Support, labels, queries; each task has other labels, and classes differ in size."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.stack([torch.arange(N) % C, torch.randint(C, (N,), generator=generator)])
    centres = 2 * torch.randn(C, D, generator=generator, dtype=torch.float64)
    support = centres[labels] + torch.randn(B, N, D, generator=generator, dtype=torch.float64)
    query = torch.randn(B, M, D, generator=generator, dtype=torch.float64) * 2
    return support.to(dtype), labels, query.to(dtype)


def heads() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "LsSvm": LsSvm(0.7),
        "LsSvm, learnable": LsSvm(LearnableAlpha(0.7), sharpness=3.0),
        "LsSvm, loo": LsSvm("loo"),
        "Kernel": Kernel(kernels.Gaussian(0.1), 0.3),
        "Kernel, loo": Kernel(kernels.Gaussian(0.1), "loo"),
        "LDA": LDA(0.1),
        "QDA": QDA(0.3),
        "SigmaIntention": SigmaIntention(0.7),
        "Matching": Matching(0.5),
        "Process": Process(D, C, (11,)).double(),
        "Prototypes": Prototypes(),
        "Logistic": Logistic(0.7),
    }


@pytest.mark.parametrize("alpha", [0.01, 1.0, 30.0])
def test_ls_svm_is_ridge_classification_one_against_all(alpha: float) -> None:
    support, labels, query = data()
    found = LsSvm(alpha)(support, labels, query)
    for task in range(B):
        oracle = RidgeClassifier(alpha=alpha).fit(support[task].numpy(), labels[task].numpy())
        expected = torch.from_numpy(oracle.decision_function(query[task].numpy()))
        torch.testing.assert_close(found[task], expected, atol=1e-5, rtol=0)
    assert LsSvm(alpha)(*(x.float() if x.is_floating_point() else x for x in data())).dtype == torch.float32


@pytest.mark.parametrize("alpha", [0.05, 1.0, 20.0])
def test_logistic_is_logistic_regression(alpha: float) -> None:
    support, labels, query = data()
    found = Logistic(alpha)(support, labels, query)
    for task in range(B):
        oracle = LogisticRegression(C=1 / alpha, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
        oracle.fit(support[task].numpy(), labels[task].numpy())
        expected = torch.from_numpy(oracle.predict_log_proba(query[task].numpy()))
        torch.testing.assert_close(found[task].log_softmax(-1), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("classes", [2, 3])
def test_logistic_of_two_classes_and_wide_features(classes: int) -> None:
    """More features than points, where classes are always separable."""
    generator = torch.Generator().manual_seed(1)
    support, query = torch.randn(11, 37, generator=generator), torch.randn(M, 37, generator=generator)
    labels = torch.arange(11) % classes
    found = Logistic(0.1)(support, labels, query)
    # scikit-learn has one column w for two classes, penalised once: here w / 2 and -w / 2 are
    oracle = LogisticRegression(C=20 if classes == 2 else 10, tol=1e-12, max_iter=10_000, solver="newton-cholesky")
    oracle.fit(support.double().numpy(), labels.numpy())
    expected = torch.from_numpy(oracle.predict_proba(query.double().numpy())).float()
    torch.testing.assert_close(found.softmax(-1), expected, atol=1e-5, rtol=0)


def test_lda_is_that_of_scikit_learn() -> None:
    support, labels, query = data()
    found = LDA(0.0)(support, labels, query).log_softmax(-1)
    for task in range(B):
        oracle = LinearDiscriminantAnalysis(solver="lsqr").fit(support[task].numpy(), labels[task].numpy())
        expected = torch.from_numpy(oracle.predict_log_proba(query[task].numpy()))
        torch.testing.assert_close(found[task], expected, atol=1e-8, rtol=0)


def test_qda_is_a_gaussian_for_each_class() -> None:
    """scikit-learn's has the divisor N_c - 1 in its covariances; the formula is written out instead."""
    support, labels, query = data()
    support, labels, query = support[0], labels[0], query[0]
    found = QDA(0.0)(support, labels, query).log_softmax(-1)
    expected = torch.from_numpy(_qda(support.numpy(), labels.numpy(), query.numpy()))
    torch.testing.assert_close(found, expected, atol=1e-8, rtol=0)


def _qda(x: np.ndarray, y: np.ndarray, query: np.ndarray) -> np.ndarray:
    scores = []
    for label in range(C):
        own = x[y == label]
        inverse = np.linalg.inv(np.cov(own.T, bias=True))
        r = query - own.mean(0)
        scores.append(-0.5 * np.einsum("md,de,me->m", r, inverse, r) + 0.5 * np.linalg.slogdet(inverse)[1])
        scores[-1] += np.log(len(own) / len(x))
    out = np.stack(scores, -1)
    return out - np.log(np.exp(out).sum(-1, keepdims=True))


def test_kernels_solve_the_equations_of_the_ls_svm() -> None:
    """Suykens: [0 1'; 1 k(K, K) + alpha I] [b; a] = [0; V], and k(q, K) a + b; a linear kernel is `LsSvm`."""
    support, labels, query = data()
    plain, linear = LsSvm(0.3)(support, labels, query), Kernel(kernels.Linear(), 0.3)(support, labels, query)
    torch.testing.assert_close(linear, plain, atol=1e-8, rtol=1e-8)
    found = Kernel(kernels.Gaussian(0.1), 0.3)(support, labels, query)
    for task in range(B):
        gram = torch.exp(-0.1 * torch.cdist(support[task], support[task]).square())
        asked = torch.exp(-0.1 * torch.cdist(query[task], support[task]).square())
        system = torch.zeros(N + 1, N + 1, dtype=torch.float64)
        system[0, 1:] = system[1:, 0] = 1
        system[1:, 1:] = gram + 0.3 * torch.eye(N)
        value = 2.0 * nn.functional.one_hot(labels[task], C) - 1
        solved = torch.linalg.solve(system, torch.cat([torch.zeros(1, C), value]).double())
        torch.testing.assert_close(found[task], asked @ solved[1:] + solved[0], atol=1e-8, rtol=1e-8)


def test_prototypes_are_nearest_means() -> None:
    support, labels, query = data()
    found = Prototypes()(support, labels, query).argmax(-1)
    for task in range(B):
        oracle = NearestCentroid().fit(support[task].numpy(), labels[task].numpy())
        assert found[task].tolist() == oracle.predict(query[task].numpy()).tolist()
    means = torch.stack([torch.stack([support[i][labels[i] == c].mean(0) for c in range(C)]) for i in range(B)])
    distances = -torch.cdist(query, means).square() / D**0.5
    logits = Prototypes()(support, labels, query)
    torch.testing.assert_close(logits - logits[..., :1], distances - distances[..., :1])


def test_votes_are_attention_over_labels() -> None:
    support, labels, query = data()
    votes = (0.5 * query @ support.mT).softmax(-1) @ nn.functional.one_hot(labels, C).double()
    torch.testing.assert_close(Matching(0.5)(support, labels, query).exp(), votes.clamp(min=1e-6))
    sigma = support.mT @ support + 0.7 * torch.eye(D, dtype=torch.float64)
    map_ = (5.0 * query @ torch.linalg.inv(sigma) @ support.mT).softmax(-1)
    expected = map_ @ nn.functional.one_hot(labels, C).double()
    torch.testing.assert_close(SigmaIntention(0.7)(support, labels, query).exp(), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", list(heads()))
def test_integer_weights_are_repetitions(name: str) -> None:
    if "loo" in name:
        pytest.skip("leaving out one of two equal points is another question than leaving out both")
    support, labels, query = data()
    times = torch.arange(N) % 3 + 1
    repeated = torch.arange(N).repeat_interleave(times)
    head = heads()[name]
    weighted = head(support, labels, query, weight=times.double().expand(B, -1))
    torch.testing.assert_close(weighted, head(support[:, repeated], labels[:, repeated], query), atol=1e-8, rtol=1e-6)
    assert not torch.allclose(weighted, head(support, labels, query))


@pytest.mark.parametrize("name", list(heads()))
def test_gradients_and_tasks_that_do_not_mix(name: str) -> None:
    support, labels, query = data()
    head = heads()[name]
    alone = torch.stack([head(support[task], labels[task], query[task]) for task in range(B)])
    torch.testing.assert_close(head(support, labels, query), alone, atol=1e-9, rtol=1e-7)
    if "loo" in name:
        return  # the choice of alpha is a jump
    small, few, ask = support[:1, :7, :3].clone(), torch.arange(7)[None] % 2, query[:1, :2, :3].clone()
    if name == "Process":
        head = Process(3, 2, (5,)).double()
    small.requires_grad_()
    ask.requires_grad_()
    assert torch.autograd.gradcheck(lambda s, q: head(s, few, q), (small, ask), atol=1e-5)


@pytest.mark.parametrize("name", ["LsSvm, learnable", "SigmaIntention", "Matching", "Process"])
def test_parameters_learn(name: str) -> None:
    head = heads()[name]
    loss = nn.functional.cross_entropy(head(*data()).flatten(0, 1), torch.arange(B * M) % C)
    loss.backward()
    assert all(weight.grad is not None and bool(weight.grad.abs().sum() > 0) for weight in head.parameters())


def test_alpha_by_leave_one_out_is_per_task() -> None:
    support, labels, query = data()
    noisy = support.clone()
    noisy[1] = torch.randn(N, D, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    context = LsSvm("loo").fit(noisy, labels)
    assert context.alpha.shape == (B,)
    assert context.alpha[0] < context.alpha[1]
    torch.testing.assert_close(LsSvm("loo")(noisy, labels, query), context(query))


def test_maml_takes_gradient_steps() -> None:
    support, labels, query = data()
    net = nn.Linear(D, C).double()
    head = Maml(net, steps=2, rate=0.1)
    found = head(support, labels, query)
    for task in range(B):
        own = nn.Linear(D, C).double()
        own.load_state_dict(net.state_dict())
        optimiser = torch.optim.SGD(own.parameters(), 0.1)
        for _ in range(2):
            optimiser.zero_grad()
            nn.functional.cross_entropy(own(support[task]), labels[task]).backward()
            optimiser.step()
        torch.testing.assert_close(found[task], own(query[task]))
    torch.testing.assert_close(head(support[0], labels[0], query[0]), found[0])
    found.square().sum().backward()
    exact = net.weight.grad.clone()
    net.zero_grad()
    Maml(net, 2, 0.1, second_order=False)(support, labels, query).square().sum().backward()
    assert not torch.allclose(exact, net.weight.grad)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": torch.zeros(N)}, "integers"),
        ({"labels": torch.arange(N - 1)}, "a label for each of 23"),
        ({"labels": -torch.ones(N, dtype=torch.long)}, "from 0 on"),
        ({"query": torch.zeros(M, D + 1)}, "wanted support"),
    ],
)
def test_wrong_input_is_told(change: dict, message: str) -> None:
    support, labels, query = data()
    wanted = {"support": support[0], "labels": labels[0], "query": query[0]} | change
    with pytest.raises((TypeError, ValueError), match=message):
        LsSvm()(**wanted)


def test_wrong_heads_are_told() -> None:
    with pytest.raises(ValueError, match="'loo'"):
        LsSvm("gcv")
    with pytest.raises(TypeError, match="LearnableAlpha"):
        LDA("loo")
    with pytest.raises(ValueError, match="alpha must be > 0"):
        Logistic(0.0)
    support, labels, query = data()
    with pytest.raises(ValueError, match="made for 5 classes"):
        Process(D, 5).double()(support, labels, query)
