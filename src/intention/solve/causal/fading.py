"""What is left of earlier tokens: D_ts = prod_{s<r<=t} gamma_r, and sums that fade, in chunks of C tokens.

Products alone: no logarithm and no division, so that a decay of 0 (everything before is forgotten) is a number like any
other, in values and in derivatives of every order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from intention.solve.ladder import has_float64


class Fading(NamedTuple):
    share: Tensor  # (B, n, C, C): D_ts, 0 above the diagonal
    from_start: Tensor  # (B, n, C, 1): c_t, from before the chunk
    to_end: Tensor  # (B, n, C, 1): at the end of the chunk
    whole: Tensor  # (B, n, 1, 1)

    def shifted(self) -> tuple[Tensor, Tensor]:
        """D_{t-1,s}, 0 from the diagonal on, and c_{t-1}."""
        return pad(self.share[..., :-1, :], (0, 0, 1, 0)), pad(self.from_start[..., :-1, :], (0, 0, 1, 0), value=1.0)

    def to(self, dtype: torch.dtype) -> Fading:
        """For products with tokens of this precision."""
        return Fading(self.share.to(dtype), self.from_start.to(dtype), self.to_end.to(dtype), self.whole)


def fading(decay: Tensor, size: int) -> Fading:
    """Of decays (B, N)."""
    steps = chunks(decay.unsqueeze(-1), size, 1.0)
    place = torch.arange(size, device=decay.device)
    share, from_start, step = torch.where(place.unsqueeze(-1) > place, steps, 1.0), steps, 1
    while step < size:  # of cumprod the third derivative is NaN at 0
        share, from_start = (x * pad(x[..., :-step, :], (0, 0, step, 0), value=1.0) for x in (share, from_start))
        step *= 2
    share = share.tril()
    return Fading(share, from_start, share[..., -1:, :].mT, from_start[..., -1:, :])


def chunks(x: Tensor, size: int, fill: float = 0.0) -> Tensor:
    """(B, n, C, ...) of (B, N, ...); `fill` completes the last chunk."""
    missing = -x.shape[1] % size
    return (pad(x, (0, 0, 0, missing), value=fill) if missing else x).unflatten(1, (-1, size))


def faded_sums(start: Tensor | None, steps: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """s_0 = start, s_{i+1} = whole_i s_i + steps_i, added in float64: all but the last (B, n, ...), and the last."""
    wide = torch.float64 if has_float64(steps.device) else steps.dtype
    total = torch.zeros_like(steps[:, 0], dtype=wide) if start is None else start.to(wide)
    out = []
    for i in range(steps.shape[1]):
        out.append(total.to(steps.dtype))
        total = torch.addcmul(steps[:, i], whole[:, i], total)
    return torch.stack(out, 1), total
