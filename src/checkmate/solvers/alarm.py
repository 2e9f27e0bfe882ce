"""A flag in memory that is raised when a solve's time is up, for compiled code, which cannot read a clock."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

Flag = npt.NDArray[np.int32]
"""An array of one entry: 0 until the time is up."""


def no_alarm() -> Flag:
    """A flag that is never raised."""
    return np.zeros(1, dtype=np.int32)


class Alarm:
    """Raises its flag from a thread when a clock has run out: kernels run without the interpreter's lock (`kernel`).

    Args:
        left_s: Seconds left, possibly infinite; no thread is started then.

    Attributes:
        flag: The flag.
    """

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
