"""Features of images, computed once: `intention embed`."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from intention.lab import data
from intention.lab.core.files import LabError
from intention.lab.data.arrays import write_npz
from intention.lab.data.folders import index_folder
from intention.lab.data.images import resize
from intention.lab.data.images import stack as read_images

BATCH = 64
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, in [0, 1]
GREY = (0.299, 0.587, 0.114)  # red, green and blue in the brightness


@dataclass(frozen=True)
class Backbone:
    """What turns images (n, size, size, channels) of uint8 into features (n, d)."""

    size: int
    channels: int | None  # None: as many as the data has
    features: Callable[[Tensor], Tensor]


def embed(name: str, backbone: str, out: Path, half: bool = False) -> dict[str, Tensor]:
    """Write the features of a data set to an npz that `data.load` reads, and give them."""
    net = find(backbone)
    whole, images = _open(name, net)
    count = sum(len(part.y) for part in whole.parts.values())
    print(f"embedding {count} images with {backbone}", flush=True)
    features = {}
    for part, some in whole.parts.items():
        batches = [net.features(images(batch)).float() for batch in _track(some.x.split(BATCH), part)]
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


def find(backbone: str) -> Backbone:
    """`pixels`, the path of an encoder of ours (.safetensors), or an id or a folder of Hugging Face."""
    if backbone == "pixels":
        return Backbone(28, None, lambda x: x.flatten(1) / 255)
    if Path(backbone).suffix == ".safetensors":
        return _ours(Path(backbone))
    return _hugging_face(backbone)


def _ours(path: Path) -> Backbone:
    from intention.fewshot.encoders import normalise
    from intention.fewshot.files import load_encoder

    try:
        encoder = load_encoder(path)
    except (OSError, ValueError) as error:
        raise LabError(f"{error}; a run of `fewshot` writes encoder.safetensors into its folder") from error

    def features(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return encoder(normalise(x))

    return Backbone(encoder.size, encoder.channels, features)


def _hugging_face(name: str) -> Backbone:
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise LabError(f"the backbone {name} needs pip install 'intention[vision]' ({error})") from error
    try:
        model: Any = AutoModel.from_pretrained(name)
    except (OSError, ValueError) as error:  # not there, not reachable, or no model that transformers knows
        raise LabError(
            f"cannot load the backbone {name}: {str(error).splitlines()[0]} There are `pixels`, the path of an "
            "encoder.safetensors, the id of a model of Hugging Face (network needed once), and a folder that has one"
        ) from error
    model = getattr(model, "vision_model", model).eval()  # of a pair of text and image models only the latter
    size, mean, spread = _preparation(name)

    def features(x: Tensor) -> Tensor:
        pixels = ((x / 255 - torch.tensor(mean)) / torch.tensor(spread)).permute(0, 3, 1, 2)
        try:
            with torch.inference_mode():
                output = model(pixel_values=pixels.contiguous())
        except (TypeError, ValueError) as error:  # a model of text
            raise LabError(f"the backbone {name} takes no images ({error}); choose a model of images") from error
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        last = output.last_hidden_state  # (n, tokens, d) or (n, d, height, width)
        return last.mean(1) if last.ndim == 3 else last.mean((2, 3))

    return Backbone(size, 3, features)


def _preparation(name: str) -> tuple[int, tuple[float, ...], tuple[float, ...]]:
    """The size, mean and spread that the model was trained with, as far as its folder tells them."""
    from transformers.utils.hub import cached_file

    quiet = {"_raise_exceptions_for_missing_entries": False, "_raise_exceptions_for_connection_errors": False}
    found = cached_file(name, "preprocessor_config.json", **quiet)
    told = {} if found is None else json.loads(Path(found).read_text(encoding="utf-8"))
    size = told.get("crop_size") or told.get("size") or 224
    if isinstance(size, dict):
        size = size.get("height") or size.get("shortest_edge") or 224
    return int(size), tuple(told.get("image_mean") or MEAN), tuple(told.get("image_std") or SPREAD)


def _open(name: str, net: Backbone) -> tuple[data.Data, Callable[[Tensor], Tensor]]:
    """A data set, and what makes images for the backbone out of a piece of its x."""
    path = Path(name).expanduser()
    if name not in data.NAMES and path.is_dir() and net.channels is not None:
        files, index = index_folder(path, name)  # photographs may be too many for the memory
        return index, lambda x: _with_channels(read_images([files[i] for i in x.tolist()], net.size), net.channels)
    whole = data.load(name, net.size if net.channels is None else None)
    if not all(part.images for part in whole.parts.values()):
        raise LabError(f"{name} holds features already; `intention embed` is for images")
    return whole, lambda x: _with_channels(resize(x, net.size), net.channels)


def _with_channels(x: Tensor, channels: int | None) -> Tensor:
    if channels is None or x.shape[3] == channels:
        return x
    if channels == 1:
        return (x.float() @ torch.tensor(GREY))[..., None].round().to(torch.uint8)
    return x.expand(*x.shape[:3], channels)


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
