"""Whether the process that one waits for is alive, by a store that may be stopped together with it.

A store may outlive rank 0: that of a launcher, or a file. Or rank 0 holds it and is stopped, by a debugger or a full machine:
then no call of the store returns, and none has a limit.
"""

from __future__ import annotations

import datetime
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


class SilentStoreError(Exception):
    """The store does not answer, so that nothing can be left there either."""


def content(store: dist.Store, key: str) -> bytes:
    """The content of a key; empty if the key does not exist."""
    return store.get(key) if store.check([key]) else b""


def asked(call: Callable[[], T], timeout: datetime.timedelta) -> T:
    """The result of a call of a store, which is made in a thread that is left behind after the timeout."""
    done: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def run() -> None:
        try:
            done.put((call(), None))
        except Exception as error:  # noqa: BLE001 - it is raised in the thread that asks
            done.put((None, error))

    threading.Thread(target=run, daemon=True, name="checkmate-store").start()
    try:
        found, error = done.get(timeout=timeout.total_seconds())
    except queue.Empty:
        raise SilentStoreError from None
    if error is not None:
        raise error
    return found  # type: ignore[return-value]


@contextmanager
def signs_of_life(store: dist.Store, key: str, longest_pause_s: float) -> Iterator[None]:
    """Count in a key while the block runs; a process that is killed or stopped counts no further."""
    over = threading.Event()
    pause_s = min(longest_pause_s, store.timeout.total_seconds() / 4)  # type: ignore[attr-defined]
    store.set(key, "1")

    def count() -> None:
        number = 1
        while not over.wait(pause_s):
            number += 1
            with suppress(RuntimeError):  # the store is gone, and with it the other ranks
                store.set(key, str(number))

    thread = threading.Thread(target=count, daemon=True, name="checkmate-signs-of-life")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
