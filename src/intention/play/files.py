"""The page's files, read once: a request names one of them or gets nothing, so no other file can be asked for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

__all__ = ["read"]

FOLDER = Path(__file__).parent / "static"
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class File(NamedTuple):
    content: bytes
    type: str


def read() -> dict[str, File]:
    """By the path under which the page asks for them; / is the page itself."""
    found = {
        f"/{path.relative_to(FOLDER).as_posix()}": File(path.read_bytes(), TYPES[path.suffix])
        for path in sorted(FOLDER.rglob("*"))
        if path.suffix in TYPES
    }
    return {"/": found["/index.html"], **found}
