"""What the documents say is so: commands, links and examples."""

from __future__ import annotations

import doctest
import functools
import importlib
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
OWN = "https://github.com/checkmate-remat/checkmate"
COMMANDS = [
    'pip install -c constraints.txt -e ".[demo]" && checkmate demo',
    'pip install -c constraints.txt -e ".[dev]" && pytest',
]


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_readme_has_the_two_commands_that_ci_runs():
    """Continuous integration takes the README's lines that install, so these are what it runs."""
    lines = (ROOT / "README.md").read_text().splitlines()
    assert [line for line in lines if line.startswith("pip install -c constraints.txt ")] == COMMANDS
    script = (ROOT / ".ci" / "run").read_text()
    assert "grep '^pip install -c constraints.txt ' \"$root/README.md\"" in script


def test_ci_script_is_valid_bash():
    """A typing error in it would be found only at the end of a long run."""
    subprocess.run(["bash", "-n", str(ROOT / ".ci" / "run")], check=True)


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_internal_links_resolve(page):
    """A link to a file in the repository names a file that is there."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", text)
    here = [(page.parent, t) for t in targets if "://" not in t and not t.startswith("mailto:")]
    here += [(ROOT, found[1]) for t in targets if (found := re.fullmatch(rf"{OWN}/(?:blob|raw|tree)/main/(.+)", t))]
    assert [target for folder, target in here if not (folder / target).exists()] == []


@pytest.mark.parametrize("page", [p for p in PAGES if p.parent != ROOT], ids=page_id)
def test_code_fits_in_88_columns(page):
    """A column of the site is as wide beside its sidebars: longer lines would be broken anywhere."""
    fence, long = None, []
    for line in page.read_text().splitlines():
        if line.startswith("```"):
            fence = line if fence is None else None
        elif fence and not fence.startswith(("```{toctree}", "```{image}", "```{eval-rst}")) and len(line) > 88:
            long.append(line)
    assert long == []


@pytest.mark.parametrize("page", [p for p in PAGES if ">>> " in p.read_text()], ids=page_id)
def test_examples_run(page):
    """The examples of a page are one session, and print what the page says."""
    blocks = re.findall(r"^```pycon\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, page_id(page), str(page), 0)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.IGNORE_EXCEPTION_DETAIL)
    said: list[str] = []
    runner.run(test, out=said.append)
    assert not runner.failures, "".join(said)


RECIPES = [
    pytest.param(source, id=f"{page.stem}-{number}")
    for page in sorted((ROOT / "docs" / "how-to").glob("for-*.md"))
    for number, source in enumerate(re.findall(r"^```python\n(.*?)^```", page.read_text(), flags=re.DOTALL | re.MULTILINE))
]


@pytest.mark.filterwarnings("ignore")  # of the packages of others
@pytest.mark.parametrize("source", RECIPES)
def test_recipes_run(source, tmp_path, monkeypatch):
    """As they are, where the packages are installed that a recipe imports."""
    for name in dict.fromkeys(re.findall(r"^(?:from|import) (\w+)", source, flags=re.MULTILINE)):
        pytest.importorskip(name, reason=f"needs {name}")
    if "checkmate.torch.compile(" in source:
        steps = importlib.import_module("checkmate.torch")
        monkeypatch.setattr(steps, "compile", functools.partial(steps.compile, time_limit_s=1, costs="estimated"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CHECKMATE_BUDGET", "8GiB")
    exec(compile(source, "recipe", "exec"), {"__name__": "recipe"})


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / "src").rglob("*.py"))], ids=page_id)
def test_nothing_names_a_machine(page):
    """Absolute paths of somebody's machine mean nothing to anybody else."""
    assert not re.search(r"(?<![\w.])/(?:home|root|work|Users)/", page.read_text())
