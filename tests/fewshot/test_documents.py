"""The loop of 14 lines: it runs, and the tutorial and README have the same one."""

from __future__ import annotations

import importlib.util
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "fewshot_loop.py"


def loop() -> list[str]:
    text = EXAMPLE.read_text(encoding="utf-8")
    inside = re.search(r"    # begin\n(.*)    # end\n", text, re.DOTALL)
    assert inside is not None
    return inspect.cleandoc("\n" + inside[1]).splitlines()


def test_the_example_learns() -> None:
    pytest.importorskip("matplotlib")
    spec = importlib.util.spec_from_file_location("fewshot_loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.main() > 0.8  # 0.73 without learning, in raw pixels


def test_the_documents_have_the_loop_of_the_example() -> None:
    lines = loop()
    assert len(lines) == 14
    tutorial = (ROOT / "docs" / "fewshot.md").read_text(encoding="utf-8")
    plain = re.sub(r"^(?:>>>|\.\.\.) (?:_ = )?", "", tutorial, flags=re.MULTILINE)
    assert "\n".join(lines) in plain
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\n".join(lines[4:10]) in readme
