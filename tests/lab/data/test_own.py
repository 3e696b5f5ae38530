"""The user's own data: what is read, and what is said of files that are not right."""

import pickle

import numpy as np
import pytest
import torch
from PIL import Image

from intention.lab import data
from intention.lab.core.files import LabError


def picture(path, colour=(10, 20, 30), size=(7, 5), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def classes(folder, names=("cat", "dog"), suffix="png", **more):
    for number, name in enumerate(names):
        for index in range(2):
            picture(folder / name / f"{index}.{suffix}", colour=(100 + number, 20, 30), **more)


@pytest.mark.parametrize("suffix", ["png", "jpg", "JPEG", "webp", "bmp"])
def test_a_folder_of_classes(tmp_path, suffix):
    classes(tmp_path, suffix=suffix)
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    (tmp_path / "cat" / f"._0.{suffix}").write_text("what some systems leave behind")
    (tmp_path / ".hidden").mkdir()
    found = data.load(str(tmp_path))
    assert (found.name, found.by_class, list(found.parts)) == (str(tmp_path), False, ["train"])
    part = found.parts["train"]
    assert part.classes == ("cat", "dog")
    assert part.y.tolist() == [0, 0, 1, 1]
    assert part.x.shape == (4, 28, 28, 3)
    assert (part.x[:, 14, 14, 0].long() - torch.tensor([100, 100, 101, 101])).abs().max() <= 3
    assert data.load(str(tmp_path), None).parts["train"].x.shape == (4, 5, 7, 3)


def test_parts_above_the_classes(tmp_path):
    classes(tmp_path / "train")
    classes(tmp_path / "test")
    same = data.load(str(tmp_path))
    assert (same.by_class, list(same.parts)) == (False, ["train", "test"])
    assert same.parts["test"].classes == ("cat", "dog")
    classes(tmp_path / "new" / "train", ("emu", "ant"))
    classes(tmp_path / "new" / "val", ("bee",))
    other = data.load(str(tmp_path / "new"))
    assert other.by_class
    assert other.parts["train"].classes == ("ant", "emu")
    assert other.parts["val"].classes == ("bee",)
    assert other.parts["val"].y.tolist() == [0, 0]
    assert other.parts["train"].x[:, 3, 3, 0].tolist() == [101, 101, 100, 100]  # the images are sorted with the classes


def test_a_class_may_be_called_test(tmp_path):
    classes(tmp_path, ("exam", "test"))
    assert data.load(str(tmp_path)).parts["train"].classes == ("exam", "test")


def test_modes_of_images(tmp_path):
    picture(tmp_path / "a" / "grey.png", 7, mode="L")
    picture(tmp_path / "b" / "grey.png", 9, mode="L")
    Image.fromarray(np.full((5, 7), 300, np.uint16)).save(tmp_path / "b" / "deep.png")
    assert data.load(str(tmp_path), 4).parts["train"].x[:, 0, 0].tolist() == [[7], [1], [9]]
    picture(tmp_path / "b" / "clear.png", (1, 2, 3, 0), mode="RGBA")
    folder = str(tmp_path)
    assert data.load(folder, 5).parts["train"].x[:, 0, 0].tolist() == [[7] * 3, [255] * 3, [1] * 3, [9] * 3]


def test_a_photograph_is_turned_upright(tmp_path):
    classes(tmp_path)
    tall = Image.new("RGB", (4, 2))
    about = tall.getexif()
    about[0x0112] = 6  # lies on its side
    tall.save(tmp_path / "cat" / "0.png", exif=about)
    with pytest.raises(LabError, match=r"0\.png is 2 x 4, .*1\.png is 7 x 5"):
        data.load(str(tmp_path), None)


def test_images_that_differ_need_a_size(tmp_path):
    classes(tmp_path)
    picture(tmp_path / "dog" / "large.png", size=(9, 9))
    assert data.load(str(tmp_path), 6).parts["train"].x.shape == (5, 6, 6, 3)
    with pytest.raises(LabError, match=r"images differ in size: .*large\.png is 9 x 9; give a size"):
        data.load(str(tmp_path), None)


def broken(folder):
    (folder / "cat" / "0.png").write_bytes(b"no image at all")


def cut(folder):
    file = folder / "cat" / "0.png"
    Image.effect_noise((64, 64), 50).save(file)
    file.write_bytes(file.read_bytes()[:900])


def empty(folder):
    (folder / "emu").mkdir()


def lonely(folder):
    for file in (folder / "dog").iterdir():
        file.unlink()
    (folder / "dog").rmdir()


def flat(folder):
    for name in ("cat", "dog"):
        for file in (folder / name).iterdir():
            file.unlink()
        (folder / name).rmdir()


def validation(folder):
    classes(folder / "train")
    classes(folder / "validation")


def no_classes(folder):
    lonely(folder)
    (folder / "cat").rename(folder / "train")


def overlap(folder):
    for name in ("cat", "dog"):
        (folder / name).rename(folder / f"_{name}")
    flat_names = {"train": ("a", "b"), "test": ("b", "c")}
    for part, names in flat_names.items():
        classes(folder / part, names)
    for name in ("_cat", "_dog"):
        for file in (folder / name).iterdir():
            file.unlink()
        (folder / name).rmdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (broken, r"cannot read the image .*cat/0\.png: .*; replace it or take it away"),
        (cut, r"cannot read the image .*cat/0\.png"),
        (empty, r"emu has no images \(\.png.*\); fill the folder"),
        (lonely, r"has 1 class\(es\); two or more"),
        (flat, "has no folders; put the images of each class into a folder"),
        (validation, "has the folder 'cat' beside train; rename it"),
        (no_classes, "train has no folders; put the images of each class into a folder"),
        (overlap, "test has classes that train has not"),
    ],
)
def test_a_folder_that_is_not_right(tmp_path, spoil, message):
    classes(tmp_path)
    spoil(tmp_path)
    with pytest.raises(LabError, match=message):
        data.load(str(tmp_path))


def save(path, **arrays):
    np.savez(path, **arrays)
    return str(path)


IMAGES = np.arange(6 * 5 * 4, dtype=np.uint8).reshape(6, 5, 4)
Y = np.array([3, 3, 8, 8, 8, 5])
FEATURES = np.arange(18.0).reshape(6, 3)


def test_arrays_of_images_and_features(tmp_path):
    path = save(tmp_path / "a.npz", x=IMAGES, y=Y)
    part = data.load(path, None).parts["train"]
    assert (part.x.shape, part.x.dtype) == ((6, 5, 4, 1), torch.uint8)
    assert (part.classes, part.y.tolist()) == (("3", "5", "8"), [0, 0, 2, 2, 2, 1])
    assert data.load(path).parts["train"].x.shape == (6, 28, 28, 1)
    for dtype in ("float16", "float64", "int32"):
        path = save(tmp_path / f"{dtype}.npz", x=FEATURES.astype(dtype), y=Y)
        part = data.load(path).parts["train"]
        assert part.x.dtype == torch.float32
        assert not part.images
        assert part.x.tolist() == FEATURES.tolist()


def test_names_of_classes(tmp_path):
    text = save(tmp_path / "text.npz", x=FEATURES, y=np.array(list("bbaacc")))
    assert data.load(text).parts["train"].classes == ("a", "b", "c")
    assert data.load(text).parts["train"].y.tolist() == [1, 1, 0, 0, 2, 2]
    # integers index the classes, even where these are numerals; a class without images is left out
    given = save(tmp_path / "given.npz", x=FEATURES, y=np.array([0, 0, 1, 1, 3, 3]), classes=["1", "0", "2", "x"])
    assert data.load(given).parts["train"].classes == ("1", "0", "x")
    assert data.load(given).parts["train"].y.tolist() == [0, 0, 1, 1, 2, 2]


def test_parts_of_arrays(tmp_path):
    part = np.array(["train"] * 2 + ["test"] * 3 + ["train"])
    by_class = data.load(save(tmp_path / "a.npz", x=FEATURES, y=Y, part=part))
    assert by_class.by_class
    assert by_class.parts["train"].classes == ("3", "5")
    assert by_class.parts["test"].classes == ("8",)
    assert by_class.parts["test"].x.tolist() == FEATURES[2:5].tolist()
    apart = save(
        tmp_path / "b.npz",
        train_x=FEATURES,
        train_y=Y.astype(np.uint64),
        test_x=FEATURES[:2],
        test_y=Y[:2].astype(np.int8),
    )
    found = data.load(apart)
    assert (found.by_class, list(found.parts)) == (False, ["train", "test"])
    assert found.parts["test"].classes == found.parts["train"].classes == ("3", "5", "8")


NAN = FEATURES.copy()
NAN[4, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": FEATURES}, "has no 'y', only"),
        ({"y": Y}, "has no 'x', only"),
        ({"images": FEATURES}, r"has \['images'\]; wanted x and y, or train_x"),
        ({"train_x": FEATURES, "train_y": Y, "test_x": FEATURES}, "has no 'test_y'"),
        ({"x": FEATURES, "y": Y, "train_x": FEATURES, "train_y": Y}, "both x and train_x"),
        ({"x": FEATURES, "y": Y[:5]}, r"x of shape \(6, 3\) and y of \(5,\)"),
        ({"x": FEATURES, "y": Y[:, None]}, r"y of \(6, 1\)"),
        ({"x": np.float64(3), "y": Y}, r"x of shape \(\)"),
        ({"x": FEATURES[:0], "y": Y[:0]}, "is empty"),
        ({"x": FEATURES[:, :0], "y": Y}, r"shape \(6, 0\), without any values"),
        ({"x": NAN, "y": Y}, "NaN or infinity, first in row 4"),
        ({"x": 1e300 * FEATURES, "y": Y}, "finite in float32"),
        ({"x": FEATURES + 1j, "y": Y}, "type complex128"),
        ({"x": FEATURES.astype(object), "y": Y}, "object arrays and pickles are not read"),
        ({"x": FEATURES, "y": Y.astype(float)}, "labels y are of type float64; wanted integers"),
        ({"x": FEATURES, "y": Y > 3}, "labels y are of type bool"),
        ({"x": FEATURES, "y": 0 * Y}, r"has 1 class\(es\)"),
        ({"x": FEATURES, "y": Y, "classes": ["a", "b"]}, "the label 3, for which classes"),
        ({"x": FEATURES, "y": -Y, "classes": list("abcdefghi")}, "the label -8"),
        ({"x": FEATURES, "y": Y, "classes": list("abcdefgha")}, "names 'a' twice"),
        ({"x": FEATURES, "y": Y, "classes": FEATURES}, "wanted a list of names"),
        ({"x": FEATURES, "y": Y, "part": ["train"] * 5}, r"part has shape \(5,\)"),
        ({"x": FEATURES, "y": Y, "part": ["learn"] * 6}, "part has 'learn'; parts are train, val, test"),
        ({"x": IMAGES / 255, "y": Y}, r"images x are float64; wanted uint8 .*255"),
        ({"x": IMAGES.reshape(6, 1, 4, 5), "y": Y}, r"channels come last: x\.transpose"),
        ({"x": IMAGES.reshape(6, 2, 5, 2), "y": Y}, r"shape \(6, 2, 5, 2\)"),
        ({"x": IMAGES.reshape(6, 1, 5, 2, 2), "y": Y}, "wanted images"),
        ({"x": IMAGES[:, :, 0, None, None][:, :, 0, 0], "y": Y, "part": ["train"] * 3 + ["x"] * 3}, "part has 'x'"),
        ({"train_x": FEATURES, "train_y": Y, "test_x": FEATURES[:, :2], "test_y": Y}, "its parts differ in kind"),
        ({"train_x": IMAGES, "train_y": Y, "test_x": FEATURES, "test_y": Y}, "its parts differ in kind"),
    ],
)
def test_arrays_that_are_not_right(tmp_path, arrays, message):
    path = save(tmp_path / "a.npz", **arrays)
    with pytest.raises(LabError, match=message) as caught:
        data.load(path)
    assert "a.npz" in str(caught.value)


class Evil:
    def __reduce__(self):
        return print, ("pickles are run",)


def test_files_that_are_no_npz(tmp_path, capsys):
    path = tmp_path / "a.npz"
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(LabError, match="object arrays and pickles are not read"):
        data.load(str(path))
    path.write_bytes(b"PK\x03\x04 and then nothing")
    with pytest.raises(LabError, match=r"cannot read .*a\.npz"):
        data.load(str(path))
    path.write_bytes(b"")
    with pytest.raises(LabError, match=r"cannot read .*a\.npz"):
        data.load(str(path))
    with path.open("wb") as file:
        np.save(file, FEATURES)
    with pytest.raises(LabError, match=r"single array; save x and y together"):
        data.load(str(path))
    np.savez_compressed(path, x=FEATURES, y=Y)
    content = bytearray(path.read_bytes())
    content[60:90] = bytes(30)
    path.write_bytes(content)
    with pytest.raises(LabError, match=r"a\.npz"):
        data.load(str(path))
    other = tmp_path / "a.csv"
    other.write_text("1,2")
    with pytest.raises(LabError, match=r"neither a folder of images nor an \.npz file"):
        data.load(str(other))
    assert not capsys.readouterr().out


def test_a_file_that_changed_is_read_again(tmp_path):
    path = save(tmp_path / "a.npz", x=FEATURES, y=Y)
    first = data.load(path)
    assert data.load(path) is first
    save(path, x=FEATURES + 1, y=Y)
    assert data.load(path).parts["train"].x[0, 0] == 1
