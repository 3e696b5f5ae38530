"""docs/architecture.md and CONTRIBUTING's table of layers say what the code does: the walks are run."""

import itertools
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import intention
from intention import fit
from intention import functional as F
from intention.lab import cli, experiments
from intention.lab.core import results
from intention.solve.native import library

tomllib = pytest.importorskip("tomllib")  # from Python 3.11 on

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
SOURCE = Path(intention.__file__).parent
WALKS = dict(re.findall(r"<!-- walk (\w+) -->\n\n```text\n(.*?)```", PAGE, re.DOTALL))
Step = tuple[str, str]


def followed(call: Callable[[], object]) -> list[Step]:
    """(file, function) of every function of ours that is called."""
    steps: list[Step] = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(SOURCE)):
            steps.append((Path(os.path.relpath(frame.f_code.co_filename, SOURCE)).as_posix(), frame.f_code.co_name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return steps


def told(name: str) -> list[Step]:
    lines = [line.split(": ") for line in WALKS[name].strip().splitlines()]
    return [(file, function) for file, functions in lines for function in functions.split(", ")]


def switches(steps: list[Step]) -> int:
    return sum(a[0] != b[0] for a, b in itertools.pairwise(steps))


def leaves() -> list[torch.Tensor]:
    return [torch.randn(2, 8, 100, 64, requires_grad=True) for _ in range(3)]


def eager() -> torch.Tensor:
    return F.intention(*leaves(), alpha=0.1)


def weighted() -> None:
    F.intention(*leaves(), alpha=0.1, weight=torch.rand(2, 8, 100)).sum().backward()


def causal() -> torch.Tensor:
    return F.intention(*leaves(), alpha=0.1, is_causal=True)


def context() -> torch.Tensor:
    key, value = torch.randn(32, 25, 8), torch.randn(32, 25, 1)
    return fit(key, value, alpha=1.0).add(key[:, :3], value[:, :3])(key)


def compiled_calls() -> tuple[list[Step], list[Step]]:
    call = torch.compile(lambda q, k, v: F.intention(q, k, v, alpha=0.1), backend="aot_eager")
    call(*leaves()).sum().backward()
    made: list[torch.Tensor] = []
    forward = followed(lambda: made.append(call(*leaves()).sum()))
    return forward, followed(made[0].backward)


def row(folder: Path) -> None:
    assert cli.main(["run", "computations_2d", "--preset", "quick", "--out", str(folder)]) == 0
    experiments.find("computations_2d").claims(results.read_folder(folder))


def walk(name: str, folder: Path) -> list[Step]:
    if name == "compiled":
        forward, backward = compiled_calls()
        return forward + backward
    if name == "row":
        return followed(lambda: row(folder))
    if name == "backward":
        out = eager().sum()
        return followed(out.backward)
    call = {"eager": eager, "weighted": weighted, "causal": causal, "context": context}[name]
    call()
    return followed(call)


@pytest.mark.skipif(not library.available(), reason="the page walks through the compiled kernels")
@pytest.mark.parametrize("name", WALKS)
def test_the_page_walks_as_the_code_does(name, tmp_path, capsys):
    steps = iter(walk(name, tmp_path))
    for step in told(name):
        assert step in steps, f"{step} does not come next; correct the walk {name!r} of docs/architecture.md"


@pytest.mark.skipif(not library.available(), reason="the page walks through the compiled kernels")
def test_the_lengths_of_the_walks_are_those_of_the_page(tmp_path):
    calls = {name: walk(name, tmp_path) for name in ("eager", "backward", "causal", "context")}
    calls["compiled"] = compiled_calls()[1]
    rows = {"eager, with gradient": "eager", "its backward": "backward", "causal, with gradient": "causal"}
    rows |= {"compiled, backward": "compiled", "fit, add, call": "context"}
    table = dict(re.findall(r"^\| ([^|]+) \| \d+ \| \d+ \| (\d+ \| \d+) \|$", PAGE, re.MULTILINE))
    for title, name in rows.items():
        files, length = map(int, table[title].split(" | "))
        steps = calls[name]
        assert len({file for file, _ in steps}) == files, title
        assert switches(steps) == length, title
    once = list(dict.fromkeys(calls["context"]))
    assert switches(once) == int(table["fit, add, call: each function once"].split(" | ")[1])


def test_every_file_of_the_page_exists():
    named = re.findall(r"`((?:_call|context|solve|lab)/[\w/]+\.(?:py|h))`", PAGE)
    assert len(named) >= 6
    for name in named:
        assert (SOURCE / name).exists(), name


def test_the_table_of_layers_is_the_contract():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"][
        "contracts"
    ]
    (layers,) = (c["layers"] for c in contracts if c["name"] == "the package")
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    table = page[page.index("| layer, highest first |") :].split("\n\n")[0].splitlines()[2:]
    assert [re.findall(r"`(\w+)`", line.split("|")[1]) for line in table] == [layer.split(" : ") for layer in layers]
