"""Signals that ask a verb to stop: each does what Ctrl-C does, so that the best plan so far is kept."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

_STOPPING: Final = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
_ONE_REQUEST_S: Final = 1.0
"""Seconds in which further signals are the same request: a terminal that closes sends several."""


@contextmanager
def stopping_as_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` where SIGTERM or SIGHUP would end the program during the block; ignored signals stay ignored."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    last = -_ONE_REQUEST_S

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        repeated, last = now - last < _ONE_REQUEST_S, now
        if not repeated:
            raise KeyboardInterrupt

    ours = [number for number in _STOPPING if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, interrupt)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def as_in_python() -> Iterator[None]:
    """Let the signals end the program during a block that runs another program's code, as they do without this package."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    taken = [number for number in _STOPPING if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, signal.SIG_DFL) for number in taken}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def ignored() -> Iterator[None]:
    """Ignore the signals during a block that writes the results: the verb ends after it anyway.

    Handlers are replaced, because a mask would hold for this thread only, and engines have threads that take signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _do_nothing) for number in (signal.SIGINT, *_STOPPING)}
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: it was not set by Python
                signal.signal(number, handler)


def _do_nothing(_number: int, _frame: FrameType | None) -> None:
    pass
