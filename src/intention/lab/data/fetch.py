"""Downloads of public data sets: checked by their hashes, continued where they stopped, then converted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intention.lab.core.files import LabError
from intention.lab.data import convert
from intention.lab.data.named import NAMES, folder, place, present

__all__ = ["SOURCES", "File", "Source", "fetch"]


@dataclass(frozen=True)
class File:
    name: str
    urls: tuple[str, ...]  # the first that answers is used
    hash: str  # "sha256:..." or "md5:..."


@dataclass(frozen=True)
class Source:
    about: str
    megabytes: int  # to download
    files: tuple[File, ...]
    convert: Callable[[Sequence[Path], Path], None]  # of the downloaded files, to the place of the set


def _mnist(name: str, sha256: str) -> File:
    mirrors = ("https://ossci-datasets.s3.amazonaws.com/mnist/", "https://storage.googleapis.com/cvdf-datasets/mnist/")
    return File(name, tuple(mirror + name for mirror in mirrors), f"sha256:{sha256}")


def _zenodo(name: str, md5: str) -> File:
    return File(name, (f"https://zenodo.org/records/7978538/files/{name}",), f"md5:{md5}")


SOURCES: Mapping[str, Source] = {
    "mnist": Source(
        "handwritten digits, 28 x 28, grey",
        12,
        (
            _mnist("train-images-idx3-ubyte.gz", "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
            _mnist("train-labels-idx1-ubyte.gz", "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
            _mnist("t10k-images-idx3-ubyte.gz", "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
            _mnist("t10k-labels-idx1-ubyte.gz", "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
        ),
        convert.mnist,
    ),
    "cifar100": Source(
        "photographs of 100 classes, 32 x 32, colour",
        169,
        (
            File(
                "cifar-100-binary.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",),
                "sha256:58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
            ),
        ),
        convert.cifar100,
    ),
    "miniimagenet": Source(
        "photographs of 100 classes, scaled to 28 x 28, colour",
        1792,
        (
            _zenodo("mini-imagenet-cache-train.pkl", "ee4e80dc7b716f3ceec891d199b5277a"),
            _zenodo("mini-imagenet-cache-validation.pkl", "c1145a80890b88d54a67d6e0022d53a5"),
            _zenodo("mini-imagenet-cache-test.pkl", "389b6c59d348b2e1ae9610f00a5e6724"),
        ),
        convert.miniimagenet,
    ),
}


def fetch(name: str) -> Path:
    """Download a set into the data folder, unless it is there, and tell where it lies."""
    if name not in SOURCES:
        known = f"can be fetched: {', '.join(SOURCES)}"
        why = "it cannot be downloaded" if name in NAMES else "there is no such set"
        raise LabError(f"{name}: {why}; {known}")
    if present(name):
        return place(name)
    downloads = folder() / "downloads"
    files = [_retrieve(file, downloads) for file in SOURCES[name].files]
    print(f"converting to {place(name)}", flush=True)
    SOURCES[name].convert(files, place(name))
    print(f"no longer needed: {', '.join(map(str, files))}", flush=True)
    return place(name)


def _retrieve(file: File, downloads: Path) -> Path:
    """A file with the right hash: the one that is there, or a download of it."""
    import pooch
    import requests

    from intention.lab.data.download import Resuming, reason

    pooch.get_logger().setLevel("WARNING")
    target = downloads / file.name
    downloader: Any = Resuming(target)
    problems = []
    for url in file.urls:
        try:
            return Path(pooch.retrieve(url, file.hash, file.name, downloads, downloader=downloader))
        except requests.RequestException as error:
            problems.append(f"{url}: {reason(error)}")
        except ValueError:
            problems.append(f"{url}: what came has not the hash {file.hash}")
        except OSError as error:
            why = error.strerror or error
            raise LabError(f"cannot write to {downloads}: {why}; INTENTION_DATA chooses another folder") from error
    if target.exists():
        problems.append(f"{target}: it has not the hash {file.hash}")
    raise LabError(
        f"cannot download {file.name} ({'; '.join(problems)}). The same command tries again and goes on where it "
        f"stopped. Or bring {file.urls[0]} here by other means, place it in the folder {downloads} as {file.name}, and "
        "give the same command"
    )
