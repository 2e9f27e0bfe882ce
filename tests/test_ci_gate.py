"""The workflow that the documents offer does what they say: its own commands are run here, with another budget."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from checkmate.cli import main
from tests.cli.test_capture import MODEL

yaml = pytest.importorskip("yaml")
WORKFLOW = Path(__file__).parent.parent / "docs" / "how-to" / "checkmate.yml"


def commands() -> list[list[str]]:
    steps = yaml.safe_load(WORKFLOW.read_text())["jobs"]["peak"]["steps"]
    lines = [shlex.split(step["run"]) for step in steps if "run" in step]
    return [words[1:] for words in lines if words[0] == "checkmate"]


def codes(budget: str) -> list[int]:
    """Exit codes up to the first that fails the job."""
    found: list[int] = []
    for words in commands():
        found.append(main([word.replace("14GiB", budget) for word in words]))
        if found[-1]:
            break
    return found


@pytest.fixture(autouse=True)
def model(inside):
    (inside / "train.py").write_text(MODEL)


def test_a_step_within_the_budget_passes():
    """Capture, plan, verify, report: all of them exit with 0, and the page is there for the artefact."""
    assert codes("14GiB") == [0, 0, 0, 0]
    assert Path("report.html").exists()


def test_a_step_over_the_budget_fails_the_job():
    """The plan's exit code is what fails it."""
    assert codes("1KiB") == [0, 1]
