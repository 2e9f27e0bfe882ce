"""All that front ends write to stderr: one line with their stage, and warnings for programs that configured no logging.

Compiling a step can take minutes. The line with the stage (capturing, measuring costs, planning, ready) is rewritten in place on
stderr, of a terminal or a notebook, and erased at the end of the work; a last line with the plan stays. If stderr is a file or a
pipe (Slurm, Docker), each stage that takes longer than `LATE_S` gets one line. Only the first rank draws, and only if logging is
set neither to ``INFO`` (the log then has the same texts) nor to ``ERROR`` and above. Drawn without rich, which is no dependency
of the front ends.

Python's handler of last resort prints messages without a name, each time they are logged. Most training scripts configure no
logging, and a warning that a budget is not kept has to reach their users: `LastResort` prints it.
"""

from __future__ import annotations

import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TypeVar

from checkmate.core.errors import printable_lines
from checkmate.core.graph import Graph
from checkmate.core.result import Progress, Result
from checkmate.core.units import format_bytes
from checkmate.solvers.clocks import announce_with
from checkmate.solvers.session import OnProgress

ItemT = TypeVar("ItemT")

_PAUSE_S = 0.1
"""Least time between two redraws."""

LATE_S = 5.0
"""Seconds after which a stage gets a line if no line can be rewritten."""

_ERASE = "\r\x1b[K"


@dataclass(slots=True)
class _Work:
    """The work that is shown."""

    draw: Callable[[str], None]  # replaces the text that is shown
    erase: str | None  # erases the drawn line; None if another program draws it, empty if lines stay
    texts: list[str] = field(default_factory=list[str])  # from the outermost block to the innermost
    plan: str = ""  # the newest plan in words
    began: float = field(default_factory=time.perf_counter)
    drawn: float = 0.0  # when the text was last drawn


_work: _Work | None = None
_redirected: Callable[[str], None] | None = None


@contextmanager
def shown(text: str, *, late_s: float = LATE_S) -> Generator[None, None, None]:
    """Show a text while the block runs; in nested blocks, the text of the innermost.

    If no line can be rewritten, a stage gets one after ``late_s`` seconds, which the outermost block decides.
    """
    global _work
    outermost = _work is None
    if outermost:
        _work = _started(late_s)
    if _work is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    work, depth = _work, len(_work.texts)
    work.texts.append(text)
    _draw(work, at_once=True)
    try:
        yield
        told = not isinstance(work.draw, _LateLines) or work.draw.told
        if outermost and work.erase is not None and work.plan and told:
            _write(f"{work.erase}checkmate: ready in {time.perf_counter() - work.began:.1f} s: {work.plan}\n")
    finally:
        del work.texts[depth:]
        if outermost:
            if isinstance(work.draw, _LateLines):
                work.draw.stop()
            elif work.erase:
                _write(work.erase)
            _work = None
        else:
            _draw(work, at_once=True)


# The work of a solver is shown if a front end called it.
announce_with(lambda text: nullcontext() if _work is None else shown(text))


def say(text: str) -> None:
    """Replace the text of the innermost block of `shown`; without one, nothing is shown."""
    if _work is not None and _work.texts and threading.current_thread() is threading.main_thread():
        _work.texts[-1] = text
        _draw(_work)


def counted(items: Collection[ItemT], doing: str, what: str = "ops") -> Iterator[ItemT]:
    """The items; the number of each is shown while the caller works on it."""
    with shown(doing):
        for number, item in enumerate(items, start=1):
            say(f"{doing}: {number} of {len(items)} {what}")
            yield item


@contextmanager
def planning(graph: Graph) -> Generator[OnProgress, None, None]:
    """Show that a graph is being planned; yields a callback for `solve` that shows every improvement."""
    doing = f"planning {len(graph.ops)} ops"

    def improved(progress: Progress) -> None:
        if progress.cost is None or not graph.cost:
            return
        gap = max(0.0, 1 - progress.bound / progress.cost) if progress.cost else 0.0
        say(f"{doing}: overhead {100 * (progress.cost / graph.cost - 1):.2f} %, gap {100 * gap:.2f} %")

    with shown(doing):
        yield improved


def planned(graph: Graph, result: Result) -> None:
    """Keep a plan for the line that stays at the end of the work."""
    if _work is not None:
        peak, budget = format_bytes(result.peak_bytes), format_bytes(result.budget_bytes)
        figures = f"overhead {100 * (result.overhead - 1):.2f} %, gap {100 * result.gap:.2f} %"
        _work.texts[:1] = ["compiling"]  # the text of the outermost block from now on
        _draw(_work, at_once=True)
        _work.plan = f"peak {peak} of {budget}, {figures}, {len(graph.ops)} ops"


@contextmanager
def redirected(draw: Callable[[str], None]) -> Generator[None, None, None]:
    """Pass the texts to a function while the block runs, for programs that draw their own progress."""
    global _redirected
    before, _redirected = _redirected, draw
    try:
        yield
    finally:
        _redirected = before


def erase() -> None:
    """Erase the line to print something else in its place; the next text draws it again."""
    if _work is not None and _work.erase:
        _write(_work.erase)


class _LateLines:
    """One line for each stage that takes long, in place of a line that is rewritten."""

    def __init__(self, late_s: float) -> None:
        self.late_s = late_s
        self.told: set[str] = set()  # stages that have been printed
        self._stage = ""
        self._timer: threading.Timer | None = None

    def __call__(self, text: str) -> None:
        """Begin a stage; a text of the same stage, with another number after the colon, changes nothing."""
        stage = text.partition(":")[0]
        if stage == self._stage:
            return
        self.stop()
        self._stage = stage
        if stage not in self.told:
            self._timer = threading.Timer(self.late_s, self._tell, [stage])
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """End the stage."""
        self._stage = ""
        if self._timer is not None:
            self._timer.cancel()

    def _tell(self, stage: str) -> None:
        self.told.add(stage)
        _write(f"checkmate: {stage}, which takes more than {self.late_s:.0f} s\n")


def _started(late_s: float) -> _Work | None:
    """Work to show, or None if nothing is to be drawn."""
    if _redirected is not None:
        return _Work(_redirected, erase=None)
    log = logging.getLogger("checkmate")
    wanted = log.isEnabledFor(logging.WARNING) and not log.isEnabledFor(logging.INFO)
    # Windows without a console has no stderr.
    if not wanted or os.environ.get("RANK", "0") != "0" or sys.stderr is None:  # pyright: ignore[reportUnnecessaryComparison]
        return None
    if type(sys.stderr).__module__.startswith("ipykernel."):
        # A notebook has no width, and knows no code to erase a line.
        return _Work(lambda text: _write("\r" + f"checkmate: {text}"[:100].ljust(100)), erase="\r" + " " * 100 + "\r")
    if os.environ.get("TERM") != "dumb" and sys.stderr.isatty():
        return _Work(_draw_line, erase=_ERASE)
    return _Work(_LateLines(late_s), erase="")


def _draw(work: _Work, *, at_once: bool = False) -> None:
    now = time.perf_counter()
    if work.texts and (at_once or now - work.drawn >= _PAUSE_S):
        work.drawn = now
        work.draw(work.texts[-1])


def _draw_line(text: str) -> None:
    _write(_ERASE + f"checkmate: {text}"[: shutil.get_terminal_size().columns - 1])


def _write(text: str) -> None:
    try:
        sys.stderr.write(text)
        sys.stderr.flush()
    except (OSError, ValueError):  # the terminal is gone: the work goes on
        pass


class LastResort(logging.Handler):
    """Prints each warning once on stderr, if no other handler takes it."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._printed: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        """Print a record, unless another handler takes it, or its text was printed before."""
        if self._has_other_handler(record.name):
            return
        text = printable_lines(record.getMessage())
        if text in self._printed:
            return
        self._printed.add(text)
        erase()
        try:
            sys.stderr.write(f"checkmate: {record.levelname.lower()}: {text}\n")
        except Exception:  # noqa: BLE001 - as in every handler of the standard library: logging never fails
            self.handleError(record)

    def _has_other_handler(self, name: str) -> bool:
        logger: logging.Logger | None = logging.getLogger(name)
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return True
            logger = logger.parent if logger.propagate else None
        return False


def install_last_resort() -> None:
    """Add `LastResort` to the logger of this package, once."""
    logger = logging.getLogger("checkmate")
    if not any(isinstance(handler, LastResort) for handler in logger.handlers):
        logger.addHandler(LastResort())
