"""The line of progress: what it shows, and where it shows nothing."""

from __future__ import annotations

import contextlib
import io
import logging
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from checkmate import Graph, Plan, Problem, Reason, Termination, evaluate
from checkmate.frontend import progress
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import planner_for
from checkmate.solvers.clocks import preparing
from checkmate.solvers.session import Session

LOG = logging.getLogger("checkmate")
CHAIN = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 4], edges=[(0, 1), (0, 2), (1, 2)])


class Terminal(io.StringIO):
    """Takes what is written to stderr in a block of `seen`; an event tells that there was something."""

    def __init__(self, tty: bool = True) -> None:
        super().__init__()
        self.tty, self.written = tty, threading.Event()

    def isatty(self) -> bool:
        return self.tty

    def write(self, text: str) -> int:
        self.written.set()
        return super().write(text)

    def seen(self, text: str, **options: float) -> contextlib.ExitStack:
        """A block whose progress is shown here: pytest sets `sys.stderr` anew between a fixture and its test."""
        with contextlib.ExitStack() as blocks:
            blocks.enter_context(contextlib.redirect_stderr(self))
            blocks.enter_context(progress.shown(text, **options))
            return blocks.pop_all()


class Notebook(Terminal):
    __module__ = "ipykernel.iostream"


@dataclass(frozen=True)
class Slow:
    """Finds a plan so late that it is drawn."""

    def run(self, problem: Problem, session: Session) -> Termination:
        time.sleep(0.11)
        session.offer(range(len(problem.graph.ops)))
        return Termination(Reason.FEASIBLE)


@pytest.fixture
def terminal(environ: dict[str, str]) -> Iterator[Terminal]:
    environ["TERM"] = "xterm"
    LOG.setLevel(logging.WARNING)
    yield Terminal()
    LOG.setLevel(logging.NOTSET)


def lines(terminal: Terminal) -> list[str]:
    return [text for text in terminal.getvalue().replace("\x1b[K", "").replace("\n", "\r").split("\r") if text]


def test_what_a_person_sees(terminal: Terminal) -> None:
    """Each phase is shown in turn, and the line that stays tells what the plan costs."""
    with terminal.seen("capturing"):
        for _ in progress.counted([7, 8, 9], "measuring costs"):
            time.sleep(0.06)
        planner_for(PlanningOptions.of(budget="12B", solver=Slow()))(CHAIN)
    seen = lines(terminal)
    assert seen[:3] == ["checkmate: capturing", "checkmate: measuring costs", "checkmate: measuring costs: 3 of 3 ops"]
    assert "checkmate: planning 3 ops: overhead 0.00 %, gap 0.00 %" in seen
    assert seen[-2] == "checkmate: compiling"
    assert seen[-1].startswith("checkmate: ready in 0.")
    assert seen[-1].endswith("peak 12 B of 12 B, overhead 0.00 %, gap 0.00 %, 3 ops")


def test_kernels_that_are_compiled_are_no_planning(terminal: Terminal) -> None:
    """Half a minute once on a machine is explained; without a front end nothing is drawn."""
    with terminal.seen("planning 3 ops"), preparing():
        pass
    shown = "checkmate: loading the solver's kernels, which are compiled once on a machine"
    assert lines(terminal) == ["checkmate: planning 3 ops", shown, "checkmate: planning 3 ops"]
    with preparing():
        pass
    assert lines(terminal).count(shown) == 1


def test_after_an_error_the_line_is_gone(terminal: Terminal) -> None:
    """A traceback begins on an empty line, and nothing claims to be ready."""
    result = planner_for(PlanningOptions.of(budget="12B"))(CHAIN)
    with contextlib.suppress(ValueError), terminal.seen("capturing"):
        progress.planned(CHAIN, result)
        raise ValueError("no")
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert "ready" not in terminal.getvalue()


def test_a_warning_takes_the_place_of_the_line(terminal: Terminal) -> None:
    """A warning that begins in the middle of a line cannot be read."""
    record = logging.LogRecord("checkmate-alone", logging.WARNING, "", 0, "over", None, None)
    handler = progress.LastResort()
    handler._has_other_handler = lambda name: False  # type: ignore[method-assign]
    with terminal.seen("capturing"):
        handler.emit(record)
    assert "checkmate: capturing\r\x1b[Kcheckmate: warning: over\n" in terminal.getvalue()


@pytest.mark.parametrize("where", ["a pipe", "a dumb terminal"])
def test_a_long_stage_has_one_line_where_none_can_be_rewritten(where: str, terminal: Terminal, environ: dict[str, str]) -> None:
    """In the log of a cluster's job nothing would tell a minute of planning from a process that hangs."""
    if where == "a pipe":
        terminal.tty = False
    else:
        environ["TERM"] = "dumb"
    with terminal.seen("planning 3 ops", late_s=0.0):
        assert terminal.written.wait(60)
        progress.say("planning 3 ops: overhead 3 %")
        progress.say("planning 3 ops: overhead 2 %")
        progress.planned(CHAIN, evaluate(CHAIN, Plan.from_order(CHAIN, range(len(CHAIN.ops)))))
    told = terminal.getvalue().splitlines()
    assert told[0] == "checkmate: planning 3 ops, which takes more than 0 s"
    assert len({*told}) == len(told)
    assert told[-1].startswith("checkmate: ready in ")


def test_a_short_stage_leaves_no_line_in_a_file(terminal: Terminal) -> None:
    """A log file is for what a person would otherwise wait for without knowing why."""
    terminal.tty = False
    with terminal.seen("capturing", late_s=1e6), progress.shown("planning 3 ops"):
        pass
    assert terminal.getvalue() == ""
    timers = [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer) and thread.interval == 1e6]
    assert all(timer.finished.is_set() for timer in timers)


@pytest.mark.usefixtures("terminal")
def test_a_notebook_has_a_line_that_is_rewritten() -> None:
    """A notebook's stderr is no terminal, and knows how to return to the beginning of a line, but not how to erase one."""
    notebook = Notebook()
    with notebook.seen("measuring costs: 1 of 10 ops"), progress.shown("capturing"):
        pass
    shown = notebook.getvalue().split("\r")
    assert "\x1b" not in notebook.getvalue()
    first, second = "checkmate: measuring costs: 1 of 10 ops", "checkmate: capturing"
    assert [text.strip() for text in shown] == ["", first, second, first, "", ""]
    assert len({len(text) for text in shown[1:5]}) == 1  # so that nothing of a longer text is left


@pytest.mark.parametrize("where", ["another rank", "a log of INFO", "a log of ERROR"])
def test_nothing_is_drawn_elsewhere(where: str, terminal: Terminal, environ: dict[str, str]) -> None:
    """Log files and other ranks would fill up with it; a log tells the same itself, or the user wants silence."""
    if where == "another rank":
        environ["RANK"] = "1"
    else:
        LOG.setLevel(logging.INFO if "INFO" in where else logging.ERROR)
    with terminal.seen("capturing"), progress.shown("measuring"):
        pass
    assert terminal.getvalue() == ""


def test_another_program_draws_it(terminal: Terminal) -> None:
    """The command line has a line already; two would overwrite each other."""
    texts: list[str] = []
    with progress.redirected(texts.append), terminal.seen("capturing"):
        list(progress.counted([1], "measuring costs"))
        planner_for(PlanningOptions.of(budget="12B"))(CHAIN)
    assert texts[:2] == ["capturing", "measuring costs"]
    assert terminal.getvalue() == ""
