"""Padding masks as libraries hand them over."""

from __future__ import annotations

import torch
from torch import Tensor


def last_columns(mask: Tensor | None, n: int) -> Tensor | None:
    """Of a padding mask (batch, tokens so far) the columns of the last n tokens; None where all of them are there."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor) or mask.dim() != 2 or mask.shape[1] < n:
        got = tuple(mask.shape) if isinstance(mask, Tensor) else type(mask).__name__
        raise ValueError(f"attention_mask must be (batch, tokens so far), 0 where padding is, got {got} for {n} tokens")
    mask = mask[:, mask.shape[1] - n :]
    return None if not torch.compiler.is_compiling() and bool(mask.all()) else mask
