"""Data in one npz file: x and y, or train_x, train_y, test_x, ... Never a pickle."""

from __future__ import annotations

import io
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from intention.lab.core.files import LabError, write_whole
from intention.lab.data.images import resize
from intention.lab.data.kinds import PARTS, Data, Labelled, take_classes

__all__ = ["assemble", "read_npz", "write_npz"]

Arrays = Mapping[str, np.ndarray]
Pair = tuple[np.ndarray, np.ndarray]  # x and y


def read_npz(path: Path, name: str, size: int | None) -> Data:
    """A data set of a file. `name`: what the set is called; images are scaled to size x size, None leaves them."""
    arrays = _arrays(path)
    pairs = _pairs(path, arrays)
    names = _names(path, arrays, pairs)
    x = {part: _values(path, _key(pairs, part, "x"), pair[0]) for part, pair in pairs.items()}
    if len({(tensor.dtype, tensor.shape[3:] if tensor.ndim == 4 else tensor.shape[1:]) for tensor in x.values()}) > 1:
        raise LabError(
            f"{path}: its parts differ in kind: {_shapes(pairs)}; all must be images or features of one width"
        )
    x = {part: resize(tensor, size) for part, tensor in x.items()}
    given = "classes" in arrays
    y = {part: _numbers(path, _key(pairs, part, "y"), pair[1], names, given) for part, pair in pairs.items()}
    return assemble(str(path), name, {part: Labelled(x[part], y[part], names) for part in pairs})


def assemble(where: str, name: str, parts: Mapping[str, Labelled]) -> Data:
    """A set of parts whose labels all index one list of classes. Disjoint ones get classes of their own."""
    used = {part: set(some.y.unique().tolist()) for part, some in parts.items()}
    every = sorted(set().union(*used.values()))
    if len(every) < 2:
        raise LabError(
            f"{where} has {len(every)} class(es); two or more are needed to tell apart: add images of another class"
        )
    by_class = len(parts) > 1 and sum(map(len, used.values())) == len(every)
    if by_class:
        return Data(name, {part: take_classes(some, sorted(used[part])) for part, some in parts.items()}, True)
    strange = [part for part in parts if "train" in parts and not used[part] <= used["train"]]
    if strange:
        part, names = strange[0], parts[strange[0]].classes
        own = min(used[part] - used["train"])
        shared = next(label for label in every if sum(label in some for some in used.values()) > 1)
        raise LabError(
            f"{where}: {part} has classes that train has not, such as {names[own]!r}, while parts share others, such "
            f"as {names[shared]!r}; they must have the same classes, or none in common: move or rename one of these"
        )
    return Data(name, {part: take_classes(some, every) for part, some in parts.items()}, False)


def write_npz(path: Path, **arrays: Any) -> None:
    """An npz that is whole or not there."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    write_whole(path, buffer.getvalue())


def _arrays(path: Path) -> Arrays:
    try:
        with path.open("rb") as stream:
            file = np.load(stream, allow_pickle=False)
            if isinstance(file, np.ndarray):
                raise LabError(f"{path} is a single array; save x and y together with numpy.savez(file, x=x, y=y)")
            return {key: file[key] for key in file.files}
    except ValueError as error:  # an object array, or a pickle in place of an npz
        raise LabError(
            f"{path} is no npz of plain arrays ({error}); object arrays and pickles are not read: save numbers, and "
            "names as strings (dtype=str)"
        ) from error
    except (OSError, EOFError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise LabError(f"cannot read {path}: {error}; save it again with numpy.savez(file, x=x, y=y)") from error


def _pairs(path: Path, arrays: Arrays) -> dict[str, Pair]:
    """x and y of each part, of equal length."""
    found = [part for part in PARTS if f"{part}_x" in arrays or f"{part}_y" in arrays]
    if "x" in arrays or "y" in arrays:
        _need(path, arrays, "x", "y")
        if found:
            raise LabError(f"{path} has both x and {found[0]}_x; keep x and y, or the parts")
        pairs = _parted(path, arrays) if "part" in arrays else {"train": (arrays["x"], arrays["y"])}
    else:
        if not found:
            raise LabError(f"{path} has {sorted(arrays)}; wanted x and y, or train_x and train_y (val_*, test_*)")
        for part in found:
            _need(path, arrays, f"{part}_x", f"{part}_y")
        pairs = {part: (arrays[f"{part}_x"], arrays[f"{part}_y"]) for part in found}
    for part, (x, y) in pairs.items():
        if y.ndim != 1 or x.ndim < 1 or len(x) != len(y):
            raise LabError(
                f"{path}: {part} has x of shape {x.shape} and y of {y.shape}; wanted one label for each row of x"
            )
        if len(y) == 0:
            raise LabError(f"{path}: {part} is empty; leave it out or fill it")
    return pairs


def _need(path: Path, arrays: Arrays, *keys: str) -> None:
    missing = [key for key in keys if key not in arrays]
    if missing:
        raise LabError(f"{path} has no {missing[0]!r}, only {sorted(arrays)}; add it with numpy.savez")


def _parted(path: Path, arrays: Arrays) -> dict[str, Pair]:
    part = arrays["part"].astype(str)
    if part.shape != arrays["y"].shape or part.shape != arrays["x"].shape[:1]:
        raise LabError(
            f"{path}: part has shape {part.shape}; wanted one of {PARTS} for each of {len(arrays['x'])} rows of x"
        )
    strange = sorted(set(part.tolist()) - set(PARTS), key=str)
    if strange:
        raise LabError(f"{path}: part has {strange[0]!r}; parts are {', '.join(PARTS)}")
    return {name: (arrays["x"][part == name], arrays["y"][part == name]) for name in PARTS if (part == name).any()}


def _names(path: Path, arrays: Arrays, pairs: Mapping[str, Pair]) -> tuple[str, ...]:
    """All classes: those given, or the labels that occur."""
    kinds = {"text" if y.dtype.kind in "US" else y.dtype.kind for _, y in pairs.values()}
    if not kinds <= {"i", "u"} and kinds != {"text"}:
        types = ", ".join(sorted({str(y.dtype) for _, y in pairs.values()}))
        raise LabError(f"{path}: labels y are of type {types}; wanted integers, or strings (dtype=str)")
    if "classes" not in arrays:
        return tuple(map(_text, sorted({label for _, y in pairs.values() for label in np.unique(y).tolist()})))
    given = arrays["classes"]
    if given.ndim != 1 or given.dtype.kind not in "USiu":
        raise LabError(f"{path}: classes is {given.dtype} of shape {given.shape}; wanted a list of names (dtype=str)")
    names = tuple(map(_text, given.tolist()))
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise LabError(f"{path}: classes names {twice!r} twice; each class needs a name of its own")
    return names


def _text(label: object) -> str:
    return label.decode("utf-8", "replace") if isinstance(label, bytes) else str(label)


def _numbers(path: Path, key: str, y: np.ndarray, names: tuple[str, ...], given: bool) -> torch.Tensor:
    """Labels as indices into `names`. Where classes are given, integers are these already."""
    labels, inverse = np.unique(y, return_inverse=True)
    if given and y.dtype.kind in "iu":
        where = {str(index): index for index in range(len(names))}
    else:
        where = {name: index for index, name in enumerate(names)}
    indexes = [where.get(_text(label), -1) for label in labels.tolist()]
    if -1 in indexes:
        wrong = labels.tolist()[indexes.index(-1)]
        raise LabError(
            f"{path}: {key} has the label {wrong!r}, for which classes ({len(names)} names) has no name; add it"
        )
    return torch.from_numpy(np.asarray(indexes, dtype=np.int64)[inverse.reshape(-1)])


def _values(path: Path, key: str, x: np.ndarray) -> torch.Tensor:
    if x.ndim == 2 and x.dtype.kind in "iuf":
        with np.errstate(over="ignore"):  # what is too large is told below
            features = torch.from_numpy(x.astype(np.float32))
        if not features.isfinite().all():
            row = int((~features.isfinite()).any(1).nonzero()[0])
            raise LabError(f"{path}: {key} has NaN or infinity, first in row {row}; features must be finite in float32")
        return _wide_enough(path, key, features)
    if x.ndim in (3, 4) and x.dtype != np.uint8:
        raise LabError(
            f"{path}: images {key} are {x.dtype}; wanted uint8 from 0 to 255: (255 * x).round().astype('uint8')"
        )
    if x.ndim == 4 and x.shape[3] not in (1, 3) and x.shape[1] in (1, 3):
        raise LabError(f"{path}: {key} has shape {x.shape}; channels come last: x.transpose(0, 2, 3, 1)")
    if x.ndim not in (3, 4) or (x.ndim == 4 and x.shape[3] not in (1, 3)):
        raise LabError(
            f"{path}: {key} has shape {x.shape} and type {x.dtype}; wanted images (n, height, width) or (n, height, "
            "width, 1 or 3) of uint8, or features (n, d) of floats"
        )
    return _wide_enough(path, key, torch.from_numpy(x[..., None] if x.ndim == 3 else x))


def _wide_enough(path: Path, key: str, x: torch.Tensor) -> torch.Tensor:
    if 0 in x.shape:
        raise LabError(f"{path}: {key} has shape {tuple(x.shape)}, without any values; save it again")
    return x


def _key(pairs: Mapping[str, Pair], part: str, name: str) -> str:
    return name if tuple(pairs) == ("train",) else f"{part}_{name}"


def _shapes(pairs: Mapping[str, Pair]) -> str:
    return ", ".join(f"{part} {x.dtype} {x.shape}" for part, (x, _) in pairs.items())
