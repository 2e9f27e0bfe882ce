"""What surrounds the code holds together: one version, its changelog, workflows, scripts and package metadata."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import checkmate

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
OFFERED = ROOT / "docs" / "how-to" / "checkmate.yml"
CONFIGURATION = [
    *sorted((ROOT / ".github").rglob("*.yml")),
    ROOT / ".pre-commit-config.yaml",
    ROOT / ".readthedocs.yaml",
    ROOT / "CITATION.cff",
    OFFERED,
]
SCRIPTS = [path for path in sorted((ROOT / ".ci").iterdir()) if path.suffix == ""]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def used(value: Any) -> Iterator[str]:
    """Every action and workflow that a workflow uses."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "uses":
                yield inner
            yield from used(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from used(inner)


def test_the_version_is_in_one_place():
    """The metadata read it from the code, and pip shows what `checkmate --version` says."""
    assert PROJECT["project"]["dynamic"] == ["version"]
    source = ROOT / PROJECT["tool"]["hatch"]["version"]["path"]
    assert source == ROOT / "src" / "checkmate" / "__init__.py"
    assert re.findall(r'^__version__ = "(.+)"$', source.read_text(), re.MULTILINE) == [checkmate.__version__]


def test_the_citation_names_this_version():
    """Who cites the software cites what they ran."""
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == checkmate.__version__


def test_the_conda_recipe_names_this_version_and_its_dependencies():
    """A recipe is read by another service, which knows nothing of the metadata; two names differ there."""
    recipe = yaml.safe_load((ROOT / "packaging" / "conda" / "recipe.yaml").read_text())
    assert recipe["context"]["version"] == checkmate.__version__
    assert recipe["about"]["summary"] == PROJECT["project"]["description"]
    names = {"msgspec-python": "msgspec"}
    wanted = {requirement.replace(">=", " >=") for requirement in PROJECT["project"]["dependencies"]}
    python, *others = recipe["requirements"]["run"]
    assert python == f"python {PROJECT['project']['requires-python']}"
    assert {f"{names.get(line.split()[0], line.split()[0])} {line.split()[1]}" for line in others} == wanted


def test_the_notebooks_for_colab_are_the_tutorials():
    """The tutorials are executed in every build of the documentation, and so are the cells of these notebooks."""
    made = runpy.run_path(str(ROOT / ".ci" / "notebooks.py"))["notebooks"]()
    assert len(made) == 2 and all(path.read_text() == text for path, text in made.items()), "run `python .ci/notebooks.py`"
    for text in made.values():
        code = ["".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code"]
        assert code[0].startswith("%pip install") and all(compile(cell, "cell", "exec") for cell in code[1:])


def test_the_changelog_knows_this_version():
    """A release without its section would be published without a word about what changed."""
    sections = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert "Unreleased" not in sections[1:], "changes that are not released come first, once"
    released = [section for section in sections if section != "Unreleased"]
    assert released[0] == checkmate.__version__


@pytest.mark.parametrize("path", CONFIGURATION, ids=name_of)
def test_configuration_is_yaml(path):
    """A service that reads a broken file does nothing, and says so where nobody looks."""
    assert isinstance(yaml.safe_load(path.read_text()), dict)


@pytest.mark.parametrize("path", [*WORKFLOWS, OFFERED], ids=name_of)
def test_actions_are_pinned_by_hash(path):
    """A tag can be moved to other code by whoever takes over an action; the hash of a commit cannot."""
    text = path.read_text()
    actions = [name for name in used(yaml.safe_load(text)) if not name.startswith("./")]
    for name in actions:
        assert re.fullmatch(r"[\w.-]+(/[\w.-]+)+@[0-9a-f]{40}", name)
        assert re.search(rf"uses: {re.escape(name)} # v\d+\.\d+\.\d+$", text, re.MULTILINE), f"{name} has no version beside it"


def test_an_action_has_one_version():
    """Two versions of one action are two to review."""
    found = {name for path in [*WORKFLOWS, OFFERED] for name in used(yaml.safe_load(path.read_text())) if "@" in name}
    assert len(found) == len({name.partition("@")[0] for name in found})


@pytest.mark.parametrize("path", [*WORKFLOWS, OFFERED], ids=name_of)
def test_a_workflow_may_only_read(path):
    """A job that may do more says so itself; what is not said is whatever the repository's settings are."""
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"}
    writers = {name for name, job in workflow["jobs"].items() if "write" in job.get("permissions", {}).values()}
    assert writers == ({"publish", "announce"} if path.name == "release.yml" else set())


@pytest.mark.parametrize("name", ["tests.yml", "wheels.yml"])
def test_every_declared_python_is_tested(name):
    """The classifiers are a claim, and the lowest of them is the floor."""
    prefix = "Programming Language :: Python :: 3."
    declared = ["3." + line.removeprefix(prefix) for line in PROJECT["project"]["classifiers"] if line.startswith(prefix)]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())["jobs"]
    first = next(job for job in jobs.values() if "strategy" in job)["strategy"]["matrix"]["python"]
    assert first == declared if name == "tests.yml" else first[: len(declared)] == declared, "wheels are tried on newer ones too"
    assert PROJECT["project"]["requires-python"] == f">={declared[0]}"


@pytest.mark.parametrize("path", SCRIPTS, ids=name_of)
def test_a_script_is_valid_bash(path):
    """A typing error in it would be found only at the end of a long run."""
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_the_source_distribution_lists_what_is_there():
    """A name in the list that is gone, or moved, would be left out without a word."""
    listed = PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"]
    assert [name for name in listed if not (ROOT / name.removeprefix("/")).exists()] == []


def test_what_is_constrained_is_exact():
    """`constraints.txt` names one version of each package, once, and every tool that `dev` asks for."""
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.+]+", line) for line in lines)
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(set(names)) == len(names)
    extras = PROJECT["project"]["optional-dependencies"]
    asked = {re.split(r"[\[<>=]", line)[0].lower() for lines in extras.values() for line in lines} - {"checkmate-remat"}
    assert asked <= set(names)
