"""Results are rows in JSONL files, one file per experiment; figures and tables read rows and never train."""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intention.lab.core.files import LabError, append_lines, write_whole

__all__ = [
    "Estimate",
    "Row",
    "append",
    "by_seed",
    "estimate",
    "estimate_log",
    "read",
    "read_folder",
    "replace_all",
    "select",
]

Json = dict[str, Any]  # what a file of JSON holds: names, and under them whatever was measured


@dataclass(frozen=True)
class Row:
    """One number with all that is needed to make it again.

    Attributes:
        experiment, run: the experiment and the id of the run that measured this.
        preset: quick, standard or paper; "quick, changed" where a flag differs from the preset.
        config: every field of the experiment's Config.
        model, seed: of the run. Closed-form references are models too.
        metric: what was measured; `x` is where (context points, training step, dimension), None if it has no axis.
        value, interval: the number and its 95% interval over evaluation tasks, where there is one.
        data: what a figure draws (lists of numbers), where one number is not enough.
        seconds: how long the run took; if it was resumed, its last part.
        rows: how many rows the run has; if fewer are there, it counts as unfinished. 0 is not known.
    """

    experiment: str
    run: str
    preset: str
    config: Json
    model: str
    seed: int
    metric: str
    value: float | None
    x: float | None = None
    interval: tuple[float, float] | None = None
    data: Json | None = None
    seconds: float = 0.0
    intention: str = ""
    torch: str = ""
    rows: int = 0


FIELDS = [field.name for field in dataclasses.fields(Row)]
NUMBER = (int, float, type(None))  # null: not finite, or none
TYPES: dict[str, type | tuple[type, ...]] = {
    **dict.fromkeys(FIELDS, str),
    "config": dict,
    "seed": int,
    "value": NUMBER,
    "x": NUMBER,
    "interval": (list, type(None)),
    "data": (dict, type(None)),
    "seconds": (int, float),
    "rows": int,
}
REQUIRED = {field.name for field in dataclasses.fields(Row) if field.default is dataclasses.MISSING}


def append(path: Path, rows: Iterable[Row]) -> None:
    """Rows to the end of a file, which is made if it is not there."""
    append_lines(path, [_line(row) for row in rows])


def replace_all(path: Path, rows: Iterable[Row]) -> None:
    """A file of these rows alone."""
    write_whole(path, "".join(f"{_line(row)}\n" for row in rows).encode())


def _line(row: Row) -> str:
    return json.dumps(_finite(dataclasses.asdict(row)))


def read(path: Path) -> list[Row]:
    """The rows of one file. A line that is not a row is an error that names it."""
    rows: list[Row] = []
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return rows
    except (OSError, UnicodeDecodeError) as error:
        raise LabError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            rows.append(_row(line, path, number))
    return rows


def read_folder(folder: Path) -> list[Row]:
    """The rows of all experiments in a folder."""
    if not folder.is_dir():
        raise LabError(f"there is no folder {folder}; `intention reproduce --out {folder}` makes one")
    rows = [row for path in sorted(folder.glob("*.jsonl")) for row in read(path)]
    if not rows:
        raise LabError(f"{folder} holds no rows (*.jsonl); `intention reproduce --out {folder}` makes some")
    return rows


def _row(line: str, path: Path, number: int) -> Row:
    try:
        fields = json.loads(line)
        missing, unknown = REQUIRED - set(fields), set(fields) - set(FIELDS)
        if missing or unknown:
            raise ValueError(f"missing {sorted(missing)}, unknown {sorted(unknown)}")
        for name, value in fields.items():
            if not isinstance(value, TYPES[name]):
                raise ValueError(f"{name} is {value!r}")
        fields["interval"] = _interval(fields.get("interval"))
        return Row(**fields)
    except (ValueError, TypeError, RecursionError) as error:
        raise LabError(
            f"{path}, line {number} is not a row: {error}. Delete that line (the run it belongs to will be repeated); "
            "all other lines can stay"
        ) from error


def _interval(ends: list[object] | None) -> tuple[float, float] | None:
    if ends is None:
        return None
    low, high = ends
    if not (isinstance(low, int | float) and isinstance(high, int | float)):
        raise ValueError(f"interval is {ends!r}, not two numbers")
    return low, high


def _finite(value: object) -> object:
    """JSON knows neither NaN nor infinity: they become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value


def select(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Rows whose fields are what is asked for; a set or list offers several.

    >>> row = Row("sine", "a", "quick", {}, "intention", 0, "mse", 0.1, x=5)
    >>> select([row], metric="mse", x=5, model={"intention", "attention"}) == [row]
    True
    """
    return [row for row in rows if all(_fits(getattr(row, name), value) for name, value in wanted.items())]


def _fits(value: object, wanted: object) -> bool:
    return value in wanted if isinstance(wanted, set | list | tuple) else value == wanted


@dataclass(frozen=True)
class Estimate:
    """A mean over runs with its 95% interval; with one run the interval is not known (NaN)."""

    mean: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        if self.count < 2 or not math.isfinite(self.low + self.high):
            return f"{self.mean:.3g}"
        return f"{self.mean:.3g} [{self.low:.2g}, {self.high:.2g}]"


def estimate(values: Sequence[float | None]) -> Estimate:
    """Mean and Student's 95% interval. A value that is missing (not finite) makes all of it NaN.

    >>> print(estimate([1.0, 2.0, 3.0]))
    2 [-0.48, 4.5]
    """
    if not values or any(value is None or not math.isfinite(value) for value in values):
        return Estimate(math.nan, math.nan, math.nan, len(values))
    known = [float(value) for value in values if value is not None]
    mean = statistics.fmean(known)
    if len(known) < 2:
        return Estimate(mean, math.nan, math.nan, len(known))
    half = student(len(known) - 1) * statistics.stdev(known) / math.sqrt(len(known))
    return Estimate(mean, mean - half, mean + half, len(known))


def estimate_log(values: Sequence[float | None]) -> Estimate:
    """Geometric mean and interval, of positive numbers that differ by factors: errors and ratios.

    >>> print(estimate_log([1.0, 10.0, 100.0]))
    10 [0.033, 3e+03]
    """
    inside = estimate([None if value is None or value <= 0 else math.log(value) for value in values])
    return Estimate(_exp(inside.mean), _exp(inside.low), _exp(inside.high), inside.count)


def by_seed(rows: Iterable[Row]) -> dict[int, float | None]:
    """One value per seed."""
    return {row.seed: row.value for row in rows}


def _exp(value: float) -> float:
    return math.inf if value >= 700 else math.exp(value)  # NaN stays NaN


def student(freedom: int) -> float:
    """The 97.5% quantile of Student's t; beyond 30 by the Cornish-Fisher expansion around the normal's."""
    if freedom <= len(_STUDENT):
        return _STUDENT[freedom - 1]
    z = 1.959964
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


_STUDENT = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)
