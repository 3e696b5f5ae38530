"""Plain programs from the tutorials: docs/tutorials/NAME.md to examples/NAME.py, text as comments.

python tools/twins.py
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TUTORIALS, EXAMPLES = ROOT / "docs" / "tutorials", ROOT / "examples"
_CELL = re.compile(r"^```\{code-cell\} python\n(.*?)^```\n", re.MULTILINE | re.DOTALL)


def names() -> list[str]:
    return sorted(path.stem for path in TUTORIALS.glob("*.md") if path.stem != "index")


def twin(name: str) -> str:
    """The cells of a tutorial, one after another; headings between them become comments."""
    page = (TUTORIALS / f"{name}.md").read_text(encoding="utf-8")
    body = page.split("---\n", 2)[2]
    title, _, body = body.strip().partition("\n")
    parts = [f'"""{title.removeprefix("# ")}. With text and pictures: docs/tutorials/{name}.md"""']
    above = ""
    for number, part in enumerate(_CELL.split(body)):
        if number % 2:
            parts.append(above + part.strip())
        above = "".join(f"# {heading}\n" for heading in re.findall(r"^## (.+)$", part, re.MULTILINE))
    return _joined(parts)


def _joined(parts: list[str]) -> str:
    """Two empty lines before and after functions and classes, else one."""
    text = parts[0] + "\n"
    for part in parts[1:]:
        begins = re.match(r"(#.*\n)*(def|class) ", part) is not None
        ends = text.splitlines()[-1].startswith(" ")
        text += "\n" * (2 if begins or ends else 1) + part + "\n"
    return text


def main() -> None:
    for name in names():
        (EXAMPLES / f"{name}.py").write_text(twin(name), encoding="utf-8")


if __name__ == "__main__":
    main()
