"""Findings: one sentence of each experiment, made of the rows that it is shown with, whatever these lack."""

from __future__ import annotations

import math
import re
import zlib
from dataclasses import replace
from pathlib import Path

import pytest

from intention.lab.core.results import Row, read
from intention.lab.experiments import NAMES, find
from intention.lab.experiments.compare import beside, by_model
from intention.lab.report.choose import choose
from lab.made import row

RESULTS = Path(__file__).parents[3] / "results"
THERE = [
    name for name in NAMES if any((RESULTS / folder / f"{name}.jsonl").exists() for folder in ("standard", "real"))
]


def rows_of(name: str) -> list[Row]:
    found = [row for folder in ("standard", "real") for row in read(RESULTS / folder / f"{name}.jsonl")]
    return choose(find(name), found).rows


def slant(model: str) -> float:
    """From .5 to 1.1, other for other models."""
    return 0.5 + 0.01 * (zlib.crc32(model.encode()) % 61)


@pytest.mark.parametrize("name", THERE)
def test_a_finding_is_one_sentence_made_of_these_rows(name: str) -> None:
    rows, finding = rows_of(name), find(name).finding
    said = finding(rows)
    assert re.fullmatch(r"[A-Z][^\n]{20,400}\.", said), said
    assert not re.search(r"[a-z]\. [A-Z]|nan|None|inf|\|", said), said
    assert re.search(r"\d", said), said
    slanted = [replace(each, value=each.value and each.value * slant(each.model)) for each in rows]
    assert finding(slanted) != said


@pytest.mark.parametrize("name", NAMES)
def test_no_finding_without_rows(name: str) -> None:
    assert find(name).finding([]) == ""


@pytest.mark.parametrize("name", THERE)
def test_a_finding_does_without_any_model_metric_or_value(name: str) -> None:
    rows, finding = rows_of(name), find(name).finding
    parts = [
        *([each for each in rows if each.model != model] for model in sorted({each.model for each in rows})),
        *([each for each in rows if each.metric != metric] for metric in sorted({each.metric for each in rows})),
        [each for each in rows if each.seed == rows[0].seed],
        [replace(each, value=None) for each in rows],
    ]
    for some in parts:
        said = finding(some)
        assert said == "" or said.endswith("."), said
        assert not re.search(r"\bnan\b|\bNone\b|\binf\b", said), said


def errors(**found: list[float]) -> dict[str, dict[int, float]]:
    return by_model(
        row(model, "mse", value, seed=seed) for model, each in found.items() for seed, value in enumerate(each)
    )


def test_what_stands_beside_is_the_best_other_model_and_the_direction_is_told() -> None:
    others = ("attention", "maml")
    found = errors(intention=[1.0, 1.1], attention=[10.0, 11.0], maml=[20.0, 30.0])
    assert beside(found, "intention", others) == (
        "an error 10 times smaller than that of Attention, the best other model"
    )
    assert beside(found, "intention", ["maml"]).startswith("an error 23 times smaller than that of MAML")
    assert "best" not in beside(found, "intention", ["maml"])
    worse = errors(intention=[4.0, 4.4], attention=[2.0, 2.2])
    assert beside(worse, "intention", others) == "an error 2 times larger than that of Attention"
    level = errors(intention=[1.0, 1.1], attention=[1.01, 1.111])
    assert beside(level, "intention", others) == "an error about the size of that of Attention"


def test_what_stands_beside_says_what_is_not_sure() -> None:
    apart = errors(intention=[1.0, 9.0], attention=[9.0, 3.0])
    assert beside(apart, "intention", ["attention"]).endswith("of Attention, though seeds differ by more")
    found = errors(intention=[1.0, 1.1], attention=[10.0, 11.0])
    learnt = {"attention": {0: True, 1: False}}
    assert beside(found, "intention", ["attention"], learnt).endswith("of Attention, which has not learnt the task")
    assert beside(errors(attention=[1.0]), "intention", ["attention"]) == ""
    assert beside(errors(intention=[1.0], attention=[1.0, 2.0]), "intention", ["attention"]) == ""
    assert beside(errors(intention=[math.inf], attention=[1.0]), "intention", ["attention"]) == (
        "an error that is not finite"
    )
    assert beside(errors(intention=[1.0], attention=[math.inf]), "intention", ["attention"]) == ""
