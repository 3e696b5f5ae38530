"""What experiments on episodes share: the loss, predictions and errors of held-out tasks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from intention.lab.core.device import answer
from intention.lab.core.results import Json
from intention.lab.experiments.base import MamlNet, Measure, Net, require
from intention.lab.tasks import Episode

__all__ = ["check_net", "check_one_number", "loss", "numbers", "over_tasks", "predict_in_parts", "task_errors"]


def check_net(model: str, net: Net) -> None:
    """Sizes with which a model can be built."""
    require(len(net.decode) > 0, f"{model}.decode must end with the size of the answer, got nothing")
    require(model == "mlp" or len(net.embed) > 0, f"{model}.embed must have at least one size, got nothing")


def check_one_number(model: str, net: Net | MamlNet) -> None:
    """Sizes of a model that answers with one number: the last layer, or, without one, a value of the context."""
    last = net.layers if isinstance(net, MamlNet) else net.decode
    decoded = model in ("maml", "attention", "neural_process")  # the others answer with values as they are
    require(last[-1:] == ((1,) if decoded else ()), f"{model} must end with one number for the answer, got {last}")
    empty = isinstance(net, Net) and not net.embed
    require(not empty, f"{model}.embed must name at least one size, got none")


def loss(model: nn.Module, episode: Episode) -> Tensor:
    return (model(episode.query, episode.key, episode.value) - episode.target).square().mean()


def predict_in_parts(model: nn.Module, episode: Episode, size: int = 500) -> Tensor:
    """The predictions of many tasks without much memory."""
    parts = zip(*(x.split(size) for x in episode[:3]), strict=True)
    return torch.cat([answer(model, *part) for part in parts])


def task_errors(predicted: Tensor, episode: Episode) -> Tensor:
    return (predicted - episode.target).square().mean((-2, -1))  # one per task


def over_tasks(metric: str, errors: Tensor, data: Json, model: str | None = None) -> Measure:
    """The mean over tasks and its 95% interval."""
    mean, half = float(errors.mean()), 1.96 * float(errors.std()) / len(errors) ** 0.5
    return Measure(metric, mean, None, (mean - half, mean + half), data, model)


def numbers(x: Tensor) -> Any:
    """Nested lists with 4 digits after the point."""
    return [numbers(row) for row in x] if x.dim() > 1 else [round(float(number), 4) for number in x]
