"""docs/pictures/badges.svg, at the top of README: what the package needs, from pyproject.toml.

python tools/badges.py

A file of our own, so that README shows it wherever it is read.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

ROOT = Path(__file__).parents[1]
FILE = ROOT / "docs" / "pictures" / "badges.svg"
LETTER, PAD, GAP, HEIGHT = 6.6, 7.0, 6.0, 20.0  # of 11 px text; widths are generous, so that any font fits
COLOURS = {"python": "#3776ab", "torch": "#c9401f", "licence": "#2a7f4f", "types": "#5b5fc7"}


def facts() -> dict[str, str]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wanted = {
        "python": r'requires-python = ">=([\d.]+)"',
        "torch": r'dependencies = \["torch>=([\d.]+)"',
        "licence": r'license = "([^"]+)"',
    }
    found = {name: match[1] for name, pattern in wanted.items() if (match := re.search(pattern, text))}
    return {name: value if name == "licence" else f"≥ {value}" for name, value in found.items()} | {"types": "pyright"}


def draw() -> str:
    parts, x = [], 0.0
    for name, value in facts().items():
        left, right = (LETTER * len(text) + 2 * PAD for text in (name, value))
        for at, width, text, colour in ((x, left, name, "#4a4f57"), (x + left, right, value, COLOURS[name])):
            parts.append(f'<rect x="{at:.1f}" width="{width:.1f}" height="{HEIGHT:g}" rx="3" fill="{colour}"/>')
            parts.append(f'<text x="{at + width / 2:.1f}" y="14" text-anchor="middle">{escape(text)}</text>')
        x += left + right + GAP
    title = "; ".join(f"{name} {value}" for name, value in facts().items())
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{x:.0f}" height="{HEIGHT:g}" role="img" fill="#fff"'
    style = 'font-family="Verdana,DejaVu Sans,sans-serif" font-size="11"'
    return f"{head} {style}>\n<title>{escape(title)}</title>\n" + "\n".join(parts) + "\n</svg>\n"


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
