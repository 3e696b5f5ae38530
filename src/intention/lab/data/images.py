"""Images of files: one by one, in folders of classes, and in sheets."""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from intention.lab.core.files import LabError, write_whole

if TYPE_CHECKING:
    from PIL import Image


SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
SHEET = (24, 25, 28)  # rows, columns and size of the images of a sheet


def resize(x: Tensor, size: int | None) -> Tensor:
    """Images (n, h, w, c) scaled to size x size (Lanczos); what has the size already, and features, stay."""
    if size is None or x.ndim != 4 or x.shape[1:3] == (size, size):
        return x
    return torch.from_numpy(resize_arrays(x.numpy(), size))


def resize_arrays(x: np.ndarray, size: int) -> np.ndarray:
    return np.stack([scaled(_to_image(image), size) for image in x])


def scaled(image: Image.Image, size: int | None) -> np.ndarray:
    """An image as an array (h, w, c)."""
    from PIL import Image

    if size is not None and image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.LANCZOS)
    array = np.array(image)
    return array[..., None] if array.ndim == 2 else array


def _to_image(array: np.ndarray) -> Image.Image:
    from PIL import Image

    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array)


def open_image(path: Path) -> Image.Image:
    """An image in mode L or RGB, upright; what is transparent becomes white."""
    from PIL import Image, ImageOps

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # an error follows at twice that size
            with Image.open(path) as file:
                return _plain(ImageOps.exif_transpose(file))
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise LabError(f"cannot read the image {path}: {error}; replace it or take it away") from error


def _plain(image: Image.Image) -> Image.Image:
    from PIL import Image

    if image.mode.startswith("I;16"):
        return Image.fromarray((np.array(image) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ValueError(f"its mode is {image.mode}, without a known white; save it with 8 bits")
    if image.has_transparency_data:
        grey = image.mode == "LA"
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("L" if grey else "RGB")
    return image.convert("L" if image.mode in ("1", "L") else "RGB")


def stack(paths: Sequence[Path], size: int | None) -> Tensor:
    """Images (n, h, w, c) of files: grey if all are."""
    arrays = [scaled(open_image(path), size) for path in paths]
    shapes = {array.shape[:2]: path for array, path in zip(arrays, paths, strict=True)}
    if len(shapes) > 1:
        (one, first), (other, second) = list(shapes.items())[:2]
        raise LabError(
            f"images differ in size: {first} is {one[1]} x {one[0]}, {second} is {other[1]} x {other[0]}; "
            "give a size to which all are scaled"
        )
    if len({array.shape[2] for array in arrays}) > 1:
        arrays = [np.repeat(array, 3, 2) if array.shape[2] == 1 else array for array in arrays]
    return torch.from_numpy(np.stack(arrays))


def read_sheet(path: Path) -> Tensor:
    """The 600 images (n, 28, 28, 3) of one class; image i is in row i // 25 and column i % 25."""
    rows, columns, size = SHEET
    sheet = np.array(open_image(path).convert("RGB"))
    if sheet.shape != (rows * size, columns * size, 3):
        raise LabError(f"{path} has the shape {sheet.shape}; wanted {rows} rows of {columns} images of {size} x {size}")
    tiles = sheet.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
    return torch.from_numpy(tiles.reshape(rows * columns, size, size, 3))


def write_sheet(path: Path, images: np.ndarray) -> None:
    """The inverse of read_sheet: an array (600, 28, 28, 3) of uint8 as a lossless webp."""
    rows, columns, size = SHEET
    tiles = np.asarray(images).reshape(rows, columns, size, size, 3).swapaxes(1, 2)
    buffer = io.BytesIO()
    _to_image(tiles.reshape(rows * size, columns * size, 3)).save(buffer, "webp", lossless=True, exact=True)
    write_whole(path, buffer.getvalue())
