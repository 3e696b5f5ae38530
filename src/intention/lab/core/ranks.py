"""Data-parallel training under torchrun: every rank draws the same tasks and works on its share of them."""

from __future__ import annotations

import os
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from intention.lab.core.files import LabError

__all__ = ["agree", "check_batch", "count", "first", "join", "leave", "mean", "share", "wrap"]

T = TypeVar("T")
Batch = TypeVar("Batch", bound=tuple[Tensor, ...])  # a NamedTuple of tensors, the tasks in front


def count() -> int:
    """Number of ranks; 1 without torchrun."""
    return int(os.environ["WORLD_SIZE"]) if dist.is_torchelastic_launched() else 1


def first() -> bool:
    """Whether this process prints and writes."""
    return count() == 1 or int(os.environ["RANK"]) == 0


def join() -> None:
    if count() > 1 and not dist.is_initialized():
        # gloo for what is on the CPU, and nccl for models on GPUs
        both = torch.cuda.is_available() and dist.is_nccl_available()
        dist.init_process_group("cpu:gloo,cuda:nccl" if both else "gloo")


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def agree(value: T) -> T:
    """The first rank's value, on all ranks."""
    if count() == 1:
        return value
    join()
    values = [value]
    dist.broadcast_object_list(values, device=torch.device("cpu"))
    return values[0]


def mean(value: float) -> float:
    """The mean over ranks."""
    if count() == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / count()


def wrap(model: nn.Module) -> nn.Module:
    return model if count() == 1 else DistributedDataParallel(model)


def check_batch(batch: int | None) -> None:
    if batch is not None and batch % count():
        raise LabError(f"a batch of {batch} tasks cannot be shared by {count()} ranks; use a multiple of {count()}")


def share(episode: Batch) -> Batch:
    """This rank's tasks. Shares are equal, so that the mean over ranks is the mean over the batch."""
    if count() == 1:
        return episode
    batch = max(part.shape[0] for part in episode)
    check_batch(batch)
    size, rank = batch // count(), int(os.environ["RANK"])
    own = slice(rank * size, (rank + 1) * size)
    return type(episode)(*(part if part.shape[0] == 1 else part[own] for part in episode))
