"""Signals that ask a verb to stop: each does what Ctrl-C does, so that the best plan so far is kept."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

_STOPPING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


@contextmanager
def _handled(numbers: Iterable[int], handler: Callable[[int, FrameType | None], Any] | signal.Handlers) -> Iterator[None]:
    """Handle signals in the main thread during the block."""
    before: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            if previous is not None:  # None: it was not set by Python
                signal.signal(number, previous)


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` where SIGTERM or SIGHUP would end the program during the block; ignored signals stay ignored."""
    last = -1.0

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        repeated, last = now - last < 1, now  # within a second it is the same request: a terminal that closes sends several
        if not repeated:
            raise KeyboardInterrupt

    with _handled([number for number in _STOPPING if signal.getsignal(number) is signal.SIG_DFL], interrupt):
        yield


@contextmanager
def as_in_python() -> Iterator[None]:
    """Let the signals end the program during a block that runs another program's code, as they do without this package."""
    with _handled([number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN], signal.SIG_DFL):
        yield


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore the signals during a block that writes the results: the verb ends after it anyway.

    Handlers are replaced, because a mask would hold for this thread only, and engines have threads that take signals.
    """
    with _handled((signal.SIGINT, *_STOPPING), lambda _number, _frame: None):
        yield
