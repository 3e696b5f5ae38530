"""The scaling experiment: its models, the walk up the sizes, and what the rows say."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing import assert_close

from intention import naive
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import scaling
from intention.lab.experiments.base import Job
from intention.lab.experiments.scaling.claims import BASELINES
from intention.lab.experiments.scaling.model import MODELS, Layers, build
from intention.lab.experiments.scaling.sizes import Need, growth, in_words, needed
from intention.lab.experiments.scaling.task import regression
from intention.nn.scaling import variance_scale

B, N, D, S = 3, 11, 5, 7
TINY = dataclasses.replace(
    scaling.Config(),
    **{model: dataclasses.replace(getattr(scaling.PAPER, model), largest=8) for model in MODELS},
    seeds=2,
    dims=(2, 3),
    steps=3,
    batch=5,
    evaluation_tasks=13,
)


def job(model: str, config: Any = TINY, d: int = 3, seed: int = 0) -> Job:
    return Job("scaling", config, model, seed, {"d": d})


def made(model: str, size: int = S) -> nn.Module:
    return build(model, D, N, size, getattr(scaling.PAPER, model), alpha=0.5)


def linear_layers(model: nn.Module) -> list[tuple[int, int]]:
    return [(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear)]


# --- models -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_model_predicts_the_weights_of_the_regression(model: str) -> None:
    episode = regression(B, N, D, torch.Generator().manual_seed(0))
    net = made(model)
    assert net(episode.query, episode.key, episode.value).shape == episode.target.shape == (B, D, 1)
    out = net(episode.query, episode.key, episode.value)
    out.sum().backward()
    assert all(weight.grad is not None for weight in net.parameters())


@pytest.mark.parametrize("model", MODELS)
def test_only_the_mlp_sees_the_order_of_the_pairs(model: str) -> None:
    episode = regression(B, N, D, torch.Generator().manual_seed(0))
    net, order = made(model), torch.randperm(N)
    out = net(episode.query, episode.key, episode.value)
    moved = net(episode.query[:, order], episode.key[:, order], episode.value[:, order])
    assert torch.allclose(out, moved, atol=1e-5) == (model != "mlp")


def test_layers_are_those_of_the_appendix() -> None:
    embed = [(D + 1, S), (S, S)]
    assert linear_layers(made("intention")) == [*embed, *embed, (S * S, S), (S, D)]
    assert linear_layers(made("linear_attention")) == linear_layers(made("intention"))
    heads = [(S, 5 * S)] * 3 + [(5 * S, S)]
    assert linear_layers(made("sigma_intention")) == [*embed, *embed, *heads, (S, S), (S, D)]  # as many as attention
    assert linear_layers(made("attention")) == [(D + 1, S)] * 3 + heads + [(S, D)]
    assert linear_layers(made("neural_process")) == [*embed, (S, S), (S, S), (S, S), (S, D)]
    assert linear_layers(made("mlp")) == [(N * (D + 1), S), (S, S), (S, S), (S, D)]
    (leaky,) = [layer for layer in made("attention").modules() if isinstance(layer, nn.LeakyReLU)]
    assert leaky.negative_slope == 0.01


@pytest.mark.parametrize("size", [S, N + 2])  # fewer features than pairs, and more
def test_intention_reads_the_ridge_weights_of_the_embedded_pairs(size: int) -> None:
    net: Any = made("intention", size).double()
    episode = regression(B, N, D, torch.Generator().manual_seed(0))
    key, value = episode.key.double(), episode.value.double()
    both = torch.cat([key, value], -1)
    k, v = net.embed_key(both), net.embed_value(both)
    w = torch.linalg.inv(k.mT @ k + 0.5 * torch.eye(size)) @ k.mT @ v
    torch.testing.assert_close(net(key, key, value), net.decode(w.flatten(-2)).unsqueeze(-1))


def test_sigma_intention_and_linear_attention_are_the_formulas_on_the_same_embeddings() -> None:
    episode = regression(B, N, D, torch.Generator().manual_seed(0))
    key, value = episode.key.double(), episode.value.double()
    both = torch.cat([key, value], -1)
    torch.manual_seed(0)
    net: Any = build("sigma_intention", D, N, S, Layers(2, 2), alpha=0.5).double()
    k, v = net.embed_key(both), net.embed_value(both)
    out = naive.sigma_intention(k, k, v, naive.sigma(k, 0.5))
    torch.testing.assert_close(net(key, key, value), net.decode(out.mean(-2)).unsqueeze(-1))
    torch.manual_seed(0)
    wide: Any = build("sigma_intention", D, N, S, Layers(2, 2, heads=3, scale="variance"), alpha=0.5).double()
    k, v = wide.embed_key(both), wide.embed_value(both)
    each = [wide.heads._split(layer(x)) for layer, x in zip((wide.heads.query, wide.heads.key), (k, k), strict=True)]
    values = wide.heads._split(wide.heads.value(v))
    scale = variance_scale(N, S)
    mixed = naive.sigma_intention(scale * each[0], each[1], values, naive.sigma(each[1], 0.5))
    want = wide.heads.output(mixed.transpose(-3, -2).flatten(-2))
    torch.testing.assert_close(wide(key, key, value), wide.decode(want.mean(-2)).unsqueeze(-1))
    net = made("linear_attention").double()
    k, v = net.embed_key(both), net.embed_value(both)
    torch.testing.assert_close(net(key, key, value), net.decode((k.mT @ v / N).flatten(-2)).unsqueeze(-1))


def test_an_unknown_model_is_named() -> None:
    with pytest.raises(ValueError, match="no model 'maml'"):
        build("maml", D, N, S, Layers(1, 1), alpha=1.0)
    with pytest.raises(ValueError, match="wanted embed >= 0"):
        Layers(1, 0)


# --- configuration and jobs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"models": ("maml",)}, "no model maml"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"dims": ()}, "dims must name"),
        ({"dims": (0, 2)}, "dims must be at least 1"),
        ({"dims": (2, 11)}, "11 unknowns need as many pairs, got pairs=10"),
        ({"smallest": 0}, "smallest must be at least 1"),
        ({"smallest": 1024}, "intention.largest must be at least 1024, got 512"),
        ({"threshold": 0.0}, "threshold must be > 0"),
        ({"alpha": 0.0}, "alpha must be > 0"),
        ({"evaluation_tasks": 1}, "evaluation_tasks must be at least 2"),
        ({"attention": Layers(0, 1)}, "attention.embed must be at least 1"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate must be > 0"),
    ],
)
def test_impossible_values_fail_before_any_work(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(scaling.Config(), **changes)


def test_sizes_double_up_to_the_cap_of_the_model() -> None:
    paper = scaling.PRESETS["paper"]
    assert paper.sizes("mlp") == [2**power for power in range(1, 14)]
    assert paper.sizes("intention")[-1] == 512
    capped = dataclasses.replace(paper, smallest=3, mlp=Layers(0, 4, largest=47))
    assert capped.sizes("mlp") == [3, 6, 12, 24]


def test_jobs_are_one_walk_per_model_dimension_and_seed() -> None:
    jobs = list(scaling.jobs(TINY))
    assert len(jobs) == len({job.id for job in jobs}) == (len(MODELS) + 1) * 2 * 2
    fewer = dataclasses.replace(TINY, models=("mlp",), seeds=1, dims=(3,))
    assert {job.id for job in scaling.jobs(fewer)} < {job.id for job in jobs}


# --- runs -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", MODELS)
def test_a_walk_that_never_gets_there_tries_every_size(model: str) -> None:
    config = dataclasses.replace(TINY, threshold=1e-9)
    *errors, smallest = scaling.run(job(model, config), Place())
    assert [measure.x for measure in errors] == [2, 4, 8]
    assert all(measure.metric == "mse" and measure.data == {"d": 3} for measure in errors)
    for measure in errors:
        assert measure.interval[0] < measure.value < measure.interval[1]  # type: ignore[index,operator]
    assert (smallest.metric, smallest.value, smallest.x) == ("smallest", None, 3)
    assert smallest.data == {"d": 3, "tried": 8}


def test_a_walk_ends_at_the_first_size_that_is_enough() -> None:
    *errors, smallest = scaling.run(job("mlp", dataclasses.replace(TINY, threshold=100.0)), Place())
    assert [measure.x for measure in errors] == [2]
    assert (smallest.value, smallest.data) == (2, {"d": 3, "tried": 2})


def test_intention_learns_where_it_is_large_enough() -> None:
    config = dataclasses.replace(TINY, smallest=8, steps=300, learning_rate=1e-2, batch=32)
    *_, smallest = scaling.run(job("intention", config, d=2), Place())
    assert smallest.value == 8


def test_a_run_is_repeated_exactly_and_seeds_differ() -> None:
    first, again = (list(scaling.run(job("attention"), Place())) for _ in range(2))
    assert first == again
    assert list(scaling.run(job("attention", seed=1), Place())) != first


def test_a_seed_decides_the_first_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    first: list[Any] = []
    monkeypatch.setattr(scaling, "train", lambda model, *rest, **options: first.append(next(model.parameters())))
    for seed in (0, 0, 1):
        next(scaling.run(job("mlp", seed=seed), Place()))
    assert torch.equal(first[0], first[1])
    assert not torch.equal(first[0], first[2])


def test_models_of_a_seed_are_tested_on_the_same_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    tested: list[Any] = []
    original = scaling._error

    def recorded(model: nn.Module, test: Any, d: int, size: int | None) -> Any:
        tested.append(test.target)
        return original(model, test, d, size)

    monkeypatch.setattr(scaling, "_error", recorded)
    for model in ("mlp", "attention"):
        list(scaling.run(job(model), Place()))
    assert len(tested) == 6
    assert all(torch.equal(tested[0], target) for target in tested)
    list(scaling.run(job("mlp", seed=1), Place()))
    assert not torch.equal(tested[0], tested[-1])


def test_a_walk_is_resumed_without_repeating_its_steps(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    place = Place(tmp_path, tell=lambda step, steps, values: told.append((step, steps)))
    walk = scaling.run(job("neural_process"), place)
    first = [next(walk), next(walk)]  # stopped after two sizes
    walk.close()  # pyright: ignore[reportAttributeAccessIssue]
    assert told == [(step, 9) for step in range(1, 7)]
    told.clear()
    again = list(scaling.run(job("neural_process"), place))
    assert again[:2] == first
    assert told == [(step, 9) for step in range(7, 10)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s2", "s4", "s8"]


def test_a_training_that_diverges_counts_as_not_enough() -> None:
    config = dataclasses.replace(TINY, learning_rate=1e30, clip=0.0, threshold=100.0)
    *errors, smallest = scaling.run(job("mlp", config), Place())
    assert [measure.value for measure in errors] == [None] * 3
    assert smallest.value is None


@pytest.mark.parametrize("d", range(2, 11))
def test_least_squares_is_exact_without_training(d: int) -> None:
    (measure,) = scaling.run(job("least_squares", d=d), Place())
    assert measure.metric == "mse"
    assert measure.value < 1e-12  # type: ignore[operator]


# --- rows -------------------------------------------------------------------------------------------------------------


def rows(sizes: dict[str, dict[int, list[int | None]]], tried: int = 32) -> list[Row]:
    """model -> dimension -> the size of each seed, None if `tried` was not enough."""
    return [
        Row("scaling", "", "quick", {"threshold": 0.1}, model, seed, "smallest", size, d, data={"d": d, "tried": tried})
        for model, by_d in sizes.items()
        for d, seeds in by_d.items()
        for seed, size in enumerate(seeds)
    ]


def curve(size: Callable[[int], int | None], dims: tuple[int, ...] = (2, 3, 4, 5)) -> dict[int, list[int | None]]:
    return {d: [size(d)] * 3 for d in dims}


def verdicts(found: list[Row]) -> list[str]:
    return [claim.verdict for claim in scaling.claims(found)]


BASELINES = BASELINES
UNTESTED = "not tested at this size"


def test_sizes_that_double_with_each_dimension_are_exponential() -> None:
    found = rows({model: curve(lambda d: 2**d) for model in BASELINES})
    claim = scaling.claims(found)[0]
    assert claim.verdict == "holds"
    assert "× 2 (all 3 seeds agree) per dimension" in claim.measured
    assert verdicts([row for row in found if row.seed < 2])[0] == UNTESTED  # two that agree are not enough


@pytest.mark.parametrize(
    ("size", "dims", "expected"),
    [
        (lambda d: d**3, (2, 3, 4, 5), "does not hold"),  # a power
        (lambda d: 2**d, (2, 3, 4), "not decided"),  # too few dimensions to tell
        (lambda d: 2**d if d < 5 else None, (2, 3, 4, 5), "not decided"),  # not reached
    ],
)
def test_sizes_that_grow_otherwise(size: Callable[[int], int | None], dims: tuple[int, ...], expected: str) -> None:
    assert verdicts(rows({model: curve(size, dims) for model in BASELINES}))[0] == expected


def test_exponential_needs_seeds_that_agree() -> None:
    unsure = {d: [2**d, 2**d, 2 ** (7 - d)] for d in (2, 3, 4, 5)}
    assert verdicts(rows(dict.fromkeys(BASELINES, unsure)))[0] == "does not hold"
    steep = {2: [32, 8, 32], 4: [None] * 3}  # all grow, and only one dimension was solved
    assert verdicts(rows(dict.fromkeys(BASELINES, steep)))[0] == "not decided"


def test_exponential_needs_all_three_baselines() -> None:
    growing = {model: curve(lambda d: 2**d) for model in BASELINES[:2]}
    assert verdicts(rows(growing))[0] == "holds in 2 of 3 (1 open)"
    assert verdicts(rows({"mlp": curve(lambda d: 2**d)})) == ["holds in 1 of 3 (2 open)", UNTESTED, UNTESTED]
    nothing_to_fit, seed_missing = {2: [None] * 3, 3: [None] * 3}, {2: [4] * 3, 3: [8] * 2}
    for third in (nothing_to_fit, seed_missing):
        assert verdicts(rows(growing | {BASELINES[2]: third}))[0] == "holds in 2 of 3 (1 open)"
    assert verdicts(rows(growing | {BASELINES[2]: curve(lambda d: 8)}))[0] == "holds in 2 of 3"
    assert verdicts(rows({model: curve(lambda d: 8) for model in BASELINES}))[0] == "does not hold"


def test_growth_with_a_size_not_reached_is_a_lower_bound() -> None:
    by_d = needed(rows({"mlp": {2: [16] * 3, 4: [None] * 3, 6: [None] * 3}}))["mlp"]
    fit = growth(by_d)
    assert fit is not None
    assert (fit.dims, fit.bound) == (1, True)
    assert math.isclose(fit.factor.mean, (64 / 16) ** (1 / 2))  # d = 6 tells nothing more
    assert str(fit).startswith("× ≥ 2 ")
    assert growth(needed(rows({"mlp": {2: [None] * 3, 4: [None] * 3}}))["mlp"]) is None


def test_smaller_than_the_baselines_is_judged_per_dimension_and_by_seed() -> None:
    baselines = {model: {2: [16, 16, 32], 4: [None] * 3} for model in BASELINES}
    claim = scaling.claims(rows(baselines | {"intention": {2: [4, 4, 8], 4: [8, 8, 16]}}))[1]
    assert claim.verdict == "holds"
    assert "d = 2: 4 (4 to 8), the best baseline 16 (16 to 32), smaller with 3 of 3 seeds" in claim.measured
    assert "the best baseline ≥ 64, smaller with 3 of 3 seeds" in claim.measured
    sometimes = scaling.claims(rows(baselines | {"intention": {2: [4, 4, 8], 4: [None] * 3}}))[1]
    assert sometimes.verdict == "holds in 1 of 2 (1 open)"
    two_of_three = scaling.claims(rows(baselines | {"intention": {2: [4, 4, 32], 4: [8] * 3}}))[1]
    assert two_of_three.verdict == "holds in 1 of 2 (1 open)"  # all seeds must say so
    never = scaling.claims(rows({model: {2: [16] * 3} for model in BASELINES} | {"intention": {2: [32] * 3}}))[1]
    assert never.verdict == "does not hold"
    learnt = scaling.claims(rows(baselines | {"sigma_intention": {2: [32, None, 32], 4: [None] * 3}}))[2]
    assert learnt.verdict == "holds in 2 of 3"
    idle = baselines | {"mlp": {2: [None, 16, 16], 4: [None] * 3}, "intention": {2: [4] * 3, 4: [8] * 3}}
    assert scaling.claims(rows(idle))[1].verdict == UNTESTED
    assert "MLP did not learn (1 of 3 runs)" in scaling.claims(rows(idle))[1].measured
    ended_early = rows({"intention": {2: [None] * 3}}, tried=4) + rows({model: {2: [16] * 3} for model in BASELINES})
    assert scaling.claims(ended_early)[1].verdict == "not decided"  # its size is not known
    one = scaling.claims(rows({model: {2: [16]} for model in BASELINES} | {"intention": {2: [4]}}))[1]
    assert one.verdict == "not decided"  # one seed says little
    two = scaling.claims(rows({model: {2: [16] * 2} for model in BASELINES} | {"intention": {2: [4] * 2}}))[1]
    assert two.verdict == "not decided"  # two that agree are not enough


def test_smaller_needs_all_baselines_and_seeds() -> None:
    complete: dict[str, dict[int, list[int | None]]] = {model: {2: [16] * 5, 4: [32] * 5} for model in BASELINES}
    complete["intention"] = {2: [4] * 5, 4: [4] * 5}
    assert verdicts(rows(complete))[1] == "holds"
    assert verdicts(rows({name: complete[name] for name in ("intention", "mlp")}))[1] == UNTESTED
    assert verdicts(rows(complete | {"intention": {2: [4] * 3, 4: [4] * 3}}))[1] == UNTESTED
    claim = scaling.claims(rows(complete | {"mlp": {2: [16] * 5, 4: [32] * 4}}))[1]
    assert claim.verdict == "holds in 1 of 2 (1 open)"
    assert "d = 4: not the same seeds of all" in claim.measured
    assert verdicts(rows(complete | {"intention": {2: [4] * 5}}))[1] == "holds in 1 of 2 (1 open)"


def test_in_words_shows_median_and_range() -> None:
    assert in_words({0: Need(8, True), 1: Need(8, True)}) == "8"
    assert in_words({0: Need(64, False)}) == "≥ 64"
    assert in_words({0: Need(64, True), 1: Need(64, False), 2: Need(4, True)}) == "64 (4 to ≥ 64)"


def test_missing_rows_are_not_tested_and_draw_nothing() -> None:
    assert verdicts([]) == ["not tested at this size"] * 3
    assert scaling.plot([]) == []
    only = rows({"intention": curve(lambda d: 4)})
    assert verdicts(only) == ["not tested at this size"] * 3
    assert len(scaling.plot(only)) == 2
    apart = rows({"intention": {2: [4]}, "mlp": {3: [4]}})
    assert verdicts(apart) == ["not tested at this size"] * 3


def test_plots_of_a_run_are_drawn() -> None:
    config = dataclasses.replace(TINY, models=("intention", "mlp"), threshold=0.9)
    found = [
        Row(
            *("scaling", one.id, "quick", dataclasses.asdict(config), one.model, one.seed),
            m.metric,
            m.value,
            m.x,
            data=m.data,
        )
        for one in scaling.jobs(config)
        for m in scaling.run(one, Place())
    ]
    sizes, numbers, errors = scaling.plot(found)
    figure = sizes.draw()  # type: ignore[misc]
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend == ["Intention", "MLP", "least squares, untrained"]
    assert figure.axes[0].get_yscale() == "log"
    assert numbers.table[0] == ["model", "d = 2", "d = 3", "growth"]  # type: ignore[index]
    assert [line[0] for line in numbers.table[1:]] == legend  # type: ignore[index]
    panels = errors.draw().axes  # type: ignore[misc]
    assert [axes.get_title() for axes in panels] == ["d = 2", "d = 3"]
    (dashed,) = [line for line in panels[0].get_lines() if line.get_linestyle() == "--"]
    assert list(dashed.get_ydata()) == [0.9, 0.9]
    figure.savefig("/dev/null", format="svg")


def test_regression_answers_are_the_weights():
    task = regression(3, 11, 5, torch.Generator().manual_seed(0))
    assert task.key.shape == (3, 11, 5)
    assert task.target.shape == (3, 5, 1)
    assert_close(task.key @ task.target, task.value)
    again = regression(3, 11, 5, torch.Generator().manual_seed(0))
    assert torch.equal(task.value, again.value)
