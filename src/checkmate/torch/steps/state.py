"""The state of the step of a thread: whether the step is under way, and whether the account of it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any


class _Update(AbstractContextManager[None]):
    """An update; a step has a dozen, and a context of `contextlib.contextmanager` would take 2 us more for each."""

    def __init__(self, unfinished: set[_Update], within: Sequence[AbstractContextManager[Any]]) -> None:
        self._unfinished, self._within = unfinished, within

    def __enter__(self) -> None:
        for context in self._within:
            context.__enter__()
        self._unfinished.add(self)

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> None:
        if kind is None:
            self._unfinished.discard(self)
        for context in reversed(self._within):
            context.__exit__(kind, *error)


class StepState:
    """The state of successive steps.

    Every update of the account of a step runs inside of `update`. After Ctrl-C or any other exception in it the state is
    interrupted until `throw_away`: the half-done account is not used.
    """

    def __init__(self) -> None:
        self.under_way = False  # whether a forward runs first in a step, or waits for its backward
        self._unfinished = set[_Update]()  # no counter: a finalizer may run in any thread, and `add` is one instruction

    @property
    def interrupted(self) -> bool:
        """Whether an exception came while the account of the step was changed, as seen outside of an update."""
        return bool(self._unfinished)

    def update(self, *within: AbstractContextManager[Any]) -> AbstractContextManager[None]:
        """Context of an update, in other contexts.

        Only an update that reaches its end is trusted: no code has to run after an exception.
        """
        return _Update(self._unfinished, within)

    def throw_away(self) -> None:
        """Begin again, after an interrupt."""
        self.under_way = False
        self._unfinished.clear()
