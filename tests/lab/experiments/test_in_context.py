"""Pairs along a sequence: the strict past, exact ridge, and claims that can fail."""

import pytest
import torch

from intention.lab.core.results import Row
from intention.lab.experiments import in_context
from intention.lab.experiments.in_context import model as models
from intention.lab.experiments.in_context import task as tasks
from intention.lab.experiments.in_context.claims import DRIFT, worst
from intention.lab.experiments.sequences import GATED
from lab.made import verdicts


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


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
        ((1.0, 1.0, 1.12), "not decided"),
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
    expected = ["not tested at this size", "holds", "holds", "holds", "does not hold", "not decided"]
    assert verdicts(in_context, errors_of(**close, **beside)) == [*expected, *["not tested at this size"] * 4]
    far = errors_of(transformer=(3.0, 3.0, 3.1), informer=(1.0, 1.1, 3.5))
    assert verdicts(in_context, far)[1:3] == ["does not hold", "not decided"]


def test_coefficients_drift_and_keep_their_variance():
    drawn = tasks.pairs(4001, generator(), dims=1, length=40, noise=0.1, drift=0.1)
    w = (drawn.clear / drawn.x).squeeze(-1)
    assert w.var(0).min() > 0.9
    assert w.var(0).max() < 1.1
    for gap in (1, 5, 20):
        assert (w[:, 0] * w[:, gap]).mean().item() == pytest.approx(0.9 ** (gap / 2), abs=0.06)


def test_the_filter_of_kalman_is_ridge_without_drift_and_the_least_error_with():
    still = tasks.pairs(31, generator(), dims=3, length=12, noise=0.3)
    torch.testing.assert_close(models.kalman(still, 0.3, 0.0), models.ridge(still, 0.3), rtol=1e-4, atol=1e-5)
    drawn = tasks.pairs(2001, generator(), dims=3, length=30, noise=0.3, drift=0.05)
    errors = {
        drift: (models.kalman(drawn, 0.3, drift) - drawn.clear).square().mean().item()
        for drift in (0.0, 0.01, 0.05, 0.2)
    }
    assert min(errors, key=lambda drift: errors[drift]) == 0.05


def drifted(**errors):
    """Errors with drift: name=(without forgetting, with)."""
    return [
        Row(*("in_context", "", "quick", {}, model, seed, DRIFT, factor * value), data={"forgets": forgets, "dims": 2})
        for model, pair in errors.items()
        for forgets, value in zip((False, True), pair, strict=True)
        if value is not None
        for seed, factor in enumerate((1.0, 1.01, 1.02))
    ]


def test_forgetting_pays_if_the_error_is_smaller_with_it():
    pays = drifted(intention_gated=(2.0, 1.2), delta_gated=(2.0, None), gated_delta_gated=(None, 1.5))
    assert verdicts(in_context, pays)[7] == "holds"
    assert verdicts(in_context, pays)[8] == "holds in 2 of 4 (2 open)"  # two mixers that can forget were not run
    others = drifted(attention_gated=(1.5, 1.4), linear_attention_gated=(3.0, 2.0))
    assert verdicts(in_context, [*pays, *others])[8] == "holds"
    harmed = drifted(attention_gated=(1.4, 1.5), linear_attention_gated=(3.0, 2.0))
    assert verdicts(in_context, [*pays, *harmed])[8] == "holds in 3 of 4"
    assert verdicts(in_context, drifted(intention_gated=(1.2, 2.0)))[7] == "does not hold"
    assert verdicts(in_context, [*pays, *others])[9] == "not tested at this size"  # without sigma_intention
    every = [*pays, *others, *drifted(sigma_intention_gated=(1.9, None))]
    assert verdicts(in_context, every)[9] == "holds"
    assert verdicts(in_context, [*every, *drifted(attention_gated=(1.0, None))])[9] == "does not hold"


@pytest.mark.parametrize(
    ("factors", "expected"),
    [
        ((1.5, 1.5, 1.6), "holds"),
        ((1.0, 1.1, 2.5), "not decided"),
        ((2.5, 2.5, 2.6), "does not hold"),
        ((1.0, 1.0, None), "does not hold"),
    ],
)
def test_gated_layers_are_judged_by_the_mean(factors, expected):
    rows = errors_of(intention_gated=factors)
    assert verdicts(in_context, rows)[6] == expected
    if expected == "holds":
        for row in rows[-3:]:
            row.data["by position"][4] *= 9  # one position does not count, and is told
        claim = in_context.claims(rows)[6]
        assert claim.verdict == "holds"
        assert "at the worst position (4 pairs seen)" in claim.measured


def test_gated_networks_have_the_same_number_of_parameters():
    sizes = [
        sum(weight.numel() for weight in models.build(name, 16, width=64, heads=4, layers=2, alpha=1.0).parameters())
        for name in GATED
    ]
    assert max(sizes) < 1.03 * min(sizes)


def test_all_gated_networks_have_the_same_parts():
    for name in GATED:
        model = models.build(name, 3, width=8, heads=2, layers=2, alpha=1.0)
        kinds = {type(part) for part in (model.norm, *(layer.norm1 for layer in model.layers))}  # type: ignore[union-attr]
        assert kinds == {torch.nn.Identity}
        for layer in model.layers:  # type: ignore[union-attr]
            assert (layer.mixer.gate_proj, layer.mixer.convolution, layer.mixer.rotate) == (None, None, None)
            assert (layer.mixer.silu, layer.mixer.unit) == (False, "delta" in name)


def test_forgetting_is_a_gate_that_can_be_left_out():
    forgets = {
        (name, on): models.build(name, 3, width=8, heads=2, layers=1, alpha=1.0, forgets=on).layers[0].mixer.gamma_proj  # type: ignore[index,union-attr]
        for name in models.CAN_FORGET
        for on in (False, True)
    }
    assert {key for key, gate in forgets.items() if gate is not None} == {(name, True) for name in models.CAN_FORGET}


def test_published_runs_of_plain_models_keep_their_names():
    names = {job.id for job in in_context.jobs(in_context.PRESETS["standard"])}
    assert {"intention-seed0-5b68e202", "delta-seed4-5b68e202"} <= names
