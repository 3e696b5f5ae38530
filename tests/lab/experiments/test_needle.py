"""Pairs before filler, streams in pieces, a window, and claims that can fail."""

import dataclasses

import pytest
import torch

from intention.lab.core.place import Place
from intention.lab.core.results import Row
from intention.lab.experiments import needle
from intention.lab.experiments.base import PRESETS
from intention.lab.experiments.needle import model as models
from intention.lab.experiments.needle import task
from lab.made import rows_of, verdicts

UNTESTED = "not tested at this size"
SMALL = dataclasses.replace(
    needle.PRESETS["quick"],
    steps=2,
    batch=3,
    pairs=2,
    filler=4,
    keys=5,
    values=6,
    rates=(1e-3, 1e-2),
    lengths=(9, 20),
    chunk=8,
    window=5,
    width=8,
    layers=1,
    evaluation_sequences=11,
    evaluations=2,
)
SIZES = {"vocabulary": 16, "width": 8, "heads": 2, "layers": 2, "window": 5}


@pytest.fixture(scope="module")
def rows():
    return rows_of(needle, SMALL)


def test_pairs_then_filler_then_the_keys_again():
    drawn = task.needle(101, torch.Generator().manual_seed(0), pairs=3, filler=40, keys=5, values=6)
    assert drawn.tokens.shape == (101, 49)
    shown, between, asked = drawn.tokens[:, :6].view(-1, 3, 2), drawn.tokens[:, 6:46], drawn.tokens[:, 46:]
    assert between.unique().tolist() == [11, 12, 13, 14, 15]
    assert shown[..., 0].unique().tolist() == [0, 1, 2, 3, 4]
    assert shown[..., 1].unique().tolist() == [5, 6, 7, 8, 9, 10]
    for pairs, keys, values in zip(shown.tolist(), asked.tolist(), drawn.answers.tolist(), strict=True):
        assert [dict(pairs)[key] for key in keys] == values  # type: ignore[arg-type]
        assert len(dict(pairs)) == len(set(values)) == 3  # type: ignore[arg-type]
    assert (asked != shown[..., 0]).any(1).float().mean() > 0.7  # in another order


@pytest.mark.parametrize("name", models.MODELS)
def test_a_stream_in_pieces_gives_what_the_whole_gives_and_its_size_does_not_grow(name):
    torch.manual_seed(0)
    model, tokens = models.build(name, **SIZES).eval(), torch.randint(16, (3, 30))
    whole = model(tokens)[0][:, -2:]
    sizes = set()
    for chunk in (1, 7, 28):
        logits, streams = models.read(model, tokens, 2, chunk)
        torch.testing.assert_close(logits, whole, rtol=1e-4, atol=1e-4)
        sizes.add(models.size(streams))
    sizes.add(models.size(models.read(model, torch.randint(16, (3, 60)), 2, 9)[1]))
    assert len(sizes) == 1
    assert sizes.pop() % 3 == 0


def test_attention_sees_its_window_and_no_more():
    torch.manual_seed(0)
    model = models.Windowed(8, 2, 5)
    x = torch.randn(1, 20, 8, requires_grad=True)
    slope = torch.autograd.grad(model(x)[0][0, 12].sum(), x)[0].abs().sum(-1)[0]
    assert slope.nonzero().flatten().tolist() == list(range(12 - 4 - 3, 13))  # window 5, and 4 taps before it
    wide = models.build("window", **{**SIZES, "window": 100})
    plain = models.InformerLM(16, 8, 2, 2, layer="gated", mixer="attention")
    plain.load_state_dict(wide.state_dict())
    tokens = torch.randint(16, (2, 9))
    torch.testing.assert_close(wide(tokens)[0], plain(tokens)[0])


def test_the_gate_is_what_keeping_leaves_out():
    with_gate, without = (models.build(name, **SIZES) for name in ("intention", "intention_kept"))
    assert any(name.endswith("gamma_proj.weight") for name, _ in with_gate.named_parameters())
    assert not any("gamma_proj" in name for name, _ in without.named_parameters())


def test_every_model_is_measured(rows):
    found = {(row.model, row.x) for row in rows if row.metric == "bytes"}
    assert found == {(model, length) for model in models.MODELS for length in (9, 20)}
    found = [row for row in rows if row.metric == "accuracy" and not row.data]
    assert len(found) == 2 * len(models.MODELS)
    assert all(0 <= row.interval[0] <= row.value <= row.interval[1] <= 1 for row in found)
    assert {row.data["rate"] for row in rows if row.metric == "accuracy" and row.data} <= {1e-3, 1e-2}
    assert set(needle.PRESETS) == set(PRESETS)
    job = next(iter(needle.jobs(SMALL)))
    assert list(needle.run(job, Place())) == list(needle.run(job, Place()))
    figure, table = needle.plot(rows)
    figure.draw().canvas.draw()
    assert len(table.table) == 1 + len(models.MODELS)
    assert needle.plot([]) == []


def test_the_better_rate_is_the_one_that_counts(monkeypatch, tmp_path):
    made = []

    def learnt(job, rate, place, short):
        made.append(rate)
        ends = {1e-3: 0.2, 1e-2: 0.7}[rate]
        return needle.Learnt(models.build(job.model, **SIZES), [{"step": 0, "accuracy": ends}], rate)

    monkeypatch.setattr(needle, "learnt", learnt)
    job = next(iter(needle.jobs(SMALL)))
    found = [m for m in needle.run(job, Place(tmp_path)) if m.data]
    assert made == [1e-3, 1e-2]
    assert [(m.value, m.data) for m in found] == [(0.7, {"trained": True, "rate": 1e-2})]


def found(model, trained, *by_length, held=(100, 100)):
    """Three seeds; accuracies after 1,000 and 2,000 tokens."""
    config, rows = {"pairs": 4, "filler": 48}, []
    for seed in range(3):
        head = ("needle", "", "quick", config, model, seed)
        rows.append(Row(*head, "accuracy", trained, 48, data={"trained": True}))
        for x, value, size in zip((1000, 2000), by_length, held, strict=True):
            value = value[seed] if isinstance(value, tuple) else value
            rows += [Row(*head, "accuracy", value, x), Row(*head, "bytes", size, x)]
    return rows


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((0.99, 0.95, 0.95), "holds"),
        ((0.99, 0.95, 0.5), "holds in 1 of 2"),
        ((0.99, 0.95, (0.99, 0.8, 0.99)), "holds in 1 of 2 (1 open)"),
        ((0.99, 0.5, 0.5), "does not hold"),
        ((0.99, 0.5, None), "does not hold"),
        ((0.5, 0.5, 0.5), UNTESTED),
    ],
)
def test_a_pair_is_found_at_every_length(own, expected):
    assert verdicts(needle, found("intention", *own))[0] == expected


@pytest.mark.parametrize(("place", "other"), [(1, "intention_kept"), (2, "linear_attention"), (3, "gated_delta")])
def test_models_are_compared_where_the_other_has_learnt(place, other):
    good, close, bad = (0.99, 0.95, 0.95), (0.99, 0.94, 0.94), (0.99, 0.3, 0.3)

    def said(own, others):
        return verdicts(needle, [*found("intention", *own), *found(other, *others)])[place]

    assert said(good, bad) == said(close, good) == "holds"
    assert said(bad, good) == "does not hold"
    assert said((0.99, 0.95, 0.3), good) == "holds in 1 of 2"
    assert said((0.4, 0.3, 0.3), (0.4, 0.3, 0.3)) == UNTESTED
    assert said(good, (0.4, 0.3, 0.3)) == UNTESTED  # what has not learnt is not beaten
    assert verdicts(needle, found("intention", *good))[place] == UNTESTED


def test_a_window_forgets_and_a_state_does_not_grow():
    assert verdicts(needle, found("window", 0.99, 0.25, 0.25))[4] == "holds"
    assert verdicts(needle, found("window", 0.99, 0.25, 0.9))[4] == "holds in 1 of 2"
    assert verdicts(needle, found("window", 0.5, 0.25, 0.25))[4] == UNTESTED
    assert verdicts(needle, found("intention", 0.99, 0.9, 0.9))[5] == "holds"
    assert verdicts(needle, found("intention", 0.99, 0.9, 0.9, held=(100, 200)))[5] == "does not hold"
    assert set(verdicts(needle, [])) == {UNTESTED}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"models": ("svd",)}, "there is no model svd"),
        ({"pairs": 6}, "pairs must be 1 to 5"),
        ({"lengths": ()}, "lengths must name"),
        ({"lengths": (-1,)}, "lengths must be at least 0"),
        ({"rates": ()}, "rates must name"),
        ({"rates": (0.0,)}, "learning_rate must be > 0"),
        ({"window": 0}, "window must be at least 1"),
        ({"width": 9}, "the width must be a multiple"),
    ],
)
def test_impossible_configs_fail_with_a_reason(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SMALL, **change)
