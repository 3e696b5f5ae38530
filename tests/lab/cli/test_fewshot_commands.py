"""`intention fewshot` and `intention classify`: tables, the page, the file, and what is wrong with a folder."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from intention.fewshot import FewShotClassifier, backbone, evaluate, unit
from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.run import embed, own, study

COLOURS = {"cat": (200, 30, 30), "dog": (30, 160, 60), "emu <b>": (40, 60, 200), "[red]fox": (220, 200, 40)}


def draw(colour: tuple[int, int, int], seed: int, size: tuple[int, int] = (24, 20)) -> Image.Image:
    noise = np.random.default_rng(seed).normal(0, 25, (*size, 3))
    return Image.fromarray((np.array(colour) + noise).clip(0, 255).astype(np.uint8))


def make(folder: Path, count: int = 8) -> Path:
    for number, (name, colour) in enumerate(COLOURS.items()):
        (folder / name).mkdir(parents=True)
        for index in range(count):
            draw(colour, 100 * number + index).save(folder / name / f"{index}.png")
    return folder


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    return make(tmp_path / "photos")


class Page(HTMLParser):
    """What a browser would find: sections, pictures, addresses and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.pictures: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids.append(found.get("id") or "")
        self.addresses += [found[name] or "" for name in ("href", "src") if name in found]
        if tag == "img":
            self.pictures.append(found["src"] or "")

    def handle_data(self, data: str) -> None:
        self.text += data


def test_a_table_and_a_page(call, photos, tmp_path):
    wrong = photos / "cat" / "strange.png"
    draw(COLOURS["dog"], 999).save(wrong)
    code, out, err = call("fewshot", photos, "--episodes", 20, "--out", tmp_path / "page.html")
    assert (code, err) == (0, "")
    assert "33 images of 4 classes, conv4: 4-way 4-shot, 4 queries of each class, 20 episodes" in out
    rows = [line.split() for line in out.splitlines() if re.match(r"\w+\(", line)]
    assert {row[0] for row in rows} == set(study.HEADS)
    shares = [float(row[1].rstrip("%")) for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 80
    assert [row[-1] == "best" for row in rows] == [True] + [False] * (len(rows) - 1)
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    page = Page(text)
    assert {"heads", "against", "episodes", "pairs", "confusion", "suspects"} <= set(page.ids)
    assert len(page.pictures) >= 3 * 4 * 8
    assert all(address.startswith("data:image/webp;base64,") for address in page.addresses)
    assert "emu <b>" in page.text  # escaped in the source
    assert "emu <b>" not in text
    assert "cat/strange.png" in page.text
    assert "cat, looks like dog" in page.text
    assert "Table 1" not in text
    assert "paper" not in page.text.lower()


def test_parts_and_npz_files(call, photos, tmp_path):
    parts = tmp_path / "parts"
    for number, part in enumerate(("train", "test")):
        for name in COLOURS:
            (parts / part / name).mkdir(parents=True)
            for file in sorted((photos / name).iterdir())[4 * number : 4 * number + 4]:
                (parts / part / name / file.name).write_bytes(file.read_bytes())
    options = ("--episodes", 10, "--out", tmp_path / "page.html")
    code, of_parts, _ = call("fewshot", parts, *options)
    assert code == 0
    assert "32 images of 4 classes" in of_parts
    assert call("embed", photos, "--out", tmp_path / "f.npz")[0] == 0
    code, of_features, _ = call("fewshot", tmp_path / "f.npz", *options)
    assert code == 0
    assert "32 images of 4 classes, features of the file" in of_features
    assert not Page((tmp_path / "page.html").read_text()).pictures
    whole = data.load(str(photos), 32).parts["train"]
    np.savez(tmp_path / "images.npz", x=whole.x.numpy(), y=whole.y.numpy(), classes=list(whole.classes))
    code, _, _ = call("fewshot", tmp_path / "images.npz", *options)
    assert code == 0
    assert Page((tmp_path / "page.html").read_text()).pictures


def test_what_is_wrong_with_a_folder_is_told(call, photos, tmp_path):
    out = ("--episodes", 5, "--out", tmp_path / "page.html")

    def told(*words: object) -> str:
        code, _, err = call(*words)
        assert code in (1, 2)
        assert not (tmp_path / "page.html").exists()
        return err

    (tmp_path / "one" / "cat").mkdir(parents=True)
    for command in (("fewshot", tmp_path / "one", *out), ("classify", "--support", tmp_path / "one", "--save", "m.st")):
        assert f"{tmp_path / 'one' / 'cat'} has no images" in told(*command)
        draw(COLOURS["cat"], 0).save(tmp_path / "one" / "cat" / "0.png")
        assert f"{tmp_path / 'one'} has 1 class(es); two or more are needed" in told(*command)
        (tmp_path / "one" / "cat" / "0.png").unlink()
    for part, names in (("train", ("cat", "dog")), ("test", ("dog", "emu"))):
        for name in names:
            (tmp_path / "both" / part / name).mkdir(parents=True)
            draw(COLOURS["cat"], 0).save(tmp_path / "both" / part / name / "0.png")
    assert "such as 'emu', while parts share others, such as 'dog'" in told("fewshot", tmp_path / "both", *out)
    assert "has no folders" in told("fewshot", tmp_path / "one" / "cat", *out)
    assert "no file or folder" in told("fewshot", tmp_path / "none", *out)
    (photos / "owl").mkdir()
    draw(COLOURS["cat"], 0).save(photos / "owl" / "0.png")
    for command in (("fewshot", photos, *out), ("classify", "--support", photos, "--save", "m.st")):
        assert f"the class 'owl' of {photos} has one image" in told(*command)
    (photos / "owl" / "1.png").write_bytes(b"no image")
    for command in (("fewshot", photos, *out), ("classify", "--support", photos, "--save", "m.st")):
        assert f"cannot read the image {photos / 'owl' / '1.png'}" in told(*command)
    draw(COLOURS["cat"], 0).save(photos / "owl" / "1.png")
    err = told("fewshot", photos, "--shot", 5, "--query", 5, *out)
    assert "has 0 classes with at least 5 + 5 images (--shot + --query), and --way 2 needs 2" in err
    assert "--shot must be at least 1, got 0" in told("fewshot", photos, "--shot", 0, *out)
    assert ".html" in told("fewshot", photos, "--out", "page.txt")


def test_small_classes_are_left_out_where_sizes_are_given(call, photos, tmp_path):
    (photos / "owl").mkdir()
    for index in range(3):
        draw((120, 120, 120), index).save(photos / "owl" / f"{index}.png")
    _, out, _ = call("fewshot", photos, "--episodes", 5, "--out", tmp_path / "page.html")
    assert "5-way 1-shot, 2 queries" in out
    _, out, _ = call("fewshot", photos, "--shot", 3, "--query", 4, "--episodes", 5, "--out", tmp_path / "page.html")
    assert "1 of 5 classes have fewer than 3 + 4 images and are in no episode: owl." in out
    assert "4-way 3-shot" in out


def test_imagenet_weights_are_not_judged_on_classes_of_imagenet(call, photos, tmp_path, monkeypatch):
    (photos / "cat").rename(photos / "n02123045")
    trained = embed.Backbone("big", 8, 3, lambda x: x.flatten(1).float(), imagenet=True)
    monkeypatch.setattr(embed.backbones, "backbone", lambda name: trained)
    for command in (("fewshot", photos), ("embed", photos, "--out", tmp_path / "f.npz")):
        code, _, err = call(*command)
        assert code == 1
        assert "its class n02123045 is one of ImageNet" in err
    with pytest.raises(ValueError, match="its classes are in ImageNet"):
        embed.refuse_imagenet(trained, "miniimagenet", [])


def test_classes_that_an_encoder_was_trained_on_are_left_out(photos):
    seen = backbone("conv4").seen
    assert len(seen) == len(set(seen)) == 80
    (photos / "cat").rename(photos / seen[7])
    found = own.gather(str(photos), "conv4")
    assert set(found.classes) == {"dog", "emu <b>", "[red]fox"}
    assert len(found.y) == 24
    assert found.notes == ("conv4 was trained on 1 of the 4 classes: these are left out.",)
    for name, other in (("dog", seen[8]), ("emu <b>", seen[9])):
        (photos / name).rename(photos / other)
    with pytest.raises(LabError, match="cannot be judged there"):
        own.gather(str(photos), "conv4")


@pytest.mark.parametrize("name", list(study.HEADS))
def test_turned_points_have_the_same_answers(name):
    generator = torch.Generator().manual_seed(0)
    support, query = (torch.randn(6, n, 90, generator=generator, dtype=torch.float64) for n in (15, 8))
    labels = torch.arange(15) % 3
    head = study.HEADS[name]().double()
    with torch.no_grad():
        plain, turned = head(support, labels, query), study.turned(head)(support, labels, query)
    if name == "Prototypes()":  # which divides by the root of the number of features
        turned = turned * (16 / 90) ** 0.5
    # of QDA the directions without points: one number for all classes
    plain, turned = (x - x.mean(-1, keepdim=True) for x in (plain, turned))
    torch.testing.assert_close(plain, turned, atol=1e-6, rtol=1e-6)
    assert torch.equal(plain.argmax(-1), turned.argmax(-1))


def test_the_table_is_that_of_evaluate(photos):
    found = own.gather(str(photos), "conv4")
    made = study.study(found, 3, 2, 4, 30, 7)
    assert torch.equal(made.own.x, found.x)
    for line in made.lines:
        direct = evaluate(study.HEADS[line.name](), unit(found.x), found.y, way=3, shot=2, query=4, episodes=30, seed=7)
        assert line.found.accuracy == pytest.approx(direct.accuracy, abs=0.006)  # ties of rounding
    assert list(made.lines[0].shots) == [1, 2]


def test_labels_for_images(call, photos, tmp_path):
    asked = tmp_path / "new.png"
    draw(COLOURS["dog"], 77, (50, 31)).save(asked)
    other = tmp_path / "[b]grey.png"
    draw(COLOURS["[red]fox"], 78).convert("L").save(other)
    code, out, err = call("classify", "--support", photos, asked, other)
    assert code == 0
    assert err == "embedding 32 images with conv4\n"
    line = next(line for line in out.splitlines() if line.startswith(str(asked)[:20]))
    assert "dog" in line
    assert "%" in line
    assert re.search(r"dog/\d\.png", out)
    code, out, _ = call("classify", "--support", photos, asked, other, "--json", "--save", tmp_path / "m.safetensors")
    assert code == 0
    first, second = json.loads(out)
    assert first["label"] == "dog"
    assert first["probability"] == max(first["probabilities"].values()) > 0.5
    assert sum(second["probabilities"].values()) == pytest.approx(1.0, abs=1e-5)
    assert list(first["probabilities"]) == sorted(COLOURS)
    assert first["decided_by"][0]["label"] == "dog"
    assert Path(first["decided_by"][0]["image"]).parent == photos / "dog"
    code, out, err = call("classify", "--model", tmp_path / "m.safetensors", asked, other, "--json")
    assert (code, err) == (0, "")
    for one, again in zip((first, second), json.loads(out), strict=True):
        assert one["label"] == again["label"]
        assert [each["image"] for each in one["decided_by"]] == [each["image"] for each in again["decided_by"]]
        assert one["probability"] == pytest.approx(again["probability"], abs=1e-5)


def test_wrong_calls_of_classify(call, photos, tmp_path):
    asked = tmp_path / "new.png"
    draw(COLOURS["dog"], 77).save(asked)
    model = tmp_path / "m.safetensors"

    def told(*words: object) -> str:
        code, out, err = call("classify", *words)
        assert code in (1, 2)
        assert out == ""
        return err

    assert "one of the two" in told(asked)
    assert "one of the two" in told("--support", photos, "--model", model, asked)
    assert "give images to classify, or --save" in told("--support", photos)
    assert f"{photos} is a folder" in told("--support", photos, photos)
    assert "there is no image none.png" in told("--support", photos, "none.png")
    inside = photos / "cat" / "0.png"
    assert f"{inside} is among the support images" in told("--support", photos, inside)
    broken = tmp_path / "broken.png"
    broken.write_bytes(asked.read_bytes()[:60])
    assert f"cannot read the image {broken}" in told("--support", photos, broken)
    assert "there is no encoder" in told("--support", photos, asked, "--backbone", "none.safetensors")
    assert "cannot read the classifier" in told("--model", model, asked)
    model.write_bytes(b"damaged")
    assert "is not a classifier of ours" in told("--model", model, asked)
    assert "is there already; give --force" in told("--support", photos, "--save", model)
    FewShotClassifier().fit(torch.randn(4, 3), [0, 0, 1, 1]).save(model)
    assert "was fitted on features" in told("--model", model, asked)
