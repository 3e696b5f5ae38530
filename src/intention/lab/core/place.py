"""Where a run works."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

__all__ = ["Place"]

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Place:
    """Where a run works: its folder (None: nothing is saved), and who hears of its progress.

    `tell(step, steps, {"loss": ...})` is called often and returns at once.
    """

    folder: Path | None = None
    tell: Callable[[int, int, Mapping[str, float]], None] | None = None
    tensorboard: bool = False
    save_every: float = 30.0  # seconds between checkpoints
    device: torch.device = CPU  # where models are trained
