"""Build hook: compiles the native kernels into the wheel; without a compiler the wheel is one of pure Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from packaging.tags import platform_tags

FOLDER = Path("src", "intention", "solve", "native")
IN_WHEEL = "intention/solve/native/_kernels.so"
WITHOUT = "installing without the native kernels, everything works in pure torch"


class NativeKernels(BuildHookInterface):
    """Called by hatchling for wheels and for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        folder = Path(self.root) / FOLDER
        if version == "editable":  # the library lies beside its sources; the wheel only points there
            out = folder / "_kernels.so"
            out.unlink(missing_ok=True)  # where compiling is not wanted or fails, an old one would be used
            compiled(folder, out)
            return
        self.scratch = tempfile.mkdtemp(prefix="intention-native-")
        out = Path(self.scratch, "_kernels.so")
        if compiled(folder, out):
            build_data["force_include"][str(out)] = IN_WHEEL
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{platform_tag()}"  # ctypes loads it: no Python's ABI is in it

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        if version != "editable":
            shutil.rmtree(self.scratch)


def compiled(folder: Path, out: Path) -> bool:
    """Whether `out` was made; if not, a notice says why (pip shows it with -v)."""
    if os.environ.get("INTENTION_NATIVE") == "0":
        print(f"intention: INTENTION_NATIVE is 0; {WITHOUT}", file=sys.stderr)
        return False
    build = by_path(folder / "build.py")
    try:
        build.compile_library(build.SOURCES, out, say=lambda line: print(line, file=sys.stderr))
    except build.NoCompiler as error:
        print(f"intention: no C++ compiler found; {WITHOUT} ({error})", file=sys.stderr)
        return False
    except build.CompileFailed as error:
        print(f"intention: compiling failed; {WITHOUT}\n{error}", file=sys.stderr)
        return False
    return True


def by_path(path: Path) -> ModuleType:
    """The module without its package: importing intention would need torch, which is not here."""
    spec = importlib.util.spec_from_file_location("intention_native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def platform_tag() -> str:
    """This machine's own tag: on Linux not manylinux, which would promise that older systems can load it.

    Who compiles for older systems says so in INTENTION_WHEEL_PLATFORM (tools/wheel.py).
    """
    tags = list(platform_tags())
    own = next((tag for tag in tags if tag.startswith("linux_")), tags[0])
    return os.environ.get("INTENTION_WHEEL_PLATFORM", own)
