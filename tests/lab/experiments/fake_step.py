"""The training step of an experiment with fake CUDA tensors: forward, backward, clipping and the optimiser's step.

Run by `test_device` as a program of its own, under a library that gives torch a CUDA device without anything in it.
Prints a line of JSON for each model: "" where the step went through, or what stopped it.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from intention import _checks as checks
from intention.lab import experiments
from intention.lab.core import train as training
from intention.lab.core.checkpoint import State
from intention.lab.core.place import Place
from intention.lab.experiments.base import Experiment, Job

GPU = torch.device("cuda", 0)
PLACES = {"fewshot": "fewshot.training", "fewshot_resnet": "fewshot.training", "fewshot_latent": "fewshot.training"}

WAY = 5  # classes of a few-shot task


class Stopped(Exception):
    """A training was about to begin."""


def tiny(experiment: Experiment) -> Any:
    """The quick preset, with hardly anything to evaluate before the training begins."""
    config = experiment.PRESETS["quick"]
    few = {item.name: 4 for item in fields(config) if item.name.startswith("evaluation_") and item.type == "int"}
    return replace(config, **few, **({"data": "built-in"} if hasattr(config, "data") else {}))


def captured(experiment: Experiment, job: Job) -> tuple[Any, ...] | None:
    """Model, sampler, loss and plan of the run; None if it trains nothing."""
    module: Any = importlib.import_module(f"intention.lab.experiments.{PLACES.get(job.experiment, job.experiment)}")
    found: list[tuple[Any, ...]] = []

    def stop(*arguments: Any, **options: Any) -> None:
        found.append(arguments)
        raise Stopped

    module.train = stop
    try:
        list(experiment.run(job, Place()))
    except Stopped:
        return found[0]
    return None


def put_on_gpu(model: nn.Module) -> None:
    """Fake weights and buffers in place of the model's; those that are shared stay shared."""
    known: dict[int, Tensor] = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None:
                    if id(tensor) not in known:
                        there = torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU)
                        weight = isinstance(tensor, nn.Parameter)
                        known[id(tensor)] = nn.Parameter(there, tensor.requires_grad) if weight else there
                    held[name] = known[id(tensor)]  # type: ignore[assignment]


def read_as_zero() -> None:
    """Fake tensors have no values: a number that is read is 0, which of a condition says that a solve is accurate."""

    def item(x: Tensor) -> float:
        return 0.0 if x.device.type == "cuda" else 1.0  # the optimiser's count of its steps is on the CPU

    for name, kind in (("item", float), ("__float__", float), ("__int__", int), ("__bool__", bool)):
        setattr(Tensor, name, lambda x, kind=kind: kind(item(x)))
    # how many rows are chosen, and how many classes there are, is read from values too: all rows, and WAY classes
    Tensor.nonzero = lambda x: torch.zeros((x.numel(), x.dim()), dtype=torch.long, device=x.device)  # type: ignore
    nn.functional.one_hot = lambda labels, num_classes=WAY: torch.zeros(  # type: ignore[assignment]
        (*labels.shape, num_classes), dtype=torch.long, device=labels.device
    )
    for check in ("decay", "positive_channels"):  # they refuse what is 0
        setattr(checks, check, lambda x: None)


def step(model: nn.Module, batch: Any, loss: Any, plan: training.Plan) -> None:
    with FakeTensorMode() as mode:
        put_on_gpu(model)
        fake = type(batch)(*(mode.from_tensor(part) for part in batch))
        state = State(model, training._optimiser(model, plan), torch.Generator(), 0, [])
        training._step(model, state, lambda *_: fake, loss, plan, GPU)
        weights = [weight for weight in model.parameters() if weight.requires_grad]
        assert any(weight.grad is not None for weight in weights)
        assert all(weight.device == GPU for weight in weights)
        assert all(weight.grad.device == GPU for weight in weights if weight.grad is not None)


def main(name: str) -> None:
    experiment = experiments.find(name)
    jobs = {job.model: job for job in experiment.jobs(tiny(experiment))}
    steps = {model: found for model, job in jobs.items() if (found := captured(experiment, job)) is not None}
    drawn = {m: sample(plan.batch, torch.Generator().manual_seed(0)) for m, (_, sample, _, plan) in steps.items()}
    read_as_zero()
    for model, (net, _, loss, plan) in steps.items():
        stopped = ""
        try:
            step(net, drawn[model], loss, plan)
        except Exception as error:
            where = [f"{frame.filename}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)]
            ours = [place for place in where if "/intention/" in place][-1:]
            stopped = f"{type(error).__name__}: {str(error).splitlines()[0][:200]} ({', '.join(ours)})"
        print(json.dumps({"model": model, "stopped": stopped}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
