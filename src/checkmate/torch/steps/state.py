"""The state of the step of a thread: whether one is under way, and whether its account can be trusted."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager


class StepState:
    """The state of successive steps.

    Every update of the account of a step runs inside of `update`. After Ctrl-C or any other exception in it the account is
    half done, and is not used before `throw_away`.

    Attributes:
        is_under_way: Whether the first forward of a step has begun, and a forward waits for its backward.
    """

    def __init__(self) -> None:
        self.is_under_way = False
        self._unfinished = set[object]()  # no counter: a finalizer may run in any thread, and `add` is one instruction

    @property
    def is_interrupted(self) -> bool:
        """Whether an update did not reach its end, as seen outside of an update."""
        return bool(self._unfinished)

    @contextmanager
    def update(self) -> Generator[None]:
        """Context of an update. Only an update that reaches its end is trusted: no code has to run after an exception."""
        self._unfinished.add(update := object())
        yield
        self._unfinished.discard(update)

    def throw_away(self) -> None:
        """Begin again, after an interrupt."""
        self.is_under_way = False
        self._unfinished.clear()
