"""Random ingredients of a call, all from one seed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
Tensors = dict[str, Tensor]


@dataclass
class Case:
    """One call. `tensors` hold numbers of the call's dtype in float64; `leaves` are those with a gradient."""

    family: str
    label: str
    dtype: torch.dtype
    tensors: Tensors
    call: Callable[[Tensors], Tensors]
    oracle: Callable[[Tensors], Tensors]
    leaves: tuple[str, ...] = ()
    autocast: bool = False
    allowance: float = 0.0  # share of the scale that is torch's own rounding
    refusals: tuple[str, ...] = ()  # errors that the docs promise
    kinds: dict[str, torch.dtype] = field(default_factory=dict)  # of tensors in another dtype than the call's

    def kind(self, name: str) -> torch.dtype:
        return self.kinds.get(name, self.dtype)


class Draw:
    """Random numbers, and tensors in float64."""

    def __init__(self, seed: int) -> None:
        self.gen = torch.Generator().manual_seed(seed)

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.gen, dtype=torch.float64))

    def integer(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self.gen))

    def chance(self, p: float) -> bool:
        return self.uniform() < p

    def choice(self, options: Sequence[Any], odds: Sequence[float] | None = None) -> Any:
        if odds is None:
            return options[self.integer(0, len(options) - 1)]
        return options[int(torch.multinomial(torch.tensor(odds), 1, generator=self.gen))]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.gen, dtype=torch.float64)

    def rand(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.gen, dtype=torch.float64)

    def dtype(self) -> tuple[torch.dtype, bool]:
        """Of the call, and whether autocast is on."""
        which = self.choice(("float32", "float64", "bfloat16", "float16", "autocast"), (0.6, 0.12, 0.1, 0.1, 0.08))
        return (torch.float32, True) if which == "autocast" else (getattr(torch, which), False)

    def alpha(self, covariance: str, least: float = 0.0) -> float:
        if covariance == "convex":
            return self.choice((1e-6, 1e-3, 0.1, 0.5, 0.9, 1.0), (1, 1, 1, 2, 1, 0.3))
        return self.choice([a for a in (0.0, 1e-6, 1e-3, 0.1, 1.0) if a >= least])

    def keys(self, lead: tuple[int, ...], n: int, d: int, dtype: torch.dtype, easy: bool = False) -> tuple[Tensor, str]:
        """Points of a given condition, now and then far from 0, repeated, or with a column that is constant."""
        if n == 0:
            return self.normal(*lead, n, d), "n=0"
        half = dtype in HALF
        cond = 10 ** (0.0 if self.chance(0.3) else self.uniform(0, 1 if easy else 2 if half else 8))
        size = 10 ** self.uniform(-1, 1 if half else 2)
        if self.chance(0.3):
            key, cond = self.normal(*lead, n, d), 0.0
        else:
            r = min(n, d)
            s = torch.logspace(0, 0 if r == 1 else -float(torch.tensor(cond).log10()), r, dtype=torch.float64)
            left, right = (torch.linalg.qr(self.normal(*lead, x, r))[0] for x in (n, d))
            key = (left * s) @ right.mT * size
        text = f"cond={cond:.0e} size={size:.1f}"
        if self.chance(0.2):
            offset = 10 ** self.uniform(0, 2 if half else 4)
            direction = torch.ones(d, dtype=torch.float64) if self.chance(0.5) else self.normal(d)
            key, text = key + offset * direction, text + f" offset={offset:.0e}"
        if self.chance(0.12) and n > 1:
            key[..., self.integer(0, n - 1), :] = key[..., self.integer(0, n - 1), :]
            text += " twins"
        if self.chance(0.08):
            key[..., self.integer(0, d - 1)], text = self.choice((0.0, 0.1, 1.0, 100.0)), text + " constant"
        return key, text

    def queries(self, lead: tuple[int, ...], m: int, key: Tensor, near: float) -> Tensor:
        """Anywhere, or where the keys are (a broadcast of them included)."""
        n, d = key.shape[-2:]
        if n and self.chance(near):
            wide = torch.broadcast_shapes(lead, key.shape[:-2])
            if wide == tuple(lead):
                return self.normal(*lead, m, n) @ key / n**0.5
        return self.normal(*lead, m, d)

    def values(self, lead: tuple[int, ...], key: Tensor, k: int) -> Tensor:
        """Noise, or nearly linear in the keys, now and then with a mean."""
        n, d = key.shape[-2:]
        value = self.normal(*lead, n, k)
        if n and self.chance(0.5) and torch.broadcast_shapes(lead, key.shape[:-2]) == tuple(lead):
            value = key @ self.normal(d, k) / key.norm(dim=(-2, -1), keepdim=True) * n**0.5 + 0.01 * value
        return value + (self.choice((1.0, 10.0)) if self.chance(0.1) else 0.0)

    def weights(self, lead: tuple[int, ...], n: int) -> Tensor:
        """In [0, 1), a fifth of them 0."""
        weight = self.rand(*lead, n) * (self.rand(*lead, n) > 0.2)
        if n and self.chance(0.9):
            weight[..., self.integer(0, n - 1)] = 1.0
        return weight


def laid_out(x: Tensor, seed: int) -> Tensor:
    """The same numbers as another storage may hold them: transposed, with gaps, or plainly."""
    how = Draw(seed + 2 * 10**9).integer(0, 5)
    if x.dim() < 2 or how > 1:
        return x.clone()
    if how == 0:
        return x.mT.clone(memory_format=torch.contiguous_format).mT
    return x.repeat_interleave(2, -1)[..., ::2]
