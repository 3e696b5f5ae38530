"""Intention for tasks of a handful of points."""

from __future__ import annotations

from torch import Tensor, nn

from intention import functional as F
from intention.lab.models import output
from intention.nn import LearnableAlpha

__all__ = ["FewPoints"]


class FewPoints(nn.Module):
    """Intention e_Q(Q) Sigma^-1 e_K(K)' e_V(V) for 5 points: always one plain Cholesky factor of the 5 x 5 dual.

    `nn.Intention` is the same but checks its accuracy and refines what is ill-conditioned; in training, where the last
    digits do not matter, that is most of the time of a step.
    """

    def __init__(self, alpha: float, embed: nn.Module | None, embed_value: nn.Module) -> None:
        super().__init__()
        self.alpha = LearnableAlpha(alpha)
        self.embed = nn.Identity() if embed is None else embed
        self.embed_value = embed_value

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        query, key, value = self.embed(query), self.embed(key), self.embed_value(value)
        return output(F.intention(query, key, value, alpha=self.alpha(), solver="dual"))
