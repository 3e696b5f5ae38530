"""Heads on features for several numbers of examples, and claims that can fail."""

import dataclasses

import pytest
import torch

from intention.lab.core.results import Row
from intention.lab.experiments import fewshot_features
from intention.lab.experiments.fewshot import training
from intention.lab.experiments.fewshot.task import Pool
from intention.lab.experiments.fewshot_features.claims import HEADS
from lab.made import rows_of, verdicts

UNTESTED, HOLDS, NOT = "not tested at this size", "holds", "does not hold"
SMALL = {
    name: dataclasses.replace(
        getattr(fewshot_features.STANDARD, name),
        steps=2,
        latent=5,
        tasks=3,
        decode=(4,) * bool(getattr(fewshot_features.STANDARD, name).decode),
    )
    for name in HEADS
}


@pytest.fixture(scope="module")
def features(tmp_path_factory):
    """An npz of 30 classes whose features are near a centre each."""
    import numpy as np

    generator = np.random.default_rng(0)
    y = np.repeat(np.arange(30), 24)
    x = generator.normal(size=(30, 11))[y] + 0.3 * generator.normal(size=(len(y), 11)) + 3
    path = tmp_path_factory.mktemp("features") / "made.npz"
    np.savez(path, train_x=x.astype("float32"), train_y=y)
    return str(path)


def test_every_head_runs_for_every_number_of_examples(features):
    small = dataclasses.replace(
        fewshot_features.PRESETS["quick"], **SMALL, models=HEADS, shots=(1, 3), data=features, evaluation_episodes=20
    )
    rows = rows_of(fewshot_features, small)
    assert {((row.data or {})["shot"], row.model) for row in rows} == {(n, model) for n in (1, 3) for model in HEADS}
    own = [row for row in rows if row.metric == "accuracy before training" and row.model == "intention_tuned"]
    assert all((row.value or 0) > 0.5 for row in own)  # the classes are easy
    figure, table = fewshot_features.plot(rows)
    assert figure.draw is not None
    figure.draw()
    assert table.table is not None
    assert table.table[0] == ["Head", "1 of a class", "3 of a class"]
    assert len(table.table) == 1 + len(HEADS)
    assert "frozen features" in fewshot_features.claims(rows)[0].measured
    with pytest.raises(ValueError, match="shots must be"):
        dataclasses.replace(small, shots=(0,))


def test_grey_images_without_features_are_encoded_by_the_encoder_of_the_package():
    small = dataclasses.replace(
        fewshot_features.PRESETS["quick"],
        models=("intention_tuned",),
        shots=(1,),
        data="built-in",
        evaluation_episodes=20,
    )
    rows = rows_of(fewshot_features, small)
    assert [row.value for row in rows if row.metric == "accuracy"]


def test_features_are_centred_on_those_of_training_and_of_one_length():
    x = torch.randn(40, 7) + 5
    pools = {name: Pool(x + shift, torch.arange(40) % 4) for name, shift in (("train", 0.0), ("test", 0.1))}
    found = training.encoded(pools, None)
    for name, shift in (("train", 0.0), ("test", 0.1)):
        torch.testing.assert_close(found[name].x.norm(dim=-1), torch.full((40,), 7**0.5))
        torch.testing.assert_close(found[name].x, 7**0.5 * torch.nn.functional.normalize(x + shift - x.mean(0), dim=-1))


def made(model, shot, *values):
    return [
        Row(
            *("fewshot_features", "", "quick", {"way": 5, "data": "built-in", "intention_tuned": {}}, model, seed),
            *("accuracy on all unseen classes", value, None, (value - 0.005, value + 0.005), {"shot": shot}),
        )
        for seed, value in enumerate(values)
    ]


def test_claims_can_fail():
    others = [
        row
        for shot in (1, 5)
        for model, value in (("attention_tuned", 0.7), ("neural_process_tuned", 0.6), ("protonet_tuned", 0.75))
        for row in made(model, shot, value, value + 0.01, value)
    ]
    own = [row for shot in (1, 5) for row in made("intention_tuned", shot, 0.8, 0.81, 0.8)]
    assert verdicts(fewshot_features, [*own, *others]) == [HOLDS, HOLDS]
    behind = [row for shot in (1, 5) for row in made("intention_tuned", shot, 0.55, 0.56, 0.55)]
    assert verdicts(fewshot_features, [*behind, *others]) == [NOT, NOT]
    mixed = [*made("intention_tuned", 1, 0.8, 0.81, 0.8), *made("intention_tuned", 5, 0.55, 0.56, 0.55)]
    assert verdicts(fewshot_features, [*mixed, *others])[1] == "holds in 1 of 2"
    assert set(verdicts(fewshot_features, [])) == {UNTESTED}
    assert "Intention 80.3%" in fewshot_features.finding([*own, *others])
    assert fewshot_features.finding([]) == ""
