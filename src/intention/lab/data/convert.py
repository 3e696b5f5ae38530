"""From what is downloaded to the formats of the data folder."""

from __future__ import annotations

import gzip
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from intention.lab.core.files import LabError
from intention.lab.data.arrays import write_npz
from intention.lab.data.images import SHEET, resize_arrays, write_sheet
from intention.lab.data.kinds import PARTS

__all__ = ["cifar100", "miniimagenet", "mnist", "read_cache"]


def mnist(files: Sequence[Path], place: Path) -> None:
    train_x, train_y, test_x, test_y = map(_idx, files)
    write_npz(place, train_x=train_x, train_y=train_y, test_x=test_x, test_y=test_y)


def _idx(path: Path) -> np.ndarray:
    """The format of MNIST: 0, 0, 8 (bytes), the number of axes, their lengths as big-endian int32, then the bytes."""
    try:
        content = gzip.decompress(path.read_bytes())
        if content[:3] != b"\0\0\x08":
            raise ValueError("it does not begin with 0, 0, 8")
        shape = np.frombuffer(content, ">i4", content[3], 4)
        return np.frombuffer(content, np.uint8, offset=4 + 4 * len(shape)).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise LabError(f"{path} is not an IDX file: {error}; delete it and fetch again") from error


def cifar100(files: Sequence[Path], place: Path) -> None:
    try:
        with tarfile.open(files[0], "r:gz") as tar:
            content = {name: _member(tar, f"cifar-100-binary/{name}") for name in _CIFAR}
        arrays: dict[str, np.ndarray] = {"classes": np.array(content["fine_label_names.txt"].decode().split())}
        for part in ("train", "test"):
            # each image: a coarse label, a fine label, 32 x 32 of red, of green and of blue
            rows = np.frombuffer(content[f"{part}.bin"], np.uint8).reshape(-1, 2 + 3 * 32 * 32)
            arrays[f"{part}_x"] = rows[:, 2:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
            arrays[f"{part}_y"] = rows[:, 1]
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError) as error:
        raise LabError(f"{files[0]} is not CIFAR-100 in binary: {error}; delete it and fetch again") from error
    write_npz(place, **arrays)


_CIFAR = ("train.bin", "test.bin", "fine_label_names.txt")


def _member(tar: tarfile.TarFile, name: str) -> bytes:
    file = tar.extractfile(name)  # read here, so that nothing is unpacked to the disk
    if file is None:
        raise ValueError(f"{name} is no file")
    with file:
        return file.read()


def miniimagenet(files: Sequence[Path], place: Path) -> None:
    """Sheets of 600 images of 28 x 28 for each class, written aside first: the folder is whole or not there."""
    aside = place.with_name(f".{place.name}.{os.getpid()}.part")
    try:
        for part, path in zip(PARTS, files, strict=True):
            images, classes = read_cache(path)
            for name, indices in classes.items():
                write_sheet(aside / part / f"{name}.webp", resize_arrays(images[indices], SHEET[2]))
        os.replace(aside, place)
    except OSError as error:
        raise LabError(f"cannot write {place}: {error.strerror or error}; make room or set INTENTION_DATA") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def read_cache(path: Path) -> tuple[np.ndarray, Mapping[str, list[int]]]:
    """Images (n, h, w, 3) and the indices of each class, from a pickle of which only plain values are read."""
    try:
        with path.open("rb") as file:
            content = _Plain(file, encoding="latin1").load()
        images, classes = content["image_data"], {str(k): list(map(int, v)) for k, v in content["class_dict"].items()}
        images = images.array
        if images.ndim != 4 or images.shape[3] != 3:
            raise ValueError(f"its images have the shape {images.shape}")
        for name, indices in classes.items():
            if not name.isalnum():
                raise ValueError(f"a class is called {name!r}")
            if len(indices) != SHEET[0] * SHEET[1] or min(indices) < 0 or max(indices) >= len(images):
                raise ValueError(f"class {name} has not {SHEET[0] * SHEET[1]} images of its own")
        return images, classes
    except OSError as error:
        raise LabError(f"cannot read {path}: {error.strerror or error}") from error
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path} is not a cache of miniImageNet: {error}; delete it and fetch again") from error


class _Array:
    """Stands for a numpy array of bytes in a pickle. Nothing of numpy is called with values of the file but reshape."""

    def __setstate__(self, state: tuple[object, tuple[int, ...], object, bool, object]) -> None:
        _, shape, kind, fortran, content = state
        if not isinstance(kind, _Kind) or fortran or not isinstance(content, (bytes, str)):
            raise ValueError("an array in it is not of bytes in C order")
        content = content.encode("latin1") if isinstance(content, str) else content  # written by Python 2
        self.array = np.frombuffer(content, np.uint8).reshape(shape)


class _Kind:
    """Stands for numpy.dtype, of which only bytes are known."""

    def __init__(self, name: str, *rest: object) -> None:
        if name != "u1":
            raise ValueError(f"an array in it has the type {name!r}, not bytes")

    def __setstate__(self, state: object) -> None:
        pass


def _array(*ignored: object) -> _Array:
    return _Array()


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes in old pickles."""
    if encoding not in ("latin1", "latin-1"):
        raise ValueError(f"bytes in it are encoded as {encoding!r}")
    return text.encode("latin1")


class _Plain(pickle.Unpickler):
    """Reads dicts, lists, numbers, texts and arrays of bytes. All else, above all any function, is refused."""

    KNOWN: Mapping[tuple[str, str], Callable[..., object]] = {
        ("numpy.core.multiarray", "_reconstruct"): _array,
        ("numpy._core.multiarray", "_reconstruct"): _array,
        ("numpy", "ndarray"): _Array,
        ("numpy", "dtype"): _Kind,
        ("_codecs", "encode"): _encode,
        ("builtins", "range"): range,
        ("__builtin__", "xrange"): range,
    }

    def find_class(self, module: str, name: str) -> Callable[..., object]:
        if (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which data has no need of")
        return self.KNOWN[module, name]

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it refers to objects outside of the file")
