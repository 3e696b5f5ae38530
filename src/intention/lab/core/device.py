"""Where models and their tasks are: the CPU, a GPU of NVIDIA (cuda) or of Apple (mps).

Weights and tasks are drawn on the CPU and moved, so that a seed means the same start and the same data everywhere.
"""

from __future__ import annotations

import os
import re
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from intention.lab.core import ranks
from intention.lab.core.files import LabError

__all__ = ["answer", "find", "moved", "of"]

CPU = torch.device("cpu")
KNOWN = re.compile(r"auto|cpu|mps|cuda(:\d+)?")
Batch = TypeVar("Batch", bound=tuple[Tensor, ...])  # a NamedTuple of tensors


def find(name: str) -> torch.device:
    """A device by its name: auto, cpu, cuda, cuda:N or mps. One that is not there is an error before any work.

    auto: a GPU if there is one. Under torchrun cuda is the GPU of the rank.

    >>> find("cpu")
    device(type='cpu')
    """
    if not KNOWN.fullmatch(name):
        raise LabError(f"there is no device {name!r}; there are auto, cpu, cuda, cuda:N (the N-th GPU, from 0) and mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "mps" and not torch.backends.mps.is_available():
        raise LabError("--device mps wants a GPU of Apple, and torch finds none; use --device auto, or cpu")
    if not name.startswith("cuda"):
        return torch.device(name)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not count:
        raise LabError(f"--device {name} wants a GPU and a torch built for it, and none is found; use --device cpu")
    index = int(name.partition(":")[2] or (os.environ.get("LOCAL_RANK", 0) if ranks.count() > 1 else 0))
    if index >= count:
        raise LabError(f"--device {name}: this machine has {count} GPU(s), numbered from 0; there is no number {index}")
    return torch.device("cuda", index)


def of(model: nn.Module) -> torch.device:
    """Where a model is; one without weights is nowhere, and stays on the CPU."""
    some = next(iter(model.parameters()), None)
    return CPU if some is None else some.device


def moved(batch: Batch, device: torch.device) -> Batch:
    """The same tasks there. A toy's batch may be one tensor."""
    if isinstance(batch, Tensor):
        return batch.to(device)  # pyright: ignore[reportReturnType]
    return type(batch)(*(part.to(device, non_blocking=True) for part in batch))


@torch.no_grad()
def answer(model: nn.Module, *inputs: Tensor, **options: Any) -> Tensor:
    """What the model says, on the CPU: the inputs go where the model is. Of several outputs the first."""
    device = of(model)
    out = model(*(x.to(device) for x in inputs), **options)
    return (out[0] if isinstance(out, tuple) else out).cpu()
