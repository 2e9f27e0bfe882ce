"""Sphinx configuration; built with warnings as errors."""

from __future__ import annotations

import re
from typing import Any

import checkmate

project = "Checkmate"
author = "The Checkmate authors"
copyright = "The Checkmate authors, Apache-2.0"  # noqa: A001  (Sphinx's name)
version = release = checkmate.__version__

extensions = [
    *("myst_nb", "sphinx_design", "sphinx_copybutton"),
    *(
        "sphinx.ext.autodoc",
        "sphinx.ext.autosummary",
        "sphinx.ext.napoleon",
        "sphinx.ext.viewcode",
    ),
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]

html_theme = "pydata_sphinx_theme"
html_title = "Checkmate"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_logo = html_favicon = "_static/logo.svg"
html_context = {
    "github_user": "checkmate-remat",
    "github_repo": "checkmate",
    "github_version": "main",
    "doc_path": "docs",
}
html_theme_options = {
    "logo": {"text": f"Checkmate {version}"},
    "github_url": "https://github.com/checkmate-remat/checkmate",
    "use_edit_page_button": True,
    "header_links_before_dropdown": 8,
    "navbar_persistent": ["search-button"],
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc", "edit-this-page"],
    "navigation_with_keys": False,
}
html_show_sourcelink = False
html_sidebars = {
    page: [] for page in ("*", "benchmarks/*", "explanation/*", "upstream/*")
}  # sections of one page
html_sidebars |= {"how-to/coming-from": [], "how-to/train-with-model-fit": []}

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
_about = "The cheapest plan found for a training step within a memory budget, with a proven gap."
myst_html_meta = {
    "description": _about,
    "property=og:title": "Checkmate",
    "property=og:description": _about,
    "property=og:image": "https://github.com/checkmate-remat/checkmate/raw/main/docs/_static/card.png",
}

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": False}
autosummary_generate = False
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True

# Tutorials are notebooks in text form; they run whenever the pages are built, and what fails in one fails the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 240
nb_merge_streams = True
nb_output_stderr = "remove"  # lines of progress


def _with_summaries(_app: Any, page: str, source: list[str]) -> None:
    """Begin each group of names in the reference with a table of them."""
    if page.startswith("reference/"):
        names = re.compile(
            r"^\.\. auto(?:function|class|exception):: (.+)$", re.MULTILINE
        )

        def table(block: re.Match[str]) -> str:
            lines = [f"   ~{name}\n" for name in names.findall(block[2])]
            head = ".. autosummary::\n   :nosignatures:\n\n" if len(lines) > 2 else ""
            return (
                block[1]
                + head
                + "".join(lines if head else [])
                + "\n" * bool(head)
                + block[2]
            )

        source[0] = re.sub(
            r"(^```\{eval-rst\}\n)(.*?)(?=^```)",
            table,
            source[0],
            flags=re.MULTILINE | re.DOTALL,
        )


def _leave_decisions_out_of_search(_app: Any, env: Any) -> None:
    for page in env.found_docs:
        if page.startswith("decisions/"):
            env.metadata[page]["nosearch"] = True


def setup(app: Any) -> None:
    """What the extensions have no setting for."""
    app.connect("source-read", _with_summaries)
    app.connect("env-updated", _leave_decisions_out_of_search)
