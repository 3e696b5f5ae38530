"""The small trained models that come with the package: the lab's own, narrower, one safetensors file each."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from intention.lab.core.results import Json
from intention.lab.experiments import pixels, sine
from intention.lab.experiments.base import MamlNet, Net

__all__ = ["trained", "untrained"]

FOLDER = Path(__file__).parent / "weights"
NAMES = {
    "sine": ("intention", "attention", "neural_process", "maml"),
    "pixels": ("intention", "attention", "neural_process"),
}
SINE = replace(
    sine.PRESETS["standard"],
    intention=Net((128,) * 4, learning_rate=1e-3),
    attention=Net((64,) * 3, (64, 64, 1), learning_rate=1e-3, heads=2),
    neural_process=Net((128, 128, 16), (128, 128, 128, 1), learning_rate=3e-3),
    maml=MamlNet(learning_rate=3e-3),
)
PIXELS = replace(
    pixels.PRESETS["standard"],
    data="built-in",
    steps=6000,
    intention=Net((128,) * 4, learning_rate=1e-3),
    attention=Net((64,) * 3, (64, 64, 1), learning_rate=1e-3, heads=2),
    neural_process=Net((128, 128, 64), (128, 128, 128, 1), learning_rate=1e-3),
)


def build(task: str, name: str) -> nn.Module:
    """The model before any training, from torch's random numbers."""
    return sine.build(SINE, name) if task == "sine" else pixels.build(PIXELS, name)


def file(task: str, name: str) -> Path:
    return FOLDER / f"{task}-{name}.safetensors"


@functools.cache
def trained(task: str, name: str) -> nn.Module:
    """The model with its weights, to be asked and not to be changed.

    >>> trained("sine", "intention")(torch.zeros(1, 7, 1), torch.zeros(1, 3, 1), torch.zeros(1, 3, 1)).shape
    torch.Size([1, 7, 1])
    """
    from safetensors.torch import load_file

    model, weights = build(task, name).requires_grad_(False), load_file(file(task, name))
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), f"{file(task, name)} is of another model; train it again: make play-models"
    for key, parameter in own.items():
        parameter.copy_(weights[key])
    return model.eval()


@functools.cache
def untrained(task: str, name: str) -> nn.Module:
    """The same model at step 0 of the training of `trained`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build(task, name).eval().requires_grad_(False)


def about(task: str, name: str) -> Json:
    """How the model was trained, as its file tells."""
    from safetensors import safe_open

    with safe_open(str(file(task, name)), framework="pt") as opened:
        return json.loads((opened.metadata() or {})["about"])
