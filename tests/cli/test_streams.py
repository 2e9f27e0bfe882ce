"""Signals keep the best plan; a reader that leaves, a full disk and a closed terminal end a verb in order."""

from __future__ import annotations

import multiprocessing
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkmate
from tests.plot.graphs import AGAIN, chain, plan

COMMAND = (sys.executable, "-c", "import sys; from checkmate.cli import main; sys.exit(main())")
EXPLAIN = (*COMMAND, "explain", "chain.graph.json", "again.plan.json")
PLAN = ("plan", "chain.graph.json", "--budget", "5.5MiB", "--out", "p.json")

STOPPED = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a job under nohup ignores it
import checkmate, checkmate.cli.plan, checkmate.cli.pareto, checkmate.solvers.evict.smallest
from checkmate.cli import main

class Solver:
    def run(self, problem, session):
        session.offer({order})
        {stop}
        time.sleep(200)

checkmate.cli.plan.solver_named = checkmate.cli.pareto.solver_named = lambda name: Solver()
{more}
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkmate.write(chain(), "chain.graph.json")
    checkmate.write(plan(AGAIN), "again.plan.json")
    checkmate.write(checkmate.Plan(plan(AGAIN).steps[1:]), "broken.plan.json")


def stopped(stop: str, *words: str, more: str = "", **options) -> subprocess.CompletedProcess[str]:
    """Run a verb whose solver finds a plan, and then does what is asked; minutes later it would go on."""
    script = STOPPED.format(order=list(AGAIN), stop=stop, more=more)
    command = [sys.executable, "-c", script, *words]
    return subprocess.run(command, **{"capture_output": True, "text": True, "check": False, "timeout": 150, **options})


def kill(name: str) -> str:
    return f"os.kill(os.getpid(), signal.{name})"


def is_whole(path: str) -> bool:
    found = checkmate.read(path)
    return isinstance(found, checkmate.Plan) and not checkmate.validate(chain(), found, 2**20 * 11 // 2)


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_keeps_the_best_plan(name):
    """A scheduler that ends a job and a terminal that is closed are as good as Ctrl-C."""
    done = stopped(kill(name), *PLAN)
    assert done.returncode == 0, done
    assert "was interrupted; the bound proves" in done.stdout
    assert is_whole("p.json")


@pytest.mark.parametrize(
    "words", [("pareto", "--points", "4", "--out", "c.json"), ("min-budget", "--out", "p.json")], ids=lambda w: w[0]
)
def test_other_verbs_keep_what_they_have(words):
    """The points that are solved, and the smallest peak so far."""
    search = "checkmate.solvers.evict.smallest._Bisection.from_the_floor = lambda self: " + kill("SIGTERM")
    done = stopped(kill("SIGTERM"), words[0], "chain.graph.json", *words[1:], more=search if words[0] == "min-budget" else "")
    assert done.returncode == 0, done
    assert checkmate.read(words[-1])


def test_an_interrupted_curve_does_not_wait_for_other_processes(run, monkeypatch):
    """Workers of `pareto --jobs` get no signal themselves, and may have an hour left."""

    def interrupted(graph, *, executor, **_options):
        sleeping = executor.submit(time.sleep, 60)
        while not sleeping.running():
            time.sleep(0.01)
        return checkmate.pareto(graph, points=2)

    monkeypatch.setattr("checkmate.cli.pareto.curve_of", interrupted)
    began = time.monotonic()
    assert run("pareto", "chain.graph.json", "--jobs", "2", "--out", "c.json").code == 0
    assert time.monotonic() - began < 50
    assert isinstance(checkmate.read("c.json"), checkmate.Curve)
    while multiprocessing.active_children():  # a join can return before the executor's thread has noted the end that it took
        assert time.monotonic() - began < 90
        time.sleep(0.01)


def test_a_signal_before_a_plan_exits_1():
    """There is nothing to keep, and no file is written."""
    done = stopped("", *PLAN, more=f"Solver.run = lambda *_: {kill('SIGTERM')}")
    assert (done.returncode, "interrupted before a plan was found" in done.stderr) == (1, True)
    assert not Path("p.json").exists()


def test_signals_while_the_plan_is_written_do_not_lose_it():
    """A terminal that closes sends several; the second must not interrupt what the first has started."""
    kills = ", ".join(kill(name) for name in ("SIGTERM", "SIGINT", "SIGHUP"))
    more = f"fsync = os.fsync; os.fsync = lambda handle: [{kills}, fsync(handle)]"
    done = stopped(f"{kill('SIGHUP')}; {kill('SIGTERM')}", *PLAN, more=more)
    assert done.returncode == 0, done
    assert is_whole("p.json")


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_whole():
    """Nothing can be done about SIGKILL, which comes when memory is short, but to have nothing half written."""
    checkmate.write(plan(AGAIN), "p.json")
    before = Path("p.json").read_bytes()
    done = stopped(kill("SIGINT"), *PLAN, more=f"os.fsync = lambda handle: {kill('SIGKILL')}")
    assert done.returncode == -9
    assert Path("p.json").read_bytes() == before
    assert [path.name[:8] for path in Path().iterdir() if path.name.startswith(".")] == [".p.json."]


def test_a_pipe_without_a_reader_can_be_interrupted():
    """The write waits for a reader for ever; the plan is saved elsewhere, and its place is named."""
    os.mkfifo("pipe")
    alarm = f"signal.signal(signal.SIGALRM, lambda *_: {kill('SIGTERM')})"
    words = ("plan", "chain.graph.json", "--budget", "5.5MiB", "--out", "pipe")
    done = stopped("signal.alarm(3); return checkmate.Termination(checkmate.Reason.FEASIBLE)", *words, more=alarm)
    assert done.returncode == 2, done
    found = re.search(r"writing pipe was interrupted; it was saved as (\S+) instead", done.stderr)
    assert found is not None, done.stderr
    assert is_whole(found[1])


def test_an_ignored_signal_stays_ignored():
    """`nohup` lets a program outlive its terminal."""
    done = stopped(f"{kill('SIGHUP')}; return checkmate.Termination(checkmate.Reason.FEASIBLE)", *PLAN,
                   more="signal.signal(signal.SIGHUP, signal.SIG_IGN)")  # fmt: skip
    assert done.returncode == 0
    assert "interrupted" not in done.stdout


def test_a_terminal_that_is_closed_loses_nothing():
    """What was to be printed is dropped; the plan is written before."""
    ours, theirs = os.openpty()
    os.close(ours)
    done = stopped(kill("SIGHUP"), *PLAN, stdout=theirs, stderr=theirs, capture_output=False)
    os.close(theirs)
    assert done.returncode == 0
    assert is_whole("p.json")


@pytest.mark.parametrize(("words", "code"), [
    (("explain", "chain.graph.json", "again.plan.json"), 0),
    (("verify", "chain.graph.json", "broken.plan.json"), 1),
    (("explain", "chain.graph.json", "again.plan.json", "--json"), 0),
    (("completion", "bash"), 0),
    (("verify", "none.json", "broken.plan.json", "--json"), 2),
])  # fmt: skip
def test_a_reader_that_leaves_does_not_change_the_exit_code(words, code):
    """As in `checkmate explain ... | head -1`: quietly, and with the verb's own answer."""
    theirs, ours = os.pipe()
    os.close(theirs)
    done = subprocess.run([*COMMAND, *words], stdout=ours, stderr=subprocess.PIPE, text=True, check=False)
    os.close(ours)
    assert done.returncode == code, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "bug", "BrokenPipe", "Exception"))


@pytest.mark.parametrize("json_too", [(), ("--json",)])
def test_a_full_disk_under_stdout_is_named(json_too):
    """The cause is not Checkmate's, and the plan is written all the same."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *PLAN, *json_too], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write to stdout: No space left on device\n\nhint: ")
    assert "Traceback" not in done.stderr
    assert is_whole("p.json")


def test_a_full_disk_under_stderr_changes_nothing():
    """Remarks are not worth an error."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(EXPLAIN, stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert done.returncode == 0
    assert "peak 5.50 MiB" in done.stdout


def test_streams_that_are_closed_stay_out_of_files():
    """A file that is opened next has the number of a closed stream; what is printed must not get into it."""
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *COMMAND, *PLAN], check=False)
    assert done.returncode == 0
    assert is_whole("p.json")
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *EXPLAIN, "--json"], stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


def test_letters_that_the_terminal_lacks_are_escaped():
    """A unit such as the micro sign in a locale without it."""
    done = subprocess.run(EXPLAIN, capture_output=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
