"""Characters of a text: a file of the user, or the licence and documentation that come with Python."""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from intention.lab.core.files import LabError

__all__ = ["Text", "Windows", "bits_of_pairs", "documentation", "load", "sample", "spread"]

HELD_OUT = 0.1  # the last tenth


@dataclass(frozen=True)
class Text:
    """A text as numbers: those to learn from, and what comes after them."""

    name: str
    characters: str  # number -> character
    seen: Tensor
    unseen: Tensor
    digest: str

    def read(self, tokens: Tensor) -> str:
        return "".join(self.characters[i] for i in tokens.tolist())


class Windows(NamedTuple):
    """Pieces of a text. At each character but the last the next one is asked."""

    tokens: Tensor  # (B, n + 1)


@lru_cache(maxsize=2)
def load(path: str, window: int) -> Text:
    """The text of a file, or Python's own documentation for "". One that does not serve is a `LabError`."""
    if path:
        name, content = Path(path).name, _read(Path(path))
    else:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        name, content = f"documentation of Python {version}", documentation(Path(sysconfig.get_path("stdlib")))
    least = round(2 / HELD_OUT) * (window + 1)
    if len(content) < least:
        hint = "give a longer one" if path else "this Python comes without its sources: give a text with --text"
        raise LabError(
            f"{path or name}: wanted at least {least} characters, so that the last tenth holds two pieces of {window}, "
            f"got {len(content)}; {hint}"
        )
    characters = "".join(sorted(set(content)))
    if len(characters) < 2:
        raise LabError(f"{path}: all characters are {characters!r}; there is nothing to learn from this text")
    number = {character: i for i, character in enumerate(characters)}
    tokens = torch.tensor([number[character] for character in content])
    cut = len(tokens) - round(HELD_OUT * len(tokens))
    return Text(name, characters, tokens[:cut], tokens[cut:], hashlib.sha256(content.encode()).hexdigest()[:8])


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise LabError(f"there is no file {path}; give the path of a text in UTF-8") from error
    except UnicodeDecodeError as error:
        raise LabError(f"{path} is not UTF-8: {error}; convert it, for example with iconv -t UTF-8") from error
    except OSError as error:
        raise LabError(f"cannot read {path}: {error}") from error


def documentation(library: Path) -> str:
    """The licence of Python, the topics of its help, and the docstrings of its modules by name; each text once."""
    found: dict[str, None] = {}
    if (licence := library / "LICENSE.txt").is_file():
        found.setdefault(licence.read_text(encoding="utf-8", errors="replace").strip())
    for text in _strings(library / "pydoc_data" / "topics.py"):
        found.setdefault(text)
    for path in sorted(library.glob("*.py")):
        for text in _docstrings(path):
            found.setdefault(text)
    return "\n\n".join(filter(None, found))


def _parsed(path: Path) -> list[ast.AST]:
    try:
        return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, SyntaxError):
        return []


def _strings(path: Path) -> list[str]:
    """The values of the dictionaries of a module, which are texts."""
    values = [value for node in _parsed(path) if isinstance(node, ast.Dict) for value in node.values]
    return [node.value.strip() for node in values if isinstance(node, ast.Constant) and isinstance(node.value, str)]


def _docstrings(path: Path) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return [(ast.get_docstring(node) or "").strip() for node in _parsed(path) if isinstance(node, kinds)]


def sample(tokens: Tensor, batch: int, generator: torch.Generator, *, window: int) -> Windows:
    """Pieces from random places.

    >>> sample(torch.arange(100), 3, torch.Generator().manual_seed(0), window=7).tokens.shape
    torch.Size([3, 8])
    """
    start = torch.randint(len(tokens) - window, (batch, 1), generator=generator)
    return Windows(tokens[start + torch.arange(window + 1)])


def spread(tokens: Tensor, most: int, window: int) -> Windows:
    """At most so many pieces side by side, evenly over the text; none overlaps another.

    >>> spread(torch.arange(100), 3, 9).tokens[:, 0].tolist()
    [0, 40, 90]
    """
    pieces = tokens[: len(tokens) // (window + 1) * (window + 1)].view(-1, window + 1)
    count = min(most, len(pieces))
    return Windows(pieces[torch.linspace(0, len(pieces) - 1, count).round().long()])


def bits_of_pairs(text: Text, windows: Windows) -> Tensor:
    """Bits per character (B,) of counting which character follows which, one added to every count."""
    size = len(text.characters)
    first, after = text.seen[:-1], text.seen[1:]
    codes, counts = torch.unique(first * size + after, return_counts=True)
    wanted = windows.tokens[:, :-1] * size + windows.tokens[:, 1:]
    place = torch.searchsorted(codes, wanted).clamp_max(len(codes) - 1)
    together = torch.where(codes[place] == wanted, counts[place], 0)
    alone = torch.bincount(first, minlength=size)[windows.tokens[:, :-1]]
    return -torch.log2((together + 1) / (alone + size)).mean(-1)
