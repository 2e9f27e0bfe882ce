"""Child processes import nothing from the folder in which a verb is run."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import checkmate
from tests.plot.graphs import chain

COMMAND = "import sys\nfrom checkmate.cli import main\nif __name__ == '__main__':\n    sys.exit(main())\n"
NAMES = (
    "json",
    "queue",
    "pickle",
    "struct",
    "socket",
    "signal",
    "multiprocessing",
    "tempfile",
    "msgspec",
    "numpy",
    "checkmate",
)


@pytest.mark.parametrize("words", [
    ("plan", "chain.graph.json", "--budget", "5.5MiB", "--gap", "0"),
], ids=lambda words: words[0])  # fmt: skip
def test_modules_in_the_folder_are_not_imported(tmp_path, tmp_path_factory, words):
    """A downloaded graph may lie in a folder with a `json.py`, which would run as the user."""
    command = tmp_path_factory.mktemp("bin") / "checkmate"  # as pip installs it: with its own folder on the path
    command.write_text(COMMAND)
    checkmate.write(chain(), tmp_path / "chain.graph.json")
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text("import pathlib\npathlib.Path(__file__ + '.ran').touch()\nraise SystemExit(7)\n")
    done = subprocess.run([sys.executable, command, *words], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.ran")) == []
    assert done.returncode == 0, done.stderr


def test_no_interpreter_is_started_by_hand():
    """Without `-P` it would look for modules in the current folder; `multiprocessing` is told not to."""
    for path in Path(checkmate.__file__).parent.rglob("*.py"):
        if "executable" not in (text := path.read_text()):
            continue
        named = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Attribute)]
        assert not [node.lineno for node in named if ast.unparse(node) == "sys.executable"], path
