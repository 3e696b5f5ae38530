"""What README and docs show of the lab comes from the rows that are kept, and all of these are there."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from intention.lab.core import results
from intention.lab.experiments import NAMES, find
from intention.lab.report.choose import choose

ROOT = Path(__file__).parents[3]
NOT_RUN = {"vit", "fewshot_features"}  # no rows are published yet, and so no verdict


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A script of benchmarks/, whose neighbours it imports."""

    def load(name: str) -> Any:
        path = next((ROOT / "benchmarks").glob(f"*/{name}.py"))
        monkeypatch.syspath_prepend(str(path.parent))
        spec = importlib.util.spec_from_file_location(f"benchmarks_{name}", path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture(scope="module")
def rows() -> list[results.Row]:
    return [row for folder in ("standard", "real") for row in results.read_folder(ROOT / "results" / folder)]


@pytest.mark.parametrize("name", NAMES)
def test_every_run_of_the_standard_preset_is_there(name: str, rows: list[results.Row]) -> None:
    own = results.select(rows, experiment=name)
    if name in NOT_RUN:
        assert not own
        return
    assert not any(row.config.get("data") == "built-in" for row in own)  # these are measured anew by everyone
    chosen = choose(find(name), own)
    assert chosen.complete
    assert len(chosen.rows) == len(own)
    assert {row.preset for row in own} == {"standard"}


def test_pages_show_these_rows(load: Any, rows: list[results.Row]) -> None:
    made = load("lab_results")
    found = made.sections(rows)
    shown = {
        "docs/lab.md": made.claims(found),
        "docs/results.md": made.short(found),
        "docs/gallery.md": made.gallery(found),
        "README.md": made.good_at(rows),
    }
    for page, text in shown.items():
        assert text in (ROOT / page).read_text(encoding="utf-8"), f"{page}: run python benchmarks/pages/lab_results.py"
    drawn = {made._file(one, n) for one in found for n in range(sum(figure.svg is not None for figure in one.figures))}
    assert {path.name for path in (ROOT / "docs" / "lab").glob("*.svg")} == drawn
    sequences = (ROOT / "docs" / "sequences.md").read_text(encoding="utf-8")
    for marker, text in {"errors": made.forgetting(rows), **made.tables(found)}.items():
        assert f"<!-- {marker} -->\n\n{text}" in sequences, f"{marker}: run python benchmarks/pages/lab_results.py"


def test_the_benchmark_of_the_lab_runs(load: Any) -> None:
    lab = load("lab")
    threads = torch.get_num_threads()
    assert set(lab.maml(0.0)) == {"vectorised", "torch.func", "loop"}
    assert 0 < lab.sampler("kabsch", 2)[0]["share"] < 1
    assert torch.get_num_threads() == threads


def test_the_forms_of_maml_in_the_benchmark_agree(load: Any) -> None:
    lab = load("lab")
    torch.manual_seed(0)
    model = lab.Maml(1, (11, 7, 1), steps=3, rate=0.1)
    episode = lab.sine.sample(5, torch.Generator().manual_seed(0), queries=13)
    want = model(*episode[:3])
    for form in (lab.OneByOne(model), lab.ByFunc(model)):
        torch.testing.assert_close(form(*episode[:3]), want, atol=1e-5, rtol=1e-4)
