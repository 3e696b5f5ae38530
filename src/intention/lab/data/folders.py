"""Data as folders of images: one folder for each class, perhaps below train, val and test."""

from __future__ import annotations

from pathlib import Path

import torch

from intention.lab.core.files import LabError
from intention.lab.data.arrays import assemble
from intention.lab.data.images import SUFFIXES, stack
from intention.lab.data.kinds import PARTS, Data, Labelled

__all__ = ["index_folder", "read_folder"]


def read_folder(path: Path, name: str, size: int | None) -> Data:
    """A data set of images; the folders' names are the classes."""
    files, index = index_folder(path, name)
    x = stack(files, size)  # all parts at once: they share one size and one number of channels
    parts = {part: Labelled(x[some.x], some.y, some.classes) for part, some in index.parts.items()}
    return Data(name, parts, index.by_class)


def index_folder(path: Path, name: str) -> tuple[list[Path], Data]:
    """The files, and a data set in whose place of images are indices into these."""
    found = {part: _files(folder) for part, folder in _parts(path).items()}
    names = tuple(sorted(set().union(*found.values())))
    number = {name: index for index, name in enumerate(names)}
    files: list[Path] = []
    parts = {}
    for part, classes in found.items():
        y = torch.tensor([number[one] for one, some in classes.items() for _ in some])
        parts[part] = Labelled(len(files) + torch.arange(len(y)), y, names)
        files += [file for some in classes.values() for file in some]
    return files, assemble(str(path), name, parts)


def _parts(path: Path) -> dict[str, Path]:
    folders = {folder.name: folder for folder in _folders(path)}
    strange = sorted(set(folders) - set(PARTS))
    parts = {part: folders[part] for part in PARTS if part in folders}
    if not parts or (strange and not any(_folders(folder) for folder in parts.values())):
        return {"train": path}  # no parts, or classes of which one is called test, say
    if strange:
        raise LabError(f"{path} has the folder {strange[0]!r} beside {', '.join(parts)}; rename it or take it away")
    return parts


def _files(path: Path) -> dict[str, list[Path]]:
    """The images of each class, sorted by name."""
    folders = _folders(path)
    if not folders:
        raise LabError(
            f"{path} has no folders; put the images of each class into a folder of its own, named as the class"
        )
    classes = {
        folder.name: sorted(
            file
            for file in folder.iterdir()
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".") and file.is_file()
        )
        for folder in folders
    }
    for name, files in classes.items():
        if not files:
            raise LabError(f"{path / name} has no images ({', '.join(SUFFIXES)}); fill the folder or take it away")
    return classes


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith((".", "__MACOSX")))
    except OSError as error:
        raise LabError(f"cannot read the folder {path}: {error.strerror}") from error
