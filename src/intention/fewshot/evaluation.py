"""How good a head is: accuracy over many episodes, with its interval, by class and against the number of shots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as nnf

from intention.fewshot.sampling import ClassIndex, Episodes, check_labelled, episodes

__all__ = ["Evaluation", "against_shots", "evaluate", "unit"]

PART = 25  # episodes that are answered at once

Answer = Callable[[Tensor, Tensor, Tensor], Tensor]  # a head


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` found. Accuracies are shares of 1."""

    accuracy: float  # mean over episodes
    interval: float  # half the width of its 95% interval
    each: Tensor  # (episodes,): the accuracy of each episode
    classes: Tensor  # (C,): the labels that occurred
    per_class: Tensor  # (C,): the accuracy on queries of each class
    confusion: Tensor  # (C, C): how often a query of the first was taken for the second
    met: Tensor  # (C, C): how often both were in an episode when a query of the first was asked

    def __str__(self) -> str:
        return f"{100 * self.accuracy:.1f} ± {100 * self.interval:.1f}%"

    def hardest(self, count: int = 5) -> list[tuple[int, int, float]]:
        """Pairs of classes that are mistaken most: (one, other, share of the queries where both were there)."""
        wrong = self.confusion + self.confusion.mT
        share = wrong / (self.met + self.met.mT).clamp(min=1)
        rows, columns = torch.triu_indices(len(share), len(share), 1)
        best = share[rows, columns].argsort(descending=True)[:count].tolist()
        found = [(rows[i], columns[i]) for i in best if share[rows[i], columns[i]] > 0]
        return [(int(self.classes[a]), int(self.classes[b]), float(share[a, b])) for a, b in found]


def unit(x: Tensor) -> Tensor:
    """Features (..., d) around their own mean, of length 1: how long or bright they are does not matter then.

    >>> unit(torch.tensor([[1.0, 2.0, 3.0]]))
    tensor([[-0.7071,  0.0000,  0.7071]])
    """
    return nnf.normalize(x - x.mean(-1, keepdim=True), dim=-1)


@torch.no_grad()
def evaluate(
    head: Answer,
    features: Tensor,
    labels: Tensor,
    *,
    way: int = 5,
    shot: int = 5,
    query: int = 15,
    episodes: int = 600,
    seed: int = 0,
    normalise: bool = True,
) -> Evaluation:
    """The accuracy of a head on episodes of features (n, d) with labels (n,).

    >>> features = torch.randn(120, 8) + 4 * torch.eye(8)[torch.arange(120) % 6]
    >>> found = evaluate(lambda support, labels, query: query @ support.mT, features, torch.arange(120) % 6, shot=1)
    >>> 0.2 < found.accuracy <= 1, found.confusion.shape
    (True, torch.Size([6, 6]))

    All heads meet the same episodes for the same seed.

    Args:
        head: (support, labels, query) -> logits.
        episodes: how many; the interval shrinks as 1 / sqrt(episodes).
        normalise: features are brought to `unit` length first.
    """
    if episodes < 2:
        raise ValueError(f"episodes must be at least 2, for an interval, got {episodes}")
    training = getattr(head, "training", False)
    if isinstance(head, torch.nn.Module):
        head.eval()
    check_labelled(features, labels)
    features = unit(features) if normalise else features
    known = ClassIndex(labels)
    size = len(known.classes)
    generator = torch.Generator().manual_seed(seed)
    shares, confusion, met = [], torch.zeros(size, size), torch.zeros(size, size)
    for start in range(0, episodes, PART):
        count = min(PART, episodes - start)
        tasks = _draw(features, labels, way, shot, query, count, generator)
        said = head(*tasks[:3]).argmax(-1)
        shares.append((said == tasks.targets).float().mean(-1))
        own = torch.searchsorted(known.classes, tasks.classes)  # (B, way)
        asked, taken = own.gather(1, tasks.targets), own.gather(1, said)
        confusion.view(-1).index_add_(0, (asked * size + taken).flatten(), torch.ones(asked.numel()))
        pairs = own.unsqueeze(-1) * size + own.unsqueeze(-2)
        met.view(-1).index_add_(0, pairs.flatten(), torch.full((pairs.numel(),), float(query)))
    if isinstance(head, torch.nn.Module):
        head.train(training)
    each = torch.cat(shares)
    half = 1.96 * float(each.std()) / len(each) ** 0.5
    right = confusion.diagonal() / confusion.sum(-1).clamp(min=1)
    return Evaluation(float(each.mean()), half, each, known.classes, right, confusion, met)


def against_shots(
    head: Answer,
    features: Tensor,
    labels: Tensor,
    shots: Sequence[int] = (1, 2, 5, 10),
    *,
    way: int = 5,
    query: int = 15,
    episodes: int = 200,
    seed: int = 0,
    normalise: bool = True,
) -> dict[int, Evaluation]:
    """`evaluate` for several numbers of shots."""
    options = {"way": way, "query": query, "episodes": episodes, "seed": seed, "normalise": normalise}
    return {shot: evaluate(head, features, labels, shot=shot, **options) for shot in shots}


def named(found: Evaluation, names: Sequence[str]) -> dict[str, float]:
    """The accuracy of each class under its name."""
    return {names[int(label)]: float(share) for label, share in zip(found.classes, found.per_class, strict=True)}


def _draw(
    features: Tensor, labels: Tensor, way: int, shot: int, query: int, count: int, generator: torch.Generator
) -> Episodes:
    return episodes(features, labels, way=way, shot=shot, query=query, count=count, seed=generator)
