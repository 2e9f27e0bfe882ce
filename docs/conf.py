"""Sphinx configuration; built with warnings as errors."""

from __future__ import annotations

import checkmate

project = "Checkmate"
author = "The Checkmate authors"
copyright = "The Checkmate authors, Apache-2.0"  # noqa: A001  (Sphinx's name)
version = release = checkmate.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build"]

html_theme = "pydata_sphinx_theme"
html_title = "Checkmate"
html_theme_options = {"show_toc_level": 2, "secondary_sidebar_items": ["page-toc"], "navigation_with_keys": False}
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": False}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
