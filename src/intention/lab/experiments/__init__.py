"""The experiments by name, imported when asked for."""

from __future__ import annotations

import importlib
from typing import Any

from intention.lab.core.files import LabError
from intention.lab.experiments.base import Experiment

__all__ = ["NAMES", "OURS", "find"]

NAMES = (
    "computations_2d",
    "layers",
    "scaling",
    "normalisation",
    "slowdown",
    "sine",
    "pixels",
    "fewshot",
    "fewshot_resnet",
    "fewshot_latent",
    "policy",
    "kabsch",
    "anomaly",
    "in_context",
    "recall",
    "text",
    "stability",
    "needle",
    "vit",
    "tables",
    "fewshot_features",
)
OURS = (
    "in_context",
    "recall",
    "text",
    "stability",
    "needle",
    "vit",
    "tables",
    "fewshot_features",
)  # the paper does not have them


def find(name: str) -> Experiment:
    """The experiment of this name: its title, presets, runs, claims and figures."""
    if name not in NAMES:
        raise LabError(f"there is no experiment {name!r}; there are {', '.join(NAMES)}")
    module: Any = importlib.import_module(f"intention.lab.experiments.{name}")
    return module
