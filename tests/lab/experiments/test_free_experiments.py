"""The experiments that train nothing, or nearly nothing: computations_2d, normalisation, slowdown, layers."""

from __future__ import annotations

import dataclasses
import io
import math
import statistics
from functools import partial

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from intention import functional as F
from intention import nn as inn
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import base, computations_2d, layers, normalisation, slowdown
from intention.lab.experiments.base import Job
from intention.lab.experiments.computations_2d import claims as computations_2d_claims
from intention.lab.experiments.computations_2d import task as linear
from intention.lab.experiments.layers import model as descent

close = partial(assert_close, rtol=1e-10, atol=1e-10)

TINY = {
    computations_2d: computations_2d.Config(points=11, queries=37, grid=3, seeds=2),
    normalisation: normalisation.Config(sizes=(3, 5), dimensions=(1, 2, 7, 48, 96), near=(1, 2), draws=300),
    slowdown: slowdown.Config(repetitions=7, smallest=3, largest=23),
    layers: layers.Config(kappas=(1.1, 10.0), d=5, points=7, problems=11, steps=3, batch=2, seeds=2),
}
EXPERIMENTS = list(TINY)


def identify(module) -> str:
    return module.__name__.split(".")[-1]


def rows_of(module, config) -> list[Row]:
    fields, rows = dataclasses.asdict(config), []
    for job in module.jobs(config):
        for m in module.run(job, Place()):
            model = m.model or job.model
            name = job.experiment
            rows.append(Row(name, job.id, "quick", fields, model, job.seed, m.metric, m.value, m.x, m.interval, m.data))
    return rows


def row(model: str, metric: str, value, x=None, seed: int = 0, **fields) -> Row:
    return Row("e", "r", "quick", {}, model, seed, metric, value, x, **fields)


def verdicts(module, rows) -> list[str]:
    return [claim.verdict for claim in module.claims(rows)]


@pytest.fixture
def normal():
    """Standard normal tensors in float64."""
    return partial(torch.randn, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module", params=EXPERIMENTS, ids=identify)
def tiny(request):
    return request.param, rows_of(request.param, TINY[request.param])


# --- all four, end to end ---------------------------------------------------------------------------------------------


def test_rows_become_claims_and_figures(tiny):
    module, rows = tiny
    assert all(claim.verdict in base.VERDICTS for claim in module.claims(rows))
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


# --- tasks ------------------------------------------------------------------------------------------------------------


def test_regression_answers_are_the_weights():
    task = linear.regression(3, 11, 5, torch.Generator().manual_seed(0))
    assert task.key.shape == (3, 11, 5)
    assert task.target.shape == (3, 5, 1)
    assert_close(task.key @ task.target, task.value)
    again = linear.regression(3, 11, 5, torch.Generator().manual_seed(0))
    assert torch.equal(task.value, again.value)


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


def test_conditioned_problems_have_their_condition_number():
    problem = linear.conditioned(3, 13, 7, 30.0, torch.Generator().manual_seed(0))
    values = torch.linalg.eigvalsh(problem.key.mT @ problem.key)
    close(values.amax(-1), torch.full((3,), 30.0, dtype=torch.float64))
    close(values.amin(-1), torch.ones(3, dtype=torch.float64))
    close(problem.value, problem.key @ problem.w)


# --- computations_2d --------------------------------------------------------------------------------------------------


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
    assert verdicts(computations_2d, rows)[4:] == ["holds", "holds"]


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
    assert text[:4] == ["holds", "partly", "holds", "holds"]
    assert verdicts(computations_2d, made_up(good, bad, {**slopes, "sigma_intention": 1.0}))[1] == "holds"
    assert verdicts(computations_2d, made_up({**good, "attention": 0.999}, bad, slopes))[2:4] == ["partly", "holds"]
    same = {**bad, "linear_attention": 0.7}
    assert verdicts(computations_2d, made_up(good, same, slopes))[3] == "partly"
    worse = {**good, "intention": 0.98, "sigma_intention": 0.98}
    assert verdicts(computations_2d, made_up(worse, bad, {**slopes, "intention": 0.5}))[:2] == ["does not hold"] * 2


def test_one_draw_is_never_sure():
    good = {"intention": 0.99998, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    bad = {"intention": 0.99998, "sigma_intention": 0.9, "attention": 0.6, "linear_attention": 0.6}
    rows = made_up(good, bad, dict.fromkeys(good, 1.0))
    assert verdicts(computations_2d, rows)[:4] == ["holds"] * 4
    assert verdicts(computations_2d, [r for r in rows if r.seed == 0])[:4] == ["partly"] * 4
    limits = rows_of(computations_2d, computations_2d.Config(points=11, queries=37, grid=2, seeds=1))
    assert verdicts(computations_2d, limits)[4:] == ["partly"] * 2


def test_a_draw_that_is_not_finite_is_not_left_out():
    good = {"intention": 0.99998, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    rows = made_up(good, good, dict.fromkeys(good, 1.0))

    def broken(model: str) -> list[str]:
        bad = (model, "correlation inside, absolute", 1)
        return verdicts(
            computations_2d,
            [dataclasses.replace(r, value=None) if (r.model, r.metric, r.seed) == bad else r for r in rows],
        )

    assert broken("intention")[:2] == ["does not hold", "partly"]  # partly: its slopes are known
    assert broken("attention")[2:4] == ["not tested at this size"] * 2


def test_intervals_of_correlations_are_fishers():
    values = {"intention": 1.0, "sigma_intention": 0.999, "attention": 0.7, "linear_attention": 0.7}
    rows = made_up(values, values, dict.fromkeys(values, 1.0))
    spread = {0: 0.999, 1: 0.95, 2: 0.5}  # Student's interval would end at 1.5
    rows = [dataclasses.replace(r, value=spread[r.seed]) if r.model == "attention" else r for r in rows]
    found = computations_2d_claims.over_seeds(rows, "attention", "correlation", "inside")
    assert found.mean == pytest.approx(math.tanh(statistics.fmean(map(math.atanh, spread.values()))))
    assert -1 < found.low < 0.5 < found.high < 1


def test_the_range_of_a_map_is_printed():
    rows = rows_of(computations_2d, TINY[computations_2d])
    figure = computations_2d.plot(rows)[0].draw()
    drawn = next(r.data for r in rows if (r.model, r.metric) == ("sigma_intention", "map inside, absolute"))
    title = next(axis.get_title() for axis in figure.axes if axis.get_title().startswith("σIntention"))
    low, high = (float(word) for word in title.splitlines()[1].split(" to "))
    assert low == pytest.approx(min(drawn["predicted"]), rel=0.06)
    assert high == pytest.approx(max(drawn["predicted"]), rel=0.06)


def test_order_of_a_power():
    alphas = [10.0**power for power in range(-2, 7)]
    assert computations_2d_claims.order(alphas, [3 / alpha for alpha in alphas]) == pytest.approx(-1)
    assert computations_2d_claims.order(alphas[:3], [1.0, 1.0, 1.0]) is None
    flat = [row("intention", "distance to linear attention, absolute", 1.0, data={"alpha": alphas, "error": [1.0] * 9})]
    assert verdicts(computations_2d, flat)[4] == "does not hold"


# --- normalisation ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(5, 11), (11, 5)])
def test_variances_are_those_of_the_maps(n, d, normal):
    """The variance over queries, given the keys, against the maps of the library at many queries."""
    key, m = normal(1, n, d), 200_003
    query, unit = normal(1, m, d), torch.eye(n, dtype=torch.float64).unsqueeze(0)
    maps = {
        "unscaled": F.intention(query, key, unit, alpha=0),
        "scaled": d**0.5 * query @ torch.linalg.pinv(key),
        "regularised": F.intention(query, key, unit, covariance="convex", alpha=0.5, scale=0.5 * d**0.5),
        "variance": inn.Intention(1.0, scale="variance")(query, key, unit),
    }
    found = normalisation.variances(key)
    for model, z in maps.items():
        assert found[model].item() == pytest.approx(z.square().mean().item(), rel=0.01), model


@pytest.mark.parametrize(("n", "d"), [(7, 31), (31, 7)])
def test_exact_variance(n, d):
    key = torch.randn(20_000, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert normalisation.variances(key)["unscaled"].mean().item() == pytest.approx(normalisation.exact(n, d), rel=0.01)
    assert normalisation.exact(7, 8) == normalisation.exact(7, 7) == normalisation.exact(7, 6) == math.inf


def test_draws_stop_when_the_mean_is_known():
    config = normalisation.Config(draws=5000, error=0.01)
    counts = [
        len(normalisation.draw(n, d, config, torch.Generator().manual_seed(0))["unscaled"])
        for n, d in ((4, 512), (4, 16), (8, 8))
    ]
    assert counts[0] == 2 * normalisation.BATCH < counts[1] < 5000
    assert counts[2] == 5000 // 6


def made_up_variances(scale: float = 1.0, half: float = 0.001, peak: float = 3.0) -> list[Row]:
    rows = []
    for d in (1, 2, 4, 16, 24, 32, 64, 128, 1024):
        true = min(normalisation.exact(16, d), 1e4) * scale
        for model, value in (("unscaled", true), ("scaled", d * true), ("regularised", peak if d == 16 else 1.0)):
            interval = (value * (1 - half), value * (1 + half))
            rows.append(row(model, "variance", value, d, interval=interval, data={"n": 16}))
        rows.append(row("variance", "variance", 0.7, d, data={"n": 16}))
    return rows


def test_verdicts_of_made_up_variances():
    text = verdicts(normalisation, made_up_variances())
    assert text == ["holds", "does not hold", "holds", "holds", "partly", "holds"]
    assert verdicts(normalisation, made_up_variances(scale=1.02, half=0.02))[0] == "partly"
    assert verdicts(normalisation, made_up_variances(scale=1.05))[0] == "does not hold"
    assert verdicts(normalisation, made_up_variances(peak=1.5))[4] == "holds"
    assert verdicts(normalisation, made_up_variances(peak=1e6))[4] == "does not hold"
    assert verdicts(normalisation, made_up_variances(scale=1.5))[3] == "does not hold"
    outside = [
        dataclasses.replace(r, value=0.4) if r.model == "variance" and r.x == 64 else r for r in made_up_variances()
    ]
    assert verdicts(normalisation, outside)[5] == "does not hold"
    exploding = [
        dataclasses.replace(r, value=9.0) if r.model == "unscaled" and r.x == 1 else r for r in made_up_variances()
    ]
    assert verdicts(normalisation, exploding)[1] == "holds"


# --- slowdown ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "d"), [(13, 5), (5, 13)])
def test_timed_codes_compute_what_they_should(n, d, normal):
    query, key, value = normal(1, 1, n, d), normal(1, 1, n, d), normal(1, 1, n, d)
    close(slowdown.inverse(query, key, value), F.intention(query, key, value, alpha=0))
    for code in (slowdown.cholesky, slowdown.ours):
        close(code(query, key, value), F.intention(query, key, value, alpha=1))
    for code in (slowdown.attention, slowdown.fused):
        close(code(query, key, value), F.attention(query, key, value))


def test_the_paper_repetitions_in_every_preset():
    assert all(config.repetitions >= 1809 for config in slowdown.PRESETS.values())
    assert slowdown.EXCLUSIVE


def test_sizes_are_log_uniform_and_reach_both_ends():
    config, generator = slowdown.Config(smallest=16, largest=31), torch.Generator().manual_seed(0)
    sizes = [slowdown.size(config, generator) for _ in range(4000)]
    assert (min(sizes), max(sizes)) == (16, 31)
    wide = slowdown.Config()
    logs = [math.log(slowdown.size(wide, generator)) for _ in range(4000)]
    assert statistics.fmean(logs) == pytest.approx((math.log(16) + math.log(724)) / 2, abs=0.06)


def test_threads_are_given_back():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        list(slowdown.run(Job("slowdown", TINY[slowdown], "all", 0), Place()))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_summary_of_known_ratios():
    ratios = [2.0 ** (index / 10) for index in range(-20, 41)]  # 1/4 to 16, median 2
    found = {m.metric.split(", ", 1)[1]: m for m in slowdown.summary("inverse", "attention", ratios, [(3, 5)] * 61)}
    assert found["median"].value == pytest.approx(2)
    assert found["median"].interval[0] < 2 < found["median"].interval[1]
    assert found["10th percentile"].value == pytest.approx(2**-1.4)
    assert found["90th percentile"].value == pytest.approx(2**3.4)
    assert found["share in [1, 4]"].value == pytest.approx(21 / 61)
    assert found["share at most 4"].value == pytest.approx(41 / 61)
    assert sum(found["median"].data["counts"]) == 61
    assert slowdown.histogram([1e-9, 1e9])[0] == slowdown.histogram([1e-9, 1e9])[-1] == 1


def test_wilson_interval():
    """Newcombe 1998, table I: 81 of 263 is 0.2553 to 0.3662."""
    assert slowdown.wilson(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)


def test_verdicts_of_made_up_slowdowns():
    def text(code: str, base: str, ratios: list[float]) -> list[str]:
        measures = slowdown.summary(code, base, ratios, [(16, 16)] * len(ratios))
        return verdicts(slowdown, [row(code, m.metric, m.value, interval=m.interval, data=m.data) for m in measures])

    assert text("inverse", "attention", [2.0] * 200)[0] == "holds"
    assert text("inverse", "attention", [2.0] * 150 + [7.0] * 50)[0] == "partly"
    assert text("inverse", "attention", [0.5] * 200)[0] == "does not hold"
    measures = slowdown.summary("inverse", "attention", [2.0] * 200, [(16, 16)] * 200)
    assert verdicts(slowdown, [row("inverse", m.metric, m.value) for m in measures])[0] == "partly"  # no intervals
    assert text("intention", "attention", [0.5] * 200)[2] == "holds"
    assert text("intention", "fused", [9.0] * 200)[3] == "does not hold"


# --- layers -----------------------------------------------------------------------------------------------------------


def test_stacked_layers_are_gradient_steps(normal):
    """L layers of linear attention over residual values = L explicit steps on w, here by autograd."""
    n, m, d, depth = 11, 7, 5, 13
    query, key, value = normal(m, d), normal(n, d), normal(n, 1)
    steps = 0.02 + 0.01 * torch.rand(depth, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    w = torch.zeros(d, 1, dtype=torch.float64)
    problem = linear.Problem(key.unsqueeze(0), value.unsqueeze(0), w.unsqueeze(0))
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
        curve = layers._constant_curve(model, kappa, linear.Problem(key, key @ w, w), ratio)
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
    problem = linear.conditioned(4000, 5, 5, kappa, torch.Generator().manual_seed(0))
    steps = torch.full((1, depth), descent.constant("step_l", kappa), dtype=torch.float64)
    *_, last = descent.stack(steps, descent.unit_queries(problem), problem)
    eigenvalues = torch.linalg.eigvalsh(problem.key.mT @ problem.key)
    expected = (1 - eigenvalues / kappa).pow(2 * depth).mean().item()
    assert descent.left(last, problem.w).item() == pytest.approx(expected, rel=0.05)


def test_stacks_beside_each_other_are_the_stacks_alone():
    problem, tried = linear.conditioned(3, 7, 5, 4.0, torch.Generator().manual_seed(0)), [1, 3, 4]
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
    assert abs(found["learned"].value - found["chebyshev"].value) <= 1
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
    assert text == ["partly", "holds", "does not hold", "holds", "holds"]
    printed = {"step_l": {1.1: 2, 10.0: 24, 100.0: 250}, "step_l_mu": {1.1: 2, 10.0: 24, 100.0: 250}}
    assert verdicts(layers, made_up_layers(printed))[0] == "holds"
    assert verdicts(layers, made_up_layers(printed))[2] == "holds"
    flat = {"step_l": {1.1: 99, 10.0: 99, 100.0: 99}, "step_l_mu": {1.1: 99, 10.0: 99, 100.0: 99}}
    text = verdicts(layers, made_up_layers(flat, tenth=2.0, left=1e-3))
    assert text == ["does not hold", "does not hold", "holds", "does not hold", "does not hold"]
    falling = {model: {10.0: 50, 100.0: 40} for model in counts}
    one_seed = [r for r in made_up_layers(falling) if r.seed == 0]
    assert verdicts(layers, one_seed)[4] == "does not hold"


def test_one_seed_of_layers_is_never_sure():
    counts = {"step_l": {1.1: 2, 10.0: 44, 100.0: 460}, "step_l_mu": {1.1: 2, 10.0: 23, 100.0: 230}}
    one_seed = [r for r in made_up_layers(counts) if r.seed == 0]
    assert verdicts(layers, one_seed)[1:] == ["partly"] * 4
    equal = [r for r in made_up_layers(dict.fromkeys(counts, counts["step_l"])) if r.seed == 0]
    assert verdicts(layers, equal)[2] == "partly"  # nor that 1/L is perfect


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
