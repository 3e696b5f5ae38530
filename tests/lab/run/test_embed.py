"""`intention embed` and `intention data`: features that go wherever data goes."""

import json
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from intention.fewshot import backbones, encoders
from intention.fewshot.files import save_encoder
from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.run import embed as embedding

RANDOM = np.random.default_rng(0)
X = RANDOM.integers(0, 256, (70, 28, 28, 3), dtype=np.uint8)
Y = np.arange(70) % 7


@pytest.fixture
def images(tmp_path):
    np.savez(tmp_path / "images.npz", train_x=X, train_y=Y, test_x=X[:14, ..., :3], test_y=Y[:14])
    return tmp_path / "images.npz"


@pytest.fixture
def photos(tmp_path):
    for name in ("a", "b", "c"):
        for index in range(3):
            path = tmp_path / "photos" / name / f"{index}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(RANDOM.integers(0, 256, (9 + index, 11, 3), dtype=np.uint8)).save(path)
    Image.fromarray(X[0, ..., 0]).save(tmp_path / "photos" / "a" / "grey.png")
    return tmp_path / "photos"


def test_pixels(call, images, tmp_path):
    code, out, err = call("embed", images, "--out", tmp_path / "f.npz", "--backbone", "pixels")
    assert (code, err) == (0, "")
    assert f"train (70, 2352), test (14, 2352) are in {tmp_path / 'f.npz'}" in out
    assert out.strip().endswith(f"next: intention run fewshot --data {tmp_path / 'f.npz'}")
    found = data.load(str(tmp_path / "f.npz"))
    assert not found.by_class
    want = torch.from_numpy(X).flatten(1) / 255
    torch.testing.assert_close(found.parts["train"].x, want - want.mean(0))
    torch.testing.assert_close(found.parts["test"].x, want[:14] - want.mean(0))
    assert found.parts["test"].y.tolist() == Y[:14].tolist()


def test_a_file_that_is_there_is_not_overwritten(call, images, tmp_path):
    out = tmp_path / "f.npz"
    out.write_text("precious")
    code, _, err = call("embed", images, "--out", out)
    assert code == 1
    assert "is there already; give --force" in err
    assert out.read_text() == "precious"
    assert call("embed", images, "--out", out, "--force", "--half")[0] == 0
    with np.load(out) as file:
        assert file["train_x"].dtype == np.float16
    assert call("embed", images, "--out", tmp_path / "f.txt")[0] == 2
    assert "cannot write" in call("embed", images, "--out", out / "inside.npz")[2]
    assert call("embed", images)[0] == 2


def test_parts_with_classes_of_their_own(tmp_path):
    names = list("zyxwvut")
    part = np.where(Y < 4, "train", np.where(Y < 5, "val", "test"))
    np.savez(tmp_path / "images.npz", x=X, y=Y, classes=names, part=part)
    embedding.embed(str(tmp_path / "images.npz"), "pixels", tmp_path / "f.npz")
    before, after = data.load(str(tmp_path / "images.npz")), data.load(str(tmp_path / "f.npz"))
    assert after.by_class
    assert {part: one.classes for part, one in after.parts.items()} == {
        "train": ("z", "y", "x", "w"),
        "val": ("v",),
        "test": ("u", "t"),
    }
    for part in data.PARTS:
        assert (after.parts[part].y == before.parts[part].y).all()


def test_an_encoder_of_ours(photos, tmp_path):
    encoder = encoders.build("conv4", 28, 3, 8).eval()
    save_encoder(tmp_path / "encoder.safetensors", encoder)
    made = embedding.embed(str(photos), str(tmp_path / "encoder.safetensors"), tmp_path / "f.npz")
    whole = data.load(str(photos)).parts["train"]
    with torch.no_grad():
        torch.testing.assert_close(made["train"], encoder(encoders.normalise(whole.x)), atol=1e-5, rtol=1e-5)
    assert data.load(str(tmp_path / "f.npz")).parts["train"].classes == ("a", "b", "c")
    save_encoder(tmp_path / "encoder.safetensors", encoders.build("conv4", 28, 1, 8))
    assert (
        embedding.embed(str(photos), str(tmp_path / "encoder.safetensors"), tmp_path / "g.npz")["train"].shape[0] == 10
    )
    with pytest.raises(LabError, match=r"none\.safetensors"):
        embedding.embed(str(photos), str(tmp_path / "none.safetensors"), tmp_path / "h.npz")


@pytest.fixture(scope="module")
def resnet(tmp_path_factory):
    """A small model with random weights, in a folder as Hugging Face has it."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("resnet")
    torch.manual_seed(0)
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 8], depths=[1, 1], layer_type="basic")
    model = transformers.ResNetModel(config).eval()
    model.save_pretrained(folder)
    told = {"size": {"shortest_edge": 48}, "image_mean": [0.5, 0.4, 0.3], "image_std": [0.2, 0.3, 0.4]}
    (folder / "preprocessor_config.json").write_text(json.dumps(told))
    return folder, model


def test_a_model_of_hugging_face(resnet, images, photos, tmp_path):
    folder, model = resnet
    made = embedding.embed(str(photos), str(folder), tmp_path / "f.npz")["train"]
    assert made.shape == (10, 8)
    x = data.load(str(photos), 48).parts["train"].x / 255
    pixels = ((x - torch.tensor([0.5, 0.4, 0.3])) / torch.tensor([0.2, 0.3, 0.4])).permute(0, 3, 1, 2)
    with torch.no_grad():
        torch.testing.assert_close(made, model(pixels).pooler_output.flatten(1), atol=1e-5, rtol=1e-5)
    assert embedding.embed(str(images), str(folder), tmp_path / "g.npz")["test"].shape == (14, 8)


def test_without_a_description_the_usual_one_is_taken(resnet, tmp_path):
    resnet[1].save_pretrained(tmp_path / "bare")
    assert backbones._preparation(str(tmp_path / "bare")) == (224, backbones.MEAN, backbones.SPREAD)


def test_backbones_that_are_not_there(call, images, monkeypatch, tmp_path):
    (tmp_path / "empty").mkdir()
    code, _, err = call("embed", images, "--out", tmp_path / "f.npz", "--backbone", tmp_path / "empty")
    assert code == 1
    assert "cannot load the backbone" in err
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = call("embed", images, "--out", tmp_path / "f.npz", "--backbone", "microsoft/resnet-34")
    assert code == 1
    assert "needs pip install 'intention[vision]'" in err
    assert not (tmp_path / "f.npz").exists()


def test_a_model_of_text(images, tmp_path):
    transformers = pytest.importorskip("transformers")
    small = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "intermediate_size": 8}
    transformers.BertModel(transformers.BertConfig(vocab_size=9, **small)).save_pretrained(tmp_path / "bert")
    with pytest.raises(LabError, match="takes no images"):
        embedding.embed(str(images), str(tmp_path / "bert"), tmp_path / "f.npz")


def test_features_cannot_be_embedded_and_infinity_is_told(images, tmp_path, monkeypatch):
    np.savez(tmp_path / "features.npz", x=X[:, 0, 0] / 255, y=Y)
    with pytest.raises(LabError, match="holds features already"):
        embedding.embed(str(tmp_path / "features.npz"), "pixels", tmp_path / "f.npz")
    huge = backbones.Backbone("huge", 28, None, lambda x: 1e6 * x.flatten(1).float())
    monkeypatch.setattr(embedding, "find", lambda name: huge)
    with pytest.raises(LabError, match="NaN or infinity; try without --half"):
        embedding.embed(str(images), "huge", tmp_path / "f.npz", half=True)


def test_the_list(call, monkeypatch, tmp_path):
    monkeypatch.setenv("INTENTION_DATA", str(tmp_path))
    code, out, err = call("data", "list")
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == f"data folder: {tmp_path} (INTENTION_DATA)"
    assert [line.split()[0] for line in lines[1:-1]] == list(data.NAMES)
    assert "not there; `intention data fetch mnist` (12 MB" in out
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / "mnist.npz").touch()
    assert f"there: {tmp_path / 'mnist' / 'mnist.npz'}" in call("data", "list")[1]


def test_the_description_of_data(call, images, photos):
    code, out, _ = call("data", "info", images)
    assert code == 0
    assert out.splitlines() == [
        f"{images}: images 28 x 28 x 3",
        "part    classes   images  per class",
        "train         7       70  10",
        "test          7       14  2",
        "parts have the same classes",
    ]
    out = call("data", "info", photos)[1]
    assert "images 28 x 28 x 3 after scaling" in out
    assert "train         3       10  3 to 4" in out
    assert "no parts" in out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("data",), 2, "followed by list, fetch, info, got nothing"),
        (("data", "lst"), 2, "got lst"),
        (("data", "info"), 2, "NAME_OR_PATH"),
        (("data", "info", "mnits"), 1, "did you mean mnist?"),
        (("data", "--help"), 0, ""),
        (("embed", "--help"), 0, ""),
    ],
)
def test_words_of_the_commands(call, words, code, message):
    got, _, err = call(*words)
    assert got == code
    assert message in err
