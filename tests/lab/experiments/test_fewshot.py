"""Few-shot classification: episodes, heads against written-out formulas, MAML, runs, and what is said of the rows."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

from intention import kernels
from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import fewshot, fewshot_latent, fewshot_resnet
from intention.lab.experiments.base import COLOURS, LABELS, Job, Measure, label
from intention.lab.experiments.compare import UNTESTED
from intention.lab.experiments.fewshot import training as fewshot_runs
from intention.lab.experiments.fewshot.claims import percent
from intention.lab.experiments.fewshot.config import MODELS, Classifier, MamlNet
from intention.lab.experiments.fewshot.figures import mean, table, table_latent
from intention.lab.experiments.fewshot.model import (
    Attention,
    ClassProcess,
    Discriminant,
    Folded,
    ImageMaml,
    LsSvm,
    Pretrained,
    Prototypes,
    SigmaVote,
    mix,
    score_loss,
)
from intention.lab.experiments.fewshot.task import Pool, Prefetch, Shots, varied
from intention.lab.experiments.fewshot.training import correct
from intention.lab.models.encoders import Conv4, load_encoder, normalise

WAY, SHOT, QUERIES = 3, 2, 5
SIZES = {"way": WAY, "shot": SHOT, "queries": QUERIES}


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def ragged() -> Pool:
    """Classes of 4 to 13 images in no order; an image is its own number."""
    y = torch.cat([torch.full((size,), number) for number, size in enumerate((7, 13, 4, 8, 11))])
    y = y[torch.randperm(len(y), generator=seeded())]
    return Pool(torch.arange(len(y)).float()[:, None], y, "ragged")


# episodes


def test_episodes_have_distinct_images_of_their_classes() -> None:
    pool = ragged()
    shots = pool.sample(50, seeded(), **SIZES)
    assert shots.x.shape == (50, WAY * (SHOT + QUERIES), 1)
    assert shots.value.shape == (50, WAY * SHOT, WAY)
    assert shots.labels.shape == (50, WAY * QUERIES)
    for x, value, labels, classes in zip(*shots, strict=True):
        index = x.flatten().long()
        assert len(index.unique()) == len(index)  # so context and queries have none in common
        own = torch.cat([value.argmax(-1), labels])
        assert torch.equal(pool.y[index], classes[own])
        assert Counter(value.argmax(-1).tolist()) == dict.fromkeys(range(WAY), SHOT)
        assert Counter(labels.tolist()) == dict.fromkeys(range(WAY), QUERIES)
        assert len(classes.unique()) == WAY
        assert torch.equal(value.sum(-1), torch.ones(WAY * SHOT))


def test_all_images_of_large_enough_classes_are_drawn_and_no_others() -> None:
    pool = ragged()
    shots = pool.sample(300, seeded(), **SIZES)
    assert shots.classes.unique().tolist() == [0, 1, 3, 4]  # class 2 has 4 images only
    assert len(shots.x.unique()) == 7 + 13 + 8 + 11
    drawn = Counter(shots.x.flatten().tolist())
    often = [count for image, count in drawn.items() if pool.y[int(image)] == 1]
    assert max(often) < 1.5 * min(often)  # none is preferred
    places = Counter(shots.classes[:, 0].tolist())
    assert max(places.values()) < 1.6 * min(places.values())  # nor any class at any place


def test_episodes_are_those_of_their_seed() -> None:
    one, same, other = (ragged().sample(7, seeded(seed), **SIZES) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not torch.equal(one.x, other.x)


def test_too_few_images_are_told() -> None:
    pool = ragged()
    pool.check(4, 2, 5)
    with pytest.raises(
        LabError, match=r"ragged has 4 classes with at least 2 \+ 5 images .*5-way.*4 to 13 images.*--way"
    ):
        pool.check(5, 2, 5)


def test_prefetched_batches_are_the_same_also_after_a_step_back() -> None:
    sample = partial(ragged().sample, **SIZES)
    plain, ahead = seeded(3), seeded(3)
    prefetch = Prefetch(sample)
    states, expected = [], []
    for batch in (2, 2, 3, 2):  # also another batch size than was expected
        states.append(plain.get_state())
        expected.append(sample(batch, plain))
        assert torch.equal(prefetch(batch, ahead).x, expected[-1].x)
        assert torch.equal(ahead.get_state(), plain.get_state())
    ahead.set_state(states[1])  # what a checkpoint does
    for batch, shots in zip((2, 3, 2), expected[1:], strict=True):
        assert torch.equal(prefetch(batch, ahead).x, shots.x)
    assert torch.equal(prefetch(2, ahead).x, sample(2, plain).x)


# heads


def heads(way: int = WAY, d: int = 7) -> dict[str, nn.Module]:
    return {
        "mse": LsSvm(0.3, "mse"),
        "cross-entropy": LsSvm(0.3, "cross-entropy"),
        "kernel": LsSvm(0.3, "mse", kernels.Gaussian(0.1, learnable=True)),
        "lda": Discriminant(0.3, quadratic=False),
        "qda": Discriminant(0.3, quadratic=True),
        "sigma": SigmaVote(0.3),
        "prototypes": Prototypes(),
        "attention": Attention(d, way, (11, 13), heads=5),
        "process": ClassProcess(d, way, (11,)),
    }


def points(d: int = 7, batch: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and one-hot values; the classes are not in order."""
    key = torch.randn(batch, WAY * SHOT, d, generator=seeded(), dtype=torch.float64)
    query = torch.randn(batch, 5, d, generator=seeded(1), dtype=torch.float64)
    labels = torch.arange(WAY * SHOT).flip(0) % WAY
    return query, key, nnf.one_hot(labels, WAY).double().expand(batch, -1, -1)


@pytest.mark.parametrize("name", list(heads()))
def test_every_head_gives_a_score_per_query_and_class(name: str) -> None:
    query, key, value = points()
    head = heads()[name].double()
    scores = head(query, key, value)
    assert scores.shape == (2, 5, WAY)
    torch.testing.assert_close(scores[1:], head(query[1:], key[1:], value[1:]))  # tasks do not mix
    torch.testing.assert_close(scores[:, 3:], head(query[:, 3:], key, value))  # nor queries
    weights = list(head.parameters())
    labels = torch.arange(10).reshape(2, 5) % WAY
    slopes = torch.autograd.grad(score_loss(scores, labels, "cross-entropy"), weights) if weights else ()
    assert all(slope.isfinite().all() and slope.any() for slope in slopes)


@pytest.mark.parametrize("name", ["mse", "cross-entropy", "kernel", "lda", "qda", "sigma", "prototypes"])
def test_other_names_of_classes_change_nothing_else(name: str) -> None:
    query, key, value = points()
    head = heads()[name].double()
    other, turned = [2, 0, 1], [3, 1, 5, 0, 2, 4]
    torch.testing.assert_close(head(query, key, value[..., other]), head(query, key, value)[..., other])
    torch.testing.assert_close(head(query, key[:, turned], value[:, turned]), head(query, key, value))


def test_ls_svm_is_ridge_with_intercept_on_plus_and_minus_one() -> None:
    query, key, value = points()
    ones = torch.ones_like(key[..., :1])
    wide = torch.cat([key, ones], -1)
    penalty = 0.3 * torch.eye(8, dtype=torch.float64)
    penalty[-1, -1] = 0
    w = torch.linalg.solve(wide.mT @ wide + penalty, wide.mT @ (2 * value - 1))
    expected = torch.cat([query, torch.ones_like(query[..., :1])], -1) @ w
    torch.testing.assert_close(heads()["mse"].double()(query, key, value), expected)
    torch.testing.assert_close(heads()["cross-entropy"].double()(query, key, value), 5 * expected)


def test_prototypes_are_nearest_means() -> None:
    query, key, value = points()
    means = torch.stack([key[:, value[0, :, c] == 1].mean(1) for c in range(WAY)], 1)
    scores = Prototypes()(query, key, value)
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
    scores = Discriminant(0.3, quadratic).double()(query, key, value)
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
        scores = head(embedded[:, value.shape[1] :], embedded[:, : value.shape[1]], value)
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


# MAML


def pictures(size: int = 16, classes: int = 5, each: int = 8) -> Pool:
    x = torch.randint(256, (classes * each, size, size, 1), dtype=torch.uint8, generator=seeded())
    return Pool(x, torch.arange(classes * each) % classes, "noise")


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


# runs

SETTINGS: dict[str, Any] = {
    "data": "built-in",
    "width": 4,
    **SIZES,
    "steps": 5,
    "decay_period": 2,
    "evaluation_episodes": 6,
    "validation_episodes": 6,
    "validations": 2,
    "precision": "float32",
    "batch": 2,
    "attention": Classifier(16, 0.05, (16,), heads=2),
    "neural_process": Classifier(16, 0.1, (16,)),
    "maml_first": MamlNet(0.1, inner_steps=2, validation_episodes=6),
    "maml": MamlNet(0.1, inner_steps=2, validation_episodes=6),
}
TINY = replace(fewshot.PRESETS["quick"], **SETTINGS)


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An npz of features of 20 classes that lie apart."""
    path = tmp_path_factory.mktemp("data") / "features.npz"
    rng = np.random.default_rng(0)
    middles = 3 * rng.normal(size=(20, 8))
    y = np.repeat(np.arange(20), 12)
    np.savez(path, x=(middles[y] + 0.3 * rng.normal(size=(len(y), 8))).astype(np.float32), y=y)
    return str(path)


def go(config: Any, model: str, place: Place | None = None) -> list[Measure]:
    return list(fewshot.run(Job("fewshot", config, model, 0, {"data": config.data}), place or Place()))


@pytest.mark.parametrize("model", MODELS)
def test_every_model_learns_on_features(model: str, features: str) -> None:
    config = replace(TINY, data=features, steps=30, decay_period=10, evaluation_episodes=30, alpha=0.1)
    measures = go(config, model)
    times = config.intention_longer.times if model == "intention_longer" else 1
    assert [(one.metric, one.x) for one in measures] == [
        ("accuracy before training", None),
        *(("validation accuracy", x * times) for x in (0, 15, 30)),
        ("accuracy", None),
        ("accuracy on all unseen classes", None),
        ("accuracy on training classes", None),
    ]
    last = measures[-3]
    assert last.value is not None
    low, high = last.interval  # type: ignore[misc]
    assert low <= last.value <= high
    about = last.data or {}
    checks = {one.x: one.value for one in measures[1:4]}
    assert checks[about["chosen step"]] == max(checks.values())  # type: ignore[type-var]
    assert about["parameters"] > 0
    assert ("alpha" in about) is (model.startswith(("intention", "sigma")) or model == "pretrained")
    assert ("gamma" in about) is (model == "intention_kernel")
    if model in ("intention", "intention_ce", "intention_lda", "protonet", "pretrained"):
        assert last.value > 0.95


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images of noise in the place of any data that are asked for."""
    x = torch.randint(256, (3, 40, 28, 28, 1), dtype=torch.uint8, generator=seeded())
    names, y = tuple("abcde"), torch.arange(40) % 5
    parts = {name: data.Labelled(one, y, names) for name, one in zip(data.PARTS, x, strict=True)}
    monkeypatch.setattr(data, "load", lambda name: data.Data(name, parts, True))


@pytest.mark.parametrize("model", ["intention", "intention_longer", "pretrained", "maml"])
def test_a_killed_run_on_images_goes_on_to_the_same_rows(model: str, tmp_path: Path, noise: None) -> None:
    def kill(step: int, steps: int, values: object) -> None:
        if step == 4:
            raise InterruptedError

    whole = go(TINY, model)
    with pytest.raises(InterruptedError):
        go(TINY, model, Place(tmp_path, save_every=0.0, tell=kill))
    assert go(TINY, model, Place(tmp_path, save_every=0.0)) == whole
    assert go(TINY, model, Place(tmp_path)) == whole  # also from a checkpoint of the end
    saved = tmp_path / "encoder.safetensors"
    assert saved.exists() is (model != "maml")
    if saved.exists():
        assert load_encoder(saved).d == (16 if model == "intention_longer" else 4)  # pooling rounds up


def test_resnet12_runs(noise: None) -> None:
    config = replace(fewshot_resnet.PRESETS["quick"], **(SETTINGS | {"width": 1, "steps": 2}))
    job = next(iter(fewshot_resnet.jobs(config)))
    assert "built-in" in job.id
    assert "accuracy" in [one.metric for one in fewshot_resnet.run(job, Place())]


def test_latent_sizes_run(features: str) -> None:
    config = replace(fewshot_latent.PRESETS["quick"], **(SETTINGS | {"data": features, "latents": (3, 16)}))
    jobs = [job for job in fewshot_latent.jobs(config) if job.model == "intention" and job.seed == 0]
    sizes = []
    for job in jobs:
        measures = list(fewshot_latent.run(job, Place()))
        assert {(one.data or {})["latent"] for one in measures} == {job.at["latent"]}
        sizes.append((job.at["latent"], (measures[-3].data or {})["parameters"]))
    assert sizes == [(3, 3 * 8 + 1), (16, 16 * 8 + 1)]  # e_H and alpha


def test_second_order_maml_has_seeds_of_its_own() -> None:
    jobs = list(fewshot.jobs(replace(TINY, seeds=3, maml_seeds=1, models=("intention", "maml"))))
    assert [(job.model, job.seed) for job in jobs] == [
        ("intention", 0),
        ("maml", 0),
        ("intention", 1),
        ("intention", 2),
    ]


def test_varied_images_are_mirrored_and_shifted_and_nothing_else() -> None:
    """Of an image whose pixels are all different, every varied one is found among the shifts and mirrored shifts."""
    image = torch.arange(64, dtype=torch.uint8).reshape(8, 8, 1)
    pool = Pool(image.expand(20, -1, -1, -1).clone(), torch.arange(20) % 2)
    sample = partial(pool.sample, way=2, shot=2, queries=3)
    shots = varied(sample, 6, torch.Generator().manual_seed(0), most=2)
    edges = torch.arange(8)
    wanted = set()
    for down, right, mirrored in product(range(-2, 3), range(-2, 3), (False, True)):
        rows, columns = (edges + down).clamp(0, 7), (edges + right).clamp(0, 7)
        moved = image[rows][:, columns.flip(0) if mirrored else columns]
        wanted.add(tuple(moved.flatten().tolist()))
    found = [tuple(one.flatten().tolist()) for one in shots.x.flatten(0, 1)]
    assert set(found) <= wanted
    assert len(set(found)) > 20  # 60 images, 50 possibilities
    plain = sample(6, torch.Generator().manual_seed(0))
    assert torch.equal(shots.classes, plain.classes)  # the same episodes


def test_mixed_tasks_are_tasks_of_the_batch() -> None:
    """Features tell class and image: a label is one class, all of its images once, shots and queries anew."""
    image = torch.arange(60)
    pool = Pool(torch.stack([image % 6, image], -1).float(), image % 6)
    shots = pool.sample(2, seeded(), way=4, shot=2, queries=3)  # 8 of 6 classes: at least two are in both episodes
    torch.manual_seed(0)
    features, labels = mix(shots.x, shots, 200)
    assert labels.tolist() == [[0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]] * 200
    own = torch.cat([torch.arange(4).repeat_interleave(2), labels[0]])
    given = {tuple(one) for one in shots.x.flatten(0, 1).tolist()}
    for task in features:
        classes = [task[own == label][:, 0].unique() for label in range(4)]
        assert all(len(one) == 1 for one in classes)
        assert len(torch.cat(classes).unique()) == 4
        assert len(task[:, 1].unique()) == 20
        assert {tuple(one) for one in task.tolist()} <= given
    contexts = {tuple(sorted(task[:8, 1].tolist())) for task in features}
    assert len(contexts) > 190  # each task has examples of its own
    assert {int(one) for one in features[:, 0, 0]} == set(shots.classes.flatten().tolist())


def test_each_part_of_the_data_has_its_purpose(noise: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are trained on the training classes, chosen on those of validation and judged on those of test."""
    seen: list[str] = []
    sample = Pool.sample

    def noted(self: Pool, *args: Any, **options: Any) -> Shots:
        seen.append(self.name)
        return sample(self, *args, **options)

    def untrained(model: Any, sample: Any, *args: Any, evaluate: Any, **options: Any) -> list[dict[str, float]]:
        seen.append("training")
        sample.sample(1, seeded())
        seen.append("choosing")
        with torch.no_grad():
            return [{"step": 0, **evaluate(model.eval())}]

    monkeypatch.setattr(Pool, "sample", noted)
    monkeypatch.setattr(fewshot_runs, "train", untrained)
    go(replace(TINY, data="noise"), "protonet")
    assert [name for name, _ in groupby(seen)] == [
        *("noise (test classes)", "training", "noise (train classes)", "choosing", "noise (val classes)"),
        *("noise (test classes)", "noise (train classes)"),  # at last, how far what was learnt carries over
    ]


@pytest.mark.parametrize("kind", ["intention", "protonet", "pretrained"])
def test_encoding_each_image_once_is_no_other_evaluation(kind: str) -> None:
    pool = pictures(28)
    torch.manual_seed(0)
    model: Any = fewshot_runs.build(TINY, kind, pool)
    model(pool.sample(2, seeded(), **SIZES))  # batch norm has seen something
    model.eval()
    with torch.no_grad():
        found = correct(model, pool, TINY, 7, 5, part=3)
        generator = seeded(5)
        shots = [pool.sample(size, generator, **SIZES) for size in (3, 3, 1)]
        expected = torch.cat([(model.scores(one).argmax(-1) == one.labels).float().mean(-1) for one in shots])
    assert torch.equal(found, expected)
    assert 0 < float(found.mean()) < 1


def test_data_with_too_few_images_are_told_before_any_training(features: str) -> None:
    with pytest.raises(LabError, match=r"features.npz .train classes. has 0 classes with at least 2 \+ 20 images"):
        go(replace(TINY, data=features, queries=20), "intention")


def test_classes_for_validation_and_test_are_not_those_of_training(features: str) -> None:
    pools = fewshot_runs.load(replace(TINY, data=features))
    seen, check, test = ({tuple(x.tolist()) for x in pools[part].x} for part in ("train", "val", "test"))
    assert len(seen | check | test) == len(seen) + len(check) + len(test) == 20 * 12
    both = fewshot_runs.together(pools["val"], pools["test"])
    assert {tuple(x.tolist()) for x in both.x} == check | test
    assert both.sizes.tolist() == [12] * 7  # no two classes became one
    middles = torch.stack([both.x[both.y == number].mean(0) for number in range(7)])
    assert all((both.x[both.y == number] - middles[number]).abs().max() < 2 for number in range(7))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"models": ("gpt",)}, "there is no model gpt here; there are intention"),
        ({"way": 1}, "way must be at least 2, got 1"),
        ({"evaluation_episodes": 1}, "evaluation_episodes must be at least 2, got 1"),
        ({"alpha": math.inf}, "alpha must be > 0 and finite, got inf"),
        ({"dropblock": 1.0}, "dropblock must be 0 to 1, got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay must be >= 0 and finite, got -1.0"),
    ],
)
def test_impossible_values_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **options)  # type: ignore[arg-type]


def test_impossible_heads_are_refused() -> None:
    with pytest.raises(ValueError, match=r"latent must be at least 0 .no e_H., got -1"):
        Classifier(-1, 0.1)
    with pytest.raises(ValueError, match="inner_rate must be >= 0 and finite, got inf"):
        MamlNet(0.1, inner_rate=math.inf)
    with pytest.raises(ValueError, match=r"latents must be sizes from 1 on, got .0,."):
        replace(fewshot_latent.PRESETS["quick"], latents=(0,))


# claims and figures

CONFIG = {"data": "miniimagenet", "steps": 4000, "batch": 2, "encoder": "conv4", "width": 64, "way": 5, "shot": 5}


def row(model: str, seed: int, value: float | None, metric: str = "accuracy", **more: Any) -> Row:
    ends = None if value is None or metric == "validation accuracy" else (value - 0.007, value + 0.007)
    config = CONFIG | {"data": more.pop("name", "miniimagenet")}
    return Row("fewshot", f"{model}-{seed}", "standard", config, model, seed, metric, value, interval=ends, **more)


def made_up(name: str = "miniimagenet", **changed: float | tuple[float, ...] | None) -> list[Row]:
    """Accuracies of two seeds in the order of the paper; MAML of second order has one."""
    scores: dict[str, Any] = {
        "intention": 0.6,
        "intention_ce": 0.605,
        "attention": 0.4,
        "neural_process": 0.45,
        "maml_first": 0.5,
        "maml": 0.51,
        "protonet": 0.55,
        "pretrained": 0.5,
        "intention_kernel": 0.602,
        "intention_lda": 0.55,
        "intention_qda": 0.5,
    }
    rows = []
    for model, score in (scores | changed).items():
        values = score if isinstance(score, tuple) else (score,) if model == "maml" else (score, score)
        rows += [row(model, seed, value, name=name) for seed, value in enumerate(values)]
    return rows


def without(model: str, seed: int | None = None) -> list[Row]:
    return [one for one in made_up() if one.model != model or seed not in (None, one.seed)]


HOLDS, PARTLY, NOT = "holds", "partly", "does not hold"


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        (made_up(), [HOLDS] * 6),
        (made_up(maml=0.59), [HOLDS, PARTLY, PARTLY, HOLDS, HOLDS, HOLDS]),  # the intervals overlap
        (made_up(maml=0.61), [HOLDS, NOT, PARTLY, HOLDS, HOLDS, HOLDS]),
        (made_up(maml=0.7, attention=0.7, neural_process=0.7), [NOT, NOT, NOT, HOLDS, HOLDS, HOLDS]),
        (made_up(attention=0.7), [PARTLY, HOLDS, PARTLY, HOLDS, HOLDS, HOLDS]),  # one of two
        (made_up(neural_process=(0.45, 0.7)), [PARTLY, HOLDS, PARTLY, HOLDS, HOLDS, HOLDS]),  # one seed of two
        (made_up(protonet=0.7), [HOLDS, HOLDS, HOLDS, NOT, HOLDS, HOLDS]),
        (made_up(pretrained=0.7), [HOLDS, HOLDS, HOLDS, HOLDS, NOT, HOLDS]),
        (made_up(intention_ce=0.62), [HOLDS, HOLDS, HOLDS, HOLDS, HOLDS, NOT]),
        (made_up(intention_ce=0.613), [HOLDS] * 6),  # the intervals overlap
        (made_up(intention_ce=(0.62, 0.58)), [HOLDS, HOLDS, HOLDS, HOLDS, HOLDS, PARTLY]),  # the means are equal
        (without("maml"), [HOLDS, UNTESTED, UNTESTED, HOLDS, HOLDS, HOLDS]),
        (without("attention", 1), [UNTESTED, HOLDS, UNTESTED, HOLDS, HOLDS, HOLDS]),
        (without("intention"), [UNTESTED] * 6),
        (without("intention", 1), [UNTESTED, HOLDS, *[UNTESTED] * 4]),  # MAML: its one seed
        ([], [UNTESTED] * 6),
        (made_up(intention=(0.6, None)), [NOT, HOLDS, PARTLY, NOT, NOT, NOT]),
        (made_up(attention=(0.4, None)), [UNTESTED, HOLDS, UNTESTED, HOLDS, HOLDS, HOLDS]),
        (made_up() + made_up("built-in", intention=0.3), [PARTLY] * 6),
    ],
)
def test_verdicts_on_table_1(rows: list[Row], verdicts: list[str]) -> None:
    found = fewshot.claims(rows)
    assert [claim.verdict for claim in found][:6] == verdicts
    assert not any("None" in claim.measured for claim in found)


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (made_up(intention=0.668), HOLDS),  # its interval reaches 67.3%
        (made_up(intention=(0.668, 0.66)), PARTLY),
        (made_up(intention=0.6), NOT),
        (made_up(intention=0.6, intention_longer=0.67), PARTLY),
    ],
)
def test_verdict_on_the_printed_number(rows: list[Row], verdict: str) -> None:
    claim = fewshot.claims(rows)[-1]
    assert "67.3%" in claim.text
    assert claim.verdict == verdict
    assert len(fewshot.claims(made_up("built-in"))) == 6  # other data are not held to it


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        (made_up(), [HOLDS, HOLDS, HOLDS]),
        (made_up(intention_lda=0.595, intention_qda=0.61), [PARTLY, NOT, HOLDS]),
        (made_up(intention_kernel=0.63), [HOLDS, HOLDS, NOT]),
        (made_up(intention_kernel=0.57), [HOLDS, HOLDS, NOT]),
        (made_up(intention_kernel=(0.63, 0.575)), [HOLDS, HOLDS, PARTLY]),
        (without("intention_qda"), [HOLDS, UNTESTED, HOLDS]),
        (without("intention_kernel", 0), [HOLDS, HOLDS, UNTESTED]),
    ],
)
def test_verdicts_on_table_2(rows: list[Row], verdicts: list[str]) -> None:
    assert [claim.verdict for claim in fewshot_resnet.claims(rows)] == verdicts


def by_latent(kernel: float = 0.5, sizes: tuple[int, ...] = (16, 32, 128)) -> list[Row]:
    scores = {16: (kernel, 0.4), 32: (0.55, 0.5), 128: (0.5, 0.6)}
    return [
        row(model, seed, score, metric, data={"latent": latent})
        for metric in ("accuracy", "accuracy before training")
        for latent in sizes
        for model, score in zip(("intention_kernel", "intention"), scores[latent], strict=True)
        for seed in range(2)
    ]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (by_latent(), HOLDS),  # what is at 128 does not count
        (by_latent(0.41), PARTLY),
        (by_latent(0.3), PARTLY),
        (by_latent(sizes=(16, 128)), UNTESTED),
        ([one for one in by_latent() if one.model == "intention" or one.seed == 0], UNTESTED),
        ([], UNTESTED),
    ],
)
def test_verdict_on_latent_sizes(rows: list[Row], verdict: str) -> None:
    assert [claim.verdict for claim in fewshot_latent.claims(rows)] == [verdict]


def test_measured_is_told_with_data_training_and_intervals() -> None:
    said, maml = (claim.measured for claim in fewshot.claims(made_up() + made_up("built-in"))[:2])
    assert said.startswith(
        "miniImageNet at 28×28, 4000 steps × 2 episodes, Conv4 of width 64: Intention 60.0% [59.3, 60.7] and "
        "60.0% [59.3, 60.7]; against Attention 40.0% [39.3, 40.7] and 40.0% [39.3, 40.7] (holds); Neural Process"
    )
    assert "MAML 51.0% [50.3, 51.7] (holds). built-in data (glyphs), 4000" in maml
    assert "against MAML (not run)" in fewshot.claims(without("maml"))[1].measured
    small = fewshot_latent.claims(by_latent())[0].measured
    assert ": at 16: Intention-kernel 50.0% [49.3, 50.7]" in small
    assert "at 128: " in small
    assert percent(row("maml", 0, None)) == "not finite"


def test_table_1_has_the_paper_beside_its_own_data_only() -> None:
    rows = made_up() + [row("intention", seed, 0.2, "accuracy before training") for seed in range(2)]
    plots = fewshot.plot(rows + made_up("built-in") + [row("maml", 0, 0.3, "validation accuracy", x=0.0)])
    assert [plot.title for plot in plots] == ["Table 1: accuracy", "Accuracy during training", "Table 1: accuracy"]
    ours, theirs = plots[0].table, plots[2].table
    assert ours and theirs  # noqa: PT018
    assert ours[0][-1] == "The paper"
    lines = {line[0]: line for line in ours[1:]}
    assert lines["Intention"] == [
        *("Intention", "least squares", "60.0% [60.0, 60.0]", "2", "60.0% [59.3, 60.7]; 60.0% [59.3, 60.7]"),
        *("", "", "20.0% [20.0, 20.0]", "4000 × 2, width 64", "67.30 ± 0.51"),
    ]
    assert lines["MAML"][2:4] == ["51.0%", "1"]
    assert (lines["MAML"][-1], lines["ProtoNet"][-1]) == ("63.15 ± 0.91 (no target)", "")
    assert lines["MAML (first order)"][-1].startswith("63.15")
    assert lines["ProtoNet"][1] == "cross-entropy"
    assert "84×84" in plots[0].caption
    assert "The paper" not in theirs[0]
    assert plots[2].caption.startswith("built-in data (glyphs), 5-way 5-shot; 4000 steps")
    assert not any("67.30" in cell for line in theirs for cell in line)
    assert "84×84" not in plots[2].caption


def test_table_2_has_the_numbers_of_the_paper() -> None:
    (plot,) = fewshot_resnet.plot(made_up())
    lines = {line[0]: line for line in plot.table or []}
    assert [lines[label(model)][-1][:5] for model in fewshot_resnet.MODELS] == ["70.05", "70.43", "66.27", ""]
    assert "5.81" in plot.caption


def test_history_has_seeds_thin_and_their_mean_thick() -> None:
    values = {"intention": (0.3, 0.4), "maml": (0.2, None)}
    rows = [
        row(model, seed, value, "validation accuracy", x=x)
        for model, both in values.items()
        for seed, value in enumerate(both)
        for x in (0.0, 10.0)
    ]
    (plot,) = fewshot.plot(rows)
    lines = plot.draw().axes[0].get_lines()  # type: ignore[misc]
    assert [(line.get_linewidth(), *line.get_ydata().round(3)) for line in lines] == [
        *((0.6, 30, 30), (0.6, 40, 40), (2, 35, 35)),
        *((0.6, 20, 20), (2, 20, 20)),
    ]
    assert lines[0].get_color() == COLOURS["intention"]


def test_latent_sizes_are_drawn_with_intervals() -> None:
    drawn, numbers = fewshot_latent.plot(by_latent())
    figure = drawn.draw()  # type: ignore[misc]
    figure.savefig("/dev/null", format="svg")
    first = figure.axes[0].get_lines()[0]
    assert first.get_label() == "Intention"
    assert list(first.get_xdata()) == [16, 32, 128]
    assert list(first.get_ydata()) == pytest.approx([40, 50, 60])
    assert len(figure.axes[0].get_lines()) == 2 * (1 + 3 * 2 * 2)  # a mean; a dot and a bar per size and seed
    dots = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if line.get_marker() == "o"]
    assert len(set(dots)) == 12  # beside each other
    assert numbers.table == table_latent(by_latent())
    assert [line[:3] for line in table_latent(by_latent())[1:3]] == [
        ["16", "Intention", "40.0% [40.0, 40.0]"],
        ["16", "Intention-kernel", "50.0% [50.0, 50.0]"],
    ]


def test_without_rows_there_is_nothing_to_show() -> None:
    assert fewshot.plot([]) == fewshot_resnet.plot([]) == fewshot_latent.plot([]) == []
    assert table([], {}) == [table(made_up(), {})[0]]
    assert mean([]) == ""
    assert mean([row("maml", 0, None)]) == "not finite"


def test_every_model_has_a_name_and_a_colour_of_its_own() -> None:
    assert all(model in LABELS and model in COLOURS for model in MODELS)
    assert len({COLOURS[model] for model in MODELS}) == len({LABELS[model] for model in MODELS}) == len(MODELS)
