"""MAML: a network whose weights take a few gradient steps on the context before it answers."""

from __future__ import annotations

from torch import Tensor, nn
from torch.func import functional_call, grad, vmap


class Maml(nn.Module):
    """Second order, vectorised over the tasks of a batch.

    >>> import torch
    >>> model = Maml(nn.Linear(1, 1), steps=3, rate=0.01)
    >>> model(torch.randn(8, 200, 1), torch.randn(8, 10, 1), torch.randn(8, 10, 1)).shape
    torch.Size([8, 200, 1])
    """

    def __init__(self, net: nn.Module, steps: int, rate: float) -> None:
        super().__init__()
        self.net, self.steps, self.rate = net, steps, rate

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        query = query.expand(key.shape[0], -1, -1)
        return vmap(self.answer, in_dims=(None, 0, 0, 0))(weights, query, key, value)

    def answer(self, weights: dict[str, Tensor], query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One task: adapt to its context, answer its queries."""
        for _ in range(self.steps):
            slopes = grad(self.error)(weights, key, value)
            weights = {name: weight - self.rate * slopes[name] for name, weight in weights.items()}
        return functional_call(self.net, weights, (query,))

    def error(self, weights: dict[str, Tensor], key: Tensor, value: Tensor) -> Tensor:
        return (functional_call(self.net, weights, (key,)) - value).square().mean()
