"""What commands end with: numbers best first, who is best in which experiment, and what a run should cost."""

import dataclasses
import math
from pathlib import Path

import pytest

from intention.lab import data, experiments
from intention.lab.cli import commands, main, tables
from intention.lab.core.results import Row
from intention.lab.run import runner


def row(model, value, metric="mse", x=None, seed=0):
    config = {"models": ["intention", "mlp"]}
    return Row("kabsch", f"{model}-seed{seed}", "quick", config, model, seed, metric, value, x=x)


def test_the_best_number_comes_first():
    rows = [
        row("mlp", 0.5),
        row("intention", 0.25),
        row("mlp", math.nan, seed=1),
        row("affine", 0.1),
        row("mlp", 9.0, x=1),
    ]
    head, *lines = tables.numbers(rows)
    assert head == "mse, best first:"
    assert [line.split()[0] for line in lines] == ["affine", "Intention", "MLP"]
    accurate = tables.numbers([row("mlp", 0.5, "accuracy"), row("intention", 0.25, "accuracy")])
    assert accurate[1].split()[0] == "MLP"


def test_the_direction_of_a_metric_is_known_or_not_told():
    alike = tables.numbers([row("mlp", 0.5, "correlation inside"), row("intention", 0.9, "correlation inside")])
    assert [line.split()[0] for line in alike] == ["correlation", "Intention", "MLP"]
    assert tables.numbers([row("mlp", 0.5, "slope"), row("intention", 0.1, "slope")])[0] == "slope:"


def test_few_numbers_are_shown():
    rows = [row(model, 0.5, f"mse of {i}") for i in range(5) for model in ("mlp", "intention")]
    rows += [row("mlp", 9.0, "mse before training")]
    lines = tables.numbers(rows)
    assert sum("best first" in line for line in lines) == tables.SHOWN == 3
    assert lines[-1] == "and 2 other metrics, in the report"


def test_numbers_along_an_axis():
    rows = [row("mlp", 2.0 + x, x=x) for x in range(20)] + [row("intention", 1.0 + x, x=x) for x in range(20)]
    rows += [row("intention", 9.0, "mse during training", x=x) for x in range(3)]
    head, places, *lines = tables.numbers(rows)
    assert head == "mse, best first:"
    assert places.split() == ["0", "4", "9", "14", "19"]
    assert [line.split()[:3] for line in lines] == [["Intention", "1", "5"], ["MLP", "2", "6"]]
    assert tables.numbers([*rows, row("mlp", 1.0, x=3)]) == []  # something else is varied, too
    assert tables.numbers([]) == []


def test_who_is_best_where():
    rows = [row("mlp", 1.0 + (x == 1), x=x) for x in range(3)] + [row("intention", 1.5, x=x) for x in range(3)]
    assert tables.winners(rows) == ["Generalised Kabsch: MLP (best in 2 of 3, mse)"]
    rows += [row("affine", 0.0, x=x) for x in range(3)]  # a closed form is no winner
    assert tables.winners(rows) == ["Generalised Kabsch: MLP (best in 2 of 3, mse)"]
    assert tables.winners([]) == []


def test_the_size_of_a_model_is_no_case_of_its_own():
    rows = [dataclasses.replace(row("mlp", 1.0), data={"parameters": 7, "dims": 2})]
    rows += [dataclasses.replace(row("intention", 0.5), data={"parameters": 5, "state": 3, "dims": 2})]
    assert tables.winners(rows) == ["Generalised Kabsch: Intention (best, mse)"]


def test_a_part_of_the_runs_costs_a_part_of_the_time(tmp_path):
    sine = experiments.find("sine")
    usual = sine.PRESETS["quick"]
    whole = runner.plan(sine, usual, "quick", tmp_path)
    assert sum(task.weight for task in whole) == pytest.approx(sine.SECONDS["quick"])
    one = runner.plan(sine, dataclasses.replace(usual, models=("intention",), seeds=1), "quick", tmp_path)
    assert one[0].weight == pytest.approx(sine.SECONDS["quick"] / len(whole))
    half = runner.plan(sine, dataclasses.replace(usual, steps=usual.steps // 2), "quick", tmp_path)
    assert half[0].weight == pytest.approx(whole[0].weight / 2)
    assert "about 4 min 40 s on one core" in commands._count(whole, whole, tmp_path)


def test_own_data_that_cannot_be_read_fails_before_anything_else(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for command in ("run", "sweep"):
        assert main([command, "fewshot", "--data", "nowhere"]) == 1
        out, err = capsys.readouterr()
        assert "there is no data set 'nowhere'" in err
        assert not out
    assert not list(tmp_path.iterdir())


def test_runs_on_own_data_have_a_folder_of_their_own():
    fewshot = experiments.find("fewshot")
    config = fewshot.PRESETS["quick"]
    mine = dataclasses.replace(config, data="my photos/2024.npz")
    assert commands._default_out(fewshot, mine, "quick") == Path("intention-results/quick-2024")
    assert commands._default_out(fewshot, dataclasses.replace(mine, steps=7), "quick").name == "quick-2024-changed"
    for known in ("auto", *data.NAMES):
        assert commands._default_out(fewshot, dataclasses.replace(config, data=known), "quick").name == "quick"


def test_the_command_alone_gives_examples(capsys):
    main([])
    out = capsys.readouterr().out
    assert out.count("  intention ") >= 10
    assert "For example" in out
