"""Storages that outlive the step in which they were seen: what the user holds, and what other steps are given."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

import torch

from checkmate.torch.graph.storages import storage_key
from checkmate.torch.steps.recorder import StepRecorder, StepSequence, gradient_parts


class _Survivor(NamedTuple):
    """A storage of an earlier step.

    Attributes:
        storage: The storage, which is not kept alive.
        size_bytes: Its bytes.
        sequence: Identity of the step that made it; None for one that the step was given.
        last: The gap of the next such step at which it is expected to be freed.
        call: The call of a compiled function at whose end that is.
        number: Number of the step that made it, among all steps.
    """

    storage: Callable[[], torch.UntypedStorage | None]
    size_bytes: int
    sequence: StepSequence | None
    last: int
    call: int
    number: int


class _Left(NamedTuple):
    """A storage that eager code made and that outlived its step.

    Attributes:
        size_bytes: Its bytes.
        last: The gap of the next such step at which it is expected to be freed.
        call: The call of a compiled function at whose end that is.
    """

    size_bytes: int
    last: int
    call: int


class Survivors:
    """Storages of earlier steps that may still be alive.

    A loop that writes ``outputs = model(batch)`` holds the outputs of the step before until the new ones are assigned. So a
    storage that a step made, and that is alive when the same kind of step begins again, is expected to be freed there: one of
    a forward when the call returns, one of eager code where its successor is made. If any older ones of the same kind of step are
    alive as well, such as a list of predictions, none is expected to be freed. Nor is any where one was found alive when such a
    step was over: a loop that writes ``loss, outputs = train(batch)`` holds the outputs of the step before until then. Eager code
    is seen in the first step of a kind only: what it left then, it is expected to leave in later steps.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Survivor] = {}
        self._number = 0
        self._newest: dict[StepSequence, int] = {}  # number of the newest step of each kind
        self._eager: dict[StepSequence, list[_Left]] = {}  # what eager code left in the steps of each kind where it was seen
        self._unseen: dict[StepSequence, list[_Left]] = {}  # of that, what was not found after the newest step
        self._held: set[StepSequence] = set()  # kinds of steps that are over before those storages are freed

    def add(self, recorder: StepRecorder) -> None:
        """Take over what a step leaves.

        Args:
            recorder: The step, which is over.
        """
        sequence = recorder.sequence
        self._number += 1
        self._newest[sequence] = self._number
        unseen = [] if recorder.watched else list(self._eager.get(sequence, ()))
        eager: list[_Left] = []
        gradients = {storage_key(part) for part in gradient_parts(recorder.eager_leaves.values())}
        for key, storage, size_bytes, last, call in recorder.remaining():
            if last is None and unseen and not self._is_known(key, storage):
                left = next((left for left in unseen if left.size_bytes == size_bytes), None)
                if left is not None:  # eager code made it, and a graph was given it
                    unseen.remove(left)
                    last, call = left.last, left.call
            elif last is not None and recorder.is_eager(key) and key not in gradients:  # those are looked up by their leaves
                eager.append(_Left(size_bytes, last, call))
            made = None if last is None else sequence
            self._found[key] = _Survivor(storage, size_bytes, made, last or 0, call, self._number)
        self._unseen[sequence] = unseen
        if recorder.watched:
            self._eager[sequence] = eager

    def outlived(self, recorder: StepRecorder, gradients: Collection[int]) -> int:
        """Bytes of the step before that are still alive when a step of the same kind is over, and were expected to be freed.

        Args:
            recorder: The step, which is over.
            gradients: Keys of the storages of gradients.
        """
        sequence, newest, count = recorder.sequence, self._newest.get(recorder.sequence), len(recorder.windows)
        if sequence in self._held:
            return 0
        return sum(
            survivor.size_bytes
            for key, survivor in self._found.items()
            if survivor.sequence == sequence and survivor.number == newest and survivor.last < count and key not in gradients
            if (storage := survivor.storage()) is not None and not recorder.is_given(key, storage)
        )

    def expect_held(self, recorder: StepRecorder) -> None:
        """Expect all that steps of a kind make to be held until the next such step is over."""
        self._held.add(recorder.sequence)

    def _is_known(self, key: int, storage: Callable[[], torch.UntypedStorage | None]) -> bool:
        known = self._found.get(key)
        return known is not None and known.storage() is storage()

    def alive(self, recorder: StepRecorder, gradients: Collection[int]) -> dict[int, int]:
        """Bytes of the storages of earlier steps that are alive and that the step is not given, by their keys.

        Args:
            recorder: An earlier step of the same kind.
            gradients: Keys of the storages of gradients, which are counted elsewhere.
        """
        return {key: survivor.size_bytes for key, survivor in self._alive(recorder, gradients).items()}

    def unseen_bytes(self, recorder: StepRecorder) -> int:
        """Bytes that eager code of the step before is expected to have left, although it was not seen."""
        return sum(left.size_bytes for left in self._unseen.get(recorder.sequence, ()))

    def carried(self, recorder: StepRecorder, gradients: Collection[int], *, held: bool = True) -> tuple[int, ...]:
        """Bytes of earlier steps that are expected to be alive at each gap of a step, besides what the step is given and makes.

        Args:
            recorder: An earlier step of the same kind.
            gradients: Keys of the storages of gradients, which are counted elsewhere.
            held: False leaves out that outputs were found alive when such a step was over.
        """
        count = len(recorder.windows)
        freed = [0] * (count + 1)  # by the last gap at which a storage is alive
        for gap, _, size_bytes in self._freed(recorder, gradients, held):
            freed[gap] += size_bytes
        return tuple(sum(freed[gap:]) for gap in range(count + 1))

    def released(self, recorder: StepRecorder, gradients: Collection[int]) -> dict[int, dict[int, int]]:
        """Bytes of them that are expected to be freed in each gap, by the call at whose end that is.

        Args:
            recorder: An earlier step of the same kind.
            gradients: Keys of the storages of gradients, which are counted elsewhere.
        """
        found: dict[int, dict[int, int]] = {}
        for gap, call, size_bytes in self._freed(recorder, gradients, held=True):
            if gap < len(recorder.windows):
                by_call = found.setdefault(gap, {})
                by_call[call] = by_call.get(call, 0) + size_bytes
        return found

    def _freed(self, recorder: StepRecorder, gradients: Collection[int], held: bool) -> Iterator[tuple[int, int, int]]:
        """The last gap at which each storage is alive, the call at whose end it is freed there, and its bytes."""
        count, sequence = len(recorder.windows), recorder.sequence
        alive = self._alive(recorder, gradients).values()
        newest = self._newest.get(sequence)
        over = held and sequence in self._held
        older = over or any(s.sequence == sequence and s.number != newest for s in alive)
        yield from ((count if over else left.last, left.call, left.size_bytes) for left in self._unseen.get(sequence, ()))
        for survivor in alive:
            last = survivor.last if survivor.sequence == sequence and not older else count
            yield last, survivor.call, survivor.size_bytes

    def _alive(self, recorder: StepRecorder, gradients: Collection[int]) -> dict[int, _Survivor]:
        alive: dict[int, _Survivor] = {}
        for key, survivor in list(self._found.items()):
            storage = survivor.storage()
            if storage is None:
                del self._found[key]
            elif key not in gradients and not recorder.is_given(key, storage):
                alive[key] = survivor
        return alive
