"""A step that was seen, and what exists of earlier steps when it begins: gradients, and storages that outlive their step."""

from __future__ import annotations

from collections.abc import Callable, Collection, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from checkmate.core.budget import Budget
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, SCALAR_TANGENT_BYTES, storage_bytes, storage_key
from checkmate.torch.measure.device_memory import LookDue
from checkmate.torch.steps.accumulation import GradientSources
from checkmate.torch.steps.program import PlannedGraph, StepAllotment
from checkmate.torch.steps.recorder import StepRecorder, StepSequence
from checkmate.torch.steps.run import SeenStorage, StorageRef, gradient_parts
from checkmate.torch.steps.state import StepFacts
from checkmate.torch.steps.step_plan import Gradients, StepPlan, StepRoom


@dataclass(frozen=True, slots=True)
class KnownPlan:
    """The outcome of planning a step."""

    plan: StepPlan | None  # None if its graphs run as they were compiled
    earlier: tuple[int, ...]  # by interval: bytes outside of the step for which the plan leaves room
    grown: int = 0  # how many earlier plans did not leave enough room

    def leaves_room(self, earlier: tuple[int, ...], ignored_bytes: int) -> bool:
        """Whether the plan keeps its budget next to these bytes of earlier steps, or exceeds it by ignored bytes only."""
        free = 0 if self.plan is None else max(0, self.plan.result.budget_bytes - self.plan.result.peak_bytes)
        free = max(free, ignored_bytes)
        return all(now <= then + free for now, then in zip(earlier, self.earlier, strict=True))


@dataclass(eq=False, slots=True)
class KnownStep:
    """A step that was recorded, with its plans."""

    recorder: StepRecorder
    plans: dict[Gradients, KnownPlan] = field(default_factory=dict)  # by the gradients that exist before the step
    look: LookDue = field(default_factory=LookDue)  # whether the tensors of the process have to be looked up when the step begins
    outside_bytes: int = 0  # tensors that belong to no step that was seen, and the state that optimizers will make
    # Leaves, by identity, whose gradients existed before a step of this kind and were set to None before its backward.
    cleared: set[int] = field(default_factory=set)
    kept: set[int] = field(default_factory=set)  # leaves whose gradients were not set to None in some step
    compiled_again: bool = False  # whether Dynamo compiled one of its graphs again, into an equal one
    following: int = 0  # how many steps have followed its record
    outside: int | None = None  # bytes that the newest look found outside, without state to come; None before a look
    # Leaves that its graphs and eager code read, by weak references.
    leaves: list[Callable[[], torch.Tensor | None]] = field(init=False)
    resident_bytes: int = field(init=False)  # of what exists before its first segment: its inputs, and what eager code made

    def __post_init__(self) -> None:
        """Look up what the record does not change any more."""
        record = self.recorder
        runs = (leaf for run in (*record.runs, *record.abandoned) for _, leaf in run.leaves)
        self.leaves = [*runs, *record.eager_leaves.values()]
        self.resident_bytes = record.input_bytes + record.early_bytes

    def note_compiled_again(self) -> None:
        """Note that its graphs are compiled again; drop plans with pieces, which were made from nodes of the earlier graphs."""
        self.compiled_again = True
        self.plans = {of: known for of, known in self.plans.items() if known.plan is None or not known.plan.in_pieces}

    def gradients(
        self, sources: GradientSources, existing: Set[int] | None = None, *, cleared: Set[int] | None = None
    ) -> Gradients:
        """The gradients before the step, of given leaves or, by default, of those that have one now."""
        runs = self.recorder.runs
        if existing is not None and not existing:
            return Gradients(frozenset(), (frozenset(),) * len(runs))
        leaves = [[(k, t) for k, leaf in run.leaves if (t := leaf()) is not None] for run in runs]
        if existing is None:
            existing = {id(t) for each in leaves for _, t in each if t.grad is not None}
        replaceable = all(run.planned.replaceable for run in runs)
        cleared = existing & (self.cleared if cleared is None else cleared) - self.kept if replaceable else frozenset()
        existing = existing - cleared
        added = (frozenset(k for k, t in each if replaceable and id(t) in existing and sources.accumulates(t)) for each in leaves)
        return Gradients(frozenset(existing), tuple(added), frozenset(cleared))

    def note_cleared(self, recorder: StepRecorder) -> int:
        """Note which gradients a step set to None before its backward; return the bytes of expected ones that remained."""
        existing, cleared = recorder.existing, recorder.cleared
        if existing <= self.kept | (self.cleared & cleared):
            return 0  # as known, in nearly every step
        self.cleared |= cleared
        self.kept |= existing - cleared
        expected = frozenset[int]().union(*(gradients.cleared for gradients in self.plans))
        missed = {id(t): t for run in recorder.runs for _, leaf in run.leaves if (t := leaf()) is not None}
        missed_bytes = sum(storage_bytes(t) for key, t in missed.items() if key in expected & existing - cleared)
        if missed_bytes:
            self.plans.clear()
        return missed_bytes

    def cleared_storages(self, gradients: Gradients) -> dict[int, tuple[int, int]]:
        """Bytes and last interval of each gradient that exists now and that the step clears, by the key of its storage."""
        record, found = self.recorder, dict[int, tuple[int, int]]()
        places = [(run, [leaf for _, leaf in run.leaves if id(leaf()) in gradients.cleared]) for run in record.runs]
        if not record.keeps_eager_gradients:  # the new gradients of the record take their place
            own = {id(t) for run in record.runs for _, leaf in run.leaves if (t := leaf()) is not None}
            eager = [leaf for key, leaf in record.eager_leaves.items() if key not in own]
            places.append((next((run for run, backward in record.segments if backward), record.runs[0]), eager))
        for run, leaves in places:
            begins = record.segments.index((run, True)) if leaves else 0
            for part in gradient_parts(leaves):
                _, last = found.get(storage_key(part), (0, begins))
                found[storage_key(part)] = storage_bytes(part), min(last, begins)
        return found

    def kept_bytes(self, gradients: Gradients, storages: dict[int, int]) -> int:
        """Bytes of the gradients that exist before the step and in its backward."""
        cleared = self.cleared_storages(gradients)
        return sum(size for key, size in storages.items() if key not in cleared)

    @property
    def given(self) -> list[torch.UntypedStorage]:
        """Storages of its inputs that are alive."""
        seen = (seen for run in self.recorder.runs for seen in run.given if seen is not None)
        return [storage for each in seen if (storage := each.storage()) is not None]

    @property
    def first(self) -> PlannedGraph:
        """The graph of the first of its runs."""
        return self.recorder.runs[0].planned

    @property
    def budget(self) -> Budget:
        """The budget in the words of the user."""
        return self.first.budget

    @property
    def is_alone(self) -> bool:
        """Whether the step is one graph that is taken for a whole step."""
        return len(self.recorder.runs) == 1 and self.first.alone

    @property
    def kind(self) -> list[tuple[str, int, frozenset[int] | None]]:
        """Identity of the step; equal graphs count as the same."""
        return [(self.recorder.runs[r].planned.key, r, undefined) for r, undefined in self.recorder.order]

    @property
    def scalar_bytes(self) -> int:
        """Bytes that an allocator hands out for a scalar."""
        return CUDA_ALIGNMENT_BYTES if self.first.device.type == "cuda" else SCALAR_TANGENT_BYTES

    @property
    def ignored_bytes(self) -> int:
        """Bytes that are no reason to plan the step again: a script that keeps its losses has one scalar more in every step."""
        return 64 * self.scalar_bytes

    def gradient_storages(self) -> dict[int, int]:
        """Bytes of each gradient that exists now, by the key of its storage."""
        return {storage_key(part): storage_bytes(part) for part in gradient_parts(self.leaves)}

    @property
    def eager_bytes(self) -> int:
        """Peak bytes of eager code in the step, its inputs included."""
        return self.recorder.eager_peak_bytes + self.recorder.eager_input_bytes

    def record_to_follow(self, first: PlannedGraph) -> StepRecorder | None:
        """The record, for a step that begins with a graph and is not recorded itself; None for each hundredth, which is."""
        record = self.recorder
        self.following += 1
        if self.following % 100 == 0:
            self.outside = None
            return None
        complete = not record.abandoned and all(run.tensors and not run.planned.dynamic for run in record.runs)
        return record if complete and self.first is first else None

    def facts(self, room: StepRoom, allotted: StepAllotment | None, compiled_for_plan: bool) -> StepFacts:
        """The facts that decide how the step runs, given the allotment of its first graph."""
        runs, first, earlier = self.recorder.runs, self.first, room.earlier
        fused = [run.planned for run in runs if not run.planned.replaceable]
        is_own_plan = (
            len(runs) == 1
            and first.alone
            and not runs[0].undefined
            and room.gradient_bytes <= first.planned_gradient_bytes
            and first.own.accumulated.intersection(runs[0].places(room.gradients.existing)) == room.gradients.accumulated[0]
        )
        keeps_budget = can_shrink = False
        if is_own_plan:
            most, memory = self.most_bytes(allotted, earlier), first.own.memory
            keeps_budget = memory.forward_peak_bytes + earlier[1] <= most and memory.backward_peak_bytes + earlier[2] <= most
            keeps_budget |= bool(fused) and first.budget.keeps_everything
            less = most - max(earlier)
            smaller = less > 0 and (allotted is None or less < allotted.limit.peak_bytes)
            can_shrink = smaller and bool(fused) and first.ranks is None
        return StepFacts(
            plan_given=any(run.planned.options.plan is not None for run in runs),
            keeps_budget=keeps_budget,
            can_shrink=can_shrink,
            compiled_for_plan=compiled_for_plan,
            from_cache=any(run.planned.joint is None for run in runs),
        )

    def most_bytes(self, allotted: StepAllotment | None, earlier: tuple[int, ...]) -> int:
        """The most bytes that its only graph and tensors of earlier steps may take, above resident memory."""
        own, first = self.first.own, self.first
        if allotted is not None and allotted.order is not None:  # compiled for the plan of its step, with room for eager code
            return allotted.limit.peak_bytes
        if first.replaceable:
            free = own.result.budget_bytes - own.result.peak_bytes + own.memory.peak_bytes
        else:  # the memory of fused ops was measured, and differs from the plan's prediction
            free = own.result.budget_bytes - first.interface.graph.resident_bytes
        # No plan leaves room for the gradient of a loss, the loss and similar ones: four scalars.
        free -= self.eager_bytes if self.eager_bytes > 4 * self.scalar_bytes else 0
        if first.budget.is_share and not first.replaceable:  # it grows with what no plan can change, such as copies of weights
            return free + max(earlier)
        return free + first.outside_bytes  # outside bytes are among the bytes of earlier steps, and in the peak of the plan


class Outliving(NamedTuple):
    """A storage of an earlier step."""

    storage: StorageRef  # not kept alive
    size_bytes: int
    sequence: StepSequence | None  # identity of the step that made it; None for an input of the step
    last: int  # the interval, of the next step of this kind, in which it is expected to be freed
    number: int  # of the step that made it, among all steps


class _EagerLeftover(NamedTuple):
    """A storage that eager code made and that outlived its step; fields as of `Outliving`."""

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
        self._found: dict[int, Outliving] = {}
        self._number = 0
        self._newest: dict[StepSequence, int] = {}  # number of the newest step of each kind
        self._eager: dict[StepSequence, list[_EagerLeftover]] = {}  # of the steps of each kind in which eager code was seen
        self._unseen: dict[StepSequence, list[_EagerLeftover]] = {}  # those of them that were not found after the newest step
        self.held = set[StepSequence]()  # kinds of steps whose storages are held until the next step of the kind is over
        self._besides: dict[StepRecorder, dict[int, Outliving]] = {}  # those that a step of a kind is not given

    def add(self, recorder: StepRecorder) -> None:
        """Take over the storages that a step leaves at its end."""
        sequence = recorder.sequence
        self._number += 1
        self._newest[sequence] = self._number
        if recorder.like is None:
            self._besides.clear()
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
            self._note(key, Outliving(seen.storage, seen.size_bytes, made, last or 0, self._number))
        self._unseen[sequence] = unseen
        if recorder.watched:
            self._eager[sequence] = eager

    def _note(self, key: int, known: Outliving) -> None:
        self._found[key] = known
        for recorder, besides in self._besides.items():
            if (storage := known.storage()) is not None and not recorder.is_given(key, storage):
                besides[key] = known

    def _is_known(self, key: int, seen: SeenStorage) -> bool:
        known = self._found.get(key)
        return known is not None and known.storage() is seen.storage()

    def outlived(self, recorder: StepRecorder, gradients: Collection[int]) -> int:
        """Bytes of the step before that were expected to be freed, and are still alive at the end of a step of the same kind."""
        sequence, newest = recorder.sequence, self._newest.get(recorder.sequence)
        if sequence in self.held:
            return 0
        return sum(
            known.size_bytes
            for key, known in self._not_given(recorder.like or recorder).items()
            if known.sequence == sequence and known.number == newest and known.last < len(recorder.segments)
            if key not in gradients and (storage := known.storage()) is not None and not recorder.is_given(key, storage)
        )

    def unseen_bytes(self, recorder: StepRecorder) -> int:
        """Bytes that eager code of the step before is expected to have left, although it was not seen."""
        return sum(left.size_bytes for left in self._unseen.get(recorder.sequence, ()))

    def bytes_from_earlier_steps(self, recorder: StepRecorder, gradients: Collection[int]) -> tuple[int, ...]:
        """Bytes that are expected to be alive in each interval of a step, besides its inputs and results.

        Gradients, by the keys of their storages, are counted elsewhere.
        """
        count, sequence = len(recorder.segments), recorder.sequence
        freed = [0] * (count + 1)  # by the last interval in which a storage is alive
        alive = self.alive(recorder, gradients).values()
        over = sequence in self.held
        older = over or any(known.sequence == sequence and known.number != self._newest.get(sequence) for known in alive)
        for left in self._unseen.get(sequence, ()):
            freed[count if over else left.last] += left.size_bytes
        for known in alive:
            freed[known.last if known.sequence == sequence and not older else count] += known.size_bytes
        return tuple(sum(freed[interval:]) for interval in range(count + 1))

    def alive(self, recorder: StepRecorder, gradients: Collection[int]) -> dict[int, Outliving]:
        """The storages of earlier steps that are alive and not among the inputs of the step, by their keys."""
        return {key: known for key, known in self._not_given(recorder).items() if key not in gradients}

    def _not_given(self, recorder: StepRecorder) -> dict[int, Outliving]:
        """Storages that are alive, and were not among the inputs of a step when it was recorded, by their keys."""
        found = self._besides.get(recorder)
        if found is None:
            self._found = {key: known for key, known in self._found.items() if known.storage() is not None}
            found = self._found
        alive = {
            key: known
            for key, known in found.items()
            if (storage := known.storage()) is not None and not (found is self._found and recorder.is_given(key, storage))
        }
        self._besides[recorder] = alive
        return alive
