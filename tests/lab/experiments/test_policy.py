"""Policy distillation: the task, its closed forms, the models, and the experiment from end to end."""

import dataclasses
import math

import pytest
import torch

from intention import nn as inn
from intention.lab.core.place import Place
from intention.lab.core.results import Row, estimate_log
from intention.lab.experiments import compare
from intention.lab.experiments import policy as experiment
from intention.lab.experiments.base import Claim, Job, Net
from intention.lab.experiments.compare import (
    applicable,
    at_most,
    best,
    by_model,
    correlation,
    errors,
    every,
    learnt,
    ratio,
    together,
    untrained,
    verdict,
)
from intention.lab.experiments.policy import model as models
from intention.lab.experiments.policy import references
from intention.lab.experiments.policy import task as policy
from intention.lab.models.references import zero

TINY = Net((7, 11), (5, 2))
CONFIG = dataclasses.replace(
    experiment.PRESETS["quick"],
    seeds=2,
    steps=3,
    batch=5,
    evaluation_tasks=13,
    evaluations=3,
    **{name: dataclasses.replace(TINY, heads=3) for name in models.MODELS if name != "mlp"},
    mlp=Net((), (7, 2)),
)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows_of(job):
    config = dataclasses.asdict(job.config)
    for made in experiment.run(job, Place()):
        name = made.model or job.model
        yield Row(
            "policy", job.id, "quick", config, name, job.seed, made.metric, made.value, made.x, made.interval, made.data
        )


@pytest.fixture(scope="module")
def rows():
    return [row for job in experiment.jobs(CONFIG) for row in rows_of(job)]


@pytest.mark.parametrize("reward", ["squared", "gaussian"])
def test_the_task_is_that_of_the_appendix(reward):
    episode = policy.sample(20_011, generator(), reward=reward, width=1.5)
    seen, observed = episode.key[..., :2], episode.key[..., 2]
    assert episode.key.shape == (20_011, 5, 3)
    assert episode.target.shape == (20_011, 1, 2)
    assert episode.key is episode.value
    assert episode.key is episode.query
    assert seen.var().item() == pytest.approx(0.25, rel=0.02)  # N(0, 1/4) is a variance
    assert episode.target.var().item() == pytest.approx(1.0, rel=0.03)
    squared = (seen - episode.target).square().sum(-1)
    expected = squared if reward == "squared" else torch.exp(-squared / (2 * 1.5**2))
    torch.testing.assert_close(observed, expected)


def test_tasks_follow_from_the_generator():
    first, again, other = (policy.sample(7, generator(seed)) for seed in (3, 3, 4))
    assert torch.equal(first.key, again.key)
    assert not torch.equal(first.key, other.key)


@pytest.mark.parametrize("width", [1.0, 0.7])
@pytest.mark.parametrize("reward", ["squared", "gaussian"])
@pytest.mark.parametrize("closed", [references.trilateration, references.intention_exact])
def test_closed_forms_find_the_target_without_training(closed, reward, width):
    episode = policy.sample(501, generator(), reward=reward, width=width)
    error = (closed(episode, reward, width) - episode.target).abs().amax((-2, -1))
    # float32 observations of nearly collinear points leave some digits to be desired in a few tasks
    assert error.median() < 1e-5
    assert error.mean() < 1e-2


@pytest.mark.parametrize("reward", ["squared", "gaussian"])
def test_ridge_on_raw_features_points_at_the_target(reward):
    episode = policy.sample(501, generator(), reward=reward)
    error = (references.ridge_raw(episode, reward) - episode.target).square().mean()
    assert 0.01 < error < 0.3
    assert (zero(episode) - episode.target).square().mean() > 0.8


@pytest.mark.parametrize("name", models.MODELS)
def test_models_predict_one_place_for_each_task(name):
    model = models.build(name, TINY.embed, TINY.decode, heads=3, points=4)
    episode = policy.sample(13, generator(), points=4)
    out = model(episode.query, episode.key, episode.value)
    assert out.shape == (13, 1, 2)
    out.square().sum().backward()
    missing = [key for key, parameter in model.named_parameters() if parameter.grad is None]
    assert missing == []
    if name != "mlp":  # the MLP alone knows the order of the observations
        order = torch.tensor([2, 0, 3, 1])
        torch.testing.assert_close(model(*(x[:, order] for x in episode[:3])), out, rtol=1e-4, atol=1e-5)


def test_few_points_is_the_intention_head():
    embed, embed_value = inn.mlp(3, 11), inn.mlp(2, 7)
    own = models.FewPoints(0.3, embed, embed_value)
    head = inn.Intention(inn.LearnableAlpha(0.3), embed_query=embed, embed_key=embed, embed_value=embed_value)
    query, key, value = torch.randn(2, 13, 3), torch.randn(2, 5, 3), torch.randn(2, 5, 2)
    torch.testing.assert_close(own(query, key, value), head(query, key, value), rtol=1e-3, atol=1e-4)


def test_weights_are_those_of_the_stacked_observations():
    model = models.build("intention", (7,), (2,), alpha=0.2)
    episode = policy.sample(3, generator())
    points = torch.cat([episode.key] * 3, -1).double()
    value = model.head.embed_value(points.float()).double()  # pyright: ignore[reportAttributeAccessIssue]
    # w = (K'K + alpha I)^-1 K'V with K = [O, O, O]
    w = torch.linalg.solve(points.mT @ points + 0.2 * torch.eye(9), points.mT @ value)
    expected = model.decode(w.flatten(-2).float())
    torch.testing.assert_close(model(*episode[:3])[:, 0], expected, rtol=1e-3, atol=1e-4)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="there is no model 'transformer'"):
        models.build("transformer", (7,), (2,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("intention", "maml")}, "there is no model maml"),
        ({"reward": ("cubic",)}, "there is no reward cubic"),
        ({"seeds": 0}, "seeds must be at least 1"),
        ({"alpha": 0.0}, "alpha must be > 0"),
        ({"width": -1.0}, "width must be > 0"),
        ({"points": 2}, "points must be at least 3"),
        ({"schedule": "linear"}, "schedule must be one of"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"mlp": Net((), (7, 3))}, "mlp.decode ends with the place"),
        ({"intention": Net((), (7, 2))}, "intention.embed must have at least one size"),
    ],
)
def test_impossible_configs_fail_with_a_reason(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **change)


@pytest.mark.parametrize(("sizes", "message"), [(((7,), (0, 2)), "sizes must be positive"), ((), "embed")])
def test_impossible_sizes_fail_with_a_reason(sizes, message):
    with pytest.raises((ValueError, TypeError), match=message):
        Net(*sizes)


def test_jobs_are_models_rewards_and_seeds():
    jobs = list(experiment.jobs(dataclasses.replace(CONFIG, models=("intention", "mlp"), reward=("gaussian",))))
    assert {job.model for job in jobs} == {"intention", "mlp", "references"}
    assert {job.at["reward"] for job in jobs} == {"gaussian"}
    assert len({job.id for job in jobs}) == len(jobs) == 3 * 2
    everything = {job.id for job in experiment.jobs(CONFIG)}
    assert {job.id for job in jobs} <= everything  # fewer models, the same runs


def test_a_run_repeats_bit_by_bit():
    job = Job("policy", CONFIG, "intention", 1, {"reward": "squared"})
    assert list(experiment.run(job, Place())) == list(experiment.run(job, Place()))
    other = dataclasses.replace(job, seed=0)
    assert list(experiment.run(job, Place())) != list(experiment.run(other, Place()))


def test_held_out_tasks_are_not_those_of_training(monkeypatch):
    seeds = []

    def sample(batch, generator, **options):
        seeds.append(generator.initial_seed())
        return actual(batch, generator, **options)

    actual = policy.sample
    monkeypatch.setattr(policy, "sample", sample)
    for model, seed in (("intention", 1), ("mlp", 1), ("mlp", 0)):
        list(experiment.run(Job("policy", CONFIG, model, seed, {"reward": "squared"}), Place()))
    held_out, training = seeds[::4], [seed for place, seed in enumerate(seeds) if place % 4]
    assert held_out[0] == held_out[1] != held_out[2]
    assert not set(held_out) & set(training)


def test_rows_hold_what_the_figures_read(rows):
    trained = [row for row in rows if row.metric == "mse" and row.model in models.MODELS]
    assert len(trained) == len(models.MODELS) * 2 * 2
    assert all(row.interval[0] < row.value < row.interval[1] for row in trained)
    steps = {row.x for row in rows if row.metric == "mse during training"}
    assert steps == {0, 1, 2, 3}
    example = next(row for row in rows if row.metric == "examples").data
    assert len(example["observed"]) == len(example["target"]) == len(example["predicted"]) == 4
    # all models of a seed are held against the same tasks
    shown = [row.data["target"] for row in rows if row.metric == "examples" and row.seed == 1]
    assert all(target == shown[0] for target in shown)


def test_last_entry_of_the_history_is_the_final_error(rows):
    for model in models.MODELS:
        mine = [row for row in rows if row.model == model and row.seed == 0 and row.data["reward"] == "squared"]
        last = [row.value for row in mine if row.metric == "mse during training" and row.x == 3]
        final = [row.value for row in mine if row.metric == "mse"]
        assert last == pytest.approx(final)


def test_claims_and_figures_from_rows(rows):
    claims = experiment.claims(rows)
    assert len(claims) == 5
    assert all(claim.measured for claim in claims)
    assert claims[-1].verdict == "holds"  # no training is needed
    plots = experiment.plot(rows)
    assert [plot.title for plot in plots] == [
        "Error by model",
        "Examples, gaussian reward",
        "Examples, squared reward",
        "Error during training",
    ]
    for plot in plots:
        plot.draw().canvas.draw()


LACKING = [{"mlp"}, {"intention"}, {"references"}, {"intention", "zero"}, {"intention", "zero", "mlp"}, set()]


@pytest.mark.parametrize("kept", LACKING)
def test_missing_rows_are_not_tested_and_do_not_crash(rows, kept):
    some = [row for row in rows if row.model in kept]
    claims = experiment.claims(some)
    assert {claim.verdict for claim in claims[:4]} <= {"not tested at this size"}
    for plot in experiment.plot(some):
        plot.draw().canvas.draw()


def made_up(errors, reward="squared"):
    return [
        Row("policy", "", "quick", {}, model, seed, "mse", value, data={"reward": reward})
        for model, values in errors.items()
        for seed, value in enumerate(values)
    ]


OWN = (0.01, 0.009, 0.0095)
NAIVE = {"zero": (1.0, 1.0, 1.0), "mlp": (1.0, 1.02, 0.98), "neural_process": (1.02, 1.0, 0.98)}  # learned nothing
BEHIND = {"zero": (1.0, 1.0, 1.0), "mlp": (0.7, 0.72, 0.7), "neural_process": (0.7, 0.69, 0.7)}  # learned a little


@pytest.mark.parametrize(
    ("attention", "only", "better"),
    [
        ((0.11, 0.1, 0.09), "does not hold", "holds"),  # improves too, but stays behind
        ((0.03, 0.06, 0.05), "does not hold", "not decided"),  # 4 times worse on average, not surely
        ((0.02, 0.019, 0.021), "does not hold", "does not hold"),  # behind, not by that much
        ((0.02, 0.005, 0.011), "does not hold", "not decided"),  # perhaps by that much
        ((0.001, 0.0011, 0.001), "does not hold", "does not hold"),
    ],
)
def test_verdicts_follow_the_numbers(attention, only, better):
    rows = made_up({**BEHIND, "intention": OWN, "attention": attention})
    claims = experiment.claims(rows)
    assert [claim.verdict for claim in claims[:2]] == [only, better]
    assert "read as: at most 1/4 of the best one's error" in claims[1].text


def test_a_baseline_that_has_not_learnt_is_not_beaten():
    rows = made_up({**NAIVE, "intention": OWN, "attention": (0.11, 0.1, 0.09)})
    better = experiment.claims(rows)[1]
    assert better.verdict == "not tested at this size"
    assert "Neural Process did not learn (3 of 3 runs), MLP did not learn (3 of 3 runs)" in better.measured
    assert experiment.claims(made_up({**NAIVE, "intention": OWN, "attention": (1.01, 0.99, 1.0)}))[0].verdict == "holds"


@pytest.mark.parametrize(
    ("sigma", "mlp", "expected"),
    [
        ((0.5, 0.6, 0.7), (0.7,) * 3, "holds"),
        ((0.5, 0.6, 0.9), (0.7,) * 3, "holds in 2 of 3"),
        ((0.9, 0.9, 0.9), (0.7,) * 3, "does not hold"),
        ((0.9, 0.9, 0.9), (0.9,) * 3, "not tested at this size"),  # training was too short
        ((0.5, 0.5, 0.5), (0.9,) * 3, "holds"),
    ],
)
def test_sigma_intention_is_held_to_what_the_paper_says(sigma, mlp, expected):
    rows = made_up({**BEHIND, "attention": (0.5,) * 3, "mlp": mlp, "sigma_intention": sigma})
    claim = experiment.claims(rows)[2]
    assert claim.verdict == expected
    assert "put to the test" in claim.text


def test_better_is_judged_for_each_reward():
    far, near = ({**BEHIND, "intention": OWN, "attention": attention} for attention in ((0.1,) * 3, (0.02,) * 3))
    assert experiment.claims([*made_up(far), *made_up(far, "gaussian")])[1].verdict == "holds"
    assert experiment.claims([*made_up(far), *made_up(near, "gaussian")])[1].verdict == "holds in 1 of 2"


def test_runs_that_are_missing_do_not_help():
    complete = {**NAIVE, "intention": OWN, "attention": (1.01, 0.99, 1.0)}
    for model in ("intention", "mlp", "neural_process", "attention"):
        without = experiment.claims(made_up({name: values for name, values in complete.items() if name != model}))
        fewer = experiment.claims(made_up({**complete, model: complete[model][:2]}))
        for claims in (without, fewer):
            assert [claim.verdict for claim in claims[:2]] == ["not tested at this size"] * 2
            assert [claim.measured for claim in claims[:2]] == ["", ""]


def test_runs_that_are_not_finite_do_not_help():
    complete = {**NAIVE, "intention": OWN, "attention": (1.01, 0.99, 1.0)}
    learned = {**BEHIND, "intention": OWN, "attention": (0.7, 0.7, 0.7)}
    own = experiment.claims(made_up({**learned, "intention": (0.01, None, 0.01)}))
    assert [claim.verdict for claim in own[:2]] == ["does not hold"] * 2
    assert "Intention not finite in 1 of 3 runs" in own[1].measured
    one = experiment.claims(made_up({**complete, "mlp": (None, 1.0, 1.0)}))
    assert [claim.verdict for claim in one[:2]] == ["not tested at this size"] * 2  # others are finite
    improving = experiment.claims(made_up({**complete, "mlp": (None, 1.0, 1.0), "attention": (0.1, 0.1, 0.1)}))
    assert improving[0].verdict == "does not hold"
    none = dict.fromkeys(("mlp", "neural_process", "attention"), (None, 1.0, 1.0))
    assert experiment.claims(made_up({**complete, **none}))[1].verdict == "not tested at this size"


def test_the_best_needs_all_models_with_the_same_seeds():
    found = {"mlp": {0: 0.2, 1: 0.3}, "attention": {0: math.inf, 1: 0.1}, "maml": {0: 0.1}}
    assert best(found, ("mlp", "attention")) == {0: 0.2, 1: 0.1}
    assert best(found, ("mlp", "attention", "maml")) == {}
    assert best(found, ("mlp", "transformer")) == {}
    assert best({}, ("mlp",)) == {}


def test_a_ratio_needs_the_same_seeds_and_finite_errors():
    assert ratio({0: 2.0, 1: 8.0}, {0: 1.0, 1: 1.0}).mean == pytest.approx(4)
    assert ratio({0: 2.0, 1: 8.0}, {0: 1.0}) is None
    assert ratio({0: 2.0}, {0: 1.0, 1: 1.0}) is None
    assert ratio({}, {}) is None
    assert ratio({0: math.inf, 1: 8.0}, {0: 1.0, 1: 1.0}) is None  # nothing to compare with
    assert verdict(ratio({0: 2.0, 1: 8.0}, {0: math.inf, 1: 1.0}), 1) == "does not hold"
    assert verdict(ratio({0: math.inf, 1: 8.0}, {0: math.inf, 1: 1.0}), 1) == "does not hold"


def test_a_diverged_run_is_infinitely_bad():
    found = by_model(made_up({"intention": (0.1, None), "mlp": (0.2, 0.3)}))
    assert found["intention"] == {0: 0.1, 1: math.inf}
    assert errors(found, ("intention", "mlp")) == "Intention not finite in 1 of 2 runs, MLP 0.245 [0.019, 3.2]"


def test_verdicts_of_several_cases():
    untested = "not tested at this size"
    assert together(["holds", "holds"]) == "holds"
    assert together(["holds", "does not hold"]) == "holds in 1 of 2"
    assert together([untested, "holds"]) == "holds in 1 of 2 (1 open)"
    assert together([untested, "not decided"]) == "not decided"
    assert together([untested, "does not hold"]) == "holds in 0 of 2 (1 open)"
    assert together(["holds in 1 of 3 (1 open)", "holds", "not decided"]) == "holds in 2 of 5 (2 open)"
    assert together([untested, untested]) == together([]) == untested
    assert verdict(estimate_log([2.0]), 1) == "not decided"  # one seed has no interval
    assert verdict(estimate_log([2.0, 2.1, 2.0]), 4) == "does not hold"
    assert at_most(estimate_log([2.0, 2.1, 2.0]), 4) == "holds"
    assert at_most(estimate_log([2.0, 9.0, 2.0]), 4) == "not decided"
    assert at_most(None, 4) == untested
    assert every(["holds", "holds"]) == "holds"
    assert every(["not decided", "does not hold", untested]) == "does not hold"
    assert every(["not decided", untested]) == untested


def test_what_has_learnt_nothing_is_told():
    found = {"mlp": learnt({0: 0.8, 1: 0.81, 2: math.inf}, {0: 1.0, 1: 1.0, 2: 1.0}), "attention": {0: True}}
    assert found["mlp"] == {0: True, 1: False, 2: False}
    assert untrained(found, ("mlp", "attention", "maml")) == "MLP did not learn (2 of 3 runs)"
    assert untrained(found, ("attention",)) == ""
    assert compare.tested("holds", "") == "holds"
    assert compare.tested("holds", "MLP did not learn") == "not tested at this size"
    assert applicable("mlp", found) == ("MLP learnt it in 1 of 3 runs", "holds in 1 of 3")
    assert applicable("maml", found) == ("", "not tested at this size")


def test_a_verdict_is_one_that_there_is():
    assert Claim("", "Figure 9", "", "holds in 3 of 5 (1 open)").kind == "holds in some cases"
    assert [Claim("", "", "", said).final for said in ("holds", "does not hold", "holds in 3 of 5")] == [True] * 3
    open_ones = ("not decided", "not tested at this size", "holds in 3 of 5 (1 open)")
    assert [Claim("", "", "", said).final for said in open_ones] == [False] * 3
    assert [Claim("", where, "", "holds").ours for where in ("Figure 9", "Figure 9, our own line")] == [False, True]
    for wrong in ("partly", "holds in some cases", "holds in 3"):
        with pytest.raises(ValueError, match="a verdict is"):
            Claim("", "", "", wrong)


def test_intervals_of_correlations_stay_inside():
    found = correlation([0.999, 0.99, 0.5])
    assert -1 < found.low < found.mean < found.high < 1
    assert found.mean == pytest.approx(math.tanh((math.atanh(0.999) + math.atanh(0.99) + math.atanh(0.5)) / 3))
    assert correlation([1.0, 1.0, -1.0]).low >= -1
    assert correlation([1.0, 1.0]).mean == pytest.approx(1)
    assert correlation([1.0, 1 - 1e-15, 1 - 1e-14]).low > 1 - 1e-11  # rounding is no spread
    assert math.isnan(correlation([0.9, None]).mean)


def test_labels_of_a_short_axis_do_not_overlap():
    plots = experiment.plot(made_up({"intention": (0.5, 0.6, 0.7), "mlp": (0.8, 0.7, 0.7)}))
    figure = plots[0].draw()
    figure.canvas.draw()
    assert {text.get_text() for text in figure.axes[0].get_xticklabels(minor=True)} <= {""}
