"""Keys that are asked for again, and claims that can fail."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from intention.lab.core.results import Row
from intention.lab.experiments import recall
from intention.lab.experiments.base import Job
from intention.lab.experiments.recall import task
from intention.lab.experiments.recall.claims import MIXED
from intention.lab.experiments.sequences import GATED
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
    assert recall.loss(lambda tokens, need_streams: (right, None), drawn) < 1e-6  # type: ignore[arg-type]


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
        ((0.9, 0.9, 0.9), (0.8, 0.99, 0.9), "not decided"),
        ((0.5, 0.5, 0.5), (0.9, 0.9, 0.9), "does not hold"),
        ((0.12, 0.13, 0.12), (0.11, 0.12, 0.1), "not tested at this size"),  # neither does more than guess
        ((0.9, 0.9, 0.9), (0.11, 0.12, 0.1), "not tested at this size"),  # what has not learnt is not beaten
        ((0.9, None, 0.9), (0.5, 0.5, 0.5), "does not hold"),
        ((0.9, 0.9), (0.5, 0.5, 0.5), "not tested at this size"),
    ],
)
def test_recall_is_compared_where_it_was_learnt(own, other, expected):
    found = verdicts(recall, recalled(intention=own, linear_attention=other))
    assert found == [expected, *["not tested at this size"] * 7]
    assert verdicts(recall, recalled(sigma_intention=own, attention=other))[3] == expected


def test_every_width_and_number_of_pairs_counts():
    good = {"intention": (0.9, 0.9, 0.9), "attention": (0.5, 0.5, 0.5)}
    bad = {"intention": (0.5, 0.5, 0.5), "attention": (0.9, 0.9, 0.9)}
    both = [*recalled(8, 32, **good), *recalled(16, 32, **good)]
    assert verdicts(recall, both)[2] == "holds"
    assert verdicts(recall, [*both, *recalled(8, 64, **bad)])[2] == "holds in 2 of 3"
    claim = recall.claims([*both, *recalled(8, 64, **bad)])[2]
    assert "width 64, 8 pairs: 50.0% against 90.0%" in claim.measured


UNTESTED = "not tested at this size"


def mixed(head, pairs, state=None, **accuracies):
    """State: of all of them; Intention's is twice that of the others in truth."""
    return [
        Row(
            *("recall", "", "quick", {}, f"{mixer}_gated", seed, MIXED, value, pairs),
            data={"head": head, "most": 64, "state": state or head},
        )
        for mixer, values in accuracies.items()
        for seed, value in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ((0.995, 0.996, 0.995), "holds"),
        ((0.98, 1.0, 1.0), "not decided"),
        ((0.98, 0.98, 0.98), "does not hold"),
        ((1.0, 1.0, None), "does not hold"),
    ],
)
def test_gated_intention_recalls_the_old_task(own, expected):
    assert verdicts(recall, recalled(16, 64, intention_gated=own))[4] == expected
    assert verdicts(recall, recalled(16, 32, intention_gated=own))[4] == UNTESTED  # another width
    assert verdicts(recall, recalled(8, 64, intention_gated=own))[4] == UNTESTED


def test_more_pairs_than_features_are_judged_with_heads_of_16():
    good, bad = (0.98, 0.98, 0.98), (0.9, 0.9, 0.9)
    assert verdicts(recall, mixed(16, 32, intention=good))[5] == "holds"
    assert verdicts(recall, mixed(16, 32, intention=bad))[5] == "does not hold"
    assert verdicts(recall, [*mixed(32, 32, intention=good), *mixed(16, 16, intention=good)])[5] == UNTESTED


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ((0.9, 0.9, 0.9), (0.91, 0.91, 0.91), "holds"),
        ((0.9, 0.9, 0.9), (0.91, 0.89, 0.95), "not decided"),
        ((0.8, 0.8, 0.8), (0.9, 0.9, 0.9), "does not hold"),
        ((0.04, 0.04, 0.04), (0.05, 0.05, 0.05), UNTESTED),  # nobody has learnt it
        ((0.04, 0.04, 0.04), (0.9, 0.9, 0.9), "does not hold"),  # another has
        ((0.9, 0.9), (0.91, 0.91, 0.91), UNTESTED),
    ],
)
def test_intention_is_beside_the_best_fixed_state(own, other, expected):
    rows = mixed(16, 32, intention=own, delta=other, linear_attention=(0.01, 0.01, 0.01), attention=(1.0, 1.0, 1.0))
    assert verdicts(recall, rows)[6:] == [expected, expected]  # attention remembers every token: it is no rival
    apart = [*mixed(16, 32, 4, intention=own), *mixed(16, 32, 2, delta=other)]
    assert verdicts(recall, apart)[6:] == [UNTESTED, expected]
    across = [*mixed(16, 32, 4, intention=own), *mixed(32, 32, 4, delta=other)]
    assert verdicts(recall, across)[6:] == [expected, UNTESTED]


def test_cells_that_nobody_has_learnt_take_nothing_away():
    good = mixed(16, 32, intention=(0.9, 0.9, 0.9), delta=(0.9, 0.9, 0.9))
    idle = mixed(16, 64, intention=(0.02, 0.02, 0.02), delta=(0.02, 0.02, 0.02))
    assert verdicts(recall, [*good, *idle])[6:] == ["holds", "holds"]


def test_mixed_lengths_double_and_have_as_many_keys():
    config = recall.PRESETS["standard"]
    own = config.of({"width": 64, "head": 32, "most": 64})
    assert own.pairs == (4, 8, 16, 32, 64)
    assert own.keys == own.values == 64
    assert config.of({"width": 64}) is config
    assert config.of({"width": 64, "head": 32, "most": 20}).pairs == (4, 8, 16, 20)


def test_gated_models_have_the_same_parameters_and_known_states():
    standard, at = recall.PRESETS["standard"], {"width": 64, "head": 32, "most": 64}
    models: dict[str, Any] = {
        name: recall.built(Job("recall", standard, name, 0, at), standard.of(at)) for name in GATED
    }
    sizes = [sum(weight.numel() for weight in model.parameters()) for model in models.values()]
    assert max(sizes) < 1.03 * min(sizes)
    matrix = 2 * 2 * 32 * 32  # layers, heads
    assert recall.state_size(models["delta_gated"]) == recall.state_size(models["linear_attention_gated"]) == matrix
    assert recall.state_size(models["intention_gated"]) == 2 * matrix
    assert models["intention_gated"].layers[0].mixer.gamma_proj is None
    assert models["gated_delta_gated"].layers[0].mixer.gamma_proj is not None
    assert all(layer.mixer.output_norm is not None for model in models.values() for layer in model.layers)


def test_intention_starts_with_its_own_ridge():
    config = replace(recall.PRESETS["standard"], intention_gated=recall.Ridged(alpha=7.0))
    model: Any = recall.built(Job("recall", config, "intention_gated", 0, {"width": 64}), config)
    assert model.layers[0].mixer.start == 7.0
    with pytest.raises(ValueError, match="alpha must be > 0"):
        recall.Ridged(alpha=0.0)


def test_published_runs_of_plain_models_keep_their_names():
    names = {job.id for job in recall.jobs(recall.PRESETS["standard"])}
    assert "sigma_intention-width16-seed0-f51b15a4" in names
    assert "delta-width64-seed2-a45bf3b9" in names
