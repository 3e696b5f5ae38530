"""MAML: a network whose weights take a few gradient steps on the context before it answers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from intention.nn import mlp

__all__ = ["Maml"]


class Maml(nn.Module):
    """A ReLU network, second order, all tasks of a batch at once.

    >>> model = Maml(1, (64, 64, 1), steps=3, rate=0.01)
    >>> model(torch.randn(8, 200, 1), torch.randn(8, 10, 1), torch.randn(8, 10, 1)).shape
    torch.Size([8, 200, 1])

    The gradient of a linear layer is D'A: its inputs A (N, in) and the slopes D (N, out) of its outputs at the N points
    of the context. So after some steps the weights of a task are W - rate D'A, with the points of all steps below one
    another, and on the few points of a context x W' - rate (x A') D needs no matrix of its own for each task.
    `torch.func` gives the same numbers (a test holds them equal) and takes longer (benchmarks/measure/lab.py).
    """

    def __init__(self, d: int, sizes: tuple[int, ...], steps: int, rate: float) -> None:
        super().__init__()
        self.net = mlp(d, *sizes)
        self.steps, self.rate = steps, rate

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        layers = [layer for layer in self.net if isinstance(layer, nn.Linear)]
        moves: list[Move] = [None] * len(layers)
        for _ in range(self.steps):
            moves = self.step(layers, moves, key, value)
        x = query.expand(key.shape[0], -1, -1)
        for layer, move in zip(layers, moves, strict=True):
            x = self.moved(layer, move, x.relu_() if layer is not layers[0] else x)  # large: in place
        return x

    def step(self, layers: list[nn.Linear], moves: list[Move], key: Tensor, value: Tensor) -> list[Move]:
        """One gradient step of every task on its mean squared error."""
        inputs, out = [], key
        for layer, move in zip(layers, moves, strict=True):
            inputs.append(out.relu() if inputs else out)
            out = self.along(layer, move, inputs[-1])
        slope = (out - value) * (2 / value[0].numel())
        slopes = [slope]
        for layer, move, x in zip(layers[:0:-1], moves[:0:-1], inputs[:0:-1], strict=True):
            slope = self.back(layer, move, slope) * (x > 0)
            slopes.append(slope)
        return [_join(move, x, d) for move, x, d in zip(moves, inputs, reversed(slopes), strict=True)]

    def along(self, layer: nn.Linear, move: Move, x: Tensor) -> Tensor:
        # x (W - rate D'A)' + b - rate D'1 = x W' + b - rate (x A' + 1) D
        out = layer(x)
        return out if move is None else torch.baddbmm(out, x @ move[0].mT + 1, move[1], alpha=-self.rate)

    def back(self, layer: nn.Linear, move: Move, slope: Tensor) -> Tensor:
        # s (W - rate D'A)
        out = slope @ layer.weight
        return out if move is None else torch.baddbmm(out, slope @ move[1].mT, move[0], alpha=-self.rate)

    def moved(self, layer: nn.Linear, move: Move, x: Tensor) -> Tensor:
        """For many queries: the weights of each task are written out."""
        if move is None:
            return layer(x)
        inputs, slopes = move
        weight = torch.baddbmm(layer.weight.expand(len(x), -1, -1), slopes.mT, inputs, alpha=-self.rate)
        bias = layer.bias - self.rate * slopes.sum(-2)
        return torch.baddbmm(bias.unsqueeze(-2), x, weight.mT)


Move = tuple[Tensor, Tensor] | None  # inputs A (B, steps N, in) and slopes D (B, steps N, out) of one layer


def _join(move: Move, inputs: Tensor, slopes: Tensor) -> Move:
    return (inputs, slopes) if move is None else (torch.cat([move[0], inputs], -2), torch.cat([move[1], slopes], -2))
