"""Formulas as MathML, written when the pages are built: browsers show it without scripts and without a network."""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from latex2mathml.converter import convert

# A prime is high by itself; as a superscript it would be lifted once more.
_PRIME = re.compile(r"<msup>(<mi>\w</mi>)<mi>(?:&#x02032;|′)</mi></msup>")


def mathml(formula: str, display: str = "inline") -> str:
    """What a browser shows."""
    return _PRIME.sub(r"<mrow>\1<mo>′</mo></mrow>", convert(formula, display=display))


def _inline(self: Any, node: nodes.math) -> None:
    self.body.append(mathml(node.astext()))
    raise nodes.SkipNode


def _block(self: Any, node: nodes.math_block) -> None:
    ids = "".join(f' id="{name}"' for name in node["ids"][:1])
    self.body.append(f'<div class="math-block"{ids}>{mathml(node.astext(), "block")}</div>\n')
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", (_inline, None), (_block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
