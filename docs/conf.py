"""Sphinx configuration."""

import os
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_extensions"))

project = "Intention"
author = "The Intention developers"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "mathml",  # _extensions: formulas are in the pages, nothing is loaded to show them
]
html_math_renderer = "mathml"
myst_enable_extensions = ["attrs_inline", "colon_fence", "dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build", "jupyter_execute", ".jupyter_cache"]

# Tutorials are run as the pages are built; what raises fails the build.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # small models: more threads only wait, minutes on a busy machine
nb_execution_mode = "cache"
nb_execution_timeout = 120
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
default_role = "code"  # in docstrings `x` is code

html_theme = "furo"
html_title = "Intention"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_extra_path = ["llms.txt"]
html_show_sourcelink = False
html_show_copyright = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
copybutton_only_copy_prompt_lines = True


def reachable(addresses: dict[str, str]) -> dict[str, tuple[str, None]]:
    """Those whose inventories can be had now; links to other projects are never required."""
    found: dict[str, tuple[str, None]] = {}
    for name, address in addresses.items():
        try:
            with urllib.request.urlopen(f"{address}objects.inv", timeout=10) as answer:
                if answer.status == 200:
                    found[name] = (address, None)
        except (OSError, urllib.error.URLError):
            print(f"{address} cannot be reached: names of {name} are not links")
    return found


if os.environ.get("INTENTION_DOCS_LINKS"):  # set where the site is published; a build at home asks nobody
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = reachable(
        {"torch": "https://docs.pytorch.org/docs/stable/", "sklearn": "https://scikit-learn.org/stable/"}
    )


_CODE = re.compile(r"(`+[^`]*`+)")  # what is in backticks stays
_MARKS = re.compile(r"(?<!\\)([*|])(?!\w+:)")


def plain_docstrings(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings hold formulas as they are typed: ||x||, Q K'V * s. Stars and bars in them are no marks of layout."""
    example = False
    for number, line in enumerate(lines):
        example = line.lstrip().startswith((">>>", "...")) or (example and bool(line.strip()))
        if not example:
            parts = _CODE.split(line)
            lines[number] = "".join(part if i % 2 else _MARKS.sub(r"\\\1", part) for i, part in enumerate(parts))


def skip(app: Any, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Methods that scikit-learn adds to its estimators are its own."""
    return True if re.fullmatch(r"set_\w+_request", name) else None


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", plain_docstrings, priority=1)  # before napoleon
    app.connect("autodoc-skip-member", skip)
