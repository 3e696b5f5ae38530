"""What the experiments along sequences share: checks, the plan of training, and lines over positions or steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from intention.lab.core.results import Row
from intention.lab.core.train import Plan
from intention.lab.experiments.base import OUR_LINE, added, require

__all__ = [
    "FIXED",
    "GATED",
    "MIXERS",
    "OURS",
    "RATES",
    "WHERE",
    "Gated",
    "about",
    "check",
    "check_heads",
    "plan",
    "texts",
]

MIXERS = ("intention", "sigma_intention", "attention", "linear_attention", "delta")
GATED = {  # models of gated layers -> their mixer
    "intention_gated": "intention",
    "sigma_intention_gated": "sigma_intention",
    "attention_gated": "attention",
    "linear_attention_gated": "linear_attention",
    "delta_gated": "delta",
    "gated_delta_gated": "gated_delta",
}
FIXED = ("intention_gated", "linear_attention_gated", "delta_gated", "gated_delta_gated")  # a state of constant size
RATES = (1e-3, 3e-3, 1e-2, 3e-2)  # tried for every model of gated layers
WHERE = OUR_LINE
OURS = "not in the paper"


@dataclass(frozen=True)
class Gated:
    """What a model of gated layers has of its own."""

    learning_rate: float = 1e-2
    weight_decay: float = added(0.0)

    def __post_init__(self) -> None:
        require(0 < self.learning_rate < math.inf, f"learning_rate must be > 0 and finite, got {self.learning_rate}")
        require(0 <= self.weight_decay < math.inf, f"weight_decay must be >= 0 and finite, got {self.weight_decay}")


def check(config: Any, models: Sequence[str], **least: int) -> None:
    """Models that there are, and numbers that are large enough."""
    unknown = set(config.models) - set(models)
    require(not unknown, f"there is no model {', '.join(sorted(unknown))} here; there are {', '.join(models)}")
    for name, bound in {"seeds": 1, "heads": 1, "layers": 1, "evaluations": 1, **least}.items():
        if hasattr(config, name):
            require(getattr(config, name) >= bound, f"{name} must be at least {bound}, got {getattr(config, name)}")
    if hasattr(config, "learning_rate"):
        plan(config)


def check_heads(width: int, heads: int) -> None:
    fits = width >= heads and width % heads == 0
    require(fits, f"the width must be a multiple of the number of heads, got {width} and {heads} heads")


def plan(config: Any, rate: float | None = None, weight_decay: float = 0.0) -> Plan:
    """The learning rate rises over the first twentieth and falls along a cosine."""
    chosen = config.learning_rate if rate is None else rate
    every = max(1, config.steps // config.evaluations)
    warmup = config.steps // 20
    options = {"clip": config.clip, "evaluate_every": every, "weight_decay": weight_decay}
    return Plan(config.steps, config.batch, chosen, warmup=warmup, **options)


def about(row: Row, name: str) -> Any:
    return (row.data or {}).get(name)


def texts(rows: Iterable[Row], name: str) -> list[Any]:
    """What rows say under a name in their data, each once, in order."""
    found = {about(row, name) for row in rows}
    return sorted(found - {None})
