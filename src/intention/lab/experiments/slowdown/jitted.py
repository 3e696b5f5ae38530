"""Attention and Intention jitted in JAX, as the paper timed them. Needs the extra `intention[jax]`."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from intention.lab.core.files import LabError

__all__ = ["seconds"]

# one thread, as torch has here; read when jax starts
FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def seconds(arrays: Sequence[Any], clock: Callable[[Callable[[], object]], float], backwards: bool) -> dict[str, float]:
    """Of both functions for query, key and value (N, d)."""
    jax = _jax()
    found = {}
    calls = [("jax_attention", partial(attention, jax)), ("jax_inverse", partial(inverse, jax))]
    moved = [jax.numpy.asarray(array) for array in arrays]
    for name, function in reversed(calls) if backwards else calls:
        call = jax.jit(function)
        call(*moved).block_until_ready()  # compiles
        found[name] = clock(lambda call=call: call(*moved).block_until_ready())
    return found


def _jax() -> Any:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", FLAGS)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # of scipy's LAPACK, which JAX calls for an inverse
    try:
        import jax  # pyright: ignore[reportMissingImports] - the extra `jax`, where it is
    except ImportError:
        raise LabError("--jax needs pip install 'intention[jax]'") from None
    return jax


def attention(jax: Any, query: Any, key: Any, value: Any) -> Any:
    """softmax(Q K' / sqrt(d)) V"""
    return jax.nn.softmax((query * key.shape[-1] ** -0.5) @ key.T, -1) @ value


def inverse(jax: Any, query: Any, key: Any, value: Any) -> Any:
    """Q (K'K)^-1 K'V, or Q K' (KK')^-1 V where N <= d."""
    if key.shape[-1] < key.shape[-2]:
        return query @ (jax.numpy.linalg.inv(key.T @ key) @ (key.T @ value))
    return (query @ key.T) @ (jax.numpy.linalg.inv(key @ key.T) @ value)
