"""The compiled library: found and loaded once, at first use. Without it everything runs in torch."""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypedDict

import torch

ABI = 8  # what the exported functions of this version take and return; dispatch.cpp holds the same number
PATH = Path(__file__).with_name("_kernels.so")


class Loaded(NamedTuple):
    """A library, or the reason why there is none; `broken` if there is a file that should have served."""

    library: ctypes.CDLL | None = None
    path: str | None = None
    arch: str | None = None
    reason: str | None = None
    broken: bool = False


_found: Loaded | None = None  # not functools.cache: where warnings are errors, the answer must be kept all the same
_off = False
_forked = False


def _after_fork() -> None:
    global _forked
    _forked = True


if hasattr(os, "register_at_fork"):  # a library that is loaded sees for itself
    os.register_at_fork(after_in_child=_after_fork)


def library() -> ctypes.CDLL | None:
    """The compiled kernels, or None: then the caller computes with torch."""
    return _look().library


def kernel(name: str) -> Callable[[bytes], int] | None:
    """An exported function that takes one block of numbers, or None where there is no library."""
    found = library()
    if found is None:
        return None
    function = getattr(found, name)
    if function.argtypes is None:
        function.argtypes, function.restype = [ctypes.c_char_p], ctypes.c_int
    return function


def available() -> bool:
    return library() is not None


vars(available)["_dynamo_marked_constant"] = True  # torch.compiler.assume_constant_result imports dynamo


class Info(TypedDict):
    native: bool
    path: str | None
    arch: str | None
    reason: str | None
    threads: int


def info() -> Info:
    """Whether compiled kernels are in use, and if not, why.

    A dict of ``native`` (bool), ``path`` of the library, ``arch`` ("avx512", "avx2" or "baseline": what this processor
    gets), ``reason`` (why it is not native; None if it is) and ``threads`` (those of torch, which the kernels keep to).
    """
    found = _look()
    native, threads = found.library is not None, torch.get_num_threads()
    return Info(native=native, path=found.path, arch=found.arch, reason=found.reason, threads=threads)


@contextmanager
def off() -> Iterator[None]:
    """Inside, library() is None, in all threads: for tests that compare the kernels with torch."""
    global _off
    before, _off = _off, True
    try:
        yield
    finally:
        _off = before


def _look() -> Loaded:
    global _found
    if _off:
        return Loaded(reason="switched off by library.off()")
    if _found is None:
        _found = _load(os.environ.get("INTENTION_NATIVE", ""))
        if _found.broken:
            warnings.warn(f"intention: {_found.reason}", RuntimeWarning, stacklevel=3)
    return _found


def _load(setting: str) -> Loaded:
    """`setting` is INTENTION_NATIVE: "0" for none, the path of another library (a sanitizer's build), or nothing."""
    if setting == "0":
        return Loaded(reason="switched off: INTENTION_NATIVE is 0")
    path = PATH if setting in ("", "1") else Path(setting)
    if not path.exists():
        built_without = "the package was built without a C++ compiler or with INTENTION_NATIVE=0"
        return Loaded(reason=f"there is no {path}: {built_without if path == PATH else 'INTENTION_NATIVE names it'}")
    try:
        loaded = ctypes.CDLL(str(path))
        loaded.intention_native_abi.restype = ctypes.c_int
        loaded.intention_native_arch.restype = ctypes.c_char_p
        abi = loaded.intention_native_abi()
    except (OSError, AttributeError) as error:  # not a library of this machine; not one of ours
        return _broken(f"{path} cannot be used ({error})")
    if abi != ABI:
        return _broken(f"{path} has interface {abi}")
    if _forked:
        loaded.intention_native_forked()
    return Loaded(loaded, str(path), loaded.intention_native_arch().decode())


def _broken(what: str) -> Loaded:
    wanted = f"wanted is a library with interface {ABI}; until then everything runs in torch"
    return Loaded(reason=f"{what}; {wanted}. Reinstall intention (in a clone: make native).", broken=True)
