"""Checkpoints: one safetensors file with weights, optimiser, random states and history. No pickle anywhere."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from intention.lab.core.device import of as device_of
from intention.lab.core.files import LabError, write_whole
from intention.lab.core.results import Json

__all__ = ["NAME", "State", "load", "save"]

NAME = "checkpoint.safetensors"


@dataclass
class State:
    """All that a training run is between two steps."""

    model: nn.Module
    optimiser: torch.optim.Optimizer
    generator: torch.Generator  # of the training tasks
    step: int
    history: list[dict[str, float]]
    best: dict[str, Tensor] | None = None  # weights of the best evaluation, where these are kept


def save(path: Path, state: State, settings: Json) -> None:
    """`settings` say which training this is; a checkpoint of another one is not continued."""
    from safetensors.torch import save as to_bytes

    tensors = {f"model.{name}": tensor for name, tensor in state.model.state_dict().items()}
    tensors |= {f"best.{name}": tensor for name, tensor in (state.best or {}).items()}
    for index, slots in state.optimiser.state_dict()["state"].items():
        tensors |= {f"optimiser.{index}.{name}": tensor for name, tensor in slots.items()}
    tensors |= {"random.tasks": state.generator.get_state(), "random.torch": torch.get_rng_state()}
    if (device := device_of(state.model)).type == "cuda":
        tensors["random.cuda"] = torch.cuda.get_rng_state(device)  # of dropout on the GPU
    # copies: a module that is used twice appears under two names, which safetensors refuses to share
    copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
    about = {"step": state.step, "history": state.history, "settings": settings, "digest": _digest(copies)}
    write_whole(path, to_bytes(copies, {"about": json.dumps(about)}))


def load(path: Path, state: State, settings: Json) -> None:
    """Fill `state` with what was saved: the run goes on with the same bits, on the device where its model is now.

    On another device than before the tasks are the same; its arithmetic, and dropout on a GPU, are not.
    """
    about, tensors = _read(path)
    if about["settings"] != json.loads(json.dumps(settings)):
        raise LabError(
            f"{path} belongs to a training with other settings: {about['settings']}, wanted {dict(settings)}; {_REMEDY}"
        )
    try:
        if not 0 <= about["step"] <= settings["steps"]:
            raise ValueError(f"it is of step {about['step']}")
        state.model.load_state_dict(_under("model.", tensors))
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _under("optimiser.", tensors).items():
            index, slot = name.split(".", 1)
            slots.setdefault(int(index), {})[slot] = tensor
        if about["step"] and set(slots) != set(range(sum(len(g["params"]) for g in state.optimiser.param_groups))):
            raise ValueError("it has no optimiser state of all parameters")
        state.optimiser.load_state_dict({**state.optimiser.state_dict(), "state": slots})
        state.best = _under("best.", tensors) or None
        state.generator.set_state(tensors["random.tasks"])
        torch.set_rng_state(tensors["random.torch"])
        if "random.cuda" in tensors and (device := device_of(state.model)).type == "cuda":
            torch.cuda.set_rng_state(tensors["random.cuda"], device)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise LabError(f"{path} does not fit this model: {error}; {_REMEDY}") from error
    state.step, state.history = about["step"], about["history"]


_REMEDY = "--fresh starts this run over; to keep the file, move it away first"


def _read(path: Path) -> tuple[Json, dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
        if about["digest"] != _digest(tensors):
            raise ValueError("its content has changed since it was written")
        if not (isinstance(about["step"], int) and isinstance(about["history"], list) and "settings" in about):
            raise ValueError("its description is not complete")
        return about, tensors
    except OSError as error:
        raise LabError(f"cannot read {path}: {error}; {_REMEDY}") from error
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise LabError(f"{path} is damaged or not a checkpoint of ours ({error}); {_REMEDY}") from error


def _digest(tensors: Mapping[str, Tensor]) -> str:
    """safetensors has no checksum: a bit that flipped on the disk would go unnoticed."""
    sha = hashlib.sha256()
    for name in sorted(tensors):
        sha.update(name.encode())
        sha.update(tensors[name].reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
