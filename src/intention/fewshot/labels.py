"""Labels as people give them, integers or text, and what a fit makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral

import torch
from torch import Tensor
from torch.nn import functional as nnf

__all__ = ["Label", "Labels", "calibrated", "check_examples", "names_of", "signs"]

Label = int | str
Labels = Tensor | Sequence[Label]


def names_of(labels: Labels) -> list[Label]:
    """
    >>> names_of(torch.tensor([3, 1])), names_of(["cat", 7])
    ([3, 1], ['cat', 7])
    """
    if isinstance(labels, Tensor):
        if labels.dim() != 1 or labels.is_floating_point() or labels.is_complex():
            raise ValueError(f"wanted integer labels (n,), got {labels.dtype} {tuple(labels.shape)}")
        return labels.tolist()
    if isinstance(labels, str):
        raise ValueError(f"wanted a label for each image, got the one text {labels!r}; give a list: [{labels!r}]")
    wrong = [label for label in labels if not isinstance(label, str | Integral)]
    if wrong:
        raise ValueError(f"labels are integers or text, got {wrong[0]!r} ({type(wrong[0]).__name__}); use str(label)")
    return [str(label) if isinstance(label, str) else int(label) for label in labels]  # of numpy, too


def check_examples(features: Tensor, names: list[Label], d: int | None = None) -> None:
    """A label for each, and as many features as those before."""
    if len(features) != len(names) or not names:
        raise ValueError(f"wanted one label for each image, got {len(features)} images and {len(names)} labels")
    if d is not None and d != features.shape[-1]:
        raise ValueError(f"the classifier has {d} features, got {features.shape[-1]}")


def signs(names: list[Label], classes: tuple[Label, ...], like: Tensor) -> Tensor:
    """+1 for the class of an example, -1 for the others (n, classes)."""
    number = {name: index for index, name in enumerate(classes)}
    own = torch.tensor([number[name] for name in names])
    return 2 * nnf.one_hot(own, len(classes)).to(like.dtype) - 1


def calibrated(scores: Tensor, own: Tensor) -> float:
    """The temperature t with the smallest cross-entropy of softmax(scores / t): convex in 1 / t, so thirds are cut."""
    low, high = -4.0, 8.0  # log of 1 / t

    def loss(log_sharpness: float) -> float:
        return float(nnf.cross_entropy(scores * torch.tensor(log_sharpness).double().exp(), own))

    while high - low > 1e-3:
        one, two = low + (high - low) / 3, high - (high - low) / 3
        low, high = (low, two) if loss(one) <= loss(two) else (one, high)
    return float(torch.tensor(-(low + high) / 2).double().exp())
