"""Compiles the C++ files into one library, `_kernels.so`.

Where INTENTION_BUILD_CACHE names a folder, objects are kept there under a hash of all that made them: a second build
compiles what has changed.

The build backend runs this file by its path, where neither torch nor this package is installed: only the standard
library is imported here. By hand: `python -m intention.solve.native.build`, or `make native` in a clone.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
SOURCES = HERE / "csrc"
NAME = "_kernels.so"  # on macOS too: ctypes asks for a file, not for an ending
COMPILERS = ("c++", "g++", "clang++")
COMMON = ("-std=c++17", "-fPIC", "-fvisibility=hidden", "-pthread", "-fno-math-errno", "-ffp-contract=fast")
FAST = ("-O3", "-falign-functions=64", "-falign-loops=32")  # aligned: where code lands else moves a kernel by up to 5%
# Baseline comes first: of an inline function that several objects hold, the linker keeps the first copy, and that one
# must run on every processor.
X86_SETS = {
    "baseline": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma"),
}
SANITIZERS = {
    "address": ("-fsanitize=address", "-fno-omit-frame-pointer"),
    "undefined": ("-fsanitize=undefined", "-fno-sanitize-recover=undefined"),  # stop instead of printing and going on
}
CACHE = "INTENTION_BUILD_CACHE"
MOST_PROCESSES = 8  # each takes up to 400 MB


class NoCompiler(RuntimeError):
    """This machine has no C++ compiler that we can call."""


class CompileFailed(RuntimeError):
    """The compiler was called and did not succeed."""


class Unit(NamedTuple):
    """One call of the compiler: a source, the name of its object, and the flags that are its own."""

    source: Path
    object_name: str
    flags: tuple[str, ...]


def find_compiler() -> list[str]:
    """The words that call the compiler: $CXX, which may hold flags, or the first known name on PATH."""
    if os.name == "nt":
        raise NoCompiler("the native kernels are not built on Windows")
    named = os.environ.get("CXX", "").strip()
    for candidate in [named] if named else COMPILERS:
        words = shlex.split(candidate)
        if shutil.which(words[0]):
            return words
    missing = f"CXX is {named!r}, which is not" if named else f"none of {', '.join(COMPILERS)} is"
    raise NoCompiler(f"{missing} on PATH: install a C++ compiler, or name one in CXX")


def run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise CompileFailed(f"{shlex.join(command)}\ncould not be started: {error}") from error
    if done.returncode != 0:
        raise CompileFailed(f"{shlex.join(command)}\nended with {done.returncode}:\n{done.stderr.strip()}")
    return done.stdout


def makes_x86_64(compiler: list[str]) -> bool:
    """What the compiler compiles for counts, not what the machine is: the two differ where CXX crosses."""
    return "#define __x86_64__" in run([*compiler, "-dM", "-E", "-x", "c++", os.devnull])


def units(folder: Path, x86: bool) -> Iterator[Unit]:
    """Files named kernels_* once per instruction set, the others once, for any processor."""
    sources = sorted(folder.glob("*.cpp"))
    if not sources:
        raise CompileFailed(f"there is no *.cpp in {folder}")
    for name, flags in (X86_SETS if x86 else {"baseline": ()}).items():
        for source in sources:
            if source.name.startswith("kernels_"):
                yield Unit(source, f"{source.stem}.{name}.o", (f"-DINTENTION_ARCH={name}", *flags))
            elif name == "baseline":
                yield Unit(source, f"{source.stem}.o", ("-DINTENTION_X86=1",) if x86 else ())


def fingerprint(compiler: list[str], unit: Unit, flags: tuple[str, ...]) -> str:
    """Of all that decides what an object holds: the compiler, what it is told, the source and every header."""
    said = run([*compiler, "--version"])
    parts = [repr((compiler, said, flags)).encode(), unit.source.read_bytes()]
    parts += [header.read_bytes() for header in sorted(unit.source.parent.glob("*.h"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def make_objects(
    compiler: list[str], plan: list[Unit], flags: tuple[str, ...], folder: Path, say: Callable[[str], None]
) -> list[str]:
    """In the order of the plan; tells of each as it is done. The last instruction set takes longest: it is first."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    with ThreadPoolExecutor(min(cores, MOST_PROCESSES)) as pool:
        begun = {pool.submit(make_object, compiler, unit, flags, folder): unit for unit in reversed(plan)}
        for done, made in enumerate(as_completed(begun), 1):
            _, how = made.result()
            say(f"intention: {done:2}/{len(plan)} {begun[made].object_name.removesuffix('.o')} ({how})")
        return [str(made.result()[0]) for made in reversed(begun)]


def make_object(compiler: list[str], unit: Unit, flags: tuple[str, ...], folder: Path) -> tuple[Path, str]:
    """Compiled into `folder`, or taken from the cache; and how long that took."""
    flags, cache = (*COMMON, *flags, *unit.flags), os.environ.get(CACHE)
    kept = Path(cache, f"{fingerprint(compiler, unit, flags)}.o") if cache else None
    if kept and kept.exists():
        return kept, "from an earlier build"
    made, start = Path(folder, unit.object_name), time.monotonic()
    run([*compiler, *flags, "-c", str(unit.source), "-o", str(made)])
    if kept:
        kept.parent.mkdir(parents=True, exist_ok=True)
        whole = kept.with_name(f"{kept.name}.{os.getpid()}")  # another process may look for it meanwhile
        shutil.copyfile(made, whole)
        os.replace(whole, kept)
    return made, f"{time.monotonic() - start:.0f} s"


def compile_library(folder: Path, out: Path, sanitize: str | None = None, say: Callable[[str], None] = print) -> None:
    """Compiles all *.cpp of `folder` into the shared library `out`; raises NoCompiler or CompileFailed."""
    compiler = find_compiler()
    extra = ("-O1", "-g", *SANITIZERS[sanitize]) if sanitize else FAST
    plan = list(units(folder, makes_x86_64(compiler)))
    out.parent.mkdir(parents=True, exist_ok=True)
    # beside `out`, so that the last step is a rename: a process that has the old library loaded keeps it whole
    with tempfile.TemporaryDirectory(prefix=".build-", dir=out.parent) as scratch:
        objects = make_objects(compiler, plan, extra, Path(scratch), say)
        linked = Path(scratch, NAME)
        run([*compiler, *extra, "-shared", "-pthread", *objects, "-ldl", "-o", str(linked)])
        os.replace(linked, out)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compiles the native kernels of intention.")
    parser.add_argument("--out", type=Path, help="where the library goes; without it, beside its sources")
    parser.add_argument("--sanitize", choices=sorted(SANITIZERS), help="a build for tests; needs --out")
    options = parser.parse_args(arguments)
    if options.sanitize and not options.out:
        parser.error("--sanitize needs --out: such a library must not take the place of the fast one")
    out = options.out or HERE / NAME
    try:
        compile_library(SOURCES, out, options.sanitize, lambda line: print(line, flush=True))
    except (NoCompiler, CompileFailed) as error:
        sys.exit(f"intention: {error}")
    print(f"intention: compiled {out}")


if __name__ == "__main__":
    main()
