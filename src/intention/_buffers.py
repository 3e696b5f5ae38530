"""Numbers that a module holds and that are not trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from typing_extensions import Self


class KeepsPrecision(nn.Module):
    """Buffers move with the module but are not rounded to half precision: they are configuration, not weights."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        given = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, before in given.items():
            after = self._buffers[name]
            if before is None or after is None or before.is_meta or after.is_meta:
                continue
            if after.dtype in (torch.float16, torch.bfloat16):
                self._buffers[name] = before.to(after.device)
        return self
