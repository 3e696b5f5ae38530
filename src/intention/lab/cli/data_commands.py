"""`intention data` and `intention embed`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from intention.lab import data
from intention.lab.cli import options
from intention.lab.cli.options import Switch, Usage
from intention.lab.core.files import LabError
from intention.lab.data.fetch import SOURCES, fetch
from intention.lab.data.named import PLACES, place

__all__ = ["Embed", "Fetch", "Info", "List", "embed", "show"]

WORDS = """usage: intention data list               which sets there are, and where
       intention data fetch NAME         download one into the data folder
       intention data info NAME_OR_PATH  parts, classes and shapes of a set or of your own data

Your own data is a folder with one folder of images for each class (perhaps below train, val and test),
or an .npz file with x and y.
"""


@dataclass(frozen=True)
class List:
    pass


@dataclass(frozen=True)
class Fetch:
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """One of mnist, cifar100, miniimagenet."""


@dataclass(frozen=True)
class Info:
    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME_OR_PATH")]
    """A set by its name, a folder of images or an .npz file."""


@dataclass(frozen=True)
class Embed:
    data: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="DATA")]
    """A set by its name, a folder of images or an .npz file of images."""
    out: Annotated[Path, tyro.conf.arg(metavar="FILE.npz")]
    """Where the features go."""
    backbone: Annotated[str, tyro.conf.arg(metavar="B")] = "conv4"
    """`conv4` (comes with the package), `efficientnet_lite0`, `_lite1` or `_lite2` (extra backbones), `pixels`
    (28 x 28, centred), an encoder.safetensors of a few-shot run, a name of timm, or the id or folder of a Hugging Face
    model such as microsoft/resnet-34 (extra vision)."""
    device: options.Device = "cpu"
    """Where images are embedded: auto (a GPU if there is one), cpu, cuda, cuda:N or mps."""
    half: Switch = False
    """Save float16, half the size."""
    force: Switch = False
    """Overwrite the file if it is there."""


def show(args: list[str]) -> int:
    """`intention data ...`"""
    if args and args[0] in ("-h", "--help"):
        print(WORDS, end="")
        return 0
    known = {"list": _list, "fetch": _fetch, "info": _info}
    if not args or args[0] not in known:
        raise Usage(f"`intention data` is followed by {', '.join(known)}, got {args[0] if args else 'nothing'}")
    return known[args[0]](args[1:])


def _list(args: list[str]) -> int:
    options.parse(List, "data list", "Which data sets there are, and where.", args)
    chosen = "INTENTION_DATA" if os.environ.get("INTENTION_DATA") else "INTENTION_DATA chooses another one"
    print(f"data folder: {data.folder()} ({chosen})")
    width = max(map(len, data.NAMES))
    print(f"{data.BUILT_IN:{width}}  always there: characters of many scripts, 28 x 28, grey")
    for name in PLACES:
        there = f"there: {place(name)}" if data.present(name) else f"not there; {_how(name)}"
        print(f"{name:{width}}  {there}")
    print("your own data: give the path of a folder or of an .npz file in place of a name")
    return 0


def _how(name: str) -> str:
    base = name.removesuffix("-64")
    if base not in SOURCES:
        return f"place it at {place(name)}, or make features of your own with `intention embed cifar100`"
    return f"`intention data fetch {base}` ({SOURCES[base].megabytes} MB: {SOURCES[base].about})"


def _fetch(args: list[str]) -> int:
    flags = options.parse(Fetch, "data fetch", "Download a data set into the data folder.", args)
    name = flags.name.removesuffix("-64")
    there = name in SOURCES and data.present(name)
    path = fetch(name)
    print(f"{name} {'was there already' if there else 'is ready'}: {path}")
    return 0


def _info(args: list[str]) -> int:
    flags = options.parse(Info, "data info", "Parts, classes and shapes of a data set.", args)
    own_folder = flags.name not in data.NAMES and Path(flags.name).expanduser().is_dir()
    whole = data.load(flags.name, 28 if own_folder else None)
    some = next(iter(whole.parts.values()))
    shape = " x ".join(map(str, some.x.shape[1:]))
    print(f"{whole.name}: {'images' if some.images else 'features'} {shape}{' after scaling' if own_folder else ''}")
    print(f"{'part':6} {'classes':>8} {'images':>8}  per class")
    for part, labelled in whole.parts.items():
        counts = labelled.y.bincount(minlength=len(labelled.classes))
        each = str(int(counts.min())) if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
        print(f"{part:6} {len(labelled.classes):8} {len(labelled.y):8}  {each}")
    if len(whole.parts) > 1:
        print("parts have disjoint classes" if whole.by_class else "parts have the same classes")
    else:
        print("no parts: for few-shot learning its classes are split")
    return 0


def embed(args: list[str]) -> int:
    """`intention embed DATA ...`"""
    about = "Features of a data set, once, for experiments on features."
    flags = options.parse(Embed, "embed", about, args)
    if flags.out.suffix != ".npz":
        raise Usage(f"--out is the name of an .npz file, got {flags.out}")
    if flags.out.exists() and not flags.force:
        raise LabError(f"{flags.out} is there already; give --force to overwrite it, or another --out")
    try:  # now, not after the work
        flags.out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LabError(f"cannot write {flags.out}: {error.strerror}; choose another --out") from error
    from intention.lab.run import embed as embedding

    made = embedding.embed(flags.data, flags.backbone, flags.out, flags.half, flags.device)
    shapes = ", ".join(f"{part} {tuple(x.shape)}" for part, x in made.items())
    print(f"features {shapes} are in {flags.out}; next: intention run fewshot --data {flags.out}")
    return 0
