"""Images of files as tensors (n, h, w, c) of bytes. Needs Pillow."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from os import PathLike, fspath
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL import Image

__all__ = ["SUFFIXES", "ImageError", "open_image", "read_images", "resize", "to_image", "with_channels"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
GREY = (0.299, 0.587, 0.114)  # red, green and blue in the brightness


class ImageError(ValueError):
    """A file that is no image, or images that do not go together."""


def open_image(path: str | PathLike[str]) -> Image.Image:
    """An image in mode L or RGB, upright; what is transparent becomes white."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # an error follows at twice that size
            with Image.open(path) as file:
                return _plain(ImageOps.exif_transpose(file))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise ImageError(f"cannot read the image {fspath(path)}: {error}; replace it or take it away") from error


def read_images(paths: Sequence[str | PathLike[str]], size: int | None = None) -> Tensor:
    """Images (n, h, w, c) of files, grey (c = 1) if all are, scaled to size x size; None: all are of one size."""
    arrays = [scaled(open_image(path), size) for path in paths]
    shapes = {array.shape[:2]: path for array, path in zip(arrays, paths, strict=True)}
    if len(shapes) > 1:
        (one, first), (other, second) = list(shapes.items())[:2]
        raise ImageError(
            f"images differ in size: {first} is {one[1]} x {one[0]}, {second} is {other[1]} x {other[0]}; "
            "give a size to which all are scaled"
        )
    if len({array.shape[2] for array in arrays}) > 1:
        arrays = [array.expand(-1, -1, 3) for array in arrays]
    return torch.stack(arrays)


def resize(x: Tensor, size: int | None) -> Tensor:
    """Images (n, h, w, c) scaled to size x size (Lanczos); what has the size already, and features, stay."""
    if size is None or x.ndim != 4 or x.shape[1:3] == (size, size):
        return x
    return torch.stack([scaled(to_image(image), size) for image in x])


def scaled(image: Image.Image, size: int | None) -> Tensor:
    """An image as a tensor (h, w, c)."""
    from PIL import Image

    if size is not None and image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.LANCZOS)
    channels = len(image.getbands())
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).reshape(image.height, image.width, channels)


def to_image(x: Tensor) -> Image.Image:
    """The image of a tensor (h, w, c) of bytes."""
    from PIL import Image

    height, width, channels = x.shape
    return Image.frombytes("L" if channels == 1 else "RGB", (width, height), bytes(x.contiguous().flatten().tolist()))


def with_channels(x: Tensor, channels: int | None) -> Tensor:
    """Images (n, h, w, c) in grey (1) or in colour (3); None leaves them."""
    if channels is None or x.shape[3] == channels:
        return x
    if channels == 1:
        return (x.float() @ torch.tensor(GREY))[..., None].round().to(torch.uint8)
    return x.expand(*x.shape[:3], channels)


def _plain(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16"):
        wide = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)  # two bytes a pixel
        high = wide[0::2] if image.mode == "I;16B" else wide[1::2]
        return Image.frombytes("L", image.size, bytes(high.tolist()))
    if image.mode in ("I", "F"):
        raise ValueError(f"its mode is {image.mode}, without a known white; save it with 8 bits")
    if image.has_transparency_data:
        grey = image.mode == "LA"
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("L" if grey else "RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")
