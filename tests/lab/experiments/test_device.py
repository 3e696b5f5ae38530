"""The training step of experiments on a GPU: fake CUDA tensors, where what is left on the CPU raises.

Without a GPU torch's autograd engine crashes on fake CUDA tensors: the loss is computed without gradients, and the
optimiser's step is made with gradients of the right shapes. The causal solve chooses its way by values, which fake
tensors do not have: models with it are left out.
"""

from __future__ import annotations

import importlib
import traceback
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from intention import _checks as checks
from intention.lab import experiments
from intention.lab.core import train as training
from intention.lab.core.device import moved
from intention.lab.core.place import Place
from intention.lab.experiments.base import Experiment, Job

GPU = torch.device("cuda", 0)
PLACES = {"fewshot": "fewshot.training", "fewshot_resnet": "fewshot.training", "fewshot_latent": "fewshot.training"}
WAY = 5  # classes of a few-shot task
# not seen: few-shot images and language models call more of what needs a CUDA, also of fake tensors
TRAINED = ("layers", "scaling", "sine", "pixels", "policy", "kabsch", "anomaly", "stability")


class Stopped(Exception):
    """A training was about to begin."""


def tiny(experiment: Experiment) -> Any:
    """The quick preset, with hardly anything to evaluate before the training begins."""
    config = experiment.PRESETS["quick"]
    few = {item.name: 4 for item in fields(config) if item.name.startswith("evaluation_") and item.type == "int"}
    return replace(config, **few, **({"data": "built-in"} if hasattr(config, "data") else {}))


def first_jobs(experiment: Experiment) -> list[Job]:
    """One run of each model; not of MAML on images, whose gradients inside the loss need the engine that crashes."""
    found = {job.model: job for job in experiment.jobs(tiny(experiment))}
    return [job for job in found.values() if job.experiment != "fewshot" or not job.model.startswith("maml")]


def captured(experiment: Experiment, job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[Any, ...] | None:
    """Model, sampler, loss and plan of the run; None if it trains nothing."""
    name = job.experiment
    module = importlib.import_module(f"intention.lab.experiments.{PLACES.get(name, name)}")
    found: list[tuple[Any, ...]] = []

    def stop(*arguments: Any, **options: Any) -> None:
        found.append(arguments)
        raise Stopped

    monkeypatch.setattr(module, "train", stop)
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
                    there = known.setdefault(id(tensor), torch.empty(tensor.shape, dtype=tensor.dtype, device=GPU))
                    held[name] = nn.Parameter(there, requires_grad=False) if held is module._parameters else there


@pytest.fixture
def without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for calls that ask a CUDA that is not there, also of fake tensors, or read values: right in shape.

    A number that is read is 0, which of a condition says that the plain solve is accurate; what is asked is not so.
    """
    getitem = Tensor.__getitem__

    def item(x: Tensor) -> float:
        return 0.0 if x.device.type == "cuda" else 1.0  # the optimiser's count of its steps is on the CPU

    def indexed(x: Tensor, key: Any) -> Tensor:
        if x.device.type != "cuda":
            return getitem(x, key)
        keys = key if isinstance(key, tuple) else (key,)
        bare = tuple(one.to("meta") if isinstance(one, Tensor) else one for one in keys)
        shape = getitem(torch.empty(x.shape, device="meta"), bare).shape
        return torch.empty(shape, dtype=x.dtype, device=x.device)

    def batch_norm(x: Tensor, *rest: Any, **options: Any) -> Tensor:
        held = [one for one in (*rest, *options.values()) if isinstance(one, Tensor)]
        assert {one.device for one in held} <= {x.device}
        return torch.empty_like(x)

    def one_hot(labels: Tensor, num_classes: int = WAY) -> Tensor:
        return torch.empty((*labels.shape, num_classes), dtype=torch.long, device=labels.device)

    def copied(x: Tensor, other: Tensor, non_blocking: bool = False) -> Tensor:
        assert x.device == other.device
        return x

    for check in ("decay", "positive_channels"):  # they read values, of which there are none
        monkeypatch.setattr(checks, check, lambda x: None)
    monkeypatch.setattr(Tensor, "__getitem__", indexed)
    monkeypatch.setattr(Tensor, "__setitem__", lambda x, key, value: None)
    monkeypatch.setattr(Tensor, "copy_", copied)
    monkeypatch.setattr(nn.functional, "one_hot", one_hot)
    monkeypatch.setattr(nn.functional, "batch_norm", batch_norm)
    for name, kind in (("item", float), ("__float__", float), ("__int__", int), ("__bool__", bool)):
        monkeypatch.setattr(Tensor, name, lambda x, kind=kind: kind(item(x)))


@pytest.mark.filterwarnings("ignore:CUDA is not available")  # torch's, of autocast
@pytest.mark.parametrize("name", TRAINED)
def test_the_training_step_stays_on_the_device(name: str, monkeypatch: pytest.MonkeyPatch, request: Any) -> None:
    experiment = experiments.find(name)
    steps = [step for job in first_jobs(experiment) if (step := captured(experiment, job, monkeypatch)) is not None]
    assert steps
    batches = [sample(plan.batch, torch.Generator().manual_seed(0)) for _, sample, _, plan in steps]
    request.getfixturevalue("without_cuda")
    stepped = 0
    for (model, _, loss, plan), batch in zip(steps, batches, strict=True):
        with FakeTensorMode() as mode, torch.no_grad():
            put_on_gpu(model)
            fake: Any = type(batch)(*(mode.from_tensor(part) for part in batch))
            try:
                out: Tensor = loss(model, moved(fake, GPU))
            except (RuntimeError, DataDependentOutputException) as error:
                if not _chooses_by_values(error):
                    raise
                continue
            assert out.device == GPU
            assert out.shape == ()
            _take_a_step(model, plan)
            stepped += 1
    assert stepped


def _chooses_by_values(error: Exception) -> bool:
    """Whether it comes from the causal solve, whose ways depend on values that fake tensors do not have."""
    text = "".join(traceback.format_exception(error))
    return "/solve/causal/" in text and ("not linked" in text or isinstance(error, DataDependentOutputException))


def _take_a_step(model: nn.Module, plan: training.Plan) -> None:
    optimiser = training._optimiser(model.requires_grad_(True), plan)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    assert all(weight.device == GPU for weight in model.parameters())
