"""Work that is needed once in a process, like compiling kernels: it is announced, and no time limit counts it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager

_log = logging.getLogger(__name__)

Announce = Callable[[str], AbstractContextManager[None]]
"""Makes a context that shows a description of the work while it lasts."""

_announcers: list[Announce] = []


class _Stopwatch:
    """Seconds of preparations so far; preparations that overlap, nested or in several threads, count once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.under_way = 0
        self.total_s = self.began = 0.0

    def seconds(self) -> float:
        with self.lock:
            return self.total_s + (time.perf_counter() - self.began if self.under_way else 0.0)


_STOPWATCH = _Stopwatch()


def announce_with(announce: Announce) -> None:
    """Announce preparations, which may take longer than a solve, by a function that is called with a description."""
    _announcers[:] = [announce]


def prepared_s() -> float:
    """Seconds that this process has spent on preparations."""
    return _STOPWATCH.seconds()


@contextmanager
def preparing() -> Generator[None]:
    """A context whose time is counted by no solve."""
    watch = _STOPWATCH
    with watch.lock:
        outermost = not watch.under_way
        watch.under_way += 1
        if outermost:
            watch.began = time.perf_counter()
    began = time.perf_counter()
    try:
        with ExitStack() as shown:
            for announce in _announcers if outermost else ():
                shown.enter_context(announce("loading the solver's kernels, which are compiled once on a machine"))
            yield
    finally:
        with watch.lock:
            watch.under_way -= 1
            if not watch.under_way:
                watch.total_s += time.perf_counter() - watch.began
        if outermost and (took := time.perf_counter() - began) > 1.0:
            _log.info("kernels were compiled or loaded in %.0f s, which is not counted", took)
