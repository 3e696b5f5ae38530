"""The sets that have a name, where they lie, and what `load` makes of a name or a path."""

from __future__ import annotations

import difflib
import functools
import os
from pathlib import Path

import torch

from intention.lab.core.files import LabError
from intention.lab.data.arrays import read_npz
from intention.lab.data.folders import read_folder
from intention.lab.data.images import read_sheet, resize
from intention.lab.data.kinds import PARTS, Data, Labelled

__all__ = ["BUILT_IN", "NAMES", "PLACES", "choose", "folder", "load", "place", "present"]

BUILT_IN = "built-in"
# what lies where in the data folder
PLACES = {
    "mnist": "mnist/mnist.npz",
    "miniimagenet": "miniimagenet28",
    "miniimagenet-64": "miniimagenet28",
    "cifar100": "cifar100/cifar100.npz",
    "cifar100-features": "cifar100/embeddings_mobilenetv2_512.npz",
}
NAMES = (BUILT_IN, *PLACES)


def folder() -> Path:
    """Where named sets lie: INTENTION_DATA, or a folder of the user's cache."""
    given = os.environ.get("INTENTION_DATA")
    if given:
        return Path(given).expanduser()
    import pooch

    return Path(pooch.os_cache("intention"))


def place(name: str) -> Path:
    return folder() / PLACES[name]


def present(name: str) -> bool:
    """Whether a named set is there; nothing is downloaded."""
    if name not in NAMES:
        raise LabError(_unknown(name))
    if name == BUILT_IN:
        return True
    return all((place(name) / part).is_dir() for part in PARTS) if _in_sheets(name) else place(name).is_file()


def choose(wanted: str, name: str) -> str:
    """The set to use: `auto` is `name` if that is there and else the built-in one; anything else is itself."""
    if wanted != "auto":
        return wanted
    given = os.environ.get("INTENTION_DATA")
    if given and not folder().is_dir():
        raise LabError(f"INTENTION_DATA is {given}, which is no folder; correct it, or unset it for the built-in data")
    return name if present(name) else BUILT_IN


def load(name: str, size: int | None = 28) -> Data:
    """A set by its name, or by the path of an npz or of a folder with a folder of images for each class.

    Images are scaled to size x size; None leaves them as they are, and then all must be equal. What was loaded
    is kept for the next call in this process.
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if name in PLACES:
        if not present(name):
            raise LabError(_absent(name))
        return _load(name, size, place(name).absolute(), 0)
    if name == BUILT_IN:
        return _load(name, size, Path(), 0)
    path = Path(name).expanduser()
    if not path.exists():
        raise LabError(_unknown(name))
    return _load(name, size, path.absolute(), path.stat().st_mtime_ns)


@functools.lru_cache(maxsize=8)
def _load(name: str, size: int | None, path: Path, changed: int) -> Data:
    if name == BUILT_IN:
        from intention.lab.data.glyphs import glyphs

        whole = glyphs()
        parts = {part: Labelled(resize(some.x, size), some.y, some.classes) for part, some in whole.items()}
        return Data(name, parts, True)
    if name in PLACES and _in_sheets(name):
        return _sheets(name, path, size)
    if path.is_dir():
        return read_folder(path, name, size)
    if path.suffix.lower() != ".npz":
        raise LabError(
            f"{path} is neither a folder of images nor an .npz file; `intention data --help` tells about both"
        )
    return read_npz(path, name, size)


def _in_sheets(name: str) -> bool:
    return name.startswith("miniimagenet")


def _sheets(name: str, path: Path, size: int | None) -> Data:
    files = {part: sorted((path / part).glob("*.webp")) for part in PARTS}
    counts = tuple(map(len, files.values()))
    if counts != (64, 16, 20):
        raise LabError(f"{path} has {counts} sheets for train, val and test; wanted (64, 16, 20): {_again(name)}")
    if name == "miniimagenet":  # the split of the paper: 80/10/10
        test = files["test"]
        files = {"train": sorted(files["train"] + files["val"], key=_wnid), "val": test[:10], "test": test[10:]}
    parts = {}
    for part, some in files.items():
        x = [resize(read_sheet(file), size) for file in some]
        y = torch.arange(len(some)).repeat_interleave(len(x[0]))
        parts[part] = Labelled(torch.cat(x), y, tuple(map(_wnid, some)))
    return Data(name, parts, True)


def _wnid(file: Path) -> str:
    return file.stem


def _again(name: str) -> str:
    return f"delete the folder and give `intention data fetch {name.removesuffix('-64')}`"


def _absent(name: str) -> str:
    how = "INTENTION_DATA names another folder to look in"
    if name != "cifar100-features":
        how = f"`intention data fetch {name.removesuffix('-64')}` downloads it; {how}"
    return f"{name} is not there: no {place(name)}; {how}"


def _unknown(name: str) -> str:
    known = f"known are {', '.join(NAMES)}, or give the path of an .npz file or a folder of images"
    if "/" in name or os.sep in name or Path(name).suffix:
        return f"there is no file or folder {name}; {known}"
    close = difflib.get_close_matches(name, NAMES, 1)
    hint = f"did you mean {close[0]}? K{known[1:]}" if close else known
    return f"there is no data set {name!r}; {hint}"
