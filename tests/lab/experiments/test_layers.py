"""Stacks of linear attention as gradient descent, their step sizes, and the verdicts."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from intention.lab.core.results import Row
from intention.lab.experiments import layers
from intention.lab.experiments.layers import model as descent
from intention.lab.experiments.layers.task import conditioned
from intention.lab.tasks import Problem
from lab.made import row, rows_of, verdicts

close = partial(assert_close, rtol=1e-10, atol=1e-10)


def test_conditioned_problems_have_their_condition_number():
    problem = conditioned(3, 13, 7, 30.0, torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(problem.key.mT @ problem.key)
    close(values.amax(-1), torch.full((3,), 30.0, dtype=torch.float64))
    close(values.amin(-1), torch.ones(3, dtype=torch.float64))
    close(problem.value, problem.key @ problem.w)


def test_stacked_layers_are_gradient_steps(normal):
    """L layers of linear attention over residual values = L explicit steps on w, here by autograd."""
    n, m, d, depth = 11, 7, 5, 13
    query, key, value = normal(m, d), normal(n, d), normal(n, 1)
    steps = 0.02 + 0.01 * torch.rand(depth, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.zeros(d, 1, dtype=torch.float64)
    problem = Problem(key.unsqueeze(0), value.unsqueeze(0), w.unsqueeze(0))
    for step, prediction in zip(steps, descent.stack(steps.unsqueeze(0), query, problem), strict=True):
        w = w.detach().requires_grad_()
        loss = 0.5 * (key @ w - value).square().sum()
        w = w - step * torch.autograd.grad(loss, w)[0]
        close(prediction[0], query @ w.detach())


def test_the_paper_example_in_the_worst_case():
    ratio = layers.Config().ratio
    assert ratio == pytest.approx(1e-4)
    assert descent.worst_case("step_l", 10.0, ratio) == pytest.approx(43.7, abs=0.05)
    assert descent.worst_case("step_l_mu", 10.0, ratio) == pytest.approx(22.9, abs=0.05)
    depth = descent.worst_case("chebyshev", 10.0, ratio)  # 1 / T(11/9) is the root of the ratio
    assert np.cosh(depth * np.arccosh(11 / 9)) == pytest.approx(100)
    assert descent.worst_case("step_l_mu", 1.1, 0.1) < 1
    assert descent.worst_case("step_l", 1.1, 0.1) < 1


@pytest.mark.parametrize("model", ["step_l", "step_l_mu"])
def test_worst_case_is_reached_by_the_slowest_direction(model):
    """Eigenvalues 1 and kappa, w along either: the slower of the two."""
    kappa, ratio = 10.0, 1e-4
    key = torch.tensor([1.0, kappa], dtype=torch.float64).sqrt().diag().unsqueeze(0)
    counts = []
    for w in torch.eye(2, dtype=torch.float64):
        w = w.reshape(1, 2, 1)
        curve = layers._constant_curve(model, kappa, Problem(key, key @ w, w), ratio)
        counts.append(layers.first(curve, ratio))
    assert max(counts) == math.ceil(descent.worst_case(model, kappa, ratio))


@pytest.mark.parametrize("depth", [1, 4, 9])
def test_chebyshev_steps_shrink_as_the_polynomial_says(depth):
    kappa = 10.0
    eigenvalues = torch.linspace(1, kappa, 1001, dtype=torch.float64)
    left = (1 - descent.chebyshev(depth, kappa).unsqueeze(-1) * eigenvalues).prod(0).abs().max().item()
    assert left == pytest.approx(1 / math.cosh(depth * math.acosh(11 / 9)))


def test_expected_gap_is_the_mean_over_the_eigenvalues():
    """After l steps what is left along an eigenvector is (1 - eta lambda)^l, and w* is the same in all directions."""
    kappa, depth = 5.0, 6
    problem = conditioned(4000, 5, 5, kappa, torch.Generator().manual_seed(0))
    steps = torch.full((1, depth), descent.constant("step_l", kappa), dtype=torch.float64)
    *_, last = descent.stack(steps, descent.unit_queries(problem), problem)
    eigenvalues = torch.linalg.eigvalsh(problem.key.mT @ problem.key)
    expected = (1 - eigenvalues / kappa).pow(2 * depth).mean().item()
    assert descent.left(last, problem.w).item() == pytest.approx(expected, rel=0.05)


def test_stacks_beside_each_other_are_the_stacks_alone():
    problem, tried = conditioned(3, 7, 5, 4.0, torch.Generator().manual_seed(0)), [1, 3, 4]
    *_, together = descent.stack(descent.padded(4.0, tried, descent.chebyshev), descent.unit_queries(problem), problem)
    for index, depth in enumerate(tried):
        steps = descent.chebyshev(depth, 4.0).unsqueeze(0)
        *_, alone = descent.stack(steps, descent.unit_queries(problem), problem)
        close(together[..., index : index + 1], alone)


def test_learned_steps_come_near_chebyshev():
    config = layers.Config(
        kappas=(5.0,), d=11, points=13, problems=32, steps=200, models=("chebyshev", "learned"), seeds=1
    )
    found = {r.model: r for r in rows_of(layers, config) if r.metric == "layers"}
    assert abs(found["learned"].value - found["chebyshev"].value) <= 1  # pyright: ignore[reportOperatorIssue]
    start = descent.Steps(5.0, [6])
    assert len(start.log_steps.unique()) == 6  # equal steps would have equal gradients for ever


def test_intention_is_one_layer_at_rounding_level():
    config = layers.Config(kappas=(300.0,), models=("intention",), seeds=1)
    found = {r.metric: r.value for r in rows_of(layers, config)}
    assert found["layers"] == 1
    assert found["gap left"] < 1e-24


def made_up_layers(counts: dict[str, dict[float, float]], tenth: float = 1.0, left: float = 1e-30) -> list[Row]:
    rows = []
    for seed in range(3):
        for model, found in counts.items():
            for kappa, value in found.items():
                rows.append(row(model, "layers", value + 0.01 * seed, kappa, seed))
                rows.append(row(model, "layers, worst case", value, kappa, seed))
                rows.append(row(model, "layers to a tenth", tenth, kappa, seed))
                rows.append(row(model, "layers to a tenth, worst case", tenth, kappa, seed))
        rows.append(row("intention", "gap left", left, 10.0, seed))
    return rows


def test_verdicts_of_made_up_layers():
    counts = {"step_l": {1.1: 2, 10.0: 44, 100.0: 460}, "step_l_mu": {1.1: 2, 10.0: 23, 100.0: 230}}
    text = verdicts(layers, made_up_layers(counts))
    assert text == ["holds in 1 of 2", "holds", "does not hold", "holds", "holds"]
    printed = {"step_l": {1.1: 2, 10.0: 24, 100.0: 250}, "step_l_mu": {1.1: 2, 10.0: 24, 100.0: 250}}
    assert verdicts(layers, made_up_layers(printed))[0] == "holds"
    assert verdicts(layers, made_up_layers(printed))[2] == "holds"
    flat = {"step_l": {1.1: 99, 10.0: 99, 100.0: 99}, "step_l_mu": {1.1: 99, 10.0: 99, 100.0: 99}}
    text = verdicts(layers, made_up_layers(flat, tenth=2.0, left=1e-3))
    assert text == ["does not hold", "does not hold", "holds", "does not hold", "does not hold"]
    falling = {model: {10.0: 50, 100.0: 40} for model in counts}
    one_seed = [r for r in made_up_layers(falling) if r.seed == 0]
    assert verdicts(layers, one_seed)[4] == "not decided"
    assert verdicts(layers, made_up_layers(falling))[4] == "does not hold"


def test_one_seed_of_layers_is_never_sure():
    counts = {"step_l": {1.1: 2, 10.0: 44, 100.0: 460}, "step_l_mu": {1.1: 2, 10.0: 23, 100.0: 230}}
    one_seed = [r for r in made_up_layers(counts) if r.seed == 0]
    assert verdicts(layers, one_seed)[1:] == ["not decided"] * 4
    equal = [r for r in made_up_layers(dict.fromkeys(counts, counts["step_l"])) if r.seed == 0]
    assert verdicts(layers, equal)[2] == "not decided"  # nor that 1/L is perfect


def test_the_worst_of_all_seeds_counts():
    rows = made_up_layers({"step_l": {10.0: 44}})
    for value in (1e-3, None):
        worse = [dataclasses.replace(r, value=value) if r.metric == "gap left" and r.seed == 0 else r for r in rows]
        assert verdicts(layers, worse)[3] == "does not hold"


def test_steps_are_compared_over_the_same_seeds_from_kappa_2():
    counts = {"step_l": {1.1: 2, 10.0: 44}, "step_l_mu": {1.1: 2, 10.0: 23}}  # at 1.1 they are the same
    rows = made_up_layers(counts)
    claim = layers.claims(rows)[2]
    assert claim.verdict == "does not hold"
    assert "κ ≥ 2" in claim.text
    fewer = [r for r in rows if r.model != "step_l_mu" or r.seed < 2]
    assert verdicts(layers, fewer)[2] == "not tested at this size"


def test_figures_of_layers_hide_nothing():
    rows = made_up_layers({"chebyshev": {10.0: 8}, "learned": {10.0: 8}, "step_l": {10.0: 44}})
    learned = {"layers": [6.0, 9.0], "left": [1e-3, 2e-4]}
    rows.append(row("learned", "layers", None, 30.0, data=learned))
    rows = [dataclasses.replace(r, data=learned) if r.model == "learned" else r for r in rows]
    rows.append(row("intention", "layers", 1.0, 10.0, data={"layers": [1.0], "left": [1e-30]}))
    sizes, gaps = (plot.draw() for plot in layers.plot(rows) if plot.draw is not None)
    lines = {line.get_label(): line for line in sizes.axes[0].get_lines()}
    assert lines["learned steps"].get_markerfacecolor() == "none"
    assert [list(data) for data in lines["learned steps, not reached"].get_data()] == [[30.0], [9.0]]
    assert gaps.axes[0].get_ylim()[0] == pytest.approx(1e-7)
    assert [text.get_text() for text in gaps.axes[0].texts] == ["Intention: 1e-30 with one layer"]
