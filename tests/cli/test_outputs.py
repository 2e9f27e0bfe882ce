"""What a verb writes goes where the path leads, replaces no input, and is not lost if it cannot be written."""

from __future__ import annotations

import json
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

import checkmate
from checkmate.core import files
from tests.cli.test_capture import MODEL
from tests.plot.graphs import AGAIN, plan

PLAN = ("plan", "chain.graph.json", "--budget", "5.5MiB")
COMMAND = (sys.executable, "-c", "import sys; from checkmate.cli import main; sys.exit(main())")


@pytest.fixture
def piped(tmp_path):
    """A FIFO called `pipe`; the function waits for what its reader gets."""
    path = tmp_path / "pipe"
    os.mkfifo(path)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(path.read_bytes()), daemon=True)
    reader.start()

    def content() -> bytes:
        reader.join(10)
        assert stat.S_ISFIFO(path.stat().st_mode)
        return read[0]

    return content


def test_a_link_stays_and_its_file_is_written(run, tmp_path):
    """Also where the file does not exist yet; no temporary file is left in either folder."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("there.json", "new.json"):
        link = tmp_path / name
        link.symlink_to(tmp_path / "elsewhere" / name)
        if name == "there.json":
            link.write_text("before")
        assert run(*PLAN, "--out", name).code == 0
        assert link.is_symlink()
        assert isinstance(checkmate.read(tmp_path / "elsewhere" / name), checkmate.Plan)
    assert {path.name for path in (tmp_path / "elsewhere").iterdir()} == {"there.json", "new.json"}


@pytest.mark.parametrize("linked", [False, True])
def test_a_pipe_is_written_and_stays_a_pipe(run, tmp_path, piped, linked):
    """As `--out >(gzip > plan.gz)` in a shell, also behind a link."""
    (tmp_path / "link").symlink_to("pipe")
    assert run(*PLAN, "--out", "link" if linked else "pipe").code == 0
    assert json.loads(piped())["format"] == "checkmate.plan/1"
    assert (tmp_path / "link").is_symlink()


def test_a_terminal_is_written_and_stays_one(run, tmp_path):
    """A device is no file to be replaced. The path is a link, so that a faulty version replaces the link only."""
    ours, theirs = os.openpty()
    (tmp_path / "terminal").symlink_to(os.ttyname(theirs))
    os.set_blocking(ours, False)
    assert run("min-budget", "chain.graph.json", "--out", "terminal").code == 0
    assert b"checkmate.plan/1" in os.read(ours, 4096)
    assert (tmp_path / "terminal").is_symlink()
    assert stat.S_ISCHR((tmp_path / "terminal").stat().st_mode)
    os.close(ours)
    os.close(theirs)


@pytest.mark.parametrize("redirected", [pytest.param("pipe", marks=pytest.mark.slow), "file"])
def test_stdout_is_written_where_it_is(run, tmp_path, redirected):
    """`--out /dev/stdout`: first the plan, then the facts; a file to which the shell redirects loses nothing of either."""
    (tmp_path / "stdout").symlink_to("/proc/self/fd/1")
    target = tmp_path / "redirected"
    with target.open("wb") as stream:
        stream.write(b"earlier line\n")
        stream.flush()
        to = subprocess.PIPE if redirected == "pipe" else stream
        done = subprocess.run([*COMMAND, *PLAN, "--out", "stdout"], stdout=to, check=True, cwd=tmp_path)
    lines = (done.stdout if redirected == "pipe" else target.read_bytes()).splitlines()
    assert (redirected == "pipe") or lines.pop(0) == b"earlier line"
    assert json.loads(lines[0])["format"] == "checkmate.plan/1"
    assert lines[1].startswith(b"graph ")


def test_links_that_lead_to_themselves_are_refused(run, tmp_path):
    """And stay as they are."""
    (tmp_path / "loop.json").symlink_to("loop.json")
    assert "cannot write loop.json" in run(*PLAN, "--out", "loop.json").err
    assert (tmp_path / "loop.json").is_symlink()


def test_a_file_keeps_its_permissions(run, tmp_path):
    """A private plan does not become public because it is planned again."""
    (tmp_path / "p.json").touch(0o600)
    assert run(*PLAN, "--out", "p.json").code == 0
    assert stat.S_IMODE((tmp_path / "p.json").stat().st_mode) == 0o600


def test_a_write_protected_file_is_not_replaced(run, tmp_path, monkeypatch):
    """A rename would do it: only the folder has to be writable."""
    (tmp_path / "p.json").write_text("mine")
    access = os.access
    monkeypatch.setattr("os.access", lambda path, mode: Path(path).name != "p.json" and access(path, mode))
    outcome = run(*PLAN, "--out", "p.json")
    assert (outcome.code, "cannot write p.json: Permission denied" in outcome.err) == (2, True)
    with pytest.raises(PermissionError):
        files.write_bytes(tmp_path / "p.json", b"")
    assert (tmp_path / "p.json").read_text() == "mine"


def test_a_name_as_long_as_the_disk_takes_is_written(run, tmp_path):
    """The temporary file beside it has another name, which is not longer."""
    name = "x" * 250 + ".json"
    assert run(*PLAN, "--out", name).code == 0


OVERWRITES = {
    "the-graph": (*PLAN, "--out", "chain.graph.json"),
    "the-graph-by-another-path": (*PLAN, "--out", "./sub/../chain.graph.json"),
    "the-graph-by-a-link": (*PLAN, "--out", "link.json"),
    "the-graph-by-a-hard-link": (*PLAN, "--out", "hard.json"),
    "the-result-is-the-graph": (*PLAN, "--out", "p.json", "--result", "chain.graph.json"),
    "both-outputs-are-one": (*PLAN, "--out", "p.json", "--result", "p.json"),
    "both-outputs-are-one-by-a-path": (*PLAN, "--out", "p.json", "--result", "sub/../p.json"),
    "min-budget": ("min-budget", "chain.graph.json", "--out", "chain.graph.json"),
    "pareto": ("pareto", "chain.graph.json", "--out", "chain.graph.json"),
    "max-batch": ("max-batch", "chain.graph.json", "--batch", "1", "--budget", "20MiB", "--out", "chain.graph.json"),
    "max-batch-beside": ("max-batch", "chain.graph.json", "--batch", "1", "--budget", "20MiB", "--out", "chain.plan.json"),
    "report-graph": ("report", "chain.graph.json", "made.plan.json", "--out", "chain.graph.json"),
    "report-plan": ("report", "chain.graph.json", "made.plan.json", "--out", "made.plan.json"),
    "report-trace": ("report", "chain.graph.json", "made.plan.json", "--perfetto", "made.plan.json"),
    "capture": ("capture", "model.py:build", "--out", "model.py"),
    "capture-module": ("capture", "model:build", "--out", "model.py"),
    "fits": ("fits", "model.py:build", "--device", "H100", "--out", "model.py"),
    "fits-device": ("fits", "model.py:build", "--device", "device.json", "--out", "device.json"),
}


@pytest.mark.parametrize("case", OVERWRITES)
def test_an_output_that_is_an_input_is_refused(run, tmp_path, case):
    """Nothing is written, and no time is spent on a plan that could not be kept."""
    checkmate.write(plan(AGAIN), tmp_path / "made.plan.json")
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "device.json").write_text(run("devices", "H100", "--json").out)
    (tmp_path / "sub").mkdir()
    (tmp_path / "link.json").symlink_to("chain.graph.json")
    os.link(tmp_path / "chain.graph.json", tmp_path / "hard.json")
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    sys.modules.pop("model", None)
    outcome = run(*OVERWRITES[case])
    sys.modules.pop("model", None)
    assert outcome.code == 2, outcome
    assert re.match(r"error: (output \S+ is the input \S+|\S+ is given for two outputs)\n\nhint: ", outcome.err), outcome.err
    shutil.rmtree(tmp_path / "__pycache__", ignore_errors=True)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


WRITERS = {
    "plan": (*PLAN, "--out", "out/p.json"),
    "result": (*PLAN, "--out", "p.json", "--result", "out/r.json"),
    "min-budget": ("min-budget", "chain.graph.json", "--out", "out/p.json"),
    "pareto": ("pareto", "chain.graph.json", "--out", "out/c.json"),
    "max-batch": ("max-batch", "chain.graph.json", "--batch", "1", "--budget", "20MiB", "--out", "out/p.json"),
    "report": ("report", "chain.graph.json", "made.plan.json", "--out", "out/r.html"),
    "trace": ("report", "chain.graph.json", "made.plan.json", "--perfetto", "out/t.json"),
    "capture": ("capture", "model.py:build", "--out", "out/g.json"),
    "fits": ("fits", "model.py:build", "--device", "H100", "--out", "out/g.json"),
}


@pytest.mark.parametrize("case", WRITERS)
@pytest.mark.parametrize("fault", ["no-folder", "no-space"])
def test_an_output_that_cannot_be_written_is_found_before_the_work(run, tmp_path, fails, case, fault):
    """A solve of an hour whose plan is lost at the end is worse than none: it would be saved in another folder."""
    checkmate.write(plan(AGAIN), tmp_path / "made.plan.json")
    (tmp_path / "model.py").write_text(MODEL)
    if fault == "no-space":
        (tmp_path / "out").mkdir()
        fails("os.posix_fallocate", OSError(28, "No space left on device"))
    outcome = run(*WRITERS[case])
    assert outcome.code == 2, outcome
    reason = "No such file or directory" if fault == "no-folder" else "No space left on device"
    assert re.match(rf"error: cannot write \S+: {reason}\n\nhint: choose another path", outcome.err), outcome.err
    assert "saved as" not in outcome.err


class FolderGone:
    """Finds a plan while the folder of the output disappears."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def run(self, problem, session):
        session.offer(AGAIN)
        shutil.rmtree(self.folder)
        return checkmate.Termination(checkmate.Reason.FEASIBLE)


def test_a_plan_that_cannot_be_written_is_saved_elsewhere(run, tmp_path, use):
    """The message says where, and what is written there is whole."""
    (tmp_path / "out").mkdir()
    use(FolderGone(tmp_path / "out"))
    outcome = run(*PLAN, "--out", "out/p.json", "--result", "out/r.json", "--json")
    assert outcome.code == 2
    saved = re.findall(r"cannot write out/\S+ No such file or directory; it was saved as (\S+) instead", outcome.json["message"])
    assert [type(checkmate.read(path)).__name__ for path in saved] == ["Plan", "Result"]


def test_a_full_disk_at_the_end_keeps_the_plan(run, tmp_path, before_fsync):
    """Its place is named; what was there before stays whole."""
    (tmp_path / "p.json").write_text("before")
    calls = []

    def full_once(handle: int) -> None:
        calls.append(handle)
        if len(calls) == 1:
            raise OSError(28, "No space left on device")

    before_fsync(full_once)
    outcome = run(*PLAN, "--out", "p.json")
    assert outcome.code == 2
    (saved,) = re.findall(r"cannot write p.json: No space left on device; it was saved as (\S+) instead", outcome.err)
    assert Path(saved).is_relative_to(tempfile.gettempdir())
    assert isinstance(checkmate.read(saved), checkmate.Plan)
    shutil.rmtree(Path(saved).parent)
    assert (tmp_path / "p.json").read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"chain.graph.json", "p.json"}


def test_a_check_leaves_everything_as_it_is(tmp_path):
    """Neither a new file nor another time of change."""
    (tmp_path / "there").write_text("before")
    before = (tmp_path / "there").stat()
    files.check_writable(tmp_path / "there", 1000)
    files.check_writable(tmp_path / "new", 1000)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]
    assert (tmp_path / "there").stat().st_mtime_ns == before.st_mtime_ns
