"""The experiments that train nothing, or nearly nothing: computations_2d, normalisation, slowdown, layers."""

from __future__ import annotations

import io

import pytest

from intention.lab.core.place import Place
from intention.lab.experiments import base, computations_2d, layers, normalisation, slowdown
from lab.made import rows_of, verdicts

TINY = {
    computations_2d: computations_2d.Config(points=11, queries=37, grid=3, seeds=2),
    normalisation: normalisation.Config(sizes=(3, 5), dimensions=(1, 2, 7, 48, 96), near=(1, 2), draws=300),
    slowdown: slowdown.Config(repetitions=7, smallest=3, largest=23),
    layers: layers.Config(kappas=(1.1, 10.0), d=5, points=7, problems=11, steps=3, batch=2, seeds=2),
}
EXPERIMENTS = list(TINY)


def identify(module) -> str:
    return module.__name__.split(".")[-1]


@pytest.fixture(scope="module", params=EXPERIMENTS, ids=identify)
def tiny(request):
    return request.param, rows_of(request.param, TINY[request.param])


def test_rows_become_claims_and_figures(tiny):
    module, rows = tiny
    assert all(claim.kind in base.VERDICTS for claim in module.claims(rows))
    assert (
        sum(claim.verdict != "not tested at this size" for claim in module.claims(rows)) >= len(module.claims(rows)) - 1
    )
    plots = module.plot(rows)
    assert any(plot.draw is not None for plot in plots)
    for plot in plots:
        if plot.draw is not None:
            file = io.BytesIO()
            plot.draw().savefig(file, format="svg")
            assert b"</svg>" in file.getvalue()
        if plot.table is not None:
            assert len({len(line) for line in plot.table}) == 1 < len(plot.table)


def test_every_job_has_its_own_name(tiny):
    module, _ = tiny
    names = [job.id for job in module.jobs(TINY[module])]
    assert len(set(names)) == len(names)
    assert {job.experiment for job in module.jobs(TINY[module])} == {identify(module)}


def test_no_rows_and_rows_of_one_model_do_not_crash(tiny):
    module, rows = tiny
    assert set(verdicts(module, [])) == {"not tested at this size"}
    assert module.plot([]) == []
    for model in {row.model for row in rows}:
        kept = [row for row in rows if row.model == model and row.seed == 0]
        assert module.claims(kept)
        for plot in module.plot(kept):
            if plot.draw is not None:
                plot.draw()


@pytest.mark.parametrize("module", [computations_2d, normalisation, layers], ids=identify)
def test_a_run_repeats(module):
    config = TINY[module]
    job = module.jobs(config)[-1]
    assert list(module.run(job, Place())) == list(module.run(job, Place()))


@pytest.mark.parametrize("module", EXPERIMENTS, ids=identify)
def test_presets(module):
    assert tuple(module.PRESETS) == base.PRESETS
    assert all(isinstance(preset, module.Config) for preset in module.PRESETS.values())


@pytest.mark.parametrize(
    ("module", "wrong"),
    [
        (computations_2d, {"points": 1}),
        (computations_2d, {"alphas": (0.0,)}),
        (computations_2d, {"repairs": ("clip",)}),
        (normalisation, {"dimensions": (0,)}),
        (normalisation, {"error": 0.0}),
        (slowdown, {"repetitions": 1}),
        (slowdown, {"smallest": 9, "largest": 7}),
        (layers, {"kappas": (1.0,)}),
        (layers, {"d": 9, "points": 7}),
        (layers, {"models": ("sgd",)}),
    ],
)
def test_impossible_values_fail_before_any_work(module, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong)).rstrip("s")):
        module.Config(**wrong)
