"""Named sets and the built-in one: what `load` gives, and what it says where it cannot."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageFont

from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.data import glyphs, images, named
from intention.lab.data.arrays import write_npz

REAL = pytest.mark.skipif(not os.environ.get("INTENTION_DATA"), reason="INTENTION_DATA does not point to real data")


@pytest.fixture
def place(monkeypatch, tmp_path):
    monkeypatch.setenv("INTENTION_DATA", str(tmp_path))
    return tmp_path


def mnist(place, classes=10):
    x = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    y = (np.arange(20) % classes).astype(np.uint8)
    write_npz(place / "mnist" / "mnist.npz", train_x=x, train_y=y, test_x=x[:10], test_y=y[:10])
    return x


def test_a_set_of_the_data_folder(place):
    assert not data.present("mnist")
    assert data.choose("auto", "mnist") == "built-in"
    x = mnist(place)
    assert data.present("mnist")
    assert data.choose("auto", "mnist") == "mnist"
    assert data.choose("some/path", "mnist") == "some/path"
    found = data.load("mnist")
    assert (found.name, found.by_class, list(found.parts)) == ("mnist", False, ["train", "test"])
    train = found.parts["train"]
    assert train.images
    assert train.classes == tuple("0123456789")
    assert (train.x.dtype, train.y.dtype) == (torch.uint8, torch.int64)
    assert (train.x[..., 0].numpy() == x).all()
    assert data.load("mnist") is found
    assert data.load("mnist", 14).parts["test"].x.shape == (10, 14, 14, 1)


def test_what_is_not_there(place):
    with pytest.raises(LabError, match=r"mnist is not there: no .*mnist\.npz; `intention data fetch mnist`"):
        data.load("mnist")
    with pytest.raises(LabError, match="did you mean miniimagenet\\? Known are built-in, mnist"):
        data.load("miniimagnet")
    with pytest.raises(LabError, match=r"no file or folder some/where\.npz"):
        data.load("some/where.npz")
    with pytest.raises(LabError, match="no data set 'qqq'; known are"):
        data.present("qqq")


def test_a_data_folder_that_is_none_is_told(monkeypatch, tmp_path):
    monkeypatch.setenv("INTENTION_DATA", str(tmp_path / "typo"))
    with pytest.raises(LabError, match=r"INTENTION_DATA is .*typo, which is no folder"):
        data.choose("auto", "mnist")


def test_the_folder_of_the_user(monkeypatch):
    monkeypatch.delenv("INTENTION_DATA", raising=False)
    assert data.folder().name == "intention"
    monkeypatch.setenv("INTENTION_DATA", "~/elsewhere")
    assert data.folder() == Path.home() / "elsewhere"


def sheets(place, counts=(64, 16, 20)):
    """Sheets in which image i of the class number c is of the colour (c, i % 256, i // 256)."""
    number = 0
    for part, count in zip(data.PARTS, counts, strict=True):
        for _ in range(count):
            x = np.zeros((600, 28, 28, 3), np.uint8)
            x[..., 0] = number
            x[..., 1] = (np.arange(600) % 256)[:, None, None]
            x[..., 2] = (np.arange(600) // 256)[:, None, None]
            # numbers run against the parts, so that sorting by name mixes train and val
            images.write_sheet(place / "miniimagenet28" / part / f"n{(37 * number) % 101:08}.webp", x)
            number += 1


def test_both_splits_of_sheets(place):
    sheets(place)
    usual, paper = data.load("miniimagenet-64"), data.load("miniimagenet")
    assert usual.by_class
    assert paper.by_class
    for found, sizes in ((usual, (64, 16, 20)), (paper, (80, 10, 10))):
        assert tuple(len(part.classes) for part in found.parts.values()) == sizes
        for part in found.parts.values():
            assert list(part.classes) == sorted(part.classes)
            assert (part.x.shape[1:], part.y.bincount().tolist()) == ((28, 28, 3), [600] * len(part.classes))
            name = torch.tensor([int(one[1:]) for one in part.classes])
            assert ((37 * part.x[:, 0, 0, 0].long()) % 101 == name[part.y]).all()  # images are with their class
            i = part.x[:600, 5, 5].long()
            assert (i[:, 1] + 256 * i[:, 2] == torch.arange(600)).all()  # and in order
    assert paper.parts["val"].classes + paper.parts["test"].classes == usual.parts["test"].classes
    assert set(paper.parts["train"].classes) == {*usual.parts["train"].classes, *usual.parts["val"].classes}


def test_where_an_image_is_in_a_sheet(tmp_path):
    x = np.zeros((600, 28, 28, 3), np.uint8)
    x[52, 3, 5] = 255  # in row 2 and column 2
    images.write_sheet(tmp_path / "a.webp", x)
    with Image.open(tmp_path / "a.webp") as sheet:
        assert (sheet.size, sheet.getbbox()) == ((700, 672), (2 * 28 + 5, 2 * 28 + 3, 2 * 28 + 6, 2 * 28 + 4))
    assert (images.read_sheet(tmp_path / "a.webp").numpy() == x).all()


def test_sheets_that_are_not_all_there(place):
    sheets(place, (3, 1, 1))
    with pytest.raises(LabError, match=r"\(3, 1, 1\) sheets .* wanted \(64, 16, 20\).*data fetch miniimagenet"):
        data.load("miniimagenet-64")


def whole(classes, each=2):
    y = torch.arange(classes).repeat_interleave(each)
    return data.Labelled(y[:, None].float(), y, tuple(f"c{i}" for i in range(classes)))


@pytest.mark.parametrize(("classes", "sizes"), [(100, (64, 16, 20)), (3, (1, 1, 1)), (4, (2, 1, 1)), (7, (4, 2, 1))])
def test_classes_are_split(classes, sizes):
    parts = data.split_classes(whole(classes))
    assert tuple(len(part.classes) for part in parts.values()) == sizes
    assert {name for part in parts.values() for name in part.classes} == set(whole(classes).classes)
    for part in parts.values():
        assert part.y.bincount().tolist() == [2] * len(part.classes)
        for x, y in zip(part.x[:, 0].tolist(), part.y.tolist(), strict=True):
            assert part.classes[y] == f"c{int(x)}"


def test_the_split_is_that_of_the_seed():
    one, same, other = (data.split_classes(whole(50), seed=seed)["test"].classes for seed in (1, 1, 2))
    assert one == same != other
    with pytest.raises(LabError, match="2 classes cannot be split"):
        data.split_classes(whole(2))
    with pytest.raises(ValueError, match="three positive numbers with sum 1"):
        data.split_classes(whole(9), (0.5, 0.5, 0.5))


def test_the_built_in_data():
    found = data.load("built-in")
    assert found.by_class
    assert [len(part.classes) for part in found.parts.values()] == [249, 62, 78]
    names = [name for part in found.parts.values() for name in part.classes]
    assert sorted(names) == sorted(glyphs.CHARACTERS)
    for part in found.parts.values():
        assert (part.x.dtype, part.x.shape[1:]) == (torch.uint8, (28, 28, 1))
        assert part.y.bincount().tolist() == [glyphs.IMAGES] * len(part.classes)
    assert data.load("built-in", 14).parts["val"].x.shape[1:] == (14, 14, 1)


def test_the_built_in_data_is_that_of_its_seed():
    drawn = torch.randint(0, 256, (7, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    one, same, other = (glyphs.distort(drawn, torch.Generator().manual_seed(seed)) for seed in (3, 3, 4))
    assert (one == same).all()
    assert (one != other).any()


def test_characters_are_in_the_fonts_and_look_different():
    import matplotlib

    assert len(set(glyphs.CHARACTERS)) == len(glyphs.CHARACTERS) >= 300
    _, of = glyphs.drawings()
    assert min(map(len, of)) >= 3 * 4  # three strokes in four fonts
    file = Path(matplotlib.get_data_path(), "fonts", "ttf", "DejaVuSans.ttf")
    font = ImageFont.truetype(str(file), 64)
    drawn = torch.from_numpy(np.stack([glyphs.draw(one, font) for one in glyphs.CHARACTERS])).float()
    flat = torch.nn.functional.avg_pool2d(drawn, 5, 1, 2).flatten(1)
    alike = torch.corrcoef(flat).fill_diagonal_(0)
    assert alike.max() < 0.9


def accuracy(part, shot, episodes=100, way=5, queries=10):
    """Of the nearest class mean in raw pixels."""
    x = part.x.reshape(len(part.classes), glyphs.IMAGES, -1).float()
    right = []
    for _ in range(episodes):
        chosen = x[torch.randperm(len(x))[:way]][:, torch.randperm(glyphs.IMAGES)[: shot + queries]]
        nearest = torch.cdist(chosen[:, shot:].flatten(0, 1), chosen[:, :shot].mean(1)).argmin(1)
        right.append((nearest == torch.arange(way).repeat_interleave(queries)).float().mean())
    return float(torch.stack(right).mean())


def test_the_built_in_data_is_neither_hopeless_nor_solved():
    test = data.load("built-in").parts["test"]
    assert 0.3 < accuracy(test, 1) < accuracy(test, 5) < 0.8


@REAL
@pytest.mark.parametrize("name", named.PLACES)
def test_real_data(name):
    if not data.present(name):
        pytest.skip(f"{name} is not in {data.folder()}")
    found = data.load(name)
    images, classes = {
        "mnist": (70_000, 10),
        "miniimagenet": (60_000, 100),
        "miniimagenet-64": (60_000, 100),
        "cifar100": (60_000, 100),
        "cifar100-features": (60_000, 100),
    }[name]
    assert sum(len(part.y) for part in found.parts.values()) == images
    assert len({one for part in found.parts.values() for one in part.classes}) == classes
    assert all(len(part.x) == len(part.y) for part in found.parts.values())
