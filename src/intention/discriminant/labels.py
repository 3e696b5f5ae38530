"""What classifiers are told: labels, priors, thresholds, shrinkage. Checked, and brought into one form."""

from __future__ import annotations

import torch
from torch import Tensor

from intention import _checks as checks
from intention._covariance import Rule, deviations
from intention.solve.torch_state import eager

__all__ = ["balanced", "check_ddof", "labelled", "mean_square", "rule_of", "threshold_of"]


def labelled(key: Tensor, value: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Checked: key, one-hot values in float64 and weights (1 where none are given) in float64."""
    if isinstance(value, Tensor) and not value.dtype.is_floating_point:
        if not value.numel():
            raise ValueError("labels are empty: the number of classes is not known; use one-hot values (..., N, C)")
        if int(value.min()) < 0:
            raise ValueError(
                f"labels must be integers >= 0 of shape (..., N), got {tuple(value.shape)} from {value.min()}"
            )
        value = torch.nn.functional.one_hot(value.long()).to(key.dtype)
    elif isinstance(value, Tensor) and isinstance(key, Tensor):
        n = key.shape[-2:-1]
        if value.shape[-1:] == n and value.shape[-2:-1] != n:
            raise TypeError(
                f"labels (..., N) must be integers, got {value.dtype} {tuple(value.shape)}; use labels.long(), or "
                "one-hot values (..., N, C)"
            )
    checks.fitted_points(key, value, weight)
    if value.shape[-1] < 2:
        raise ValueError(f"a classifier needs at least 2 classes, got one-hot values {checks.shape(value)}")
    if eager():
        checks.one_hot(value)
        checks.require_values(weight, key.new_zeros(()), None)
    mass = value.new_ones(value.shape[:-1]) if weight is None else weight
    return key, value.double(), mass.double()


def balanced(value: Tensor, weight: Tensor | None, priors: Tensor | None) -> tuple[Tensor, Tensor]:
    """Weights whose mass in each class is that of `priors` (..., C), of the same total; and the priors."""
    mass = value.new_ones(value.shape[:-1]) if weight is None else weight.double()
    sizes = (value * mass.unsqueeze(-1)).sum(-2)
    total = sizes.sum(-1, keepdim=True)
    if priors is None:
        return mass, sizes / total
    prior = checks.priors(priors, sizes)
    factor = prior * total / torch.where(sizes > 0, sizes, 1.0)
    return mass * (value * factor.unsqueeze(-2)).sum(-1), prior


def mean_square(key: Tensor, labels: Tensor, mass: Tensor) -> Tensor:
    """trace(S) / d of the covariance within classes (...)"""
    return (deviations(key.double(), labels, mass).square() * mass.unsqueeze(-1)).mean(-1).sum(-1)


def rule_of(size: Tensor | None, alpha: float | Tensor, shrinkage: float | Tensor, device: torch.device) -> Rule:
    """(1 - s) S + (s trace(S) / d + alpha) I; size, trace(S) / d, is None for a kernel, whose space has no d."""
    alpha, shrinkage = (_number(x, name, device) for x, name in ((alpha, "alpha"), (shrinkage, "shrinkage")))
    if eager():
        checks.require_values(None, alpha, None)
        if not bool(((shrinkage >= 0) & (shrinkage <= 1)).all()):
            raise ValueError(f"shrinkage must be in [0, 1], got {shrinkage.detach()}")
    if size is not None:
        # keys that are not finite show in S, where they give NaN
        return Rule(alpha + shrinkage * size.nan_to_num(), 1 - shrinkage, False, "within")
    if eager() and not (bool((alpha > 0).all()) and bool((shrinkage == 0).all())):
        raise ValueError("a kernel classifier needs alpha > 0 and no shrinkage: its space has no finite dimension")
    return Rule(alpha, None, False, "within")


def _number(x: float | Tensor, name: str, device: torch.device) -> Tensor:
    if not isinstance(x, Tensor):
        checks.number(name, x)
        x = torch.tensor(float(x), dtype=torch.float64)
    return x.to(device, torch.float64)


def check_ddof(ddof: float, sizes: Tensor) -> None:
    if eager() and bool(((sizes > 0) & (sizes <= ddof)).any()):
        least = sizes[sizes > 0].min().item()
        raise ValueError(
            f"ddof = {ddof} leaves nothing of a total weight of {least:g}; use a smaller one, or more points"
        )


def threshold_of(threshold: float | Tensor | None, classes: int, device: torch.device) -> Tensor | None:
    if threshold is None:
        return None
    if isinstance(threshold, Tensor) and threshold.dim() > 0:
        if threshold.shape[-1] != classes:
            raise ValueError(f"threshold must be (..., C) with C = {classes} classes, got {tuple(threshold.shape)}")
        return threshold.to(device, torch.float64).unsqueeze(-2)
    if classes != 2:
        raise ValueError(f"one threshold belongs to 2 classes, got {classes}; give a tensor (..., C)")
    lead = _number(threshold, "threshold", device)
    return torch.stack([torch.zeros_like(lead), lead])
