"""What is said of the rows of the few-shot experiments: verdicts, tables and drawings."""

from __future__ import annotations

from dataclasses import replace
from statistics import stdev
from typing import Any

import pytest

from intention.lab.core.results import Row
from intention.lab.experiments import fewshot, fewshot_latent, fewshot_resnet
from intention.lab.experiments.base import COLOURS, LABELS, label
from intention.lab.experiments.compare import UNTESTED
from intention.lab.experiments.fewshot.config import FROM_SCRATCH, MODELS, UNSEEN
from intention.lab.experiments.fewshot.figures import mean, table
from intention.lab.experiments.fewshot.judge import above, difference, gaps, percent, same
from intention.lab.experiments.fewshot_latent.figures import table_latent

CONFIG = {"data": "miniimagenet", "steps": 4000, "batch": 2, "encoder": "conv4", "width": 64, "way": 5, "shot": 5}


def row(model: str, seed: int, value: float | None, metric: str = "accuracy", **more: Any) -> Row:
    ends = None if value is None or metric == "validation accuracy" else (value - 0.007, value + 0.007)
    config = CONFIG | {"data": more.pop("name", "miniimagenet")}
    return Row("fewshot", f"{model}-{seed}", "standard", config, model, seed, metric, value, interval=ends, **more)


def made_up(name: str = "miniimagenet", **changed: float | tuple[float, ...] | None) -> list[Row]:
    """Accuracies of two seeds in the order of the paper; MAML of second order has one."""
    scores: dict[str, Any] = {
        "intention": 0.6,
        "intention_ce": 0.605,
        "attention": 0.4,
        "neural_process": 0.45,
        "maml_first": 0.5,
        "maml": 0.51,
        "protonet": 0.55,
        "pretrained": 0.5,
        "intention_kernel": 0.602,
        "intention_lda": 0.55,
        "intention_qda": 0.5,
    }
    rows = []
    for model, score in (scores | changed).items():
        values = score if isinstance(score, tuple) else (score,) if model == "maml" else (score, score)
        rows += [row(model, seed, value, name=name) for seed, value in enumerate(values)]
    return rows


def without(model: str, seed: int | None = None) -> list[Row]:
    return [one for one in made_up() if one.model != model or seed not in (None, one.seed)]


HOLDS, OPEN, NOT = "holds", "not decided", "does not hold"
SCRATCH = (0, 1, 2, 3, 9, 10)  # of the claims: those of models that were each trained from scratch


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        (made_up(), [*[HOLDS] * 5, OPEN]),
        (made_up(maml=0.595), [HOLDS, OPEN, "holds in 3 of 4 (1 open)", HOLDS, HOLDS]),  # the interval holds 0
        (made_up(maml=0.62), [HOLDS, NOT, "holds in 3 of 4", HOLDS, HOLDS]),
        (made_up(maml=0.7, attention=0.7, neural_process=0.7), [NOT, NOT, "holds in 0 of 4 (2 open)", HOLDS, HOLDS]),
        (made_up(attention=0.7), ["holds in 1 of 2", HOLDS, "holds in 3 of 4", HOLDS, HOLDS]),  # one of two
        (made_up(neural_process=(0.45, 0.7)), ["holds in 1 of 2 (1 open)", HOLDS, "holds in 3 of 4 (1 open)"]),
        (made_up(neural_process=0.3), ["holds in 1 of 2 (1 open)", HOLDS, "holds in 1 of 4 (3 open)"]),  # not learnt
        (made_up(protonet=0.7), [HOLDS, HOLDS, HOLDS, NOT, HOLDS]),
        (made_up(pretrained=0.7), [HOLDS, HOLDS, HOLDS, HOLDS, NOT]),
        (made_up(intention_ce=0.63), [*[HOLDS] * 5, NOT]),
        (without("maml"), [HOLDS, UNTESTED, "holds in 2 of 4 (2 open)", HOLDS, HOLDS]),
        (without("attention", 1), ["holds in 1 of 2 (1 open)", HOLDS, "holds in 3 of 4 (1 open)", HOLDS, HOLDS]),
        (without("intention"), [UNTESTED, UNTESTED, "holds in 2 of 4 (2 open)", *[UNTESTED] * 3]),
        (without("intention", 1), [UNTESTED, HOLDS, "holds in 3 of 4 (1 open)", *[UNTESTED] * 3]),  # MAML: one seed
        ([], [UNTESTED] * 6),
        (made_up(intention=(0.6, None)), [NOT, HOLDS, "holds in 3 of 4", NOT, NOT, NOT]),
        (made_up(attention=(0.5, None)), ["holds in 1 of 2 (1 open)", HOLDS, "holds in 3 of 4 (1 open)", HOLDS]),
        (made_up() + made_up("built-in", intention=0.3), ["holds in 1 of 2"] * 2),
    ],
)
def test_verdicts_on_table_1(rows: list[Row], verdicts: list[str]) -> None:
    found = fewshot.claims(rows)
    assert [found[index].verdict for index in SCRATCH][: len(verdicts)] == verdicts
    assert not any("None" in claim.measured for claim in found)
    assert [claim.verdict for claim in found[4:9]] == [UNTESTED] * 5  # nothing began with one encoder


def test_models_that_begin_with_one_encoder_are_judged_among_themselves() -> None:
    models = ("intention", "attention", "neural_process", "maml", "protonet")
    tuned = [replace(one, model=f"{one.model}_tuned") for one in made_up() if one.model in models]
    tuned += [row("sigma_intention_tuned", seed, value) for seed, value in enumerate((0.5, 0.3))]
    found = fewshot.claims(tuned)
    assert [claim.verdict for claim in found[4:9]] == [*[HOLDS] * 4, "holds in 1 of 2"]
    assert {found[index].verdict for index in SCRATCH} == {UNTESTED}
    assert "put to the test" in found[8].text


def paired(model: str, right: list[int], seed: int = 0) -> Row:
    """Answers of 10 queries in each episode."""
    value = sum(right) / len(right) / 10
    data = {"queries": 10, "right": bytes(right).hex()}
    return replace(row(model, seed, value, UNSEEN), interval=(value - 0.1, value + 0.1), data=data)


def test_episodes_are_paired_where_rows_have_them() -> None:
    own, other = paired("intention", [6, 9, 4, 8] * 5), paired("protonet", [5, 8, 3, 8] * 5)
    gap = difference(own, other)
    assert gap.mean == pytest.approx(0.075)
    assert gap.high - gap.mean == pytest.approx(1.96 * stdev([0.1, 0.1, 0.1, 0.0] * 5) / 20**0.5)
    assert above({0: own}, {0: other}) == HOLDS
    assert above({0: replace(own, data=None)}, {0: other}) == OPEN  # the intervals overlap
    assert same({0: own}, {0: paired("protonet", [6, 9, 4, 8] * 5)}) == HOLDS
    assert same({0: own}, {0: other}) == NOT


def test_with_three_seeds_the_interval_is_over_seeds() -> None:
    own, other = (
        {seed: row("a", seed, v) for seed, v in enumerate(some)} for some in ((0.6, 0.7, 0.8), (0.5, 0.6, 0.7))
    )
    assert [gap.count for gap in gaps(own, other)] == [3]
    assert above(own, other) == HOLDS
    assert above(own, {**other, 2: row("a", 2, 0.9)}) == OPEN


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (made_up(intention=0.69), HOLDS),
        (made_up(intention=0.668), OPEN),  # its interval reaches 67.3%
        (made_up(intention=0.6), NOT),
        (made_up(intention=0.6, intention_longer=0.67), OPEN),
        (made_up(intention=0.6, intention_tuned=0.69), HOLDS),
        (made_up(intention=(0.6, 0.6, 0.6), intention_tuned=(0.6, 0.7, 0.8)), OPEN),  # over seeds
    ],
)
def test_verdict_on_the_printed_number(rows: list[Row], verdict: str) -> None:
    claim = fewshot.claims(rows)[-1]
    assert "67.3%" in claim.text
    assert claim.verdict == verdict
    assert len(fewshot.claims(made_up("built-in"))) == 11  # other data are not held to it


@pytest.mark.parametrize(
    ("rows", "verdicts"),
    [
        (made_up(), [HOLDS, HOLDS, OPEN]),
        (made_up(intention_lda=0.595, intention_qda=0.62), [OPEN, NOT, OPEN]),
        (made_up(intention_kernel=0.63), [HOLDS, HOLDS, NOT]),
        (made_up(intention_kernel=0.57), [HOLDS, HOLDS, NOT]),
        (without("intention_qda"), [HOLDS, UNTESTED, OPEN]),
        (without("intention_kernel", 0), [HOLDS, HOLDS, UNTESTED]),
    ],
)
def test_verdicts_on_table_2(rows: list[Row], verdicts: list[str]) -> None:
    assert [claim.verdict for claim in fewshot_resnet.claims(rows)] == [*verdicts, *[UNTESTED] * 3]
    tuned = [replace(one, model=f"{one.model}_tuned") for one in rows]
    assert [claim.verdict for claim in fewshot_resnet.claims(tuned)] == [*[UNTESTED] * 3, *verdicts]


def by_latent(kernel: float = 0.5, sizes: tuple[int, ...] = (16, 32, 128)) -> list[Row]:
    scores = {16: (kernel, 0.4), 32: (0.55, 0.5), 128: (0.5, 0.6)}
    return [
        row(model, seed, score, metric, data={"latent": latent})
        for metric in ("accuracy", "accuracy before training")
        for latent in sizes
        for model, score in zip(("intention_kernel", "intention"), scores[latent], strict=True)
        for seed in range(2)
    ]


@pytest.mark.parametrize(
    ("rows", "verdict"),
    [
        (by_latent(), HOLDS),  # what is at 128 does not count
        (by_latent(0.405), "holds in 1 of 2 (1 open)"),
        (by_latent(0.3), "holds in 1 of 2"),
        (by_latent(sizes=(16, 128)), "holds in 1 of 2 (1 open)"),
        ([one for one in by_latent() if one.model == "intention" or one.seed == 0], UNTESTED),
        ([], UNTESTED),
    ],
)
def test_verdict_on_latent_sizes(rows: list[Row], verdict: str) -> None:
    assert [claim.verdict for claim in fewshot_latent.claims(rows)] == [verdict]


def test_measured_is_told_with_data_training_and_intervals() -> None:
    said, maml = (claim.measured for claim in fewshot.claims(made_up() + made_up("built-in"))[:2])
    assert said.startswith(
        "miniImageNet at 28×28, 4000 steps × 2 episodes, Conv4 of width 64: Intention 60.0% [59.3, 60.7] and "
        "60.0% [59.3, 60.7]; against Attention 40.0% [39.3, 40.7] and 40.0% [39.3, 40.7] (+20.0 [+19.0, +21.0] and "
        "+20.0 [+19.0, +21.0]; holds); Neural Process"
    )
    assert "MAML 51.0% [50.3, 51.7] (+9.0 [+8.0, +10.0]; holds). built-in data (glyphs), 4000" in maml
    assert "against MAML (not run)" in fewshot.claims(without("maml"))[1].measured
    small = fewshot_latent.claims(by_latent())[0].measured
    assert ": at 16: Intention-kernel 50.0% [49.3, 50.7]" in small
    assert "at 128: " in small
    assert percent(row("maml", 0, None)) == "not finite"


def test_table_1_has_the_paper_beside_its_own_data_only() -> None:
    rows = made_up() + [row("intention", seed, 0.2, "accuracy before training") for seed in range(2)]
    plots = fewshot.plot(rows + made_up("built-in") + [row("maml", 0, 0.3, "validation accuracy", x=0.0)])
    assert [plot.title for plot in plots] == ["Table 1: accuracy", "Accuracy during training", "Table 1: accuracy"]
    ours, theirs = plots[0].table, plots[2].table
    assert ours and theirs  # noqa: PT018
    assert ours[0][-1] == "The paper"
    lines = {line[0]: line for line in ours[1:]}
    assert lines["Intention"] == [
        *("Intention", "least squares", "60.0% [60.0, 60.0]", "2", "60.0% [59.3, 60.7]; 60.0% [59.3, 60.7]"),
        *("", "", "", "20.0% [20.0, 20.0]", "4000 × 2, width 64", "67.30 ± 0.51"),
    ]
    assert lines["MAML"][2:4] == ["51.0%", "1"]
    assert (lines["MAML"][-1], lines["ProtoNet"][-1]) == ("63.15 ± 0.91 (no target)", "")
    assert lines["MAML (first order)"][-1].startswith("63.15")
    assert lines["ProtoNet"][1] == "cross-entropy"
    assert "84×84" in plots[0].caption
    assert "The paper" not in theirs[0]
    assert plots[2].caption.startswith("built-in data (glyphs), 5-way 5-shot; 4000 steps")
    assert not any("67.30" in cell for line in theirs for cell in line)
    assert "84×84" not in plots[2].caption


def test_table_2_has_the_numbers_of_the_paper() -> None:
    (plot,) = fewshot_resnet.plot(made_up())
    lines = {line[0]: line for line in plot.table or []}
    assert [lines[label(model)][-1][:5] for model in fewshot_resnet.MODELS] == ["70.05", "70.43", "66.27", ""]
    assert "5.81" in plot.caption


def test_history_has_seeds_thin_and_their_mean_thick() -> None:
    values = {"intention": (0.3, 0.4), "maml": (0.2, None)}
    rows = [
        row(model, seed, value, "validation accuracy", x=x)
        for model, both in values.items()
        for seed, value in enumerate(both)
        for x in (0.0, 10.0)
    ]
    (plot,) = fewshot.plot(rows)
    lines = plot.draw().axes[0].get_lines()  # type: ignore[misc]
    assert [(line.get_linewidth(), *line.get_ydata().round(3)) for line in lines] == [  # pyright: ignore[reportAttributeAccessIssue]
        *((0.6, 30, 30), (0.6, 40, 40), (2, 35, 35)),
        *((0.6, 20, 20), (2, 20, 20)),
    ]
    assert lines[0].get_color() == COLOURS["intention"]


def test_latent_sizes_are_drawn_with_intervals() -> None:
    drawn, numbers = fewshot_latent.plot(by_latent())
    figure = drawn.draw()  # type: ignore[misc]
    figure.savefig("/dev/null", format="svg")
    first = figure.axes[0].get_lines()[0]
    assert first.get_label() == "Intention"
    assert list(first.get_xdata()) == [16, 32, 128]
    assert list(first.get_ydata()) == pytest.approx([40, 50, 60])
    assert len(figure.axes[0].get_lines()) == 2 * (1 + 3 * 2 * 2)  # a mean; a dot and a bar per size and seed
    dots = [line.get_xdata()[0] for line in figure.axes[0].get_lines() if line.get_marker() == "o"]  # pyright: ignore[reportIndexIssue]
    assert len(set(dots)) == 12  # beside each other
    assert numbers.table == table_latent(by_latent())
    assert [line[:3] for line in table_latent(by_latent())[1:3]] == [
        ["16", "Intention", "40.0% [40.0, 40.0]"],
        ["16", "Intention-kernel", "50.0% [50.0, 50.0]"],
    ]


def test_without_rows_there_is_nothing_to_show() -> None:
    assert fewshot.plot([]) == fewshot_resnet.plot([]) == fewshot_latent.plot([]) == []
    assert table([], {}) == [table(made_up(), {})[0]]
    assert mean([]) == ""
    assert mean([row("maml", 0, None)]) == "not finite"


def test_every_model_has_a_name_and_a_colour_of_its_own() -> None:
    assert all(model in LABELS and model in COLOURS for model in MODELS)
    assert len({LABELS[model] for model in MODELS}) == len(MODELS)
    assert len({COLOURS[model] for model in FROM_SCRATCH}) == len(FROM_SCRATCH)
