"""MAML as a head: a network that takes gradient steps on the examples of a task before it answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as nnf

__all__ = ["Maml"]


class Maml(nn.Module):
    """The network of a task is net - rate * gradient of its cross-entropy on the support, `steps` times.

    >>> head = Maml(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 5)), steps=2, rate=0.1)
    >>> head(torch.randn(2, 15, 8), torch.arange(15) % 5, torch.randn(2, 7, 8)).shape
    torch.Size([2, 7, 5])

    Args:
        net: examples (n, ...) -> logits (n, classes): images, too. Batch norm should use the statistics of the batch.
        steps, rate: of gradient descent on the support.
        second_order: whether training sees how the steps depend on the weights; without it is faster.
    """

    def __init__(self, net: nn.Module, steps: int = 5, rate: float = 0.01, second_order: bool = True) -> None:
        super().__init__()
        self.net, self.steps, self.rate, self.second_order = net, steps, rate, second_order

    def forward(self, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        """Logits (..., M, classes) of support (..., N, *), labels (..., N), query (..., M, *), at most one batch."""
        if labels.dim() == 1 and support.shape[0] == len(labels):
            return self.adapted(support, labels, query)
        several = labels.expand(len(support), -1)
        # The tasks take turns: weights of their own make convolutions grouped, which is slower than a loop
        return torch.stack([self.adapted(*task) for task in zip(support, several, query, strict=True)])

    def adapted(self, support: Tensor, labels: Tensor, query: Tensor) -> Tensor:
        """The logits of one task's queries."""
        learning = torch.is_grad_enabled()
        weights: dict[str, Tensor] = dict(self.net.named_parameters())
        with torch.enable_grad():
            if not learning:
                weights = {name: weight.detach().requires_grad_() for name, weight in weights.items()}
            for _ in range(self.steps):
                scores = torch.func.functional_call(self.net, weights, support)
                graph = self.second_order and learning
                slopes = torch.autograd.grad(
                    nnf.cross_entropy(scores, labels), list(weights.values()), create_graph=graph
                )
                pairs = zip(weights.items(), slopes, strict=True)
                weights = {name: weight - self.rate * slope for (name, weight), slope in pairs}
        return torch.func.functional_call(self.net, weights, query)
