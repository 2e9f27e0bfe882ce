"""Signals keep the best plan; a reader that leaves, a full disk and a closed terminal end a verb in order."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import checkmate
from tests.plot.graphs import AGAIN, chain, plan

COMMAND = (sys.executable, "-c", "import sys; from checkmate.cli import main; sys.exit(main())")
EXPLAIN = ("explain", "chain.graph.json", "again.plan.json")
PLAN = ("plan", "chain.graph.json", "--budget", "5.5MiB", "--out", "p.json")


@pytest.fixture(autouse=True)
def _files(run):
    checkmate.write(plan(AGAIN), "again.plan.json")
    checkmate.write(checkmate.Plan(plan(AGAIN).steps[1:]), "broken.plan.json")
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


class Stopped:
    """Finds a plan, then the signals come; it would go on for minutes."""

    def __init__(self, *signals: signal.Signals, order: tuple[int, ...] = AGAIN) -> None:
        self.signals, self.order = signals, order

    def run(self, problem, session):
        if self.order:
            session.offer(self.order)
        for number in self.signals:
            os.kill(os.getpid(), number)
        time.sleep(0.2)
        return checkmate.Termination(checkmate.Reason.FEASIBLE)


def is_whole(path: str) -> bool:
    found = checkmate.read(path)
    return isinstance(found, checkmate.Plan) and not checkmate.validate(chain(), found, 2**20 * 11 // 2)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_keeps_the_best_plan(run, use, number):
    """A scheduler that ends a job and a terminal that is closed are as good as Ctrl-C."""
    if number is signal.SIGINT:  # a job that a shell starts in the background ignores it
        signal.signal(number, signal.default_int_handler)
    use(Stopped(number))
    done = run(*PLAN)
    assert done.code == 0, done
    assert "was interrupted; the bound proves" in done.out
    assert is_whole("p.json")
    assert signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler)


def test_an_interrupted_curve_keeps_the_points_that_are_solved(run, use):
    """Each point still has the best plan found for it, and the file is whole."""
    use(Stopped(signal.SIGTERM))
    outcome = run("pareto", "chain.graph.json", "--points", "4", "--out", "c.json", "--json")
    assert outcome.code == 0
    curve = checkmate.read("c.json")
    assert [point["budget_bytes"] for point in outcome.json["points"]] == [point.budget_bytes for point in curve.points]
    for point in curve.points:
        assert checkmate.validate(chain(), point.plan, point.budget_bytes) == ()


def test_an_interrupted_search_keeps_the_smallest_peak_so_far(run, monkeypatch):
    """There is always the plan that keeps everything."""
    search = "checkmate.solvers.evict.smallest._Bisection.from_the_floor"
    monkeypatch.setattr(search, lambda _self: os.kill(os.getpid(), signal.SIGTERM))
    assert run("min-budget", "chain.graph.json", "--out", "p.json").code == 0
    assert isinstance(checkmate.read("p.json"), checkmate.Plan)


def test_a_signal_before_a_plan_exits_1(run, use):
    """There is nothing to keep, and no file is written."""
    use(Stopped(signal.SIGTERM, order=()))
    done = run(*PLAN)
    assert (done.code, "interrupted before a plan was found" in done.err) == (1, True)
    assert not Path("p.json").exists()


def test_signals_while_the_plan_is_written_do_not_lose_it(run, use, before_fsync):
    """A terminal that closes sends several; the second must not interrupt what the first has started."""

    def disturbed(_handle: int) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            os.kill(os.getpid(), number)

    use(Stopped(signal.SIGHUP, signal.SIGTERM))
    before_fsync(disturbed)
    done = run(*PLAN)
    assert done.code == 0, done
    assert is_whole("p.json")


def test_a_process_that_is_killed_while_it_writes_leaves_the_old_file_whole():
    """Nothing can be done about SIGKILL, which comes when memory is short, but to have nothing half written."""
    checkmate.write(plan(AGAIN), "p.json")
    before = Path("p.json").read_bytes()
    killed = "import os, sys; from checkmate.cli import main; os.fsync = lambda _: os.kill(os.getpid(), 9); sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", killed, *PLAN], check=False)
    assert done.returncode == -9
    assert Path("p.json").read_bytes() == before
    assert [path.name[:8] for path in Path().iterdir() if path.name.startswith(".")] == [".p.json."]


def test_a_pipe_without_a_reader_can_be_interrupted(run, use):
    """The write waits for a reader for ever; the plan is saved elsewhere, and its place is named."""
    os.mkfifo("pipe")
    use(Stopped())
    before = signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    signal.setitimer(signal.ITIMER_REAL, 1.5)
    done = run(*PLAN[:-1], "pipe")
    signal.signal(signal.SIGALRM, before)
    assert done.code == 2, done
    found = re.search(r"writing pipe was interrupted; it was saved as (\S+) instead", done.err)
    assert found is not None, done.err
    assert is_whole(found[1])


def test_an_ignored_signal_stays_ignored(run, use):
    """`nohup` lets a program outlive its terminal."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    use(Stopped(signal.SIGHUP))
    done = run(*PLAN)
    assert done.code == 0
    assert "interrupted" not in done.out


@pytest.mark.parametrize(("words", "code"), [(EXPLAIN, 0), (("verify", "chain.graph.json", "broken.plan.json", "--json"), 1)])
def test_a_reader_that_leaves_does_not_change_the_exit_code(words, code):
    """As in `checkmate explain ... | head -1`: quietly, and with the verb's own answer."""
    theirs, ours = os.pipe()
    os.close(theirs)
    done = subprocess.run([*COMMAND, *words], stdout=ours, stderr=subprocess.PIPE, text=True, check=False)
    os.close(ours)
    assert done.returncode == code, done.stderr
    assert not any(word in done.stderr for word in ("Traceback", "bug", "BrokenPipe", "Exception"))


def test_a_terminal_that_is_closed_loses_nothing():
    """What was to be printed is dropped; the plan is written before."""
    ours, theirs = os.openpty()
    os.close(ours)
    done = subprocess.run([*COMMAND, *PLAN], stdout=theirs, stderr=theirs, check=False)
    os.close(theirs)
    assert done.returncode == 0
    assert is_whole("p.json")


def test_a_full_disk_under_stdout_is_named():
    """The cause is not Checkmate's, and the plan is written all the same."""
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *PLAN], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: cannot write to stdout: No space left on device\n\nhint: ")
    assert "Traceback" not in done.stderr
    assert is_whole("p.json")


def test_a_full_disk_under_stderr_changes_nothing():
    """Remarks are not worth an error; and letters that a locale lacks are escaped."""
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([*COMMAND, *EXPLAIN], stdout=subprocess.PIPE, stderr=full, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert "peak 5.50 MiB" in done.stdout


@pytest.mark.slow
def test_streams_that_are_closed_stay_out_of_files():
    """A file that is opened next has the number of a closed stream; what is printed must not get into it."""
    done = subprocess.run(["sh", "-c", 'exec "$@" >&- 2>&-', "sh", *COMMAND, *PLAN], check=False)
    assert done.returncode == 0
    assert is_whole("p.json")
