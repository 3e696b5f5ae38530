"""Four computations on a plane: data, printed formulas, verdicts and maps."""

from __future__ import annotations

import dataclasses
import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from intention.lab.core.results import Row
from intention.lab.experiments import computations_2d
from intention.lab.experiments.computations_2d import task as linear
from intention.lab.experiments.computations_2d.claims import order, over_seeds
from lab.made import row, rows_of, verdicts

close = partial(assert_close, rtol=1e-10, atol=1e-10)


def test_repairs_of_the_printed_covariance():
    """|eigenvalues| is what numpy draws from the printed matrix; the other is singular and nearer to it."""
    printed = torch.tensor(linear.PLANE, dtype=torch.float64)
    absolute, nearest = (root @ root for root in map(linear.plane_root, linear.REPAIRS))
    with pytest.warns(RuntimeWarning, match="positive-semidefinite"):
        drawn = np.random.RandomState(0).multivariate_normal([0, 0], printed.numpy(), 40_000)
    assert_close(torch.from_numpy(np.cov(drawn.T)), absolute, atol=0.02, rtol=0)
    close(absolute, torch.tensor([[0.7727, 0.8384], [0.8384, 1.0522]], dtype=torch.float64), atol=1e-4)
    assert torch.linalg.det(nearest).abs() < 1e-12
    assert torch.linalg.norm(nearest - printed) < torch.linalg.norm(absolute - printed)


def test_plane_draws_what_the_appendix_says():
    problem = linear.plane(4001, 7, "absolute", torch.Generator().manual_seed(0))
    root = linear.plane_root("absolute")
    assert_close(problem.w.flatten().var().item(), 10.0, rtol=0.05, atol=0)
    flat = problem.key.flatten(0, 1)
    assert_close(flat.mT @ flat / len(flat), root @ root, atol=0.03, rtol=0)
    close(problem.value, problem.key @ problem.w)
    query = linear.square(1, 5003, 25.0, torch.Generator().manual_seed(0))
    assert 24.5 < query.max() <= 25
    assert -25 <= query.min() < -24.5


def test_both_repairs_of_a_seed_have_the_same_weights():
    one, other = (linear.plane(1, 5, repair, torch.Generator().manual_seed(3)) for repair in linear.REPAIRS)
    assert torch.equal(one.w, other.w)
    assert not torch.equal(one.key, other.key)


def test_agreement_is_numpys(normal):
    true = normal(101, 1)
    predicted = 0.3 * true + 0.2 * normal(101, 1) + 5
    found = computations_2d.agreement(predicted, true)
    a, b = predicted.flatten().numpy(), true.flatten().numpy()
    assert found["correlation"] == pytest.approx(np.corrcoef(a, b)[0, 1])
    assert found["slope"] == pytest.approx(np.polyfit(b, a, 1)[0])
    assert found["mse"] == pytest.approx(((a - b) ** 2).mean())


def test_computations_are_the_printed_ones():
    problem = linear.plane(1, 11, "absolute", torch.Generator().manual_seed(0))
    query = linear.square(1, 7, 1.0, torch.Generator().manual_seed(1))
    key, value = problem.key, problem.value
    inverse = torch.linalg.inv(key.mT @ key)
    printed = {
        "attention": torch.softmax(query @ key.mT, -1) @ value,
        "linear_attention": query @ key.mT @ value,
        "sigma_intention": torch.softmax(query @ inverse @ key.mT, -1) @ value,
        "intention": query @ inverse @ key.mT @ value,
    }
    for model, wanted in printed.items():
        close(computations_2d.predict(model, query, problem), wanted)


def test_intention_is_exact_inside_and_outside_and_a_line_hides_half():
    rows = rows_of(computations_2d, computations_2d.Config(grid=2, seeds=3))

    def lowest(where: str, repair: str) -> float:
        metric = computations_2d.named("correlation", where, repair)
        return min(r.value for r in rows if r.model == "intention" and r.metric == metric)

    assert lowest("inside", "absolute") > 0.9999
    assert lowest("outside", "absolute") > 0.9999
    assert lowest("inside", "nearest") < 0.9
    assert verdicts(computations_2d, rows)[0] == "holds"
    assert verdicts(computations_2d, rows)[5:] == ["holds", "holds"]


def made_up(inside: dict, outside: dict, slopes: dict) -> list[Row]:
    rows = []
    for seed in range(3):
        for where, found in (("inside", inside), ("outside", outside)):
            for model, value in found.items():
                noise = 1e-5 * (seed - 1)
                rows.append(row(model, f"correlation {where}, absolute", value + noise, seed=seed))
                rows.append(row(model, f"slope {where}, absolute", slopes[model] + noise, seed=seed))
    return rows


def test_verdicts_of_made_up_correlations():
    good = {"intention": 0.99998, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    bad = {"intention": 0.99998, "sigma_intention": 0.9, "attention": 0.6, "linear_attention": 0.6}
    slopes = {"intention": 1.0, "sigma_intention": 0.02, "attention": 1.0, "linear_attention": 50.0}
    text = verdicts(computations_2d, made_up(good, bad, slopes))
    assert text[:5] == ["holds", "holds", "holds in 1 of 2", "holds", "holds"]
    assert verdicts(computations_2d, made_up(good, bad, {**slopes, "sigma_intention": 1.0}))[1:3] == ["holds"] * 2
    half = verdicts(computations_2d, made_up({**good, "attention": 0.999}, bad, slopes))[3:5]
    assert half == ["holds in 1 of 2", "holds"]
    higher = {**bad, "linear_attention": 0.8}
    assert verdicts(computations_2d, made_up(good, higher, slopes))[4] == "holds in 1 of 2"
    same = {**bad, "linear_attention": 0.7}
    assert verdicts(computations_2d, made_up(good, same, slopes))[4] == "holds"  # none of three draws rises
    worse = {**good, "intention": 0.98, "sigma_intention": 0.98}
    assert verdicts(computations_2d, made_up(worse, bad, {**slopes, "intention": 0.5}))[:3] == ["does not hold"] * 3


def test_one_draw_is_never_sure():
    good = {"intention": 0.99998, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    bad = {"intention": 0.99998, "sigma_intention": 0.9, "attention": 0.6, "linear_attention": 0.6}
    rows = made_up(good, bad, dict.fromkeys(good, 1.0))
    assert verdicts(computations_2d, rows)[:5] == ["holds"] * 5
    assert verdicts(computations_2d, [r for r in rows if r.seed == 0])[:5] == ["not decided"] * 5
    limits = rows_of(computations_2d, computations_2d.Config(points=11, queries=37, grid=2, seeds=1))
    assert verdicts(computations_2d, limits)[5:] == ["not decided"] * 2


def test_a_draw_that_is_not_finite_is_not_left_out():
    good = {"intention": 0.99998, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    rows = made_up(good, good, dict.fromkeys(good, 1.0))

    def broken(model: str) -> list[str]:
        bad = (model, "correlation inside, absolute", 1)
        return verdicts(
            computations_2d,
            [dataclasses.replace(r, value=None) if (r.model, r.metric, r.seed) == bad else r for r in rows],
        )

    assert broken("intention")[:3] == ["does not hold", "holds in 1 of 2", "holds"]  # its slopes are known
    assert broken("attention")[3:5] == ["not tested at this size"] * 2


def test_intervals_of_correlations_are_fishers():
    values = {"intention": 1.0, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    rows = made_up(values, values, dict.fromkeys(values, 1.0))
    spread = {0: 0.999, 1: 0.95, 2: 0.5}  # Student's interval would end at 1.5
    rows = [dataclasses.replace(r, value=spread[r.seed]) if r.model == "attention" else r for r in rows]
    found = over_seeds(rows, "attention", "correlation", "inside")
    assert found.mean == pytest.approx(math.tanh(statistics.fmean(map(math.atanh, spread.values()))))
    assert -1 < found.low < 0.5 < found.high < 1


def test_the_range_of_a_map_is_printed():
    rows = rows_of(computations_2d, computations_2d.Config(points=11, queries=37, grid=3, seeds=2))
    figure = computations_2d.plot(rows)[0].draw()
    drawn = next(r.data for r in rows if (r.model, r.metric) == ("sigma_intention", "map inside, absolute"))
    title = next(axis.get_title() for axis in figure.axes if axis.get_title().startswith("σIntention"))
    low, high = (float(word) for word in title.splitlines()[1].split(" to "))
    assert low == pytest.approx(min(drawn["predicted"]), rel=0.06)
    assert high == pytest.approx(max(drawn["predicted"]), rel=0.06)


def test_order_of_a_power():
    alphas = [10.0**power for power in range(-2, 7)]
    assert order(alphas, [3 / alpha for alpha in alphas]) == pytest.approx(-1)
    assert order(alphas[:3], [1.0, 1.0, 1.0]) is None
    metric, data = "distance to linear attention, absolute", {"alpha": alphas, "error": [1.0] * 9}
    flat = [row("intention", metric, 1.0, data=data, seed=seed) for seed in range(3)]
    assert verdicts(computations_2d, flat)[5] == "does not hold"
