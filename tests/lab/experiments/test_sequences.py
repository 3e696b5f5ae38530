"""Experiments along sequences: samplers, the strict past, texts of the user, tiny runs, and claims that can fail."""

import dataclasses
import math

import pytest
import torch

from intention.lab.core.files import LabError
from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import NAMES, OURS, in_context, recall, text
from intention.lab.experiments.base import PRESETS
from intention.lab.experiments.in_context import model as models
from intention.lab.experiments.in_context import task as tasks
from intention.lab.experiments.in_context.claims import worst
from intention.lab.experiments.text import task as texts
from intention.nn import InformerLM

REGRESSION = dataclasses.replace(
    in_context.PRESETS["quick"], steps=2, batch=3, dims=3, length=7, width=8, evaluation_tasks=11, evaluations=2
)
RECALL = dataclasses.replace(
    recall.PRESETS["quick"],
    steps=2,
    batch=3,
    widths=(4, 8),
    pairs=(2, 3),
    keys=5,
    values=7,
    head=4,
    evaluation_sequences=11,
)
TEXT = dataclasses.replace(text.PRESETS["quick"], steps=2, batch=3, window=11, width=8, evaluation_windows=7)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def rows_of(experiment, config):
    made = []
    for job in experiment.jobs(config):
        for one in experiment.run(job, Place()):
            name = one.model or job.model
            head = (job.experiment, job.id, "quick", dataclasses.asdict(job.config), name, job.seed)
            made.append(Row(*head, one.metric, one.value, one.x, one.interval, one.data))
    return made


def verdicts(experiment, rows):
    return [claim.verdict for claim in experiment.claims(rows)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("texts") / "mine.txt"
    path.write_text("All that is gold does not glitter, über alles. " * 23, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def rows(written):
    configs = {in_context: REGRESSION, recall: RECALL, text: dataclasses.replace(TEXT, text=written)}
    return {experiment.TITLE: rows_of(experiment, config) for experiment, config in configs.items()}


def test_the_experiments_that_are_ours_stand_last():
    assert NAMES[-3:] == OURS
    for experiment in (in_context, recall, text):
        assert set(experiment.PRESETS) == set(PRESETS)
        assert experiment.PRESETS["paper"] == experiment.PRESETS["standard"]


# ---- pairs of a linear map


def test_pairs_belong_to_one_map_with_noise_on_y():
    drawn = tasks.pairs(2001, generator(), dims=3, length=7, noise=0.1)
    assert drawn.x.shape == (2001, 7, 3)
    w = torch.linalg.lstsq(drawn.x[:, :4], drawn.clear[:, :4]).solution
    gap = (drawn.x @ w - drawn.clear).abs().flatten(1).amax(1)
    assert gap.quantile(0.9) < 1e-3  # the same w at all positions
    noise = drawn.y - drawn.clear
    assert noise.std().item() == pytest.approx(0.1, rel=0.02)
    flat = noise.squeeze(-1)
    assert torch.corrcoef(flat.T).tril(-1).abs().max() < 0.08  # y depends on no other position but by w
    assert w.std().item() == pytest.approx(1.0, rel=0.05)


def test_ridge_is_the_least_error_there_is():
    drawn = tasks.pairs(301, generator(), dims=3, length=12, noise=0.3)
    errors = {
        alpha: (models.ridge(drawn, alpha**0.5) - drawn.clear).square().mean().item()
        for alpha in (0.09 / 9, 0.09, 0.09 * 9)
    }
    assert min(errors, key=lambda alpha: errors[alpha]) == 0.09
    x, y = drawn.x[0].double(), drawn.y[0].double()
    w = torch.linalg.solve(x[:5].T @ x[:5] + 0.09 * torch.eye(3), x[:5].T @ y[:5])
    torch.testing.assert_close(models.ridge(drawn, 0.3)[0, 5], (x[5] @ w).float())
    assert (models.ridge(drawn, 0.3)[:, 0] == 0).all()  # nothing was seen


@pytest.mark.parametrize("name", models.MODELS)
def test_a_prediction_sees_the_strict_past_alone(name):
    torch.manual_seed(0)
    model = models.build(name, 3, width=8, heads=2, layers=2, alpha=0.1)
    drawn = tasks.pairs(5, generator(), dims=3, length=9, noise=0.1)
    out = model(drawn.x, drawn.y)
    assert out.shape == (5, 9, 1)
    changed = drawn.y.clone()
    changed[:, 4] += 3.0
    again = model(drawn.x, changed)
    torch.testing.assert_close(again[:, :5], out[:, :5], rtol=1e-4, atol=1e-5)  # its own y, at position 4, too
    assert (again[:, 5:] - out[:, 5:]).abs().amax() > 1e-3
    moved = drawn.x.clone()
    moved[:, 4] += 3.0
    assert (model(moved, drawn.y)[:, 4] - out[:, 4]).abs().amax() > 1e-3
    out.square().sum().backward()
    assert [key for key, weight in model.named_parameters() if weight.grad is None] == []


def test_the_one_layer_is_ridge_with_its_alpha():
    drawn = tasks.pairs(5, generator(), dims=3, length=9, noise=0.1)
    model = models.build("intention", 3, width=8, heads=2, layers=1, alpha=0.04)
    torch.testing.assert_close(model(*drawn[:2]), models.ridge(drawn, 0.2), rtol=1e-3, atol=1e-4)


def test_an_unknown_model_is_named():
    with pytest.raises(ValueError, match="there is no model 'svd'"):
        models.build("svd", 3, width=8, heads=2, layers=1, alpha=1.0)


# ---- recall


def test_keys_are_distinct_and_answers_are_their_values():
    drawn = tasks.recall(501, generator(), pairs=5, keys=7, values=6)
    assert drawn.tokens.shape == (501, 15)
    shown, asked = drawn.tokens[:, :10].view(501, 5, 2), drawn.tokens[:, 10:]
    assert all(len(set(keys)) == 5 for keys in shown[..., 0].tolist())
    assert all(len(set(values)) == 5 for values in shown[..., 1].tolist())
    assert (shown[..., 0] < 7).all()
    assert (shown[..., 1] >= 7).all()
    assert (shown[..., 1] < 13).all()
    for pairs, keys, values in zip(shown.tolist(), asked.tolist(), drawn.answers.tolist(), strict=True):
        assert [dict(pairs)[key] for key in keys] == values  # type: ignore[arg-type]
    assert (asked != shown[..., 0]).any(1).float().mean() > 0.95  # in another order
    assert asked[:, 0].bincount(minlength=7).min() > 40  # every key is asked for


def test_only_the_asked_positions_are_trained():
    model = InformerLM(8, 8, 2, 1)
    drawn = tasks.recall(3, generator(), pairs=2, keys=5, values=3)
    logits = recall.answers(model, drawn)
    assert logits.shape == (3, 2, 8)
    torch.testing.assert_close(logits, model(drawn.tokens)[0][:, 4:])
    right = torch.full((3, 2, 8), -50.0).scatter(-1, drawn.answers.unsqueeze(-1), 50.0)
    assert recall.loss(lambda tokens: (right, None), drawn) < 1e-6  # type: ignore[arg-type]


# ---- texts


def test_a_text_is_cut_by_position(written):
    found = texts.load(written, 11)
    content = "All that is gold does not glitter, über alles. " * 23
    assert found.read(found.seen) + found.read(found.unseen) == content
    assert len(found.unseen) == round(0.1 * len(content))
    assert found.name == "mine.txt"
    drawn = texts.sample(found.seen, 501, generator(), window=11)
    assert drawn.tokens.shape == (501, 12)
    assert all(found.read(piece) in content for piece in drawn.tokens[:20])
    pieces = texts.spread(found.unseen, 5, 11)
    assert pieces.tokens.shape == (5, 12)
    assert len(texts.spread(found.unseen, 500, 11).tokens) == len(found.unseen) // 12
    assert found.read(pieces.tokens[0]) == content[len(found.seen) :][:12]


def test_counted_pairs_know_what_follows_what(tmp_path):
    path = tmp_path / "ab.txt"
    path.write_text("ab" * 500)
    found = texts.load(str(path), 9)
    bits = texts.bits_of_pairs(found, texts.spread(found.unseen, 5, 9))
    assert bits.max() < 0.01
    odd = texts.Windows(torch.zeros(1, 10, dtype=torch.long))  # a never follows a
    assert texts.bits_of_pairs(found, odd).item() == pytest.approx(math.log2(450 + 2), abs=0.01)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "there is no file"),
        (b"\xff\xfe\x00 text" * 200, "is not UTF-8"),
        (b"too short", "wanted at least 240 characters.*got 9; give a longer one"),
        (b"", "wanted at least 240 characters"),
        (b"a" * 1000, "all characters are 'a'"),
    ],
)
def test_a_text_that_does_not_serve_fails_before_any_work(tmp_path, content, message):
    path = tmp_path / "some.txt"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(LabError, match=message) as caught:
        text.jobs(dataclasses.replace(TEXT, text=str(path)))
    assert str(path) in str(caught.value)
    with pytest.raises(LabError, match="cannot read"):
        text.jobs(dataclasses.replace(TEXT, text=str(tmp_path)))


def test_documentation_is_that_of_python_and_of_its_modules(tmp_path):
    (tmp_path / "b.py").write_text('"""Second."""\ndef f():\n    """Inside.\n\n    More."""\n')
    (tmp_path / "a.py").write_text('"""First."""\nclass A:\n    """Second."""\n')  # it is there once
    (tmp_path / "broken.py").write_text('"""No.')
    (tmp_path / "latin.py").write_bytes(b'"""\xff"""')
    modules = "First.\n\nSecond.\n\nInside.\n\nMore."
    assert texts.documentation(tmp_path) == modules
    (tmp_path / "LICENSE.txt").write_text("All may.\n")
    (tmp_path / "pydoc_data").mkdir()
    (tmp_path / "pydoc_data" / "topics.py").write_text("topics = {'if': 'The if\\nstatement\\n', 'no': 3}\n")
    assert texts.documentation(tmp_path) == "All may.\n\nThe if\nstatement\n\n" + modules


def test_without_a_text_python_itself_has_one():
    found = texts.load("", 64)
    assert 300_000 < len(found.seen) < 3_000_000
    assert found.name.startswith("documentation of Python 3.")
    assert [job.at for job in text.jobs(TEXT)] == [{}] * 12  # rows of another version of Python are these runs, too


def test_another_text_under_the_same_name_is_another_run(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("abc" * 500)
    config = dataclasses.replace(TEXT, text=str(path))
    first = {job.id for job in text.jobs(config)}
    texts.load.cache_clear()
    path.write_text("abd" * 500)
    assert not first & {job.id for job in text.jobs(config)}


# ---- runs


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
    found = [row for row in rows[recall.TITLE] if row.metric == "accuracy"]
    assert len(found) == len(models.MIXERS) * 2 * 2 * 2  # widths, numbers of pairs, seeds
    assert all(0 <= row.interval[0] <= row.value <= row.interval[1] <= 1 for row in found)
    found = rows[text.TITLE]
    assert {row.model for row in found if row.metric == "bits per character"} == {*models.MIXERS, "counted_pairs"}
    shown = [row.data for row in found if row.metric == "sample"]
    assert all(len(one["sample"]) == 200 and len(one["prompt"]) == 50 for one in shown)
    assert len({one["sample"] for one in shown}) == 10


@pytest.mark.parametrize(
    ("experiment", "config", "model"), [(in_context, REGRESSION, "informer"), (recall, RECALL, "delta")]
)
def test_a_run_repeats_bit_by_bit(experiment, config, model):
    first, *_, last = [job for job in experiment.jobs(config) if job.model == model]
    assert list(experiment.run(first, Place())) == list(experiment.run(first, Place()))
    assert list(experiment.run(first, Place())) != list(experiment.run(last, Place()))


def test_two_steps_are_not_enough_to_hold_and_figures_are_drawn(rows):
    for experiment, count in ((in_context, 3), (recall, 3), (text, 3)):
        found = rows[experiment.TITLE]
        claims = experiment.claims(found)
        assert all(claim.measured for claim in claims)
        plots = experiment.plot(found)
        assert len(plots) == count
        for plot in plots:
            assert plot.draw is not None or len(plot.table) > 5
            if plot.draw is not None:
                plot.draw().canvas.draw()
    assert verdicts(in_context, rows[in_context.TITLE])[:3] == ["does not hold"] * 3


@pytest.mark.parametrize("kept", [set(), {"delta"}, {"ridge"}, {"zero", "counted_pairs"}])
def test_missing_rows_are_not_tested_and_do_not_crash(rows, kept):
    for experiment in (in_context, recall, text):
        some = [row for row in rows[experiment.TITLE] if row.model in kept]
        assert set(verdicts(experiment, some)) == {"not tested at this size"}
        assert {claim.measured for claim in experiment.claims(some)} == {""}
        for plot in experiment.plot(some):
            if plot.draw is not None:
                plot.draw().canvas.draw()


# ---- claims on made-up rows


def errors_of(**factors):
    """Rows whose error at positions 0 ... 5 is so many times that of ridge; d = 2."""
    made = []
    for model, each in {"ridge": (1.0,) * 3, **factors}.items():
        for seed, factor in enumerate(each):
            places = None if factor is None else [9.0, 9.0, *(0.01 * factor for _ in range(4))]
            value = None if factor is None else 0.01 * factor
            data = {"dims": 2, "by position": places or [None] * 6}
            made.append(Row("in_context", "", "quick", {}, model, seed, "mse", value, data=data))
    return made


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.01, 1.02, 1.01), "holds"),
        ((1.0, 1.0, 1.12), "partly"),
        ((1.2, 1.21, 1.2), "does not hold"),
        ((1.01, None, 1.01), "does not hold"),
    ],
)
def test_the_layer_is_judged_by_its_worst_position(factors, expected):
    claim = in_context.claims(errors_of(intention=factors))[0]
    assert claim.verdict == expected
    one = errors_of(intention=(1.0, 1.0, 1.0))
    for row in one[-3:]:
        row.data["by position"][4] *= 1.5  # one position is enough; those before d do not count
    assert in_context.claims(one)[0].verdict == "does not hold"
    assert worst(one, "intention")[1] == 4


def test_networks_are_compared_with_ridge_and_each_other():
    close = {"transformer": (1.8, 1.7, 1.8), "informer": (1.1, 1.1, 1.2)}
    beside = {"linear_attention": (5.0, 5.0, 6.0), "delta": (1.0, 1.0, 1.1), "sigma_intention": (1.7, 1.8, 1.8)}
    expected = ["not tested at this size", "holds", "holds", "holds", "does not hold", "partly"]
    assert verdicts(in_context, errors_of(**close, **beside)) == expected
    far = errors_of(transformer=(3.0, 3.0, 3.1), informer=(1.0, 1.1, 3.5))
    assert verdicts(in_context, far)[1:3] == ["does not hold", "partly"]


def recalled(pairs=8, width=32, **accuracies):
    return [
        Row("recall", "", "quick", {}, model, seed, "accuracy", value, pairs, data={"width": width})
        for model, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ((0.9, 0.91, 0.9), (0.5, 0.5, 0.5), "holds"),
        ((0.9, 0.9, 0.9), (0.905, 0.905, 0.905), "holds"),  # within a percentage point
        ((0.9, 0.9, 0.9), (0.8, 0.99, 0.9), "partly"),
        ((0.5, 0.5, 0.5), (0.9, 0.9, 0.9), "does not hold"),
        ((0.12, 0.13, 0.12), (0.11, 0.12, 0.1), "not tested at this size"),  # neither does more than guess
        ((0.9, None, 0.9), (0.5, 0.5, 0.5), "does not hold"),
        ((0.9, 0.9), (0.5, 0.5, 0.5), "not tested at this size"),
    ],
)
def test_recall_is_compared_where_it_was_learnt(own, other, expected):
    found = verdicts(recall, recalled(intention=own, linear_attention=other))
    assert found == [expected, *["not tested at this size"] * 3]
    assert verdicts(recall, recalled(sigma_intention=own, attention=other))[3] == expected


def test_every_width_and_number_of_pairs_counts():
    good = {"intention": (0.9, 0.9, 0.9), "attention": (0.5, 0.5, 0.5)}
    bad = {"intention": (0.5, 0.5, 0.5), "attention": (0.9, 0.9, 0.9)}
    both = [*recalled(8, 32, **good), *recalled(16, 32, **good)]
    assert verdicts(recall, both)[2] == "holds"
    assert verdicts(recall, [*both, *recalled(8, 64, **bad)])[2] == "partly"
    claim = recall.claims([*both, *recalled(8, 64, **bad)])[2]
    assert "width 64, 8 pairs: 50.0% against 90.0%" in claim.measured


def bits_of(name="mine.txt", **bits):
    return [
        Row("text", "", "quick", {}, model, seed, "bits per character", value, data={"text": name, "characters": 9})
        for model, values in bits.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((2.0, 2.01, 2.0), "holds"),
        ((2.0, 2.4, 2.5), "partly"),
        ((2.6, 2.6, 2.7), "does not hold"),
        ((2.0, None, 2.0), "does not hold"),
    ],
)
def test_bits_are_compared_seed_by_seed(own, expected):
    others = dict.fromkeys(("linear_attention", "delta", "attention", "counted_pairs"), (2.5, 2.4, 2.5))
    found = verdicts(text, bits_of(intention=own, **others))
    assert found == [expected, expected, expected, "not tested at this size", expected]
    assert verdicts(text, bits_of(sigma_intention=own, **others))[3] == expected


def test_texts_do_not_mix():
    good = bits_of("one", intention=(2.0, 2.0, 2.0), attention=(2.5, 2.5, 2.5))
    bad = bits_of("two", intention=(2.0, 2.0, 2.0), attention=(1.5, 1.5, 1.5))
    assert verdicts(text, good)[2] == "holds"
    assert verdicts(text, [*good, *bad])[2] == "partly"
    assert verdicts(text, bad)[2] == "does not hold"
