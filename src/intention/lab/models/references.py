"""What is worth to know of a task without training: closed forms that several experiments have beside their models."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import functional as F
from intention.lab.models import output
from intention.lab.tasks import Episode

__all__ = ["RIDGE_ALPHA", "ridge", "zero"]

RIDGE_ALPHA = 0.1  # of "ridge on raw features"


def zero(episode: Episode) -> Tensor:
    """The mean of the prior: the origin, in both tasks."""
    return torch.zeros_like(episode.target)


def ridge(query: Tensor, key: Tensor, value: Tensor, alpha: float, *, intercept: bool) -> Tensor:
    return output(F.intention(query, key, value, alpha=alpha, intercept=intercept))
