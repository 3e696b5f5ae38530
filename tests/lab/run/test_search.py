"""The search for learning rates: one grid for all, and the presets are what it found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from intention.lab.core.results import Row
from intention.lab.experiments import find
from intention.lab.experiments.sequences import GATED, RATES
from intention.lab.report.search import read_search, searches
from intention.lab.run import search

SEARCHED = ("sine", "pixels", "policy", "kabsch", "tables")
SEQUENCES = ("text", "recall")  # gated layers
# where the best rate of the search is not kept for longer training: READING says why
SECOND_BEST = {
    ("sine", "maml", "standard"),
    ("pixels", "sigma_intention", "quick"),
    ("pixels", "sigma_intention", "standard"),
}


@pytest.mark.parametrize("name", SEARCHED)
def test_every_model_gets_the_same_grid(name: str) -> None:
    experiment = find(name)
    config = experiment.PRESETS["quick"]
    jobs = search.jobs(experiment, config)
    grids = {model: [] for model in config.models}
    for job in jobs:
        grids[job.model].append((getattr(job.config, job.model).learning_rate, *job.at.values()))
    first = grids[config.models[0]]
    assert len(first) == len(set(first)) >= len(search.LEARNING_RATES)
    assert all(grid == first for grid in grids.values())
    assert {job.seed for job in jobs} == {search.SEED}
    assert search.SEED not in range(config.seeds)
    kept = {name: getattr(config, name) for name in (*config.models, "seeds", "data") if hasattr(config, name)}
    assert {replace(job.config, **kept) for job in jobs} == {config}  # nothing else is changed; jobs name their data


def test_experiments_have_grids_and_scores_of_their_own() -> None:
    text = find("text")
    jobs = search.jobs(text, replace(text.PRESETS["standard"], plain_seeds=1))
    grids = {name: [getattr(job.config, name).learning_rate for job in jobs if job.model == name] for name in GATED}
    assert all(grid == list(RATES) for grid in grids.values())
    assert sum(map(len, grids.values())) == len(jobs)  # plain models have one rate
    assert {str(job.at) for job in jobs} == {"{}"}  # parts are changed in one model alone
    assert 0.01 in RATES[1:-1]
    other = replace(row("mlp", 0.1, 4.0), metric="bits")
    assert [one.value for one in search.distil([other, row("mlp", 0.1, 5.0)], "bits")] == [4.0]


def test_experiments_without_rates_of_their_own_are_refused() -> None:
    for name in ("scaling", "normalisation", "layers"):
        experiment = find(name)
        with pytest.raises(ValueError, match="no learning rate of their own"):
            search.jobs(experiment, experiment.PRESETS["quick"])


def row(model: str, rate: float, value: float | None, run: str = "", **changes: object) -> Row:
    config = {name: {"learning_rate": rate} for name in ("intention", "mlp")}
    made = Row("sine", run or f"{model}{rate}", "quick", config, model, search.SEED, "mse", value, seconds=2.0)
    return replace(made, **changes)  # type: ignore[arg-type]


def test_the_smallest_geometric_mean_is_chosen() -> None:
    rows = [
        *(row("intention", 0.1, value) for value in (1.0, 100.0)),
        *(row("intention", 0.2, value) for value in (8.0, 8.0)),
        row("mlp", 0.1, None),
        row("mlp", 0.2, 3.0),
        row("mlp", 0.1, 0.001, seed=0),  # of another run
        row("mlp", 0.1, 0.001, metric="mse before training"),
        row("least squares", 0.1, 0.0),
    ]
    found = {(one.model, one.data["options"]["learning_rate"]): one for one in search.distil(rows)}  # type: ignore[index]
    assert {key: one.data["chosen"] for key, one in found.items()} == {  # type: ignore[index]
        ("intention", 0.1): False,
        ("intention", 0.2): True,
        ("mlp", 0.1): False,
        ("mlp", 0.2): True,
    }
    assert found["intention", 0.1].value == pytest.approx(10.0)
    assert found["intention", 0.1].seconds == 2.0  # of one run, though it has two rows
    assert {one.metric for one in found.values()} == {"search"}


def with_rates(name: str) -> list[str]:
    """The models that have a learning rate of their own."""
    config = find(name).PRESETS["standard"]
    return [model for model in config.models if hasattr(getattr(config, model, None), "learning_rate")]


@pytest.mark.parametrize("name", [*SEARCHED, *SEQUENCES])
def test_the_presets_are_what_was_found(name: str) -> None:
    experiment, found = find(name), search.found(name)
    models = with_rates(name)
    assert {row.model for row in found} == set(models)
    grids = {model: [row for row in found if row.model == model] for model in models}
    for model, rows in grids.items():
        assert sorted(row.data["options"]["learning_rate"] for row in rows) == sorted(search.rates(experiment))  # type: ignore[index]
        best = min(rows, key=lambda row: float("inf") if row.value is None else row.value)
        assert [row for row in rows if row.data["chosen"]] == [best]  # type: ignore[index]
        for preset in ("quick", "standard"):
            rate = getattr(experiment.PRESETS[preset], model).learning_rate
            ranked = sorted(rows, key=lambda row: float("inf") if row.value is None else row.value)
            kept = ranked[(name, model, preset) in SECOND_BEST]
            assert rate == kept.data["options"]["learning_rate"], (model, preset)  # type: ignore[index]


def test_the_report_shows_one_grid_for_all() -> None:
    for found in searches(read_search(search.FOLDER)):
        assert found.budget == f"All models got the same grid of {len(search.LEARNING_RATES)} options."
        assert sum(chosen == "chosen" for *_, chosen in found.rows) == len(with_rates(found.experiment))
