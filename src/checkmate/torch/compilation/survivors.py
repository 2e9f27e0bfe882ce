"""Storages that outlive the step in which they were seen: what the user holds, and what other steps are given."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

import torch

from checkmate.torch.compilation.recorder import StepRecorder, StepSequence


class _Survivor(NamedTuple):
    """A storage of an earlier step.

    Attributes:
        storage: The storage, which is not kept alive.
        size_bytes: Its bytes.
        sequence: Identity of the step that made it; None for one that the step was given.
        last: The gap of the next such step at which it is expected to be freed.
        number: Number of the step that made it, among all steps.
    """

    storage: Callable[[], torch.UntypedStorage | None]
    size_bytes: int
    sequence: StepSequence | None
    last: int
    number: int


class Survivors:
    """Storages of earlier steps that may still be alive.

    A loop that writes ``outputs = model(batch)`` holds the outputs of the step before until the new ones are assigned. So a
    storage that a step made, and that is alive when the same kind of step begins again, is expected to be freed there: one of
    a forward when the call returns, one of eager code where its successor is made. If any older ones of the same kind of step are
    alive as well, such as a list of predictions, none is expected to be freed.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Survivor] = {}
        self._number = 0
        self._newest: dict[StepSequence, int] = {}  # number of the newest step of each kind

    def add(self, recorder: StepRecorder) -> None:
        """Take over what a step leaves.

        Args:
            recorder: The step, which is over.
        """
        sequence = recorder.sequence
        self._number += 1
        self._newest[sequence] = self._number
        for key, storage, size_bytes, last in recorder.remaining():
            made = None if last is None else sequence
            self._found[key] = _Survivor(storage, size_bytes, made, last or 0, self._number)

    def carried(self, recorder: StepRecorder, gradients: Collection[int]) -> tuple[int, ...]:
        """Bytes of earlier steps that are expected to be alive at each gap of a step, besides what the step is given.

        Args:
            recorder: An earlier step of the same kind.
            gradients: Keys of the storages of gradients, which are counted elsewhere.
        """
        count = len(recorder.windows)
        sequence = recorder.sequence
        alive: list[_Survivor] = []
        for key, survivor in list(self._found.items()):
            storage = survivor.storage()
            if storage is None:
                del self._found[key]
            elif key not in gradients and not recorder.is_given(key, storage):
                alive.append(survivor)
        newest = self._newest.get(sequence)
        older = any(s.sequence == sequence and s.number != newest for s in alive)
        freed = [0] * (count + 1)  # by the last gap at which a storage is alive
        for survivor in alive:
            freed[survivor.last if survivor.sequence == sequence and not older else count] += survivor.size_bytes
        return tuple(sum(freed[gap:]) for gap in range(count + 1))
