"""Storages that outlive the step in which they were seen: the user holds them, or other steps read them."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from checkmate.torch.graph.storages import storage_key
from checkmate.torch.steps.recorder import SeenStorage, StepRecorder, StepSequence, StorageRef, gradient_parts


class _Outliving(NamedTuple):
    """A storage of an earlier step."""

    storage: StorageRef  # not kept alive
    size_bytes: int
    sequence: StepSequence | None  # identity of the step that made it; None for an input of the step
    last: int  # the interval, of the next step of this kind, in which it is expected to be freed
    number: int  # of the step that made it, among all steps


class _EagerLeftover(NamedTuple):
    """A storage that eager code made and that outlived its step; fields as of `_Outliving`."""

    size_bytes: int
    last: int


class OutlivingStorages:
    """Storages of earlier steps that may still be alive.

    A loop that writes ``outputs = model(batch)`` holds the outputs of the step before until the new ones are assigned. A storage
    that a step made is therefore expected to be freed in the next step of the same kind: a storage of a forward when the call
    returns, a storage of eager code when eager code makes its successor. In three cases it is expected to live on:

    - Older storages of the same kind of step are alive as well, such as those of a list of predictions.
    - A storage was found alive at the end of a step of this kind: a loop that writes ``loss, outputs = train(batch)`` holds the
      outputs of the step before until then.
    - The next step is of another kind.

    Eager code is seen in the first step of a kind only: later steps are expected to leave the same storages.
    """

    def __init__(self) -> None:
        self._found: dict[int, _Outliving] = {}
        self._number = 0
        self._newest: dict[StepSequence, int] = {}  # number of the newest step of each kind
        self._eager: dict[StepSequence, list[_EagerLeftover]] = {}  # of the steps of each kind in which eager code was seen
        self._unseen: dict[StepSequence, list[_EagerLeftover]] = {}  # those of them that were not found after the newest step
        self._held: set[StepSequence] = set()  # kinds of steps that end before those storages are freed

    def add(self, recorder: StepRecorder) -> None:
        """Take over the storages that a step leaves at its end."""
        sequence = recorder.sequence
        self._number += 1
        self._newest[sequence] = self._number
        unseen = [] if recorder.watched else list(self._eager.get(sequence, ()))
        eager: list[_EagerLeftover] = []
        gradients = {storage_key(part) for part in gradient_parts(recorder.eager_leaves.values())}
        for key, seen, last in recorder.remaining():
            if last is None and unseen and not self._is_known(key, seen):
                left = next((left for left in unseen if left.size_bytes == seen.size_bytes), None)
                if left is not None:  # eager code made it, and a graph was given it
                    unseen.remove(left)
                    last = left.last
            elif last is not None and seen.eager is not None and key not in gradients:  # those are looked up by their leaves
                eager.append(_EagerLeftover(seen.size_bytes, last))
            made = None if last is None else sequence
            self._found[key] = _Outliving(seen.storage, seen.size_bytes, made, last or 0, self._number)
        self._unseen[sequence] = unseen
        if recorder.watched:
            self._eager[sequence] = eager

    def _is_known(self, key: int, seen: SeenStorage) -> bool:
        known = self._found.get(key)
        return known is not None and known.storage() is seen.storage()

    def outlived(self, recorder: StepRecorder, gradients: Collection[int]) -> int:
        """Bytes of the step before that were expected to be freed, and are still alive at the end of a step of the same kind."""
        sequence, newest = recorder.sequence, self._newest.get(recorder.sequence)
        if sequence in self._held:
            return 0
        return sum(
            known.size_bytes
            for key, known in self._found.items()
            if known.sequence == sequence and known.number == newest and known.last < len(recorder.segments)
            if key not in gradients and (storage := known.storage()) is not None and not recorder.is_given(key, storage)
        )

    def expect_held(self, recorder: StepRecorder) -> None:
        """Expect all storages that steps of a kind make to be held until the next step of the kind is over."""
        self._held.add(recorder.sequence)

    def unseen_bytes(self, recorder: StepRecorder) -> int:
        """Bytes that eager code of the step before is expected to have left, although it was not seen."""
        return sum(left.size_bytes for left in self._unseen.get(recorder.sequence, ()))

    def bytes_from_earlier_steps(self, recorder: StepRecorder, gradients: Collection[int]) -> tuple[int, ...]:
        """Bytes that are expected to be alive in each interval of a step, besides its inputs and results.

        Gradients, by the keys of their storages, are counted elsewhere.
        """
        count, sequence = len(recorder.segments), recorder.sequence
        freed = [0] * (count + 1)  # by the last interval in which a storage is alive
        alive = self._alive(recorder, gradients).values()
        over = sequence in self._held
        older = over or any(known.sequence == sequence and known.number != self._newest.get(sequence) for known in alive)
        for left in self._unseen.get(sequence, ()):
            freed[count if over else left.last] += left.size_bytes
        for known in alive:
            freed[known.last if known.sequence == sequence and not older else count] += known.size_bytes
        return tuple(sum(freed[interval:]) for interval in range(count + 1))

    def alive(self, recorder: StepRecorder, gradients: Collection[int]) -> dict[int, int]:
        """Bytes of the storages of earlier steps that are alive and not among the inputs of the step, by their keys."""
        return {key: known.size_bytes for key, known in self._alive(recorder, gradients).items()}

    def _alive(self, recorder: StepRecorder, gradients: Collection[int]) -> dict[int, _Outliving]:
        found = {key: (known, storage) for key, known in self._found.items() if (storage := known.storage()) is not None}
        self._found = {key: known for key, (known, _) in found.items()}
        return {
            key: known for key, (known, storage) in found.items() if key not in gradients and not recorder.is_given(key, storage)
        }
