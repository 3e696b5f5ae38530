"""What the tests of the table of hyperparameters share: how an optimiser, a loss and a non-linearity are found out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from intention.lab.core.place import Place
from intention.lab.core.train import Plan, train
from intention.lab.paper.lines import Row
from intention.lab.tasks import Episode

IMAGES = ("pixels", "fewshot", "fewshot_resnet", "fewshot_latent", "anomaly")  # measured in a file of their own


def name_of(row: Row) -> str:
    return f"{row.experiment}: {row.name}"


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def stepped(experiment: Any, plan: Plan) -> Optimizer:
    """The one that the experiment's loop makes for the plan."""
    assert experiment.train is train
    used: list[Optimizer] = []
    hook = register_optimizer_step_post_hook(lambda one, *_: used.append(one))
    try:
        sample = lambda batch, generator: torch.randn(batch, 1, generator=generator)  # noqa: E731
        short = replace(plan, steps=1, evaluate_every=0, keep="")
        train(nn.Linear(1, 1), sample, lambda m, x: m(x).square().mean(), short, seed=0, place=Place())
    finally:
        hook.remove()
    return used[0]


def plans(experiment: Any) -> list[Plan]:
    """How the paper preset trains its models."""
    config = experiment.PRESETS["paper"]
    return [config.plan(model) for model in config.models] if signature(config.plan).parameters else [config.plan()]


def optimiser(experiment: Any, loop: Any = None) -> Callable[[], str]:
    """Its name; `loop`: the module that trains, where that is not the experiment's own."""

    def name() -> str:
        found = {type(stepped(loop or experiment, plan)).__name__ for plan in plans(experiment)}
        return " and ".join(sorted(found))

    return name


def loss(function: Callable[[nn.Module, Episode], Tensor]) -> Callable[[], str]:
    class Constant(nn.Module):
        def forward(self, *inputs: Tensor) -> Tensor:
            return out

    def name() -> str:
        found = function(Constant(), Episode(target, target, target, target))
        return "MSE" if torch.allclose(found, nn.functional.mse_loss(out, target)) else "another"

    out, target = torch.randn(2, 3, 5, 2, generator=generator())
    return name


def activation(*models: nn.Module) -> str:
    """The non-linearities of all models but the leaky ones."""
    found = {type(layer).__name__ for model in models for layer in model.modules() if _bends(layer)}
    return " and ".join(sorted(found - {"LeakyReLU"}))


def _bends(layer: nn.Module) -> bool:
    return type(layer).__module__ == "torch.nn.modules.activation"


def sizes(net: nn.Module) -> tuple[int, ...]:
    """The outputs of its linear layers."""
    return tuple(layer.out_features for layer in net.modules() if isinstance(layer, nn.Linear))
