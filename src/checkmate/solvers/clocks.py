"""Clocks of a solve.

Work that is needed once in a process, like compiling kernels, is announced, and no time limit counts it. A flag in memory is
raised when the time of a solve is up, for compiled code, which cannot read a clock.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

_log = logging.getLogger(__name__)

Announce = Callable[[str], AbstractContextManager[None]]
"""Makes a context that shows a description of the work while it lasts."""


@dataclass(slots=True)
class _Preparations:
    """The preparations of this process; those that overlap, nested or in several threads, count once."""

    announce: Announce = lambda work: nullcontext()
    lock: threading.Lock = field(default_factory=threading.Lock)
    under_way: int = 0
    total_s: float = 0.0
    began: float = 0.0  # of those under way


_PREPARATIONS = _Preparations()


def announce_with(announce: Announce) -> None:
    """Announce preparations, which may take longer than a solve, by a function that is called with a description."""
    _PREPARATIONS.announce = announce


def prepared_s() -> float:
    """Seconds that this process has spent on preparations."""
    with _PREPARATIONS.lock:
        return _PREPARATIONS.total_s + (time.perf_counter() - _PREPARATIONS.began if _PREPARATIONS.under_way else 0.0)


@contextmanager
def preparing() -> Generator[None]:
    """A context whose time is counted by no solve."""
    with _PREPARATIONS.lock:
        outermost = not _PREPARATIONS.under_way
        _PREPARATIONS.under_way += 1
        if outermost:
            _PREPARATIONS.began = time.perf_counter()
    work = "loading the solver's kernels, which are compiled once on a machine"
    try:
        with _PREPARATIONS.announce(work) if outermost else nullcontext():
            yield
    finally:
        with _PREPARATIONS.lock:
            _PREPARATIONS.under_way -= 1
            took_s = 0.0 if _PREPARATIONS.under_way else time.perf_counter() - _PREPARATIONS.began
            _PREPARATIONS.total_s += took_s
        if took_s > 1.0:
            _log.info("kernels were compiled or loaded in %.0f s, which is not counted", took_s)


Flag = npt.NDArray[np.int32]
"""An array of one entry: 0 until the time is up."""


def no_alarm() -> Flag:
    """A flag that is never raised."""
    return np.zeros(1, dtype=np.int32)


class Alarm:
    """Raises its flag from a thread when a clock has run out: kernels run without the interpreter's lock (`kernel`)."""

    def __init__(self, left_s: Callable[[], float]) -> None:
        self.flag = no_alarm()
        self._left_s = left_s
        self._ended: threading.Event | None = None

    @property
    def is_set(self) -> bool:
        """Whether the alarm was set and not turned off since."""
        return self._ended is not None

    def set(self) -> None:
        """Wait for the clock from now on; lower a raised flag if there is time left."""
        self.off()
        self.flag[0] = self._left_s() <= 0
        self._ended = threading.Event()
        if not self.flag[0] and math.isfinite(self._left_s()):
            threading.Thread(target=self._wait, args=(self._ended,), daemon=True, name="checkmate-alarm").start()

    def off(self) -> None:
        """Stop waiting; the flag does not change."""
        if self._ended is not None:
            self._ended.set()
        self._ended = None

    def _wait(self, ended: threading.Event) -> None:
        while (left := self._left_s()) > 0:
            if ended.wait(min(left, 3600.0)):  # a wait of years overflows the timers of the operating system
                return
        self.flag[0] = 1
