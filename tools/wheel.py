"""Builds a wheel that other Linux machines can load, and audits it: `make wheel`.

A library needs the symbols of the glibc that it was linked with, or newer ones. zig's compiler links with an older one
on demand and puts the C++ library inside. auditwheel then says which glibc the wheel needs: none
newer than its name says.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GLIBC = (2, 28)


def build(project: Path, out: Path) -> Path:
    """The wheel of `project`, in `out`, which holds no other."""
    machine, (major, minor) = platform.machine(), GLIBC
    zig = [sys.executable, "-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.{major}.{minor}", "-g0"]
    env = os.environ | {"CXX": shlex.join(zig), "INTENTION_WHEEL_PLATFORM": f"manylinux_{major}_{minor}_{machine}"}
    for old in out.glob("*.whl"):
        old.unlink()
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out.resolve())]
    subprocess.run(command, cwd=project, env=env, check=True)
    (wheel,) = out.glob("*.whl")
    return wheel


def audited(wheel: Path) -> tuple[int, int]:
    """The glibc that the wheel needs, as auditwheel finds it."""
    command = [sys.executable, "-m", "auditwheel", "show", str(wheel)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r'platform\s+tag:\s+"manylinux_(\d+)_(\d+)_', said)
    if not found:
        sys.exit(f"{wheel.name} is no manylinux wheel:\n{said}")
    return int(found[1]), int(found[2])


def check(wheel: Path) -> None:
    needed, promised = audited(wheel), re.search(r"manylinux_(\d+)_(\d+)_", wheel.name)
    if not promised or needed > (int(promised[1]), int(promised[2])):
        sys.exit(f"{wheel.name} needs glibc {needed[0]}.{needed[1]}")
    print(f"{wheel}: needs glibc {needed[0]}.{needed[1]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--project", type=Path, default=ROOT)
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--check", type=Path, help="audit this wheel and build none")
    options = parser.parse_args()
    check(options.check or build(options.project, options.out))


if __name__ == "__main__":
    main()
