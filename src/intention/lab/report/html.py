"""Templates to pages: one look for both, nothing that leads to the network."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

__all__ = ["render"]

FILES = resources.files("intention.lab.report")


def render(template: str, filters: Mapping[str, Callable[..., Any]], **values: Any) -> str:
    """A template of this folder as a page."""
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(_read)
    )
    environment.filters.update(**filters, safe_svg=Markup)
    return environment.get_template(template).render(**values, style=Markup(_read("style.css"))) + "\n"


def _read(name: str) -> str:
    return (FILES / name).read_text(encoding="utf-8")
