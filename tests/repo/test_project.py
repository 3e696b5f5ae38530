"""The project's own parts: benchmark, tables, versions and links that must not rot."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest
import torch

import intention
from intention import functional as F

ROOT = Path(__file__).parents[2]


def load(name):
    spec = importlib.util.spec_from_file_location(name, next((ROOT / "benchmarks").glob(f"*/{name}.py")))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_benchmark_runs_and_its_methods_agree():
    ops = load("ops")
    shape = (8, 11, 7, 5, 3)
    q, k, v = ops.make(shape, grad=False)
    want = F.intention(q, k, v, alpha=ops.ALPHA)
    for name in ("inv", "solve"):
        torch.testing.assert_close(ops.METHODS[name](q, k, v), want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ops.written_out(q, k, v), ops.SDPA(q, k, v))
    for grad in (False, True):
        assert set(ops.compare(ops.METHODS, shape, grad, seconds=0.0)) == set(ops.METHODS)
    assert set(ops.REFERENCE) == set(ops.SHAPES)
    assert len(ops.SHAPES) == 8
    assert len(ops.SIGMA_SHAPES) == 2


def test_the_benchmark_of_contexts_runs():
    module = load("context")
    assert set(module.update_row(32, 8, 0.0)["seconds"]) >= {"refit 1", "add 1", "add 32, sums only", "remove 32"}
    for shape in ((2, 32, 8), (2, 5, 13)):
        row = module.leave_one_out_row(*shape, torch.float32, 0.0)
        assert row["seconds"]["fit"] > 0


def test_the_version_is_one():
    version = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert intention.__version__ == version
    assert f"version: {version}" in (ROOT / "CITATION.cff").read_text()
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()


def test_hooks_before_a_commit_are_those_of_lint():
    lint = (ROOT / "Makefile").read_text().split("\nlint:")[1].split("\n\n")[0]
    commands = [line.strip().replace("$(BIN)", ".venv/bin") for line in lint.splitlines()[1:]]
    hooks = re.findall(r"entry: (.+)", (ROOT / ".pre-commit-config.yaml").read_text())
    assert [command.removesuffix(" .github/workflows/*.yml") for command in commands] == hooks


def test_the_oldest_torch_is_told():
    oldest = re.search(r'"torch>=(.+)"', (ROOT / "pyproject.toml").read_text())[1]
    assert f"needs torch >= {oldest} " in (ROOT / "README.md").read_text()
    script = re.search(r"sed -n '(.+)' pyproject.toml", (ROOT / ".github/workflows/tests.yml").read_text())[1]
    found = subprocess.run(
        ["sed", "-n", script, "pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert found.stdout == f"torch=={oldest}.*\n"


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "docs/index.md"])
def test_links_lead_somewhere(page):
    text = (ROOT / page).read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        assert target.startswith("http") or (ROOT / page).parent.joinpath(target).exists(), target
    if page == "docs/index.md":
        for name in re.findall(r"^(\w+)$", text.split("```{toctree}")[1].split("```")[0], re.MULTILINE):
            assert (ROOT / "docs" / f"{name}.md").exists(), name


def test_commands_of_the_readme_are_targets():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in ("README.md", "CONTRIBUTING.md"):
        for line in re.findall(r"make ([a-z0-9 ]+)", (ROOT / page).read_text()):
            assert set(line.split()) <= targets, line


@pytest.mark.parametrize(
    ("page", "name", "rows"),
    [
        ("docs/speed.md", "in short", 10),
        ("docs/speed.md", "one thread", 20),
        ("docs/speed.md", "two threads", 20),
        ("docs/speed.md", "growth", 12),
        ("docs/speed.md", "memory", 6),
        ("docs/speed.md", "profile", 16),
        ("docs/context.md", "updates", 17),
        ("docs/context.md", "leave one out", 12),
        ("docs/nn.md", "layers", 8),
        ("docs/nn.md", "activations", 8),
        ("docs/nn.md", "training", 27),
        ("docs/native.md", "shapes", 16),
        ("docs/native.md", "heads", 20),
        ("docs/native.md", "sigma", 4),
        ("docs/native.md", "causal", 8),
    ],
)
def test_the_tables_are_filled_from_the_benchmark(page, name, rows):
    """`make bench`, then `python benchmarks/pages/table.py`; the JSON and the pages are committed together."""
    block = re.search(rf"<!-- {name} -->\n(.*?)<!-- end -->", (ROOT / page).read_text(), re.DOTALL)[1].strip()
    files = {"docs/context.md": "context", "docs/nn.md": "modules", "docs/native.md": "native"}
    file = "native" if name == "in short" else files.get(page, "ops")
    table, results = load("table"), ROOT / "benchmarks" / "results"
    result = json.loads((results / f"{file}.json").read_text())
    depth = [json.loads(line) for line in (results / "depth.jsonl").read_text().splitlines()]
    made = {
        "in short": table.short,
        "one thread": lambda r: table.full(r, 1),
        "two threads": lambda r: table.full(r, 2),
        "growth": table.growth,
        "memory": table.memory,
        "profile": table.profile,
        "updates": table.updates,
        "leave one out": table.leave_one_out,
        "layers": table.modules,
        "activations": lambda _: table.activations(depth),
        "training": lambda _: table.training(depth),
        **{part: lambda r, part=part: table.native_part(r, part) for part in ("shapes", "heads", "sigma", "causal")},
    }[name](result)
    assert block == made
    assert len(block.splitlines()) == rows + 2
