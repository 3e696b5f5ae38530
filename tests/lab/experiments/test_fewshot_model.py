"""Heads of few-shot classifiers against written-out formulas, and MAML."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention import kernels
from intention.fewshot import LDA, QDA, Kernel, LsSvm, Process, Prototypes, SigmaIntention
from intention.fewshot.encoders import Conv4, normalise
from intention.lab.experiments.fewshot.model import (
    SHARPNESS,
    Folded,
    ImageMaml,
    Pretrained,
    attention,
    score_loss,
)
from intention.lab.experiments.fewshot.task import Shots
from intention.nn import LearnableAlpha
from lab.toy_episodes import QUERIES, SHOT, SIZES, WAY, pictures, ragged, seeded


def heads(way: int = WAY, d: int = 7) -> dict[str, nn.Module]:
    return {
        "mse": LsSvm(LearnableAlpha(0.3)),
        "cross-entropy": LsSvm(LearnableAlpha(0.3), SHARPNESS),
        "kernel": Kernel(kernels.Gaussian(0.1, learnable=True), LearnableAlpha(0.3)),
        "lda": LDA(LearnableAlpha(0.3)),
        "qda": QDA(LearnableAlpha(0.3)),
        "sigma": SigmaIntention(LearnableAlpha(0.3)),
        "prototypes": Prototypes(),
        "attention": attention(d, way, (11, 13), heads=5),
        "process": Process(d, way, (11,)),
    }


def points(d: int = 7, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and one-hot values; the classes are not in order."""
    key = torch.randn(batch, WAY * SHOT, d, generator=seeded(), dtype=torch.float64)
    query = torch.randn(batch, 5, d, generator=seeded(1), dtype=torch.float64)
    labels = torch.arange(WAY * SHOT).flip(0) % WAY
    return query, key, nnf.one_hot(labels, WAY).double().expand(batch, -1, -1)


def answer(head: nn.Module, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return head(key, value.argmax(-1), query)


@pytest.mark.parametrize("name", list(heads()))
def test_every_head_gives_a_score_per_query_and_class(name: str) -> None:
    query, key, value = points()
    head = heads()[name].double()
    scores = answer(head, query, key, value)
    assert scores.shape == (2, 5, WAY)
    torch.testing.assert_close(scores[1:], answer(head, query[1:], key[1:], value[1:]))  # tasks do not mix
    torch.testing.assert_close(scores[:, 3:], answer(head, query[:, 3:], key, value))  # nor queries
    weights = list(head.parameters())
    labels = torch.arange(10).reshape(2, 5) % WAY
    slopes = torch.autograd.grad(score_loss(scores, labels, "cross-entropy"), weights) if weights else ()
    assert all(slope.isfinite().all() and slope.any() for slope in slopes)


@pytest.mark.parametrize("name", ["mse", "cross-entropy", "kernel", "lda", "qda", "sigma", "prototypes"])
def test_other_names_of_classes_change_nothing_else(name: str) -> None:
    query, key, value = points()
    head = heads()[name].double()
    other, turned = [2, 0, 1], [3, 1, 5, 0, 2, 4]
    torch.testing.assert_close(answer(head, query, key, value[..., other]), answer(head, query, key, value)[..., other])
    torch.testing.assert_close(answer(head, query, key[:, turned], value[:, turned]), answer(head, query, key, value))


def test_ls_svm_is_ridge_with_intercept_on_plus_and_minus_one() -> None:
    query, key, value = points()
    ones = torch.ones_like(key[..., :1])
    wide = torch.cat([key, ones], -1)
    penalty = 0.3 * torch.eye(8, dtype=torch.float64)
    penalty[-1, -1] = 0
    w = torch.linalg.solve(wide.mT @ wide + penalty, wide.mT @ (2 * value - 1))
    expected = torch.cat([query, torch.ones_like(query[..., :1])], -1) @ w
    torch.testing.assert_close(answer(heads()["mse"].double(), query, key, value), expected)
    torch.testing.assert_close(answer(heads()["cross-entropy"].double(), query, key, value), 5 * expected)


def test_prototypes_are_nearest_means() -> None:
    query, key, value = points()
    means = torch.stack([key[:, value[0, :, c] == 1].mean(1) for c in range(WAY)], 1)
    scores = answer(Prototypes(), query, key, value)
    distances = (query.unsqueeze(2) - means.unsqueeze(1)).square().sum(-1) / 7**0.5
    assert torch.equal(scores.argmax(-1), distances.argmin(-1))
    torch.testing.assert_close(scores.log_softmax(-1), (-distances).log_softmax(-1))


@pytest.mark.parametrize("quadratic", [False, True])
def test_discriminants_are_gaussian_classes(quadratic: bool) -> None:
    query, key, value = points()
    own = [key[:, value[0, :, c] == 1] for c in range(WAY)]
    around = [x - x.mean(1, keepdim=True) for x in own]
    spreads = [x.mT @ x / SHOT for x in around]
    if not quadratic:
        spreads = [torch.stack(spreads).mean(0)] * WAY
    eye = torch.eye(7, dtype=torch.float64)
    logs = [
        torch.distributions.MultivariateNormal(x.mean(1, keepdim=True), (s + 0.3 * eye).unsqueeze(1)).log_prob(query)
        for x, s in zip(own, spreads, strict=True)
    ]
    scores = answer(heads()["qda" if quadratic else "lda"].double(), query, key, value)
    torch.testing.assert_close(scores.log_softmax(-1), torch.stack(logs, -1).log_softmax(-1))


@pytest.mark.parametrize("name", ["mse", "cross-entropy", "kernel", "lda", "qda"])
@pytest.mark.parametrize("latent", [5, 31])
def test_a_folded_layer_answers_as_the_linear_one(name: str, latent: int) -> None:
    """5: not wider than the features, where nothing is folded; 31 is."""
    value = points()[2]
    x = torch.randn(2, WAY * SHOT + 11, 7, generator=seeded(2), dtype=torch.float64)
    labels = torch.arange(22).reshape(2, 11) % WAY
    torch.manual_seed(0)
    folded = Folded(7, latent).double()
    plain = nn.Linear(7, latent).double()  # its bias, a shift, makes no difference
    plain.weight.data.copy_(folded.weight)
    found = []
    for layer in (folded, plain):
        given, head = x.clone().requires_grad_(), heads()[name].double()
        embedded = layer(given)
        scores = answer(head, embedded[:, value.shape[1] :], embedded[:, : value.shape[1]], value)
        slopes = torch.autograd.grad(
            score_loss(scores, labels, "cross-entropy"), [layer.weight, given, *head.parameters()]
        )
        # what is added to all scores of a query is no matter to LDA and QDA
        found.append([scores.log_softmax(-1) if name in ("lda", "qda") else scores, *slopes])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-9, rtol=1e-6)
    assert folded(x).shape[-1] == min(7, latent)


def test_a_folded_layer_keeps_lengths_at_the_start() -> None:
    torch.manual_seed(0)
    x = torch.randn(50, 64)
    for latent in (32, 8192):
        ratio = Folded(64, latent)(x).detach().norm() / x.norm()
        assert float(ratio) == pytest.approx(1, abs=0.1)


def test_losses() -> None:
    scores, labels = torch.randn(2, 5, 3, generator=seeded()), torch.tensor([[0, 1, 2, 1, 0], [2, 2, 0, 1, 1]])
    signs = torch.full((2, 5, 3), -1.0).scatter(2, labels.unsqueeze(-1), 1.0)
    assert torch.allclose(score_loss(scores, labels, "mse"), (scores - signs).square().mean())
    right = scores.softmax(-1).gather(2, labels.unsqueeze(-1))
    assert torch.allclose(score_loss(scores, labels, "cross-entropy"), -right.log().mean())


def test_pretrained_learns_the_classes_of_the_data_set() -> None:
    pool = ragged()
    pool.x = torch.randn(len(pool.y), 7, generator=seeded())
    shots = pool.sample(4, seeded(), **SIZES)
    torch.manual_seed(0)
    model = Pretrained(None, 7, 0, 5, 1.0)
    # by the images themselves: which of the pool is each one?
    index = (shots.x.flatten(0, 1).unsqueeze(1) == pool.x).all(-1).long().argmax(-1)
    expected = nnf.cross_entropy(model.classify(pool.x[index]), pool.y[index])
    torch.testing.assert_close(model(shots), expected)
    assert model.scores(shots).shape == (4, WAY * QUERIES, WAY)
    assert [name for name, weight in model.named_parameters() if weight.requires_grad] == [
        "classify.weight",
        "classify.bias",
    ]


def maml(second_order: bool, steps: int = 2) -> ImageMaml:
    torch.manual_seed(0)
    return ImageMaml(Conv4(16, 1, 2, running=False), 2, WAY, steps, 0.4, second_order).double()


def maml_loss(model: ImageMaml, shots: Shots) -> Tensor:
    """The same by changing copies of the weights, one task after another; only forward."""
    total = torch.zeros((), dtype=torch.float64)
    for x, value, labels in zip(shots.x, shots.value, shots.labels, strict=True):
        copied = maml(model.second_order)
        copied.load_state_dict(model.state_dict())
        images = normalise(x).double()
        for _ in range(model.steps):
            loss = nnf.cross_entropy(copied.net(images[: len(value)]), value.argmax(-1))
            slopes = torch.autograd.grad(loss, list(copied.parameters()))
            for weight, slope in zip(copied.parameters(), slopes, strict=True):
                weight.data -= model.rate * slope
        total += nnf.cross_entropy(copied.net(images[len(value) :]).detach(), labels) / len(shots.x)
    return total


@pytest.fixture
def double_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Encoders compute in the precision of their weights."""
    monkeypatch.setattr("intention.lab.experiments.fewshot.model.normalise", lambda x: normalise(x).double())
    monkeypatch.setattr(Conv4, "forward", lambda self, x: self.features(x))


def test_maml_takes_gradient_steps_on_the_examples(double_images: None) -> None:
    shots = pictures().sample(2, seeded(), way=WAY, shot=2, queries=3)
    for second_order in (True, False):
        model = maml(second_order)
        expected = maml_loss(model, shots)
        assert float(model(shots).detach()) == pytest.approx(float(expected), rel=1e-9)
        with torch.no_grad():  # as in an evaluation
            assert float(model.eval()(shots)) == pytest.approx(float(expected), rel=1e-9)
    assert abs(float(maml_loss(maml(True, steps=0), shots) - expected)) > 1e-3


def test_second_order_maml_has_the_slope_of_its_loss(double_images: None) -> None:
    shots = pictures().sample(2, seeded(), way=WAY, shot=2, queries=3)
    found = {}
    for second_order in (True, False):
        model = maml(second_order)
        model(shots).backward()
        found[second_order] = model.net[0].blocks[3][0].weight.grad[1, 0, 1, 1]  # type: ignore[index,union-attr]
    model, ends = maml(True), []
    weight = model.net[0].blocks[3][0].weight.data  # type: ignore[index,union-attr]
    for move in (1e-6, -2e-6):
        weight[1, 0, 1, 1] += move
        ends.append(float(maml_loss(model, shots)))
    slope = (ends[0] - ends[1]) / 2e-6
    assert abs(slope) > 1e-4
    assert float(found[True]) == pytest.approx(slope, rel=1e-3)
    assert abs(float(found[False]) - slope) > 0.02 * abs(slope)  # first order leaves something out
