"""Point clouds to map: a rabbit of our own drawing, and the user's files."""

from __future__ import annotations

import hashlib
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from intention.lab.core.files import LabError

__all__ = ["OUTLINE", "Cloud", "load_cloud", "normalised", "rabbit"]

NAMES = ("points", "xyz", "xy", "vertices", "v")  # arrays of an npz that are taken for the points

# A sitting rabbit that looks to the right; the outline is smooth through these places, from the nose downwards.
OUTLINE = (
    *((3.05, 2.55), (2.88, 2.22), (2.45, 2.02), (2.2, 1.55), (2.15, 0.9), (2.25, 0.36)),  # mouth, chin, chest, leg
    *((2.62, 0.14), (2.4, 0.0), (1.85, 0.02), (1.72, 0.5), (1.38, 0.58), (1.08, 0.36)),  # front paw, belly
    *((1.38, 0.14), (1.0, 0.0), (-0.3, 0.0), (-0.72, 0.3), (-0.98, 0.42), (-1.3, 0.62)),  # hind paw, rump, tail
    *((-1.22, 0.98), (-0.86, 1.02), (-0.52, 1.62), (0.15, 2.1), (0.95, 2.2), (1.48, 2.45)),  # tail, back, neck
    *((1.62, 2.95), (1.12, 3.65), (0.88, 4.5), (1.5, 4.1), (1.9, 3.35)),  # one ear
    *((1.86, 4.0), (2.1, 4.75), (2.42, 4.05), (2.3, 3.28), (2.62, 3.12), (2.92, 2.85)),  # the other, forehead
)
EYE = (2.45, 2.72, 0.09)  # x, y, radius


@dataclass(frozen=True)
class Cloud:
    """Points with mean 0 and variance 1 (over all coordinates), as the models know them from training."""

    points: Tensor  # (n, dims)
    centre: Tensor  # (dims,)
    size: float
    name: str

    @property
    def dims(self) -> int:
        return self.points.shape[-1]

    @property
    def digest(self) -> str:
        """Names the content: a changed file is another cloud."""
        content = np.round(self.points.double().numpy() * self.size + self.centre.double().numpy(), 6).tobytes()
        return hashlib.sha256(content).hexdigest()[:8]

    def back(self, points: Tensor) -> Tensor:
        """From the normalised units to those of the cloud."""
        return points * self.size + self.centre

    def thinned(self, most: int, generator: torch.Generator) -> Tensor:
        """At most so many of the points, drawn without repetition."""
        return self.points[torch.randperm(len(self.points), generator=generator)[:most]]


def rabbit(n: int, generator: torch.Generator) -> Cloud:
    """A rabbit of n points: most on its outline, some inside, a few around the eye.

    >>> rabbit(300, torch.Generator().manual_seed(0)).points.shape
    torch.Size([300, 2])
    """
    around = n // 25
    inside = n // 4
    line = _bezier(torch.tensor(OUTLINE), 40)
    angle = torch.linspace(0, 2 * torch.pi, around + 1)[:-1]
    eye = torch.tensor(EYE[:2]) + EYE[2] * torch.stack([angle.cos(), angle.sin()], -1)
    points = torch.cat([_evenly(line, n - around - inside), _within(line, inside, generator), eye])
    return normalised(points.double().numpy(), "rabbit")


def _bezier(through: Tensor, pieces: int) -> Tensor:
    """A closed chain of cubic Bezier curves through the points, (points * pieces, 2).

    From p to q the inner control points are p + (q - before) / 6 and q - (after - p) / 6, which joins them smoothly.
    """
    before, after, beyond = through.roll(1, 0), through.roll(-1, 0), through.roll(-2, 0)
    control = torch.stack([through, through + (after - before) / 6, after - (beyond - through) / 6, after])
    t = torch.linspace(0, 1, pieces + 1)[:-1]
    weight = torch.stack([(1 - t) ** 3, 3 * t * (1 - t) ** 2, 3 * t**2 * (1 - t), t**3])  # (4, pieces)
    return torch.einsum("cp,cnx->npx", weight, control).flatten(0, 1)


def _evenly(line: Tensor, n: int) -> Tensor:
    """n points at equal distances along a closed line."""
    length = (line.roll(-1, 0) - line).norm(dim=-1).cumsum(0)
    return line[torch.searchsorted(length, torch.linspace(0, float(length[-1]), n + 1)[:-1]).clamp_max(len(line) - 1)]


def _within(line: Tensor, n: int, generator: torch.Generator) -> Tensor:
    """n points inside a closed line: a ray to the right crosses it an odd number of times."""
    low, high = line.amin(0), line.amax(0)
    point = low + (high - low) * torch.rand(20 * n + 20, 2, generator=generator)
    (x, y), (next_x, next_y) = line.unbind(-1), line.roll(-1, 0).unbind(-1)
    height = point[:, 1:]
    spans = (y > height) != (next_y > height)  # (tried, pieces of the line)
    crossing = x + (height - y) / torch.where(next_y == y, 1.0, next_y - y) * (next_x - x)
    odd = (spans & (crossing > point[:, :1])).sum(-1) % 2 == 1
    return point[odd][:n]


def load_cloud(path: str | Path) -> Cloud:
    """The points of a npz, npy, ply or csv file, 2-D or 3-D. One that does not serve is a `LabError` that says why."""
    path = Path(path)
    readers = {".npz": _read_numpy, ".npy": _read_numpy, ".ply": _read_ply, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise LabError(f"{path} is no point cloud known here; wanted a file named .npz, .npy, .ply or .csv")
    try:
        points = reader(path)
    except FileNotFoundError as error:
        raise LabError(f"there is no file {path}; give the path of a .npz, .npy, .ply or .csv") from error
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {path}: {error}") from error
    return normalised(points, str(path))


def normalised(points: np.ndarray, name: str) -> Cloud:
    """Checked, shifted to mean 0 and scaled to variance 1."""
    if points.ndim != 2 or points.shape[1] not in (2, 3):
        raise LabError(
            f"{name}: wanted points as rows, (n, 2) or (n, 3), got shape {points.shape}; transpose or cut it"
        )
    if points.dtype.kind not in "fiu":
        raise LabError(f"{name}: wanted numbers, got {points.dtype}; save the points as float32 or float64")
    points = points.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(points).all(1))
    if len(bad):
        raise LabError(
            f"{name}: {len(bad)} of {len(points)} points are not finite, the first is row {bad[0]}; remove them"
        )
    if len(points) < 2:
        raise LabError(f"{name}: wanted at least 2 points, got {len(points)}")
    with np.errstate(over="ignore", invalid="ignore"):
        centre = points.mean(0)
        size = float(np.sqrt(np.square(points - centre).mean()))
    if not np.isfinite(size) or not size > 0:
        why = "all points are the same" if size == 0 else "the points are too far apart for float64"
        raise LabError(f"{name}: {why}; wanted a cloud with some extent")
    inner = torch.from_numpy((points - centre) / size).float()
    return Cloud(inner, torch.from_numpy(centre).float(), size, Path(name).name)


def _read_numpy(path: Path) -> np.ndarray:
    """Never unpickles: what came from elsewhere must not run."""
    try:
        with path.open("rb") as file:
            found = np.load(file, allow_pickle=False)
            if isinstance(found, np.ndarray):
                return found
            with found:
                return _choose({name: found[name] for name in found.files}, path)
    except (ValueError, EOFError, KeyError, zipfile.BadZipFile, NotImplementedError) as error:
        raise LabError(
            f"{path} is not a file of plain numpy arrays: {error}. Pickled objects are refused, because loading them "
            "can run code; save the points alone with np.savez(path, points=points)"
        ) from error


def _choose(arrays: dict[str, np.ndarray], path: Path) -> np.ndarray:
    """The array of an npz that holds the points: by its name, or the only one of the right shape."""
    for name in NAMES:
        if name in arrays:
            return arrays[name]
    fits = [name for name, array in arrays.items() if array.ndim == 2 and array.shape[1] in (2, 3)]
    if len(fits) != 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items()) or "nothing"
        raise LabError(f"{path} holds {shapes}; wanted one array (n, 2) or (n, 3), or one named {' or '.join(NAMES)}")
    return arrays[fits[0]]


def _read_csv(path: Path) -> np.ndarray:
    """Numbers separated by commas, semicolons or blanks; a heading may name the columns x, y and z."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").splitlines()]
    rows = [(number, re.split(r"\s*[,;]\s*|\s+", line)) for number, line in enumerate(lines, 1) if line]
    columns = None
    if rows and not _is_number(rows[0][1][0]):
        heading = [name.strip("\"'").lower() for name in rows.pop(0)[1]]
        columns = [heading.index(name) for name in "xyz" if name in heading]
        columns = columns if len(columns) >= 2 else None
    points = []
    for number, row in rows:
        try:
            points.append([float(x) for x in (row if columns is None else [row[column] for column in columns])])
        except (ValueError, IndexError) as error:
            raise LabError(f"{path}, line {number}: wanted 2 or 3 numbers, got {' '.join(row)!r}") from error
        if len(points[-1]) not in (2, 3) or len(points[-1]) != len(points[0]):
            wanted = len(points[0]) if len(points) > 1 else "2 or 3"
            raise LabError(
                f"{path}, line {number}: wanted {wanted} numbers, got {len(points[-1])}; name columns x, y, z"
            )
    return np.array(points, dtype=np.float64).reshape(len(points), -1 if points else 2)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


PLY_TYPES = {
    name: kind
    for names, kind in (
        *(("char int8", "i1"), ("uchar uint8", "u1"), ("short int16", "<i2"), ("ushort uint16", "<u2")),
        *(("int int32", "<i4"), ("uint uint32", "<u4"), ("float float32", "<f4"), ("double float64", "<f8")),
    )
    for name in names.split()
}


def _read_ply(path: Path) -> np.ndarray:
    """The vertices x, y (, z) of an ascii or binary_little_endian file, whatever else it holds."""
    content = path.read_bytes()
    end = re.search(rb"end_header\r?\n", content)
    if not content.startswith(b"ply") or end is None:
        raise LabError(f"{path} is not a ply file: wanted 'ply' first and a line 'end_header'")
    form, count, fields = _ply_header(content[: end.start()].decode("ascii", "replace"), path)
    columns = [column for column, (name, _) in enumerate(fields) if name in ("x", "y", "z")]
    if [fields[column][0] for column in columns] not in (["x", "y"], ["x", "y", "z"]):
        raise LabError(f"{path}: wanted vertices with x, y and perhaps z, got {', '.join(name for name, _ in fields)}")
    body, size = content[end.end() :], count * len(fields)
    try:
        if form == "ascii":
            words = np.array(body.split(None, size)[:size], dtype=np.float64)
            return words.reshape(count, len(fields))[:, columns]
        table = np.frombuffer(body, np.dtype(fields), count)
    except ValueError as error:
        raise LabError(f"{path} does not hold its {count} vertices: {error}; write the file again") from error
    return np.stack([table[fields[column][0]].astype(np.float64) for column in columns], -1)


def _ply_header(header: str, path: Path) -> tuple[str, int, list[tuple[str, str]]]:
    """(format, number of vertices, their properties with numpy types)."""
    form, element = "", ""
    count: int | None = None
    fields: list[tuple[str, str]] = []
    for words in (line.split() for line in header.splitlines()):
        if words[:1] == ["format"] and len(words) > 1:
            form = words[1]
        if words[:1] == ["element"] and len(words) == 3:
            if words[1] == "vertex" and element:
                raise LabError(f"{path}: wanted the vertices first, got element {element} before them")
            element = words[1]
            count = int(words[2]) if element == "vertex" and words[2].isdigit() else count
        if words[:1] == ["property"] and element == "vertex":
            if len(words) != 3 or words[1] not in PLY_TYPES:
                raise LabError(f"{path}: wanted plain properties of vertices, got {' '.join(words)!r}")
            fields.append((words[2], PLY_TYPES[words[1]]))
    if form not in ("ascii", "binary_little_endian"):
        raise LabError(f"{path}: wanted format ascii or binary_little_endian, got {form or 'none'}; convert the file")
    if count is None or not fields:
        raise LabError(f"{path}: wanted an element vertex with properties, got none")
    return form, count, fields
