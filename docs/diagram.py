"""Draws docs/kvq_space.svg, the one picture of the README: python docs/diagram.py"""

from __future__ import annotations

from pathlib import Path

BOXES = [  # x, y, title, formula
    (20, 20, "Intention", "Q (K′K + αI)⁻¹ K′ V"),
    (20, 170, "linear attention", "Q K′ V"),
    (420, 20, "σIntention", "softmax(Q (K′K + αI)⁻¹ K′) V"),
    (420, 170, "attention", "softmax(Q K′) V"),
]
ARROWS = [((160, 90), (160, 170), "α → ∞, scale = α"), ((560, 90), (560, 170), "α → ∞, scale = α")]
WIDTH, HEIGHT = 720, 260


def box(x: int, y: int, title: str, formula: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="280" height="70" rx="10" class="box"/>'
        f'<text x="{x + 140}" y="{y + 29}" class="title">{title}</text>'
        f'<text x="{x + 140}" y="{y + 54}" class="formula">{formula}</text>'
    )


def arrow(start: tuple[int, int], end: tuple[int, int], label: str) -> str:
    return (
        f'<line x1="{start[0]}" y1="{start[1]}" x2="{end[0]}" y2="{end[1] - 4}" class="arrow" marker-end="url(#tip)"/>'
        f'<text x="{start[0] + 12}" y="{(start[1] + end[1]) // 2 + 5}" class="label">{label}</text>'
    )


def across(y: int) -> str:
    return (
        f'<line x1="300" y1="{y}" x2="414" y2="{y}" class="arrow" marker-end="url(#tip)"/>'
        f'<text x="357" y="{y - 8}" class="label" text-anchor="middle">softmax</text>'
    )


STYLE = """
.box { fill: #eef2fb; stroke: #3455a4; stroke-width: 1.5; }
.title { font: 600 17px sans-serif; fill: #1b2a4a; text-anchor: middle; }
.formula { font: 15px ui-monospace, monospace; fill: #1b2a4a; text-anchor: middle; }
.label { font: 13px sans-serif; fill: #667799; }
.arrow { stroke: #667799; stroke-width: 1.6; }
"""


def draw() -> str:
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img">',
        "<title>Four operations on keys, values and queries</title>",
        f"<style>{STYLE}</style>",
        '<defs><marker id="tip" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
        'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="#667799"/></marker></defs>',
        *(box(*b) for b in BOXES),
        *(arrow(*a) for a in ARROWS),
        across(55),
        across(205),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("kvq_space.svg").write_text(draw(), encoding="utf-8")
