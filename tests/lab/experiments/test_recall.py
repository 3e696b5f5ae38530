"""Keys that are asked for again, and claims that can fail."""

import pytest
import torch

from intention.lab.core.results import Row
from intention.lab.experiments import recall
from intention.lab.experiments.recall import task
from intention.nn import InformerLM
from lab.made import verdicts


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_keys_are_distinct_and_answers_are_their_values():
    drawn = task.recall(501, generator(), pairs=5, keys=7, values=6)
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
    drawn = task.recall(3, generator(), pairs=2, keys=5, values=3)
    logits = recall.answers(model, drawn)
    assert logits.shape == (3, 2, 8)
    torch.testing.assert_close(logits, model(drawn.tokens)[0][:, 4:])
    right = torch.full((3, 2, 8), -50.0).scatter(-1, drawn.answers.unsqueeze(-1), 50.0)
    assert recall.loss(lambda tokens: (right, None), drawn) < 1e-6  # type: ignore[arg-type]


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
