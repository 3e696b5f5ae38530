"""What a scene's state is made of. One table serves the page's controls, its links, and the check of every request."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qsl

from intention.lab.core.results import Json

__all__ = ["Choice", "Digits", "Fields", "Flag", "Number", "Points", "Row", "State", "Wrong", "about", "check", "parse"]

Row = tuple[float, ...]
State = dict[str, Any]


class Wrong(ValueError):
    """A state that cannot be: says what came and what was wanted."""


@dataclass(frozen=True)
class Number:
    """`power`: the number is a power of ten. `ends`: what the two ends of its range mean, where that is exact."""

    label: str
    low: float
    high: float
    default: float
    step: float = 0.05
    power: bool = False
    ends: tuple[str, str] = ("", "")
    hint: str = ""
    kind: str = "number"

    def check(self, name: str, got: object) -> float:
        return _number(name, got, self.low, self.high)

    def parse(self, name: str, text: str) -> object:
        return _parsed(name, text)


@dataclass(frozen=True)
class Choice:
    label: str
    options: Mapping[str, str]  # value: what people read
    default: str
    hint: str = ""
    kind: str = "choice"

    def check(self, name: str, got: object) -> str:
        if not isinstance(got, str) or got not in self.options:
            raise Wrong(f"{name} is {_short(got)}; wanted one of {', '.join(self.options)}")
        return got

    def parse(self, name: str, text: str) -> object:
        return text


@dataclass(frozen=True)
class Flag:
    label: str
    default: bool
    hint: str = ""
    kind: str = "flag"

    def check(self, name: str, got: object) -> bool:
        if not isinstance(got, bool):
            raise Wrong(f"{name} is {_short(got)}; wanted true or false")
        return got

    def parse(self, name: str, text: str) -> object:
        return {"1": True, "0": False}.get(text, text)


@dataclass(frozen=True)
class Points:
    """Rows of numbers, each column within its own range."""

    columns: tuple[tuple[str, float, float], ...]  # name, low, high
    default: tuple[Row, ...]
    most: int
    least: int = 0
    kind: str = "points"

    def check(self, name: str, got: object) -> list[Row]:
        wanted = f"{self.least} to {self.most} rows of {len(self.columns)} numbers"
        if not isinstance(got, list):
            raise Wrong(f"{name} is {_short(got)}; wanted a list of {wanted}")
        if not self.least <= len(got) <= self.most:
            raise Wrong(f"{name} has {len(got)} rows; wanted {wanted}")
        return [self._row(f"{name}[{index}]", row) for index, row in enumerate(got)]

    def _row(self, name: str, row: object) -> Row:
        if not isinstance(row, list) or len(row) != len(self.columns):
            wanted = ", ".join(column for column, *_ in self.columns)
            raise Wrong(f"{name} is {_short(row)}; wanted {len(self.columns)} numbers: {wanted}")
        pairs = zip(self.columns, row, strict=True)
        return tuple(_number(f"{name} {column}", x, low, high) for (column, low, high), x in pairs)

    def parse(self, name: str, text: str) -> object:
        return [[_parsed(name, x) for x in row.split("_")] for row in text.split(";") if row]


@dataclass(frozen=True)
class Digits:
    """A picture or a mask as hexadecimal digits; "" is none."""

    length: int
    default: str = ""
    kind: str = "digits"

    def check(self, name: str, got: object) -> str:
        wanted = f"wanted {self.length} hexadecimal digits, or none"
        if not isinstance(got, str):
            raise Wrong(f"{name} is {_short(got)}; {wanted}")
        if got and (len(got) != self.length or not set(got) <= set("0123456789abcdef")):
            raise Wrong(f"{name} is a text of {len(got)} characters; {wanted} (0-9, a-f)")
        return got

    def parse(self, name: str, text: str) -> object:
        return text


Field = Number | Choice | Flag | Points | Digits
Fields = Mapping[str, Field]


def check(fields: Fields, got: object) -> State:
    """A whole state: what is missing has its default, what is unknown is refused."""
    if not isinstance(got, dict):
        raise Wrong(f"a state is an object with names, got {_short(got)}")
    if unknown := [str(name) for name in got if name not in fields]:
        raise Wrong(f"there is no {_short(unknown[0])} in this scene; there are {', '.join(fields)}")
    return {name: field.check(name, got[name]) if name in got else default(field) for name, field in fields.items()}


def default(field: Field) -> Any:
    return list(field.default) if isinstance(field, Points) else field.default


def parse(fields: Fields, text: str) -> State:
    """The state of a link: what stands behind the ? of `#line?alpha=-2&points=0.5_1;0.7_1.2`."""
    try:
        pairs = parse_qsl(text, keep_blank_values=True, strict_parsing=bool(text), errors="strict")
    except ValueError as error:
        raise Wrong(f"the part of a link behind ? has the form name=value&name=value; {error}") from error
    got = {name: fields[name].parse(name, value) if name in fields else value for name, value in pairs}
    return check(fields, got)


def about(fields: Fields) -> Json:
    """For the page."""
    return {name: {**asdict(field), "default": default(field)} for name, field in fields.items()}


def _number(name: str, got: object, low: float, high: float) -> float:
    wanted = f"wanted a number from {low:g} to {high:g}"
    if isinstance(got, bool) or not isinstance(got, int | float):
        raise Wrong(f"{name} is {_short(got)}; {wanted}")
    if isinstance(got, float) and not math.isfinite(got):
        raise Wrong(f"{name} is not finite; {wanted}")
    if not low <= got <= high:  # of a whole number before it becomes a float: it may be too large for one
        raise Wrong(f"{name} is out of range; {wanted}")
    return float(got)


def _parsed(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise Wrong(f"{name} has {_short(text)}; wanted a number") from None


def _short(got: object) -> str:
    """As JSON writes it, cut: an error is a sentence."""
    text = json.dumps(got, default=str)
    return text if len(text) <= 40 else f"{text[:37]}..."
