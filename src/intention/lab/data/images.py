"""Images of files: one by one, in folders of classes, and in sheets."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from intention.fewshot import images
from intention.fewshot.images import SUFFIXES, resize, to_image
from intention.lab.core.files import LabError, write_whole

if TYPE_CHECKING:
    from PIL import Image


__all__ = ["SUFFIXES", "open_image", "read_sheet", "resize", "resize_arrays", "stack", "write_sheet"]

SHEET = (24, 25, 28)  # rows, columns and size of the images of a sheet


def resize_arrays(x: np.ndarray, size: int) -> np.ndarray:
    return resize(torch.from_numpy(x), size).numpy()


def open_image(path: Path) -> Image.Image:
    """An image in mode L or RGB, upright; what is transparent becomes white."""
    with _told():
        return images.open_image(path)


def stack(paths: Sequence[Path], size: int | None) -> Tensor:
    """Images (n, h, w, c) of files: grey if all are."""
    with _told():
        return images.read_images(paths, size)


@contextmanager
def _told() -> Iterator[None]:
    """What is wrong with an image is told without a traceback."""
    try:
        yield
    except images.ImageError as error:
        raise LabError(str(error)) from error


def read_sheet(path: Path) -> Tensor:
    """The 600 images (n, 28, 28, 3) of one class; image i is in row i // 25 and column i % 25."""
    rows, columns, size = SHEET
    sheet = np.array(open_image(path).convert("RGB"))
    if sheet.shape != (rows * size, columns * size, 3):
        raise LabError(f"{path} has the shape {sheet.shape}; wanted {rows} rows of {columns} images of {size} x {size}")
    tiles = sheet.reshape(rows, size, columns, size, 3).swapaxes(1, 2)
    return torch.from_numpy(tiles.reshape(rows * columns, size, size, 3))


def write_sheet(path: Path, tiles: np.ndarray) -> None:
    """The inverse of read_sheet: an array (600, 28, 28, 3) of uint8 as a lossless webp."""
    rows, columns, size = SHEET
    tiles = np.asarray(tiles).reshape(rows, columns, size, size, 3).swapaxes(1, 2)
    buffer = io.BytesIO()
    to_image(torch.from_numpy(tiles.reshape(rows * size, columns * size, 3))).save(
        buffer, "webp", lossless=True, exact=True
    )
    write_whole(path, buffer.getvalue())
