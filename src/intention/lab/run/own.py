"""A user's data, ready for heads: the features, labels and files of all its images, parts and all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from intention.lab import data
from intention.lab.core.device import find as find_device
from intention.lab.core.files import LabError
from intention.lab.run import embed

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Own", "check_counts", "gather"]


@dataclass(frozen=True)
class Own:
    """All images of a data set; labels count `classes`, of which each has two images or more."""

    name: str
    backbone: str
    x: Tensor  # (n, d)
    y: Tensor  # (n,)
    classes: tuple[str, ...]
    members: list[str]  # (n,): the file, or which image of which part
    picture: Callable[[int], Image.Image] | None  # None: the data were features
    notes: tuple[str, ...] = ()

    @property
    def sizes(self) -> Tensor:
        return self.y.bincount(minlength=len(self.classes))


def gather(name: str, backbone: str, device: str = "cpu") -> Own:
    """The features of all images of a folder, an .npz or a named set; features that are there are taken."""
    there = find_device(device)  # before any work
    path = Path(name).expanduser()
    if path.suffix.lower() == ".npz" and path.is_file():
        whole = data.load(name, None)
        if not any(part.images for part in whole.parts.values()):
            _check(whole, path)
            features = {part: some.x for part, some in whole.parts.items()}
            return _own(name, "features of the file", whole, features, None, ())
    net = embed.find(backbone).to(there)
    opened = embed.open_for(name, net)
    _check(opened.whole, path)
    return _own(name, backbone, opened.whole, embed.compute(opened, net), opened, net.seen)


def _check(whole: data.Data, path: Path) -> None:
    """Before any work."""
    counts: dict[str, int] = {}
    for part in whole.parts.values():
        for label, count in zip(part.classes, part.y.bincount(minlength=len(part.classes)).tolist(), strict=True):
            counts[label] = counts.get(label, 0) + count
    check_counts(counts, path)


def check_counts(counts: dict[str, int], path: Path) -> None:
    """How many images each class has: two or more, or nothing could be checked."""
    single = [label for label, count in counts.items() if count < 2]
    if single:
        more = f", and so have {len(single) - 1} other classes" if len(single) > 1 else ""
        raise LabError(
            f"the class {single[0]!r} of {path} has one image{more}: with that for an example there is none to "
            "check it with. Add images or take the class away"
        )


def _own(
    name: str,
    backbone: str,
    whole: data.Data,
    features: dict[str, Tensor],
    opened: embed.Opened | None,
    seen: tuple[str, ...],
) -> Own:
    names = tuple(dict.fromkeys(label for part in whole.parts.values() for label in part.classes))
    kept = tuple(label for label in names if label not in seen)
    if len(kept) < 2:
        raise LabError(
            f"{backbone} was trained on the classes of {name} and cannot be judged there; use another backbone"
        )
    number = {label: kept.index(label) if label in kept else -1 for label in names}
    xs, ys, members, pictures = [], [], [], []
    for part, some in whole.parts.items():
        y = torch.tensor([number[label] for label in some.classes])[some.y]
        for i in (y >= 0).nonzero().flatten().tolist():
            members.append(_member(opened, part, some.x[i], i))
            pictures.append(some.x[i])
        xs.append(features[part][y >= 0])
        ys.append(y[y >= 0])
    notes = ()
    if len(kept) < len(names):
        notes = (
            f"{backbone} was trained on {len(names) - len(kept)} of the {len(names)} classes: these are left out.",
        )
    picture = None if opened is None else lambda i: opened.picture(pictures[i])
    return Own(name, backbone, torch.cat(xs).float(), torch.cat(ys), kept, members, picture, notes)


def _member(opened: embed.Opened | None, part: str, x: Tensor, number: int) -> str:
    return f"{part} {number}" if opened is None or opened.files is None else str(opened.files[int(x)])
