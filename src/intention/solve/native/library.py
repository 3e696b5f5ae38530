"""The compiled kernels, where there are any."""

from __future__ import annotations

import ctypes
import functools
import os
from pathlib import Path


@functools.cache
def library() -> ctypes.CDLL | None:
    path = Path(__file__).with_name("_kernels.so")
    if os.environ.get("INTENTION_NATIVE") == "0" or not path.exists():
        return None
    return ctypes.CDLL(str(path))
