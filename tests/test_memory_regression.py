"""The GitHub Action that comments on the memory of a pull request: its own commands, run on commits of a repository made here."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

import checkmate
from tests.cli.test_capture import MODEL
from tests.plot.graphs import AGAIN, KEEP_ALL, chain, plan

yaml = pytest.importorskip("yaml")
pytest.importorskip("torch")
ACTION = Path(__file__).parent.parent / ".github" / "actions" / "memory-regression"
STEPS = {step["name"]: step for step in yaml.safe_load((ACTION / "action.yml").read_text())["runs"]["steps"]}
WIDER = MODEL.replace("nn.Linear(8, 16)", "nn.Linear(8, 64)").replace("nn.Linear(16, 2)", "nn.Linear(64, 2)")


def git(*words: str) -> str:
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    return subprocess.run(["git", *identity, *words], check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def base(inside) -> str:
    """A repository with the small network in its first commit, and the wider one in its working tree."""
    git("init", "--quiet")
    Path("train.py").write_text(MODEL)
    git("add", "train.py")
    git("commit", "--quiet", "-m", "small")
    Path("train.py").write_text(WIDER)
    return git("rev-parse", "HEAD")


def compare(base: str, **inputs: str) -> subprocess.CompletedProcess[str]:
    """The step of the action that compares, with its environment as GitHub sets it."""
    given = {
        "TARGET": "train.py:build",
        "BUDGET": "14GiB",
        "ALLOW": "",
        "BASE": base,
        "GITHUB_ACTION_PATH": str(ACTION),
        **inputs,
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        ["bash", "-eo", "pipefail", "-c", STEPS["Compare"]["run"]],
        env={**os.environ, **given, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow  # three processes with PyTorch for each commit
def test_a_pull_request_is_compared_with_its_base(base):
    """Peak, overhead and what changed, by module; an increase fails the check only above what is allowed."""
    done = compare(base)
    assert done.returncode == 0, done.stderr
    said = Path("checkmate-memory/comment.md").read_text()
    rows = {cells[0]: cells[1:] for line in said.splitlines() if (cells := [c.strip() for c in line.split("|")[1:-1]])}
    assert said.splitlines()[1] == "### Memory of `train.py:build`: within 14GiB"
    before, after, grown = rows["peak without recomputation"]
    assert re.fullmatch(r"[\d.]+ (B|KiB)", before)
    assert re.fullmatch(r"[\d.]+ (B|KiB)", after)
    assert grown.startswith("+")
    assert rows["overhead of the plan"][:2] == ["1.000x", "1.000x"]
    assert rows["ops"][2] == "="
    assert rows["`resident`"][2].startswith("+")
    assert Path("checkmate-memory/report.html").exists()
    assert git("worktree", "list").count("\n") == 0
    assert git("status", "--short", "train.py") == "M train.py"

    refused = compare(base, ALLOW="5%")
    assert refused.returncode == 1, refused.stderr
    assert "the peak rose by more than 5.0%" in Path("checkmate-memory/comment.md").read_text()
    assert compare(base, ALLOW="900%").returncode == 0


@pytest.mark.slow
def test_a_step_over_the_budget_fails_with_a_comment(base):
    """The comment says so, and what the base had."""
    done = compare(base, BUDGET="8KiB")
    said = Path("checkmate-memory/comment.md").read_text()
    assert done.returncode == 1, done.stderr
    assert "no plan within 8KiB" in said
    assert re.search(r"planned peak, within 8KiB \| [\d.]+ KiB \| no plan", said)


@pytest.mark.slow
def test_a_new_step_has_nothing_to_compare_with(base):
    """The pull request that adds the step has a base without it."""
    Path("new.py").write_text(WIDER)
    done = compare(base, TARGET="new.py:build")
    assert done.returncode == 0, done.stderr
    assert "nothing to compare with" in Path("checkmate-memory/comment.md").read_text()
    assert compare(base, TARGET="absent.py:build").returncode == 2


def test_the_comment_names_what_changed():
    """A module of the pull request's code may have any name; in the table it is code, and one cell."""
    spec = importlib.util.spec_from_file_location("compare", ACTION / "compare.py")
    script = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "compare", script)  # a dataclass looks up its module
        spec.loader.exec_module(script)
    ops = tuple(msgspec.structs.replace(op, source="a|b`@everyone") for op in chain().ops)
    before = script.Step(chain(), checkmate.evaluate(chain(), plan(KEEP_ALL)))
    after = script.Step(msgspec.structs.replace(chain(), ops=ops), checkmate.evaluate(chain(), plan(AGAIN)))
    said = script.comment("train.py:build", "8GiB", before, after, "within 8GiB").splitlines()
    assert "| planned peak, within 8GiB | 7.50 MiB | 5.50 MiB | -26.7% |" in said
    assert "| overhead of the plan | 1.000x | 1.167x |  |" in said
    assert "| `a/b'@everyone` | 0 B | 7.00 MiB | new |" in said
    assert "| `a/b'@everyone` | 0 x | 3 x | new |" in said
    assert all(line.count("|") == 5 for line in said if line.startswith("|"))


@pytest.mark.parametrize("existing", ["", "17"])
def test_the_comment_is_replaced_and_not_repeated(base, tmp_path, existing):
    """`gh` is replaced by a script that notes how it is called; it finds a comment of an earlier run, or none."""
    Path("checkmate-memory").mkdir()
    Path("checkmate-memory/comment.md").write_text("<!-- mark -->\n@everyone\n")
    fake = tmp_path / "bin" / "gh"
    fake.parent.mkdir()
    fake.write_text(f'#!/bin/sh\necho "$@" >> calls\ncase "$*" in *--jq*) echo "{existing}";; esac\n')
    fake.chmod(0o755)
    given = {"PULL_REQUEST": "3", "GITHUB_REPOSITORY": "o/r", "GITHUB_STEP_SUMMARY": "summary", "GH_TOKEN": "t"}
    path = f"{fake.parent}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(
        ["bash", "-eo", "pipefail", "-c", STEPS["Comment"]["run"]], env={**os.environ, **given, "PATH": path}, check=True
    )
    written = Path("calls").read_text().splitlines()[1]
    assert ("--method PATCH repos/o/r/issues/comments/17 " in written) == bool(existing)
    assert ("repos/o/r/issues/3/comments " in written) == (not existing)
    assert Path("summary").read_text().startswith("<!-- mark -->")


def test_inputs_reach_the_shell_as_environment():
    """An expression inside a script is text that the shell runs: a branch or file name could hold a command."""
    for step in STEPS.values():
        assert "${{" not in step.get("run", "")
