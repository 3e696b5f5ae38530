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

from intention.fewshot.encoders import Encoder
from intention.fewshot.encoders import build as build_encoder
from intention.fewshot.files import load_encoder, save_encoder
from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.experiments import fewshot, fewshot_latent, fewshot_resnet
from intention.lab.experiments.base import Job, Measure
from intention.lab.experiments.fewshot import training as fewshot_runs
from intention.lab.experiments.fewshot.config import FROM_SCRATCH, MODELS, Classifier, MamlNet, Tuned
from intention.lab.experiments.fewshot.model import (
    ImageMaml,
    mix,
)
from intention.lab.experiments.fewshot.task import Pool, Prefetch, Shots, varied
from intention.lab.experiments.fewshot.training import correct
from lab.toy_episodes import QUERIES, SHOT, SIZES, WAY, pictures, ragged, seeded


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
        LabError, match=r"ragged has 4 classes with at least 2 \+ 5 examples .*5-way.*4 to 13 examples.*--way"
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


@pytest.mark.parametrize("model", FROM_SCRATCH)
def test_every_model_learns_on_features(model: str, features: str) -> None:
    config = replace(TINY, data=features, steps=30, decay_period=10, evaluation_episodes=30, alpha=0.1)
    measures = go(config, model)
    times = config.intention_longer.times if model == "intention_longer" else 1
    assert [(one.metric, one.x) for one in measures] == [
        ("accuracy before training", None),
        *(("validation accuracy", x * times) for x in (0, 15, 30)),
        ("validation error", None),
        ("accuracy", None),
        ("accuracy on all unseen classes", None),
        ("accuracy on random halves of the unseen classes", None),
        ("accuracy on training classes", None),
    ]
    last = measures[-4]
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


@pytest.fixture
def encoder(tmp_path: Path) -> str:
    """The path of an encoder of the tiny images, for each seed."""
    torch.manual_seed(0)
    save_encoder(tmp_path / "start-0.safetensors", build_encoder("conv4", 28, 1, 4, round_up=True))
    return str(tmp_path / "start-{seed}.safetensors")


TUNED = [model for model in MODELS if model.endswith("_tuned")]


@pytest.mark.parametrize("model", TUNED)
def test_heads_begin_with_one_encoder(model: str, noise: None, encoder: str) -> None:
    small = {"start": encoder, "steps": 2} | ({} if model == "maml_tuned" else {"latent": 6, "tasks": 3})
    net = replace(getattr(TINY, model), **small, **({"decode": (5,)} if "attention" in model else {}))
    config = replace(TINY, precision="float32", **{model: net})
    measures = go(config, model)
    steps = [one.x for one in measures if one.metric == "validation accuracy"]
    assert steps[-1] == 2  # its own steps
    (last,) = [one for one in measures if one.metric == "accuracy"]
    assert (last.data or {})["chosen step"] == 2  # no step is chosen
    built: Any = fewshot_runs.build(config, model, pictures(28, 1), seed=0)
    ours = next(one for one in built.modules() if isinstance(one, Encoder))
    start = load_encoder(encoder.format(seed=0)).state_dict()
    for name, weight in ours.named_parameters():
        assert torch.equal(weight, start[name]), name


@pytest.mark.parametrize("model", TUNED)
def test_mirror_images_are_asked_about_as_well(model: str, noise: None, encoder: str) -> None:
    """Then a task of mirror images is the same task."""
    small = {"start": encoder} | ({} if model == "maml_tuned" else {"latent": 6, "tasks": 3})
    small |= {"decode": (5,)} if "attention" in model else {}
    shots = pictures(28, 1).sample(2, torch.Generator().manual_seed(0), way=3, shot=2, queries=2)
    turned = shots._replace(x=shots.x.flip(3))
    for mirrored in (True, False):
        net = replace(getattr(TINY, model), **small, mirrored=mirrored)
        config = replace(TINY, way=3, precision="float32", **{model: net})
        torch.manual_seed(0)
        built: Any = fewshot_runs.build(config, model, pictures(28, 1), seed=0)
        with torch.no_grad():
            assert (difference(built.eval(), shots, turned) < 1e-4) == mirrored
            assert difference(built.train(), shots, turned) > 1e-3


def difference(model: Any, one: Shots, other: Shots) -> float:
    """Of the scores of MAML, of the features of others: in units of their spread over images."""
    first, second = (
        model.scores(shots) if isinstance(model, ImageMaml) else model.encode(shots.x.flatten(0, 1))
        for shots in (one, other)
    )
    return float((first - second).norm() / (first - first.mean(0)).norm())


def test_a_frozen_encoder_encodes_once(noise: None, encoder: str) -> None:
    net = replace(TINY.intention_tuned, start=encoder, steps=2, tasks=3, latent=6, frozen=True)
    config = replace(TINY, intention_tuned=net)
    known = [(name, pool.x, pool.y) for name, pool in fewshot_runs.load(config).items()]
    pools = fewshot_runs.encoded(fewshot_runs.load(config), fewshot_runs.shared_encoder(config, encoder, 0))
    assert pools["val"].x.shape == (40, 16)
    assert torch.allclose(pools["val"].x.norm(dim=-1), torch.full((40,), 4.0))
    for mirrored in (True, False):  # of what is asked; what is learnt from stays as it is
        plain, turned = (
            fewshot_runs.encoded(
                {name: Pool(x.flip(2) if flipped and name != "train" else x, y) for name, x, y in known},
                fewshot_runs.shared_encoder(config, encoder, 0),
                mirrored,
            )
            for flipped in (False, True)
        )
        assert torch.allclose(plain["val"].x, turned["val"].x, atol=1e-3) == mirrored
        assert torch.equal(plain["train"].x, pools["train"].x)
    model: Any = fewshot_runs.build(config, "intention_tuned", pools["train"])
    assert model.encoder is None
    assert "accuracy on all unseen classes" in [one.metric for one in go(config, "intention_tuned")]


def test_an_encoder_that_is_not_there_is_told(noise: None, encoder: str) -> None:
    config = replace(TINY, intention_tuned=replace(TINY.intention_tuned, start="nowhere-{seed}"))
    with pytest.raises(LabError, match=r"there is no encoder 'nowhere-0'.*tools/encoder.py trains one"):
        go(config, "intention_tuned")
    other = replace(TINY, encoder="resnet12", intention_tuned=replace(TINY.intention_tuned, start=encoder))
    with pytest.raises(LabError, match="is a conv4, and this config has encoder resnet12"):
        go(other, "intention_tuned")
    for wrong in ("", "conv4-{model}"):
        with pytest.raises(ValueError, match="start m"):
            Tuned(8, 0.1, start=wrong)


def test_unseen_classes_are_also_judged_in_random_halves(features: str) -> None:
    """20 of them, the same for all models; and answers of each episode are kept, to be paired."""
    config = replace(TINY, data=features, way=2)
    found = {one.metric: one for one in go(config, "protonet")}
    about = found["accuracy on random halves of the unseen classes"].data or {}
    assert len(about["splits"]) == 20
    assert found["accuracy on random halves of the unseen classes"].value == pytest.approx(
        sum(about["splits"]) / 20, abs=1e-3
    )
    unseen = found["accuracy on all unseen classes"]
    right = bytes.fromhex((unseen.data or {})["right"])
    assert len(right) == config.evaluation_episodes
    assert sum(right) / len(right) / (unseen.data or {})["queries"] == pytest.approx(unseen.value)
    few = Pool(torch.randn(30, 8), torch.arange(30) % 3)  # a half has one class
    assert list(fewshot_runs.halves(fewshot_runs.build(config, "protonet", few), few, config)) == []


def test_latent_sizes_run(features: str) -> None:
    config = replace(fewshot_latent.PRESETS["quick"], **(SETTINGS | {"data": features, "latents": (3, 16)}))
    jobs = [job for job in fewshot_latent.jobs(config) if job.model == "intention" and job.seed == 0]
    sizes = []
    for job in jobs:
        measures = list(fewshot_latent.run(job, Place()))
        assert {(one.data or {})["latent"] for one in measures} == {job.at["latent"]}
        (last,) = [one for one in measures if one.metric == "accuracy"]
        sizes.append((job.at["latent"], (last.data or {})["parameters"]))
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
    with pytest.raises(LabError, match=r"features.npz .train classes. has 0 classes with at least 2 \+ 20 examples"):
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
