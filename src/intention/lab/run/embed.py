"""Features of images, computed once: `intention embed`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from intention.fewshot import backbones
from intention.fewshot.backbones import BATCH, Backbone, BackboneError, refuse_imagenet
from intention.fewshot.images import ImageError, with_channels
from intention.lab import data
from intention.lab.core.device import find as find_device
from intention.lab.core.files import LabError
from intention.lab.data.arrays import write_npz
from intention.lab.data.folders import index_folder
from intention.lab.data.images import resize
from intention.lab.data.images import stack as read_images


def embed(name: str, backbone: str, out: Path, half: bool = False, device: str = "cpu") -> dict[str, Tensor]:
    """Write the features of a data set to an npz that `data.load` reads, and give them."""
    place = find_device(device)
    net = find(backbone).to(place)
    whole, images = _open(name, net)
    with told():
        refuse_imagenet(net, name, [label for part in whole.parts.values() for label in part.classes])
    count = sum(len(part.y) for part in whole.parts.values())
    print(f"embedding {count} images with {backbone}", flush=True)
    features = {}
    for part, some in whole.parts.items():
        with told():
            there = (images(batch).to(net.device) for batch in _track(some.x.split(BATCH), part))
            batches = [net.features(batch).float().cpu() for batch in there]
        features[part] = torch.cat(batches)
    if backbone == "pixels":
        mean = next(iter(features.values())).mean(0)  # of the first part, which is train wherever there is one
        features = {part: x - mean for part, x in features.items()}
    features = {part: x.to(torch.float16 if half else torch.float32) for part, x in features.items()}
    if not all(x.isfinite().all() for x in features.values()):
        how = "without --half, or " if half else ""
        raise LabError(f"features of {backbone} have NaN or infinity; try {how}another backbone")
    write_npz(out, **_arrays(whole, features))
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


def _open(name: str, net: Backbone) -> tuple[data.Data, Callable[[Tensor], Tensor]]:
    """A data set, and what makes images for the backbone out of a piece of its x."""
    path = Path(name).expanduser()
    if name not in data.NAMES and path.is_dir() and net.channels is not None:
        files, index = index_folder(path, name)  # photographs may be too many for the memory
        return index, lambda x: with_channels(read_images([files[i] for i in x.tolist()], net.size), net.channels)
    whole = data.load(name, net.size if net.channels is None else None)
    if not all(part.images for part in whole.parts.values()):
        raise LabError(f"{name} holds features already; `intention embed` is for images")
    return whole, lambda x: with_channels(resize(x, net.size), net.channels)


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
