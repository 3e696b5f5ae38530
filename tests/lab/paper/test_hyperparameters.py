"""Every hyperparameter of the paper's appendix, in our `paper` presets; those that are code are measured.

Those of the experiments on images are measured in test_images.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from intention.lab import experiments
from intention.lab.experiments import computations_2d, kabsch, layers, normalisation, policy, scaling, sine
from intention.lab.experiments.computations_2d import task as plane_task
from intention.lab.experiments.kabsch import model as kabsch_models
from intention.lab.experiments.kabsch import task as kabsch_task
from intention.lab.experiments.normalisation.model import variances
from intention.lab.experiments.policy import model as policy_models
from intention.lab.experiments.policy import task as policy_task
from intention.lab.experiments.scaling import model as scaling_models
from intention.lab.experiments.scaling.task import regression
from intention.lab.experiments.sine import task as sine_task
from intention.lab.paper import hyperparameters
from intention.lab.paper.hyperparameters import ROWS
from intention.lab.paper.lines import NOT_PRINTED, Row
from lab.paper.checks import IMAGES, activation, generator, loss, name_of, optimiser

CODE = [row for row in ROWS if not row.path and row.experiment not in IMAGES]
MANY = 100_000


# --- fields and constants ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", [row for row in ROWS if row.path], ids=name_of)
def test_the_paper_preset_has_the_value(row: Row) -> None:
    if row.printed is NOT_PRINTED:
        assert hyperparameters.value(row) is not None  # the paper gives none, we must
    else:
        assert hyperparameters.value(row) == row.expected, f"{row.section}: {row.name} is printed as {row.printed}"


def test_every_row_belongs_to_an_experiment_and_says_why_it_differs() -> None:
    assert {row.experiment for row in ROWS} == set(experiments.NAMES) - set(experiments.OURS)
    for row in ROWS:
        differs = row.printed is not NOT_PRINTED and row.expected != row.printed
        assert bool(row.why) >= differs, f"{name_of(row)}: say why {row.expected} is not {row.printed}"
        assert row.path or row.expected is not NOT_PRINTED, f"{name_of(row)}: neither printed nor ours"
    assert len({(row.experiment, row.section, row.name) for row in ROWS}) == len(ROWS)


def test_a_value_that_differs_is_noticed() -> None:
    row = next(row for row in ROWS if row.name == "MAML: inner rate")
    assert (row.printed, hyperparameters.value(row)) == (0.1, 0.01)
    assert "spikes" in row.why  # and is rarely not finite: tests/lab/experiments/test_sine.py
    assert hyperparameters.value(row._replace(path="maml.inner_steps")) == 3
    with pytest.raises(AttributeError):
        hyperparameters.value(row._replace(path="maml.inner_rates"))


def test_the_table_has_a_line_for_every_row() -> None:
    heading, *lines = hyperparameters.table()
    assert len(lines) == len(ROWS)
    assert {len(line) for line in lines} == {len(heading)}
    line = next(line for line in lines if line[1] == "Attention: layers of e_P" and line[0] == "Sine regression")
    assert line[2:] == ["[128, 128, 1]", "[128, 128, 1]", ""]
    assert next(line for line in lines if line[1] == "context pixels")[2:4] == ["264", "264"]
    assert next(line for line in lines if line[1] == "maximum error")[2:4] == ["not printed", "0.1"]


# --- what is code -----------------------------------------------------------------------------------------------------


def spread(*samples: Tensor) -> float:
    """The standard deviation of all, rounded; NaN if they do not agree."""
    found = {round(float(sample.std()), 1) for sample in samples}
    return found.pop() if len(found) == 1 else math.nan


def scaling_nets() -> list[nn.Module]:
    paper = scaling.PRESETS["paper"]
    models = scaling_models.MODELS
    return [scaling_models.build(name, 3, 10, 4, getattr(paper, name), alpha=1.0) for name in models]


def policy_nets() -> list[nn.Module]:
    return [policy_models.build(name, (7, 7), (3, 2), heads=5) for name in policy_models.MODELS]


def kabsch_nets() -> list[nn.Module]:
    return [kabsch_models.build(name, (7, 7), (3, 2), heads=5) for name in kabsch_models.MODELS]


def sine_nets() -> list[nn.Module]:
    return [sine.build(sine.PRESETS["quick"], name) for name in sine.PRESETS["quick"].models]


def shared_by(model: str) -> str:
    """Which of K, Q, V pass through the first layer of the embedding of K."""
    net: Any = sine.build(sine.PRESETS["quick"], model)
    seen: list[int] = []
    net.embed_key[0].register_forward_hook(lambda layer, inputs, out: seen.append(inputs[0].shape[-2]))
    n, m = 5, 7
    net(torch.randn(2, m, 1), torch.randn(2, n, 1), torch.randn(2, n, 1))
    return ", ".join(["K"] * (n in seen) + ["Q"] * (m in seen) + ["V"] * (seen.count(n) == 2))


def sine_wave() -> str:
    """y at x, from a and b that are fitted: a sin(x - b) = p sin x + q cos x."""
    query, _, _, target = sine_task.sample(7, generator())
    basis = torch.cat([query.sin(), query.cos()], -1).double().expand(7, -1, -1)
    w = torch.linalg.lstsq(basis, target.double()).solution
    p, q = w[:, 0, 0], w[:, 1, 0]
    a, b = torch.hypot(p, q), torch.atan2(-q, p)
    inside = ((a >= 0.1) & (a < 5) & (b >= 0) & (b < math.pi)).all()
    return "a sin(x − b)" if inside and torch.allclose(basis @ w, target.double(), atol=1e-5) else "another"


def keys_of_sine() -> str:
    query, key, value, target = sine_task.sample(3, generator())
    same = query.squeeze(-1).unsqueeze(-2) == key  # (B, N, M)
    found = (same.float() @ target == value).all() and bool((same.sum(-1) == 1).all())
    return "the queries" if found else "other points"


def inner_loss() -> str:
    """The answer after three steps of gradient descent on the mean squared error of the context."""
    settings = sine.PRESETS["quick"].maml
    model: Any = sine.build(sine.PRESETS["quick"], "maml")
    query, key, value = torch.randn(3, 1, 5, 1, generator=generator())
    weights: dict[str, Tensor] = dict(model.net.named_parameters())
    for _ in range(settings.inner_steps):
        error = nn.functional.mse_loss(functional_call(model.net, weights, (key,)), value)
        slopes = torch.autograd.grad(error, list(weights.values()))
        steps = zip(weights.items(), slopes, strict=True)
        weights = {name: weight - settings.inner_rate * slope for (name, weight), slope in steps}
    expected = functional_call(model.net, weights, (query,))
    return "MSE" if torch.allclose(model(query, key, value), expected, atol=1e-5) else "another"


def is_formula(model: str, printed: str) -> Callable[[], str]:
    """Whether the comparison on the plane computes what is printed."""

    def name() -> str:
        problem = plane_task.plane(1, 23, "absolute", generator())
        q, k, v = plane_task.square(1, 7, 1.0, generator()), problem.key, problem.value
        inverse = torch.linalg.inv(k.mT @ k)
        formulas = {
            "attention": lambda: torch.softmax(q @ k.mT, -1) @ v,
            "linear_attention": lambda: q @ k.mT @ v,
            "sigma_intention": lambda: torch.softmax(q @ inverse @ k.mT, -1) @ v,
            "intention": lambda: q @ inverse @ k.mT @ v,
        }
        return printed if torch.allclose(computations_2d.predict(model, q, problem), formulas[model]()) else "another"

    return name


def plane_covariance() -> tuple[tuple[int, ...], ...]:
    w = plane_task.plane(MANY, 3, "absolute", generator()).w.squeeze(-1)
    return tuple(tuple(round(number) for number in row) for row in (w.mT @ w / MANY).tolist())


def is_map(model: str, printed: str, factor: float = 1.0, theta: float | None = None) -> Callable[[], str]:
    """Whether the variance of the entries over queries is that of the printed map Z = Q z."""

    def name() -> str:
        n, d = 7, 23
        key = torch.randn(1, n, d, generator=generator(), dtype=torch.float64)
        weight = 1.0 if theta is None else 1 / (1 + math.exp(-theta))
        sigma = weight * key @ key.mT + (1 - weight) * torch.eye(n)
        z = factor * key.mT @ torch.linalg.inv(sigma) * (1.0 if model == "unscaled" else math.sqrt(d))
        found = variances(key)[model]
        return printed if torch.allclose(found, z.square().sum((-2, -1)) / n) else "another"

    return name


def e_k_of_policy() -> str:
    """Neither embeds [K, V, Q]: what the head is given are the 9 numbers."""
    given: list[int] = []
    for net in (policy_models.build("intention", (7, 7), (3, 2)), policy_models.build("attention", (7, 7), (3, 2))):
        head: Any = net.head if hasattr(net, "head") else net.mixer
        head.register_forward_hook(lambda layer, inputs, out: given.append(inputs[1].shape[-1]))
        if isinstance(head, policy_models.FewPoints):
            assert isinstance(head.embed, nn.Identity)
        net(*policy_task.sample(2, generator())[:3])
    return "[K, V, Q] as it is" if given == [9, 9] else "another"


def k_v_q_of_policy() -> str:
    query, key, value, _ = policy_task.sample(2, generator())
    return "all are O" if torch.equal(query, key) and torch.equal(key, value) else "another"


def reads_of_kabsch() -> str:
    """The value's embedding reads V; one embedding reads K and Q, each point on its own."""
    nets: list[Any] = [kabsch_models.build(name, (7, 7), (3, 2), heads=5) for name in ("intention", "attention")]
    for net in nets:
        query, key, value, _ = kabsch_task.sample(2, generator(), queries=7)
        out = net(query, key, value)
        alone = net(query[:, :1], key, value)  # a query does not see the others, and M need not be N
        assert torch.allclose(out[:, :1], alone, atol=1e-5)
        assert {layer.in_features for layer in net.head.modules() if isinstance(layer, nn.Linear)} >= {2}
        assert len([one for one in net.head.modules() if isinstance(one, nn.Linear) and one.in_features == 2]) == 2
    return "K or Q, V, K or Q"


def kabsch_spread() -> float:
    episode = kabsch_task.sample(MANY // 10, generator())
    return spread(episode.key, episode.query, kabsch_task.similarities(MANY, generator()).translation)


def e_q_of_scaling() -> str:
    """The queries do not matter, the answer does not vanish."""
    net = scaling_nets()[0]
    query, key, value, _ = regression(2, 10, 3, generator())
    out = net(query, key, value)
    return "none: w is returned" if torch.equal(out, net(0 * query, key, value)) and out.abs().min() > 0 else "another"


def next_size() -> str:
    sizes = scaling.PRESETS["paper"].sizes("mlp")
    return "2 s" if all(b == 2 * a for a, b in itertools.pairwise(sizes)) else "another"


def scaling_y() -> str:
    _, key, value, target = regression(2, 10, 3, generator())
    return "x W" if torch.allclose(value, key @ target) else "another"


def pair_spread() -> float:
    episode = regression(MANY // 10, 10, 3, generator())
    return spread(episode.target, episode.key)


def key_spread() -> float:
    """The variance of an entry is 1/(d - N - 1) times that of the queries over that of the keys."""
    found = normalisation.draw(7, 47, normalisation.PRESETS["quick"], generator())["unscaled"].mean()
    return round(float(found * (47 - 7 - 1)) ** -0.5, 1)


MEASURED: dict[str, Callable[[], Any]] = {
    "scaling: standard deviation of W and of x": pair_spread,
    "scaling: y": scaling_y,
    "scaling: next latent size": next_size,
    "scaling: optimiser": optimiser(scaling),
    "scaling: loss": loss(scaling.loss),
    "scaling: non-linearity": lambda: activation(*scaling_nets()),
    "scaling: Intention: E_Q": e_q_of_scaling,
    "computations_2d: covariance of w": plane_covariance,
    "computations_2d: Attention": is_formula("attention", "softmax(Q K') V"),
    "computations_2d: Linear attention": is_formula("linear_attention", "Q K' V"),
    "computations_2d: σIntention": is_formula("sigma_intention", "softmax(Q (K'K)⁻¹ K') V"),
    "computations_2d: Intention": is_formula("intention", "Q (K'K)⁻¹ K' V"),
    "sine: y": sine_wave,
    "sine: keys are among": keys_of_sine,
    "sine: optimiser": optimiser(sine),
    "sine: loss": loss(sine.loss),
    "sine: non-linearity": lambda: activation(*sine_nets()),
    "sine: Intention: e_K is shared by": lambda: shared_by("intention"),
    "sine: Attention: e_K is shared by": lambda: shared_by("attention"),
    "sine: MAML: inner loss": inner_loss,
    "policy: standard deviation of the target": lambda: spread(policy_task.sample(MANY, generator()).target),
    "policy: shape of O": lambda: tuple(policy_task.sample(2, generator()).key.shape[1:]),
    "policy: K, V, Q": k_v_q_of_policy,
    "policy: optimiser": optimiser(policy),
    "policy: loss": loss(policy.loss),
    "policy: non-linearity": lambda: activation(*policy_nets()),
    "policy: Intention, Attention: e_K": e_k_of_policy,
    "kabsch: optimiser": optimiser(kabsch),
    "kabsch: loss": loss(kabsch.loss),
    "kabsch: non-linearity": lambda: activation(*kabsch_nets()),
    "kabsch: standard deviation of keys, queries and translation": kabsch_spread,
    "kabsch: what e_K, e_V and e_Q read": reads_of_kabsch,
    "layers: condition numbers": lambda: tuple(k for k in (1.1, 10.0) if k in layers.PRESETS["paper"].kappas),
    "normalisation: standard deviation of keys and queries": key_spread,
    "normalisation: unscaled": is_map("unscaled", "Q K' [K K']⁻¹"),
    "normalisation: scaled": is_map("scaled", "√d Q K' [K K']⁻¹"),
    "normalisation: with a regulariser": is_map(
        "regularised", "0.5 √d Q K' [sig(α) K K' + (1 − sig(α)) I]⁻¹", factor=0.5, theta=0.0
    ),
    "normalisation: α at the start": lambda: 0 if is_map("regularised", "yes", 0.5, 0.0)() == "yes" else math.nan,
}


@pytest.mark.parametrize("row", CODE, ids=name_of)
def test_what_is_code_is_as_the_table_says(row: Row) -> None:
    assert name_of(row) in MEASURED, f"measure {name_of(row)!r} in this test"
    assert MEASURED[name_of(row)]() == row.expected


def test_nothing_is_measured_that_is_not_in_the_table() -> None:
    assert set(MEASURED) == {name_of(row) for row in CODE}
