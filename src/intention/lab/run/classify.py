"""Labels for images, from a few that have labels: `intention classify`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from intention.fewshot import FewShotClassifier
from intention.fewshot.backbones import Backbone
from intention.fewshot.stored import read
from intention.lab.core.device import find as find_device
from intention.lab.core.files import LabError
from intention.lab.data.folders import index_folder
from intention.lab.run.embed import find, told
from intention.lab.run.own import check_counts

__all__ = ["Answer", "Known", "answer", "check_images", "learn", "load", "save"]

DECIDED = 3  # support images that are told for an answer


class Known(NamedTuple):
    """A classifier and the files it has learnt."""

    model: FewShotClassifier
    files: list[str]


class Answer(NamedTuple):
    image: Path
    label: str
    probability: float
    probabilities: dict[str, float]
    decided_by: list[
        tuple[str, str, float]
    ]  # support images: file, label, what it adds to the score; the largest first


def learn(folder: Path, backbone: str, asked: Sequence[Path] = (), device: str = "cpu") -> Known:
    """A classifier of a folder with a folder of images for each class; the images to ask about are not in it."""
    there = find_device(device)  # before any work
    files, whole = index_folder(folder, str(folder))
    examples = {file.absolute() for file in files}
    for image in asked:
        if image.absolute() in examples:
            raise LabError(f"{image} is among the support images, so its label is known; move it out of {folder}")
    labels = [part.classes[y] for part in whole.parts.values() for y in part.y.tolist()]
    check_counts({label: labels.count(label) for label in dict.fromkeys(labels)}, folder)
    net = find(backbone).to(there)
    print(f"embedding {len(files)} images with {backbone}", file=sys.stderr, flush=True)
    with told():
        return Known(FewShotClassifier(net).fit(files, labels), [str(file) for file in files])


def load(path: Path, device: str = "cpu") -> Known:
    """What `save` wrote."""
    there = find_device(device)
    try:
        with told():
            model = FewShotClassifier.load(path)
        files = json.loads(read(path)[2].get("files", "[]"))
    except (OSError, ValueError) as error:
        raise LabError(f"{error}; `intention classify --support FOLDER --save {path}` makes one") from error
    if model.encoder is None:
        raise LabError(f"{path} was fitted on features, and cannot read images; make one with --support FOLDER --save")
    if isinstance(model.encoder, Backbone):
        model.encoder.to(there)
    count = len(model.labels)
    return Known(
        model, [str(file) for file in files] if len(files) == count else [f"example {i}" for i in range(count)]
    )


def save(known: Known, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        known.model.save(path, {"files": json.dumps(known.files)})
    except OSError as error:
        raise LabError(f"cannot write {path}: {error.strerror or error}; choose another --save") from error


def check_images(images: Sequence[Path]) -> None:
    """Before any work: they are files."""
    for image in images:
        if image.is_dir():
            raise LabError(f"{image} is a folder; give the images in it, such as {image}/*.jpg")
        if not image.is_file():
            raise LabError(f"there is no image {image}; look at the path")


def answer(known: Known, images: Sequence[Path]) -> list[Answer]:
    """What the classifier says of each image."""
    model, labels = known.model, known.model.labels
    with told():
        features = model.features(images)
    chances = (model.decision(features) / model.temperature).softmax(-1)
    answers = []
    for image, chance, influence in zip(images, chances, model.influences(features), strict=True):
        best = int(chance.argmax())
        order = influence.argsort(descending=True)[:DECIDED].tolist()
        decided = [(known.files[i], str(labels[i]), float(influence[i])) for i in order if influence[i] > 0]
        probabilities = {str(label): float(p) for label, p in zip(model.classes, chance, strict=True)}
        answers.append(Answer(image, str(model.classes[best]), float(chance[best]), probabilities, decided))
    return answers
