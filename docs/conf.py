"""Sphinx configuration; built with warnings as errors."""

from __future__ import annotations

import checkmate

project = "Checkmate"
author = "The Checkmate authors"
copyright = "The Checkmate authors, Apache-2.0"  # noqa: A001  (Sphinx's name)
version = release = checkmate.__version__

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

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

# Tutorials are notebooks in text form; they run whenever the pages are built, and what fails in one fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
