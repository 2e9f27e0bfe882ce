"""Ctrl-C while a plan is made inside of a user's script: the script stops."""

from __future__ import annotations

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

from checkmate.core.result import Result


@contextmanager
def interrupts_kept() -> Generator[None, None, None]:
    """Raise the `KeyboardInterrupt` of a Ctrl-C during the block at its end, if Python has dropped it.

    Python delivers a signal in the next Python code that runs. After a kernel of seconds that can be the callback of a weak
    reference, where an exception is printed and ignored.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not ours:
        yield
        return
    pressed = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if pressed:
        raise KeyboardInterrupt


def raise_interrupt(result: Result) -> None:
    """Interrupt the program if the user interrupted the search.

    `solve` returns the best plan so far, which is what a user who waits for a plan wants. While a framework compiles, the user
    wants to stop the script.

    Raises:
        KeyboardInterrupt: The search was interrupted.
    """
    if result.termination.limit == "interrupt":
        raise KeyboardInterrupt
