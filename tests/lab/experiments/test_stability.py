"""Conjugate gradients in half precision beside the solve, errors of single fits, norms of gradients, and claims."""

import dataclasses
import math

import pytest
import torch

from intention import causal_intention
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import stability
from intention.lab.experiments.base import PRESETS
from intention.lab.experiments.stability import model as models
from intention.lab.experiments.stability import task
from lab.made import rows_of, verdicts

UNTESTED = "not tested at this size"
SMALL = dataclasses.replace(
    stability.PRESETS["quick"],
    steps=3,
    length=20,
    period=6,
    vocabulary=7,
    width=8,
    layers=1,
    evaluation_sequences=5,
    evaluations=2,
    fit_length=9,
    fit_dims=4,
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def rows():
    return rows_of(stability, SMALL)


def test_a_piece_is_repeated_with_mistakes():
    right = task.repeated(50, generator(), length=29, period=6, vocabulary=9, mistakes=0.0).tokens
    assert right.shape == (50, 30)
    periods = [[p for p in range(3, 7) if torch.equal(row[p:], row[:-p])] for row in right]
    assert all(periods)
    assert {min(each) for each in periods} == {3, 4, 5, 6}
    wrong = task.repeated(50, generator(), length=29, period=6, vocabulary=9, mistakes=0.5).tokens
    assert 0.35 < (wrong != right).float().mean() < 0.55  # one in nine is drawn right


@pytest.mark.parametrize("decay", [1.0, 0.9, 0.05])
def test_all_ways_to_solve_are_the_same_fit(decay):
    drawn = task.fits(2, generator(), length=12, dims=3)
    want = task.token_by_token(drawn, 0.3, decay, torch.float64)
    k, v, q = (x.double() for x in (drawn.key, drawn.value, drawn.query))
    left = decay ** (11 - torch.arange(12.0, dtype=torch.float64)).view(-1, 1)
    gram, cross = k.mT @ (left * k) + 0.3 * torch.eye(3), k.mT @ (left * v)
    torch.testing.assert_close(want[:, -1:], q[:, -1:] @ torch.linalg.solve(gram, cross))
    steps = task.conjugate_gradients(drawn, 0.3, decay, 10)
    torch.testing.assert_close(steps.double(), want, rtol=1e-4, atol=1e-5)
    ours = causal_intention(*drawn, alpha=0.3, decay=torch.full((2, 12), decay))
    torch.testing.assert_close(ours.double(), want, rtol=1e-5, atol=1e-6)


def gates(batch, n):
    weight, decay = torch.rand(2, batch, n, generator=generator(3))
    return weight, 0.5 + 0.5 * decay


@pytest.mark.parametrize("n", [20, 3 * models.CHUNK])
def test_sums_in_half_precision_are_the_sums_but_for_their_rounding(n, monkeypatch):
    drawn, (weight, decay) = task.fits(2, generator(), length=n, dims=4), gates(2, n)
    state, want = torch.zeros(2, 4, 4), []
    for t in range(n):
        k, v = drawn.key[:, t, :, None], drawn.value[:, t, None]
        state = decay[:, t, None, None] * state + weight[:, t, None, None] * k @ v
        want.append(drawn.query[:, t, None] @ state)
    want = torch.cat(want, 1)
    rough = models.Sums.of(drawn.key, drawn.value, weight, decay).read(drawn.query)
    assert 1e-4 < (rough - want).norm() / want.norm() < 2e-2
    monkeypatch.setattr(models, "half", lambda x: x)
    exact = models.Sums.of(drawn.key, drawn.value, weight, decay).read(drawn.query)
    torch.testing.assert_close(exact, want, rtol=1e-4, atol=1e-5)


def test_without_rounding_the_iteration_is_the_model_and_has_its_gradients(monkeypatch):
    monkeypatch.setattr(models, "half", lambda x: x)
    monkeypatch.setattr(models, "SAFE", 1e-30)
    torch.manual_seed(0)
    sizes = {"vocabulary": 7, "width": 8, "heads": 2, "layers": 1, "alpha": 0.5, "steps": 30}
    solved, iterated = (models.build(name, **sizes) for name in stability.MODELS)
    iterated.load_state_dict(solved.state_dict())
    assert [type(model.layers[0].mixer).__name__ for model in (solved, iterated)] == ["GatedIntention", "Iterated"]
    tokens, found = torch.randint(7, (3, 20)), []
    for model in (solved, iterated):
        logits = model(tokens, need_streams=False)[0]
        found.append([logits, *torch.autograd.grad(logits.square().mean(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_the_model_is_the_same_at_the_start_and_runs_in_bfloat16():
    sizes = {"vocabulary": 7, "width": 8, "heads": 2, "layers": 1, "alpha": 0.5, "steps": 30}
    weights = []
    for name in stability.MODELS:
        torch.manual_seed(0)
        weights.append(models.build(name, **sizes).state_dict())
    assert all(torch.equal(a, b) for a, b in zip(*(each.values() for each in weights), strict=True))
    seen = []
    model = models.Watched(models.build("intention", **sizes), 2)
    model.model.get_submodule("layers.0.mixer.in_proj").register_forward_hook(
        lambda module, given, out: seen.append(out.dtype)
    )
    assert model(torch.randint(7, (2, 5))).dtype == torch.float32
    assert seen == [torch.bfloat16]


def test_norms_are_those_of_all_weights_at_each_step():
    model = models.Watched(models.build("intention", vocabulary=7, width=8, heads=2, layers=1, alpha=1.0, steps=1), 3)
    wanted = []
    for _ in range(2):
        model.zero_grad()
        stability.loss(model, task.repeated(2, generator(), length=9, period=4, vocabulary=7, mistakes=0.1)).backward()
        wanted.append(torch.cat([w.grad.flatten() for w in model.parameters()]).norm())
        model.eval()(torch.randint(7, (1, 4)))  # what is measured on the way is no step
        model.train()
    torch.testing.assert_close(model.norms(), torch.stack(wanted))


def test_every_case_is_measured(rows):
    found = {(row.model, row.x, row.data["decay"]) for row in rows if row.metric == "error"}
    assert len(found) == 3 * 2 * 2
    for metric in ("steps that were finite", "bits per token", "gradient"):
        found = [row for row in rows if row.metric == metric]
        assert {(row.model, row.x) for row in found} == {(m, x) for m in stability.MODELS for x in (1.0, 1e-4)}
        assert all(row.value > 0 for row in found)
    assert all(len(row.data["by step"]) == 3 for row in rows if row.metric == "gradient")
    assert all(row.data["largest"] >= row.value for row in rows if row.metric == "gradient")
    job = next(job for job in stability.jobs(SMALL) if job.model == "intention")
    assert list(stability.run(job, Place())) == list(stability.run(job, Place()))
    assert set(stability.PRESETS) == set(PRESETS)
    plots = stability.plot(rows)
    assert len(plots) == 3
    plots[0].draw().canvas.draw()
    assert len(plots[1].table) == len(plots[2].table) == 5


def test_a_loss_that_is_not_finite_ends_a_run_and_is_counted(monkeypatch):
    real, calls = stability.loss, []

    def loss(model, drawn):
        calls.append(model.training)
        return real(model, drawn) * (math.nan if sum(calls) == 2 else 1.0)

    monkeypatch.setattr(stability, "loss", loss)
    job = next(job for job in stability.jobs(SMALL) if job.model == "intention")
    found = {m.metric: m for m in stability.run(job, Place())}
    assert found["steps that were finite"].value == 1
    assert math.isnan(found["bits per token"].value)
    assert len(found["gradient"].data["by step"]) == 1


def trained(model, steps=(40, 40), gradient=1.0, alphas=(1.0, 1e-4)):
    config = {"steps": 40}
    found = []
    for alpha, done in zip(alphas, steps, strict=True):
        norm = gradient if alpha == alphas[-1] else 1.0
        found.append(Row("stability", "", "quick", config, model, 0, "steps that were finite", done, alpha))
        found.append(Row("stability", "", "quick", config, model, 0, "gradient", norm, alpha, data={"by step": []}))
    return found


@pytest.mark.parametrize(
    ("rows_", "expected"),
    [
        (trained("intention"), ["holds", UNTESTED, "holds"]),
        (trained("intention", (40, 12)), ["holds in 1 of 2", UNTESTED, "holds"]),
        (trained("intention", (3, 12)), ["does not hold", UNTESTED, "holds"]),
        (trained("intention", alphas=(1.0, 0.1)), [UNTESTED, UNTESTED, "holds"]),  # the smallest was not tried
        (trained("intention", (40, 3), alphas=(1.0, 0.1)), ["does not hold", UNTESTED, "holds"]),
        (trained("intention", gradient=11.0), ["holds", UNTESTED, "does not hold"]),
        (trained("intention", gradient=None), ["holds", UNTESTED, "does not hold"]),
        (trained("conjugate_gradients"), [UNTESTED, "does not hold", UNTESTED]),
        (trained("conjugate_gradients", (40, 12)), [UNTESTED, "holds", UNTESTED]),
    ],
)
def test_what_is_not_finite_is_not_finite(rows_, expected):
    assert verdicts(stability, rows_) == [*expected, UNTESTED, UNTESTED]


def errors(model, *values):
    cases = [(1.0, 0.9), (1.0, 0.05), (1e-4, 0.9)]
    return [
        Row("stability", "", "quick", {}, model, 0, "error", value, alpha, data={"decay": decay, "worst token": value})
        for (alpha, decay), value in zip(cases, values, strict=True)
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((1e-7, 1e-7, 1e-7), ["holds", "holds"]),
        ((1e-7, 1e-7, 9e-6), ["holds", "holds in 2 of 3"]),
        ((1e-7, 1e-7, 2e-5), ["holds in 1 of 2", "holds in 2 of 3"]),
        ((1e-7, 2e-6, 2e-5), ["does not hold", "holds in 1 of 3"]),
        ((1e-7, 1e-7, None), ["holds in 1 of 2", "holds in 2 of 3"]),
    ],
)
def test_errors_are_bounded_in_the_worst_case_and_in_the_median(own, expected):
    assert verdicts(stability, [*errors("intention", *own), *errors("solve", 2e-7, 2e-7, 2e-7)])[3:] == expected
    assert verdicts(stability, errors("intention", *own))[3:] == [expected[0], UNTESTED]


def test_missing_rows_are_not_tested_and_do_not_crash(rows):
    for kept in (set(), {"solve"}):
        some = [row for row in rows if row.model in kept]
        assert set(verdicts(stability, some)) == {UNTESTED}
        assert len(stability.plot(some)) == len(kept)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("svd",)}, "there is no model svd"),
        ({"alphas": (0.0,)}, "alphas must be > 0"),
        ({"alphas": ()}, "alphas must name"),
        ({"decays": (0.0,)}, "decays must be > 0"),
        ({"length": 100}, "length must be less than 64 or a multiple"),
        ({"mistakes": 1.5}, "mistakes must be a share"),
        ({"width": 9}, "the width must be a multiple"),
        ({"iterations": 0}, "iterations must be at least 1"),
    ],
)
def test_impossible_configs_fail_with_a_reason(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
