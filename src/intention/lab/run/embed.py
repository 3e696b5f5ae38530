"""Features of images, computed once: `intention embed`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from intention.fewshot import backbones
from intention.fewshot.backbones import BATCH, Backbone, BackboneError, refuse_imagenet
from intention.fewshot.images import ImageError, to_image, with_channels
from intention.lab import data
from intention.lab.core.device import find as find_device
from intention.lab.core.files import LabError
from intention.lab.data.arrays import write_npz
from intention.lab.data.folders import index_folder
from intention.lab.data.images import open_image, resize
from intention.lab.data.images import stack as read_images

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["Opened", "compute", "embed", "find", "open_for", "told"]


class Opened(NamedTuple):
    """A data set whose images a backbone can read."""

    whole: data.Data  # of a folder of files: in the place of images indices into `files`
    files: list[Path] | None
    images: Callable[[Tensor], Tensor]  # what the backbone wants of a piece of x

    def picture(self, member: Tensor) -> Image.Image:
        """One member of x, as large as it is."""
        return to_image(member) if self.files is None else open_image(self.files[int(member)])


def embed(name: str, backbone: str, out: Path, half: bool = False, device: str = "cpu") -> dict[str, Tensor]:
    """Write the features of a data set to an npz that `data.load` reads, and give them."""
    net = find(backbone).to(find_device(device))
    opened = open_for(name, net)
    features = {part: x.to(torch.float16 if half else torch.float32) for part, x in compute(opened, net).items()}
    if not all(x.isfinite().all() for x in features.values()):
        how = "without --half, or " if half else ""
        raise LabError(f"features of {backbone} have NaN or infinity; try {how}another backbone")
    write_npz(out, **_arrays(opened.whole, features))
    return features


def compute(opened: Opened, net: Backbone) -> dict[str, Tensor]:
    """The features of each part."""
    parts = opened.whole.parts
    with told():
        refuse_imagenet(net, opened.whole.name, [label for part in parts.values() for label in part.classes])
    print(f"embedding {sum(len(part.y) for part in parts.values())} images with {net.name}", flush=True)
    features = {}
    for part, some in parts.items():
        with told():
            there = (opened.images(batch).to(net.device) for batch in _track(some.x.split(BATCH), part))
            batches = [net.features(batch).float().cpu() for batch in there]
        features[part] = torch.cat(batches)
    if net.name == "pixels":
        mean = next(iter(features.values())).mean(0)  # of the first part, which is train wherever there is one
        features = {part: x - mean for part, x in features.items()}
    return features


def find(name: str) -> Backbone:
    """A backbone of `intention.fewshot`."""
    with told():
        return backbones.backbone(name)


@contextmanager
def told() -> Iterator[None]:
    """What a user can mend is told without a traceback."""
    try:
        yield
    except (BackboneError, ImageError) as error:
        raise LabError(str(error)) from error


def open_for(name: str, net: Backbone) -> Opened:
    """A data set for a backbone."""
    path = Path(name).expanduser()
    if name not in data.NAMES and path.is_dir() and net.channels is not None:
        files, index = index_folder(path, name)  # photographs may be too many for the memory

        def read(x: Tensor) -> Tensor:
            return with_channels(read_images([files[i] for i in x.tolist()], net.size), net.channels)

        return Opened(index, files, read)
    whole = data.load(name, net.size if net.channels is None else None)
    if not all(part.images for part in whole.parts.values()):
        raise LabError(f"{name} holds features already; `intention embed` is for images")
    return Opened(whole, None, lambda x: with_channels(resize(x, net.size), net.channels))


def _track(batches: Iterable[Tensor], part: str) -> Iterable[Tensor]:
    from rich.progress import track

    return track(list(batches), part, disable=not sys.stdout.isatty(), transient=True)


def _arrays(whole: data.Data, features: dict[str, Tensor]) -> dict[str, np.ndarray | list[str]]:
    """x, y and all classes; parts with classes of their own count these one after the other."""
    arrays: dict[str, np.ndarray | list[str]] = {}
    names: list[str] = []
    for part, some in whole.parts.items():
        offset = len(names) if whole.by_class else 0
        names = names + list(some.classes) if whole.by_class else list(some.classes)
        prefix = "" if tuple(whole.parts) == ("train",) else f"{part}_"
        arrays |= {f"{prefix}x": features[part].numpy(), f"{prefix}y": (some.y + offset).numpy()}
    return arrays | {"classes": names}
