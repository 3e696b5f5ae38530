"""Pairs along a sequence: the strict past, exact ridge, and claims that can fail."""

import pytest
import torch

from intention.lab.core.results import Row
from intention.lab.experiments import in_context
from intention.lab.experiments.in_context import model as models
from intention.lab.experiments.in_context import task as tasks
from intention.lab.experiments.in_context.claims import worst
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
