"""Matplotlib figures to SVG that stands inside a page: its ids are its own, and black is the page's text colour."""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.typing import RcKeyType

__all__ = ["standalone", "to_svg", "transparent"]

SVG, XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
STYLE: dict[RcKeyType, Any] = {
    "svg.fonttype": "none",
    "font.size": 10.5,
    "axes.titlesize": 11,
    "axes.labelsize": 10.5,
    "figure.labelsize": 10.5,
    "figure.titlesize": 11,
    "legend.fontsize": 9.5,
    "legend.frameon": False,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "black",
    "grid.alpha": 0.15,
    "mathtext.fontset": "dejavusans",
}
# The page gives --page; a file that stands alone is white.
_COLOURS = ((re.compile(r"#000000\b"), "currentColor"), (re.compile(r"#ffffff\b"), "var(--page, #fff)"))
_FAMILY = re.compile(r"('[^']*'|\"[^\"]*\"|[\w-]+)(, *('[^']*'|\"[^\"]*\"|[\w-]+))*$")


def to_svg(draw: Callable[[], Figure], name: str, title: str) -> str:
    """What `draw` draws, as an <svg> element. `name` begins all its ids, `title` is read to those who cannot see it."""
    import matplotlib

    buffer = io.BytesIO()
    with matplotlib.rc_context():
        matplotlib.rcdefaults()  # the same bytes whatever the user's matplotlibrc says
        matplotlib.rcParams.update({**STYLE, "svg.hashsalt": name})
        draw().savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{SVG}}}metadata", f"{{{SVG}}}style"):  # the style's selector * would reach the page
                parent.remove(child)
    for element in root.iter():
        _adapt(element, f"{name}-")
    width = root.attrib.pop("width").removesuffix("pt")
    root.attrib.pop("height", None)
    root.set("fill", "currentColor")  # matplotlib leaves out a fill that is black
    root.set("style", f"max-width: {float(width) * 4 / 3:.0f}px; stroke-linejoin: round; stroke-linecap: butt")
    root.set("role", "img")
    root.set("aria-label", title)
    ET.register_namespace("", SVG)
    ET.register_namespace("xlink", XLINK)
    return ET.tostring(root, encoding="unicode")


def standalone(svg: str) -> bytes:
    """The same figure as a file, black on white."""
    return ('<?xml version="1.0" encoding="utf-8"?>\n' + svg.replace("max-width: ", _ALONE, 1) + "\n").encode()


_ALONE = "background: #fff; color: #1b1f24; font-family: sans-serif; width: "


def transparent(svg: str, dark: bool) -> bytes:
    """The same figure as a file for pages that are light or dark: nothing behind it, ink that suits the page."""
    width, height = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg).groups()  # type: ignore[union-attr]
    ink, page = ("#e6edf3", "#0d1117") if dark else ("#1b1f24", "#fff")
    style = f"color: {ink}; --page: {page}; font-family: sans-serif; max-width: "
    sized = svg.replace("<svg ", f'<svg width="{width}" height="{height}" ', 1).replace("max-width: ", style, 1)
    return ('<?xml version="1.0" encoding="utf-8"?>\n' + sized + "\n").encode()


def _adapt(element: ET.Element, prefix: str) -> None:
    for key, value in element.attrib.items():
        if key == "id":
            value = prefix + value
        elif key == f"{{{XLINK}}}href" and value.startswith("#"):
            value = f"#{prefix}{value[1:]}"
        elif key != "d":
            value = value.replace("url(#", f"url(#{prefix}")
            for colour, ours in _COLOURS:
                value = colour.sub(ours, value)
        if key == "style":
            value = "; ".join(_declaration(part.strip()) for part in value.split(";") if part.strip())
        element.set(key, value)


def _declaration(text: str) -> str:
    """The page's fonts in place of matplotlib's: `font: italic 10px 'DejaVu Sans', ...` keeps all but the family."""
    name, _, value = text.partition(":")
    if name == "font-family":
        return "font-family: inherit"
    if name == "font":
        return f"font: {_FAMILY.sub('', value.strip()).strip()} system-ui, sans-serif"  # inherit is not allowed here
    return text
