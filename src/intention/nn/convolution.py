"""A short causal convolution along a sequence, one filter for each channel, that streams."""

from __future__ import annotations

import torch
import torch.nn.functional as TF
from torch import Tensor, nn

__all__ = ["ShortConvolution"]


class ShortConvolution(nn.Module):
    """y_t = sum_j w_j x_{t-j} over the last `taps` tokens, each channel with weights w of its own; 0 before the first.

    >>> convolution, x = ShortConvolution(6, 4), torch.randn(2, 9, 6)
    >>> first, tail = convolution(x[:, :7])
    >>> second, tail = convolution(x[:, 7:], tail)
    >>> torch.allclose(torch.cat([first, second], 1), convolution(x)[0])
    True
    """

    def __init__(
        self, channels: int, taps: int, device: torch.device | str | int | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(taps, channels, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = (3 / len(self.weight)) ** 0.5  # outputs of the size of the tokens
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[1]}, taps={len(self.weight)}"

    def forward(self, x: Tensor, tail: Tensor | None = None, length: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Convolved tokens (batch, n, channels), and the tail (batch, taps - 1, channels) that the next ones need.

        Args:
            x: (batch, n, channels).
            tail: what the call before returned; None at the start.
            length: (batch,): how many of the n tokens there are in each sequence, the others are padding behind them.
        """
        (taps, channels), n = self.weight.shape, x.shape[1]
        x = TF.pad(x, (0, 0, taps - 1, 0)) if tail is None else torch.cat([tail.to(x.dtype), x], 1)
        out = x.narrow(1, taps - 1, n) * self.weight[0]
        for j in range(1, taps):
            out = out + x.narrow(1, taps - 1 - j, n) * self.weight[j]
        if length is None:
            return out, x.narrow(1, n, taps - 1)
        rows = length.unsqueeze(1) + torch.arange(taps - 1, device=x.device)
        return out, x.gather(1, rows.unsqueeze(-1).expand(-1, -1, channels))
