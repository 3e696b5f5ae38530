"""Sphinx configuration."""

project = "Intention"
author = "The Intention developers"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.mathjax"]
myst_enable_extensions = ["dollarmath"]
html_theme = "furo"
html_title = "Intention"
exclude_patterns = ["_build"]
autodoc_typehints = "none"
autodoc_member_order = "bysource"
nitpicky = False
