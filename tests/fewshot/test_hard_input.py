"""What users hand over: labels of all kinds, classes that empty, files that are damaged, images of every mode."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from intention.fewshot import (
    LDA,
    QDA,
    EpisodeSampler,
    FewShotClassifier,
    Kernel,
    Logistic,
    LsSvm,
    Matching,
    Prototypes,
    SigmaIntention,
    backbone,
    evaluate,
)

X = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)) + 3 * torch.eye(6)[torch.arange(12) % 3]
NAMES = ["a", "b", "c"] * 4


@pytest.mark.parametrize(
    ("labels", "first"),
    [
        ([5, 7, 9] * 4, [5, 7, 9]),
        (torch.tensor([5, 7, 9] * 4), [5, 7, 9]),
        (np.array([5, 7, 9] * 4), [5, 7, 9]),
        (np.array(NAMES), ["a", "b", "c"]),
        (tuple(NAMES), ["a", "b", "c"]),
        (["a", 1, "1"] * 4, ["a", 1, "1"]),
    ],
)
def test_labels_of_all_kinds(labels: object, first: list, tmp_path: Path) -> None:
    model = FewShotClassifier().fit(X, labels)
    found = model.predict(X[:3])
    assert found == first
    assert [type(label) for label in found] == [type(label) for label in first]
    model.save(tmp_path / "m.safetensors")
    assert FewShotClassifier.load(tmp_path / "m.safetensors").predict(X[:3]) == first


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0.5, 1.5, 2.5] * 4, "integers or text, got 0.5"),
        ([None, 1, 2] * 4, "integers or text, got None"),
        (torch.zeros(12), "integer labels"),
        ("abcabcabcabc", "give a list"),
        (NAMES[:-1], "12 images and 11 labels"),
        (["a"] * 12, "two or more classes"),
    ],
)
def test_labels_that_are_none(labels: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FewShotClassifier().fit(X, labels)


def test_features_that_learn_or_are_arrays() -> None:
    model = FewShotClassifier().fit(X.clone().requires_grad_(), NAMES)
    assert not model.predict_proba(X).requires_grad
    with pytest.raises(ValueError, match="got ndarray"):
        FewShotClassifier().fit(X.numpy(), NAMES)
    with pytest.raises(ValueError, match=r"got torch\.int64"):
        model.predict(X.long())


def test_classes_of_one_example() -> None:
    model = FewShotClassifier().fit(X[:3], ["a", "b", "c"])
    assert model.predict(X[:3]) == ["a", "b", "c"]
    assert model.temperature == 1.0  # nothing to calibrate with
    assert model.suspects() == []
    model.add(X[3:5], ["a", "b"])
    assert {one.label for one in model.suspects()} <= {"a", "b"}  # of c the others know nothing
    other = FewShotClassifier().fit(X[[0, 3, 1, 4]], ["a", "a", "b", "b"])
    assert model.temperature != 1.0
    assert other.temperature < 20


def test_a_class_that_loses_its_last_example(tmp_path: Path) -> None:
    model = FewShotClassifier().fit(X[:7], [*NAMES[:6], "a"])
    model.remove(X[[2, 5]], ["c", "c"])
    assert model.classes == ("a", "b", "c")
    assert set(model.predict(X)) == {"a", "b"}
    assert bool(torch.isfinite(model.predict_proba(X)).all())
    model.save(tmp_path / "m.safetensors")
    again = FewShotClassifier.load(tmp_path / "m.safetensors").add(X[[2, 5]], ["c", "c"])
    fitted = FewShotClassifier().fit(X[:7], [*NAMES[:6], "a"])
    torch.testing.assert_close(
        again.decision(again.features(X)), fitted.decision(fitted.features(X)), atol=1e-5, rtol=1e-5
    )
    with pytest.raises(ValueError, match="leave nothing"):
        fitted.remove(X[:7], [*NAMES[:6], "a"])
    assert len(fitted.labels) == 7


def test_examples_that_are_not_there() -> None:
    model = FewShotClassifier().fit(X, NAMES)
    for points, labels in ((X[[0, 0]], ["a", "a"]), (X[:1], ["b"]), (-X[:1], ["a"])):
        with pytest.raises(ValueError, match="was not learnt with that label"):
            model.remove(points, labels)
    assert len(model.labels) == 12
    double = FewShotClassifier().fit(X[[0, 0, 1, 1]], ["a", "a", "b", "b"]).remove(X[[0]], ["a"])
    assert double.labels == ["a", "b", "b"]
    with pytest.raises(ValueError, match="1 labels"):
        model.add(X[:2], ["new"])
    assert model.classes == ("a", "b", "c")  # as before


def paint(path: Path, seed: int, mode: str = "RGB", size: tuple[int, int] = (30, 20)) -> Path:
    x = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    image = Image.fromarray(x) if mode != "I;16" else Image.fromarray(256 * x[..., 0].astype(np.uint16))
    (image if mode == "I;16" else image.convert(mode)).save(path)
    return path


def test_images_are_found_again_whatever_their_batch(tmp_path: Path) -> None:
    """Convolutions round in another way in a batch of another size."""
    files = [paint(tmp_path / f"{i}.png", i) for i in range(9)]
    model = FewShotClassifier("conv4").fit(files, ["x", "y", "z"] * 3)
    model.remove([files[4]], ["y"])
    assert model.labels == ["x", "y", "z", "x", "z", "x", "y", "z"]
    whole = FewShotClassifier("conv4").fit([*files[:4], *files[5:]], model.labels)
    torch.testing.assert_close(model.features(files), whole.features(files))
    torch.testing.assert_close(
        model.decision(model.features(files)), whole.decision(whole.features(files)), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize(
    ("mode", "kind"),
    [("L", "png"), ("1", "png"), ("P", "png"), ("RGBA", "png"), ("LA", "png"), ("I;16", "png"), ("CMYK", "jpg")],
)
@pytest.mark.parametrize("size", [(30, 20), (1, 1), (900, 2)])
def test_images_of_every_mode_and_size(mode: str, kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    file = paint(tmp_path / f"image.{kind}", 0, mode, size)
    found = backbone("conv4")([file])
    assert found.shape == (1, 256)
    assert bool(torch.isfinite(found).all())


def test_images_that_are_none(tmp_path: Path) -> None:
    net, good = backbone("conv4"), paint(tmp_path / "good.jpg", 0)
    (tmp_path / "cut.jpg").write_bytes(good.read_bytes()[:300])
    (tmp_path / "empty.png").touch()
    for name in ("cut.jpg", "empty.png", "absent.png"):
        with pytest.raises(ValueError, match=f"cannot read the image .*{name}.*replace it or take it away"):
            net([good, tmp_path / name])
    for one in (good, str(good)):
        with pytest.raises(ValueError, match="put it into brackets"):
            net(one)
    for shape in ((2, 3, 28, 28), (2, 28, 28, 4), (28, 28, 3)):
        with pytest.raises(ValueError, match="c is 1 or 3"):
            net(torch.zeros(shape, dtype=torch.uint8))
    with pytest.raises(ValueError, match="at least one image"):
        net([])


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    FewShotClassifier().fit(X, NAMES).save(tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_damaged_files(saved: Path) -> None:
    whole = saved.read_bytes()
    for end in (0, 4, 60, len(whole) // 2, len(whole) - 1):
        saved.write_bytes(whole[:end])
        with pytest.raises(ValueError, match=r"m\.safetensors is not a classifier of ours"):
            FewShotClassifier.load(saved)
    with pytest.raises(OSError, match="cannot write"):
        FewShotClassifier().fit(X, NAMES).save(saved.parent / "no" / "folder.safetensors")


@pytest.mark.parametrize(
    ("change", "without"),
    [
        ({"classes": ["a"]}, ""),
        ({"classes": ["a", "a", "b"]}, ""),
        ({"classes": [1.5, None, "b"]}, ""),
        ({"temperature": 0}, ""),
        ({"temperature": "hot"}, ""),
        ({"format": 2}, ""),
        ({"normalise": None}, ""),
        ({}, "alpha"),
        ({}, "key"),
        ({}, "value"),
        ({}, "meta"),
    ],
)
def test_files_that_say_what_cannot_be(change: dict, without: str, saved: Path) -> None:
    with safe_open(saved, "pt") as file:
        told = json.loads(file.metadata()["fewshot"]) | change
        state = {name: file.get_tensor(name) for name in list(file.keys()) if name != without}
    save_file(state, saved, {"fewshot": json.dumps(told)})
    with pytest.raises(ValueError, match="is not a classifier of ours"):
        FewShotClassifier.load(saved)


@pytest.mark.parametrize("head", [LsSvm(0.3), LsSvm("loo"), Kernel("gaussian", 0.3), Kernel("polynomial", "loo")])
def test_a_loaded_classifier_fits_as_before(head: LsSvm, tmp_path: Path) -> None:
    model = FewShotClassifier(head=head).fit(X, NAMES)
    model.save(tmp_path / "m.safetensors")
    again = FewShotClassifier.load(tmp_path / "m.safetensors").fit(X, NAMES)
    torch.testing.assert_close(again.decision(again.features(X)), model.decision(model.features(X)))
    assert type(again.head) is type(head)


@pytest.mark.parametrize(
    "head", [LsSvm(), Kernel(), LDA(), QDA(), SigmaIntention(), Matching(), Prototypes(), Logistic()]
)
@pytest.mark.parametrize("how", ["label", "weight"])
def test_a_class_without_points_is_never_the_answer(head: torch.nn.Module, how: str) -> None:
    labels, weight = torch.tensor([0, 0, 2, 2]), None
    support, query = X[[0, 3, 2, 5]], X
    if how == "weight":
        support, labels = X[[0, 3, 2, 5, 1]], torch.tensor([0, 0, 2, 2, 1])
        weight = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0])
    with torch.no_grad():
        scores = head(support, labels, query, weight)
    assert scores.shape == (12, 3)
    assert not bool(scores.isnan().any())
    assert 1 not in scores.argmax(-1).tolist()


def test_labels_of_episodes_are_integers() -> None:
    for labels in (NAMES, [0, 1, 2] * 4):
        with pytest.raises(TypeError, match="number the classes first"):
            evaluate(LsSvm(), X, labels, way=2, shot=1, query=1)
    with pytest.raises(ValueError, match="number the classes"):
        EpisodeSampler(X, labels=NAMES, way=2, shot=1, query=1)
    small: Tensor = torch.tensor([0, 1, 2] * 4, dtype=torch.uint8)
    assert evaluate(LsSvm(), X, small, way=2, shot=1, query=1, episodes=4).accuracy > 0.5
