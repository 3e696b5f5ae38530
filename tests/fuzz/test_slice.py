"""A seeded part of the fuzz over options, and what its oracle itself is checked by."""

import pytest
import torch

import reference
from fuzz import oracle
from fuzz.draw import Draw
from fuzz.run import FAMILIES, Survey

ROUND = sum(FAMILIES.values())


@pytest.mark.parametrize("softmax", [False, True])
@pytest.mark.parametrize("intercept", [False, True])
@pytest.mark.parametrize("covariance", ["ridge", "convex"])
def test_the_oracle_is_the_formula_of_the_paper_and_so_are_its_gradients(covariance, intercept, softmax):
    draw = Draw(0)
    n, m, d, k = 7, 5, 3, 2
    query, key, value = draw.normal(2, m, d), draw.normal(2, n, d), draw.normal(2, n, k)
    weight, alpha = draw.weights((2,), n), torch.tensor([0.3, 0.1], dtype=torch.float64)
    leaves = [x.requires_grad_() for x in (query, key, value, weight, alpha)]
    name = "sigma_intention" if softmax else "intention"
    settings = {"intercept": intercept, "covariance": covariance, "scale": 0.7}
    got = getattr(oracle, name)(*leaves, **settings)
    want = getattr(reference, name)(query, key, value, weight=weight, alpha=alpha, **settings)
    torch.testing.assert_close(got, want)
    upstream = draw.normal(2, m, k)
    for ours, exact in zip(*(torch.autograd.grad(x, leaves, upstream) for x in (got, want)), strict=True):
        torch.testing.assert_close(ours, exact)


def test_a_wide_fit_without_regularisation_is_the_pseudo_inverse():
    draw = Draw(0)
    query, key, value = draw.normal(3, 11), draw.normal(5, 11), draw.normal(5, 2)
    key[4] = key[1]
    want = query @ torch.linalg.pinv(key) @ value
    zero = torch.zeros((), dtype=torch.float64)
    one = torch.ones(5, dtype=torch.float64)
    torch.testing.assert_close(oracle.intention(query, key, value, one, zero), want)
    with oracle.mirrored():
        torch.testing.assert_close(oracle.intention(query, key, value, one, zero), want)


@pytest.mark.parametrize("grad", [False, True])
def test_no_option_is_silently_wrong(grad):
    """A seeded part of `make fuzz`."""
    survey = Survey().run(FAMILIES, (12 if grad else 24) * ROUND, 0, grad)
    assert not survey.silent, "\n".join(survey.silent)
    assert not survey.raised, "\n".join(survey.raised)
    assert survey.share("float32", "value", 1e-5) >= 0.995
    if grad:
        assert survey.share("float32", "gradient", 1e-4) >= 0.995
    assert sum(survey.count[family, "undecided"] for family in FAMILIES) <= 0.02 * 24 * ROUND


def test_the_fuzz_sees_a_wrong_answer(monkeypatch):
    """Break a formula once, and every family that uses it fails."""
    monkeypatch.setattr(oracle, "mean", lambda x, count: 1.01 * x.mean(-2, keepdim=True))
    assert Survey().run(["heads", "context"], 30, 0, False).silent


@pytest.mark.parametrize("seed", [61265, 60022, 60935])
def test_gradients_that_divide_by_alpha_twice(seed):
    """Within-class fits and sigma-Intention of queries that keys leave mostly unseen."""
    survey = Survey()
    survey.one("functional", seed, True)
    assert not survey.silent


@pytest.mark.parametrize(
    ("family", "seed", "grad"),
    [
        ("mixers", 19424, False),  # a half-precision module: its projections, rounded as torch does, decide
        ("functional", 468, True),  # sigma-Intention at a condition of 1e17: values are right, slopes are warned of
        ("functional", 8740, True),  # an SVD at 1e15, whose coefficients need more than one step of refinement
        ("functional", 8848, True),  # an intercept of no points jumps: it has no slope in their weights
        ("causal", 294, False),  # streams whose state is nearly singular: a root of it lost what values know
        ("causal", 2250, False),
        ("causal", 815, True),
        ("causal", 2054, True),
        ("causal", 1658, True),  # alpha's gradient, which a state's own rounding moves: warned of
        ("causal", 3228, True),
    ],
)
def test_what_was_silently_wrong_once(family, seed, grad):
    survey = Survey()
    survey.one(family, seed, grad)
    assert not survey.silent
    assert not survey.raised
