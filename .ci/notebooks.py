"""Writes the notebooks for Colab, `examples/colab_*.ipynb`, from the tutorials that every build of the documentation executes.

`python .ci/notebooks.py`. A link within the documentation becomes one to the repository, and a first cell installs the package.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TUTORIALS = {"pytorch": ("1-pytorch", "demo"), "jax": ("4-jax", "jax")}  # of each notebook: the tutorial, and the extra it needs
DOCS = "https://github.com/checkmate-remat/checkmate/blob/main/docs"


def notebook(page: str, extra: str) -> str:
    """A page of MyST as a notebook."""
    text = re.sub(r"\A---\n.*?\n---\n", "", page, flags=re.DOTALL)
    text = re.sub(r"\]\((?!https?:)(\.\./)?([^)]+)\)", lambda link: f"]({DOCS}/{'' if link[1] else 'tutorials/'}{link[2]})", text)
    cells = [cell("code", f'%pip install -q "checkmate-remat[{extra}]"')]
    for k, part in enumerate(re.split(r"```\{code-cell\} ipython3\n(.*?)```\n", text, flags=re.DOTALL)):
        if part.strip():
            cells.append(cell("code" if k % 2 else "markdown", re.sub(r"\A(:.*\n)+", "", part).strip()))
    for number, each in enumerate(cells):
        each["id"] = f"cell-{number}"
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1, ensure_ascii=False) + "\n"
    )


def cell(kind: str, text: str) -> dict[str, object]:
    """A cell of a notebook that has not run."""
    more = {"execution_count": None, "outputs": []} if kind == "code" else {}
    return {"cell_type": kind, "metadata": {}, "source": text.splitlines(keepends=True), **more}


def notebooks() -> dict[Path, str]:
    """The files, and what is to be in them."""
    docs = ROOT / "docs" / "tutorials"
    made = {name: notebook((docs / f"{page}.md").read_text(), extra) for name, (page, extra) in TUTORIALS.items()}
    return {ROOT / "examples" / f"colab_{name}.ipynb": text for name, text in made.items()}


if __name__ == "__main__":
    for path, text in notebooks().items():
        path.write_text(text)
