"""Experiments along sequences: samplers, the strict past, texts of the user, tiny runs, and claims that can fail."""

import dataclasses

import pytest

from intention.lab.core.place import Place
from intention.lab.experiments import NAMES, OURS, in_context, recall, text
from intention.lab.experiments.base import PRESETS, Job
from intention.lab.experiments.in_context import model as models
from intention.lab.experiments.in_context.claims import DRIFT
from intention.lab.experiments.recall.claims import MIXED
from intention.lab.experiments.sequences import FIXED, GATED, MIXERS, Gated
from lab.made import rows_of, verdicts

REGRESSION = dataclasses.replace(
    in_context.PRESETS["quick"],
    models=models.MODELS,
    seeds=2,
    gated_seeds=2,
    steps=2,
    batch=3,
    dims=3,
    drift_dims=2,
    length=7,
    width=8,
    evaluation_tasks=11,
    evaluations=2,
)
RECALL = dataclasses.replace(
    recall.PRESETS["quick"],
    models=(*MIXERS, *GATED),
    seeds=2,
    gated_seeds=2,
    steps=2,
    batch=3,
    widths=(4, 8),
    pairs=(2, 3),
    keys=5,
    values=7,
    head=4,
    most=6,
    head_sizes=(4, 8),
    evaluation_sequences=11,
)
TEXT = dataclasses.replace(
    text.PRESETS["quick"],
    seeds=2,
    plain_seeds=2,
    parts=("as it is", "no SiLU"),
    ablation_steps=1,
    steps=2,
    batch=3,
    window=11,
    width=8,
    evaluation_windows=7,
)


@pytest.fixture(scope="module")
def rows(written):
    configs = {in_context: REGRESSION, recall: RECALL, text: dataclasses.replace(TEXT, text=written)}
    return {experiment.TITLE: rows_of(experiment, config) for experiment, config in configs.items()}


@pytest.mark.parametrize("experiment", [in_context, recall, text])
def test_every_gated_model_has_its_own_rate_and_weight_decay(experiment):
    for name in GATED:
        own = dataclasses.replace(getattr(experiment.PRESETS["quick"], name), learning_rate=2e-3, weight_decay=0.3)
        config = dataclasses.replace(experiment.PRESETS["quick"], **{name: own})
        planned = experiment._plan(Job(experiment.__name__.split(".")[-1], config, name, 0))
        assert (planned.learning_rate, planned.weight_decay) == (2e-3, 0.3)
    with pytest.raises(ValueError, match="weight_decay must be >= 0 and finite, got -1"):
        Gated(weight_decay=-1.0)


def test_the_experiments_that_are_ours_stand_last():
    assert NAMES[-len(OURS) :] == OURS
    for experiment in (in_context, recall, text):
        assert set(experiment.PRESETS) == set(PRESETS)
        assert experiment.PRESETS["paper"] == experiment.PRESETS["standard"]


@pytest.mark.parametrize(
    ("config", "change", "message"),
    [
        (REGRESSION, {"models": ("svd",)}, "there is no model svd"),
        (REGRESSION, {"length": 3}, "length must be more than dims"),
        (REGRESSION, {"noise": 0.0}, "noise must be > 0"),
        (REGRESSION, {"alpha": -1.0}, "alpha must be > 0"),
        (REGRESSION, {"width": 9}, "the width must be a multiple of the number of heads"),
        (REGRESSION, {"layer_rate": 0.0}, "learning_rate must be > 0"),
        (REGRESSION, {"evaluations": 0}, "evaluations must be at least 1"),
        (RECALL, {"pairs": (2, 6)}, "pairs must be 1 to 5"),
        (RECALL, {"pairs": ()}, "pairs must name at least one"),
        (RECALL, {"widths": (6,)}, "widths must be multiples of the size of a head"),
        (RECALL, {"layers": 0}, "layers must be at least 1"),
        (TEXT, {"window": 0}, "window must be at least 1"),
        (TEXT, {"batch": 0}, "batch must be at least 1"),
        (TEXT, {"models": ("transformer",)}, "there is no model transformer"),
        (TEXT, {"parts": ("no hat",)}, "there is no part no hat"),
        (RECALL, {"head_sizes": (3,)}, "head_sizes must divide the largest width"),
        (RECALL, {"most": 2}, "most must be at least 4"),
        (REGRESSION, {"drift": 1.0}, r"drift must be in \[0, 1\)"),
        (REGRESSION, {"drift_dims": 7}, "length must be more than drift_dims"),
    ],
)
def test_impossible_configs_fail_with_a_reason(config, change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config, **change)


def test_every_model_is_measured(rows):
    found = rows[in_context.TITLE]
    final = {(row.model, row.seed): row for row in found if row.metric == "mse"}
    assert set(final) == {(model, seed) for model in (*models.MODELS, "ridge", "zero") for seed in (0, 1)}
    assert all(len(row.data["by position"]) == 7 for row in final.values())
    for row in final.values():
        assert row.value == pytest.approx(sum(row.data["by position"][3:]) / 4, rel=1e-4)
    drifting = {(row.model, row.data.get("forgets"), row.seed) for row in found if row.metric == DRIFT}
    cells = {(name, on) for name in models.CAN_FORGET for on in (False, True)} - {("gated_delta_gated", False)}
    cells |= {("delta_gated", False), ("sigma_intention_gated", False)}
    cells |= {(name, None) for name in ("kalman", "ridge", "zero")}
    assert drifting == {(*cell, seed) for cell in cells for seed in (0, 1)}
    found = [row for row in rows[recall.TITLE] if row.metric == "accuracy"]
    assert len(found) == (len(MIXERS) * 2 + len(GATED)) * 2 * 2  # widths (gated: the largest), numbers of pairs, seeds
    mixed = [row for row in rows[recall.TITLE] if row.metric == MIXED]
    assert len(mixed) == len(GATED) * 2 * 2 * 2  # sizes of heads, numbers of pairs, seeds
    assert all(0 <= row.interval[0] <= row.value <= row.interval[1] <= 1 for row in (*found, *mixed))
    assert {row.model for row in mixed if "state" in row.data} == set(FIXED)
    found = rows[text.TITLE]
    assert {row.model for row in found if row.metric == "bits per character"} == {*MIXERS, *GATED, "counted_pairs"}
    shown = [row.data for row in found if row.metric == "sample"]
    assert all(len(one["sample"]) == 200 and len(one["prompt"]) == 50 for one in shown)
    distinct = {one["sample"] for one in shown}
    assert len(distinct) >= 2 * (len(MIXERS) + len(GATED)) - 2  # delta rules differ by a decay that starts near 1


@pytest.mark.parametrize(
    ("experiment", "config", "model"),
    [(in_context, REGRESSION, "informer"), (recall, RECALL, "delta"), (recall, RECALL, "intention_gated")],
)
def test_a_run_repeats_bit_by_bit(experiment, config, model):
    first, *_, last = [job for job in experiment.jobs(config) if job.model == model]
    assert list(experiment.run(first, Place())) == list(experiment.run(first, Place()))
    assert list(experiment.run(first, Place())) != list(experiment.run(last, Place()))


def test_two_steps_are_not_enough_to_hold_and_figures_are_drawn(rows):
    for experiment, count in ((in_context, 6), (recall, 5), (text, 5)):
        found = rows[experiment.TITLE]
        claims = experiment.claims(found)
        at_full_size = {"2.68 bits", "16 pairs (16 keys", "32 pairs with heads of 16"}
        assert all(claim.measured for claim in claims if not any(words in claim.text for words in at_full_size))
        plots = experiment.plot(found)
        assert len(plots) == count
        for plot in plots:
            assert plot.draw is not None or len(plot.table) > 2
            assert plot.table is None or len({len(line) for line in plot.table}) == 1
            if plot.draw is not None:
                plot.draw().canvas.draw()
    assert verdicts(in_context, rows[in_context.TITLE])[:3] == ["not decided", "does not hold", "does not hold"]


@pytest.mark.parametrize("kept", [set(), {"delta"}, {"ridge"}, {"zero", "counted_pairs"}])
def test_missing_rows_are_not_tested_and_do_not_crash(rows, kept):
    for experiment in (in_context, recall, text):
        some = [row for row in rows[experiment.TITLE] if row.model in kept]
        assert set(verdicts(experiment, some)) == {"not tested at this size"}
        assert {claim.measured for claim in experiment.claims(some)} == {""}
        for plot in experiment.plot(some):
            if plot.draw is not None:
                plot.draw().canvas.draw()
