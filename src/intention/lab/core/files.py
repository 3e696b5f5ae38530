"""Files that are either whole or not there: what a stopped process leaves behind can be read."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

__all__ = ["LabError", "append_lines", "write_whole"]


class LabError(Exception):
    """Something the user can mend: the command line prints its text alone, without a traceback."""


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step. If this fails, what was there before is still there."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except OSError as error:
        raise LabError(_cannot_write(path, error)) from error
    finally:
        with contextlib.suppress(OSError):
            part.unlink()


def append_lines(path: Path, lines: list[str]) -> None:
    """Add whole lines in one write; a line that was cut off before is ended first."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab+", buffering=0) as file:  # a buffer would write the rest of a failed write when it is closed
            start = file.seek(0, os.SEEK_END)
            if start:
                file.seek(start - 1)
            cut_off = start > 0 and file.read(1) != b"\n"
            rest = ("\n" if cut_off else "").encode() + "".join(f"{line}\n" for line in lines).encode()
            try:
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())
            except OSError:
                os.truncate(path, start)  # a full disk must not leave half a line
                raise
    except OSError as error:
        raise LabError(_cannot_write(path, error)) from error


def _cannot_write(path: Path, error: OSError) -> str:
    return (
        f"cannot write {path}: {error.strerror or error}. What was saved before is still there; make room or choose "
        "another folder with --out, and give the same command again: finished runs are not repeated"
    )
