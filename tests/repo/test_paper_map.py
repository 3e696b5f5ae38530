"""docs/paper_map.md points only to what exists, and leaves out no test of tests/paper."""

from __future__ import annotations

import importlib
import re
from functools import reduce
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAP = ROOT / "docs" / "paper_map.md"
HEADER = ["paper", "function", "test or experiment", "our departure"]


def rows(text: str) -> list[list[str]]:
    """The cells of every table row, headers and rules left out."""
    found = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")
    ]
    return [cells for cells in found if cells != HEADER and not all(re.fullmatch("-{3,}", cell) for cell in cells)]


def entries(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def imports(dotted: str) -> bool:
    """Whether `package.module.name` can be had: import the longest module there is, getattr the rest."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:cut]))
        except ModuleNotFoundError:
            continue
        try:
            reduce(getattr, parts[cut:], module)
        except AttributeError:
            return False
        return True
    return False


def exists(test: str) -> bool:
    """`tests/x.py::test_name`, or the path of an experiment."""
    path, _, name = test.partition("::")
    file = ROOT / path
    return file.is_file() and (
        not name or re.search(rf"^def {name}\(", file.read_text("utf-8"), re.MULTILINE) is not None
    )


def problems(text: str) -> list[str]:
    """Everything that is wrong with the rows of a map."""
    wrong, tested = [], False
    for cells in rows(text):
        if len(cells) != len(HEADER):
            wrong.append(f"{cells[0]}: {len(cells)} cells instead of {len(HEADER)}")
            continue
        paper, function, test, _ = cells
        functions, tests = entries(function), entries(test)
        if not (functions or tests):
            wrong.append(f"{paper}: neither a function nor a test")
        wrong += [f"{paper}: {cell!r} is no entry" for cell in (function, test) if not _reads(cell)]
        wrong += [f"{paper}: {name} does not import" for name in functions if not imports(name)]
        wrong += [f"{paper}: {name} does not exist" for name in tests if not exists(name)]
        tested |= any("::" in name for name in tests)
    if not tested:
        wrong.append("no row has a test")
    return wrong


def _reads(cell: str) -> bool:
    """The dash of an empty cell, or entries and nothing else."""
    return cell == "-" or not re.sub(r"`[^`]+`|,|\s", "", cell)


def test_map_points_to_what_exists():
    text = MAP.read_text("utf-8")
    headers = [line for line in text.splitlines() if line.startswith("| paper")]
    assert len(headers) == text.count("\n## ") > 0
    assert all([cell.strip() for cell in line.strip("|").split("|")] == HEADER for line in headers)
    assert problems(text) == []


def test_map_mentions_every_test_of_the_paper():
    mentioned = {test for cells in rows(MAP.read_text("utf-8")) for test in entries(cells[2])}
    written = {
        f"tests/paper/{file.name}::{name}"
        for file in (ROOT / "tests" / "paper").glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\(", file.read_text("utf-8"), re.MULTILINE)
    }
    assert len(written) > 0
    assert written - mentioned == set()


@pytest.mark.parametrize(
    ("row", "complaint"),
    [
        (
            "| a | `intention.fit` | `tests/repo/test_paper_map.py::test_map_points_to_what_exists` | |",
            None,
        ),
        ("| a | `intention.functional.attention` | - | |", "no row has a test"),
        ("| a | `intention.functional.attend` | - | |", "does not import"),
        ("| a | `intentional` | - | |", "does not import"),
        ("| a | - | `tests/repo/test_paper_map.py::test_nothing` | |", "does not exist"),
        ("| a | - | `tests/nothing.py::test_nothing` | |", "does not exist"),
        ("| a | - | - | |", "neither"),
        ("| a | planned | - | |", "no entry"),
        ("| a | `intention.functional.attention` | - |", "cells"),
    ],
)
def test_map_check_can_fail(row, complaint):
    found = problems(row)
    assert (found == []) if complaint is None else any(complaint in problem for problem in found)
