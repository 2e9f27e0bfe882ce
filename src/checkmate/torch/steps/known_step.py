"""A step that was seen: its record, its plans, and the gradients that exist before it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field

import torch

from checkmate.core.budget import Budget
from checkmate.torch.graph.storages import CUDA_ALIGNMENT_BYTES, SCALAR_TANGENT_BYTES, storage_bytes, storage_key
from checkmate.torch.measure.device_memory import LookDue
from checkmate.torch.steps.accumulation import GradientSources
from checkmate.torch.steps.program import PlannedGraph, StepAllotment
from checkmate.torch.steps.recorder import StepRecorder, gradient_parts
from checkmate.torch.steps.state import StepFacts
from checkmate.torch.steps.step_plan import Gradients, StepPlan, StepRoom

Allotments = Mapping[str, StepAllotment]
"""Allotments of the graphs that are compiled again for their step, by the key of the graph."""


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
    # Run and input of gradients that existed before a step of this kind and were set to None before its backward.
    cleared: set[tuple[int, int]] = field(default_factory=set)
    kept: set[tuple[int, int]] = field(default_factory=set)  # gradients that were not set to None in some step
    compiled_again: bool = False  # whether Dynamo compiled one of its graphs again, into an equal one

    def note_compiled_again(self) -> None:
        """Note that its graphs are compiled again; drop plans with pieces, which were made from nodes of the earlier graphs."""
        self.compiled_again = True
        self.plans = {of: known for of, known in self.plans.items() if known.plan is None or not known.plan.in_pieces}

    def gradients(
        self,
        sources: GradientSources,
        existing: Set[tuple[int, int]] | None = None,
        *,
        cleared: Set[tuple[int, int]] | None = None,
    ) -> Gradients:
        """The gradients before the step."""
        leaves = [(r, k, t) for r, run in enumerate(self.recorder.runs) for k, leaf in run.leaves if (t := leaf()) is not None]
        if existing is None:
            existing = {(r, k) for r, k, t in leaves if t.grad is not None}
        replaceable = all(run.planned.replaceable for run in self.recorder.runs)
        cleared = existing & (self.cleared if cleared is None else cleared) - self.kept if replaceable else frozenset()
        existing = existing - cleared
        added = {(r, k) for r, k, t in leaves if replaceable and (r, k) in existing and sources.accumulates(t)}
        of_run = tuple(frozenset(k for other, k in added if other == r) for r in range(len(self.recorder.runs)))
        return Gradients(frozenset(existing), of_run, frozenset(cleared))

    def note_cleared(self, recorder: StepRecorder) -> int:
        """Note which gradients a step of this kind set to None before its backward."""
        existing, cleared = recorder.existing, recorder.cleared
        if existing <= self.kept | (self.cleared & cleared):
            return 0  # as known, in nearly every step
        places: dict[int, set[tuple[int, int]]] = {}  # by leaf, which may be an input of several runs
        sizes: dict[tuple[int, int], int] = {}
        for r, run in enumerate(recorder.runs):
            for k, leaf in run.leaves:
                if (t := leaf()) is not None:
                    places.setdefault(id(t), set()).add((r, k))
                    sizes[r, k] = storage_bytes(t)
        expected = {place for gradients in self.plans for place in gradients.cleared}
        missed_bytes = 0
        for of in places.values():
            if of & cleared:
                self.cleared |= of
            elif of & existing:
                self.kept |= of
                missed_bytes += max((sizes[place] for place in of & expected), default=0)
        if missed_bytes:
            self.plans.clear()
        return missed_bytes

    def cleared_storages(self, gradients: Gradients) -> dict[int, tuple[int, int]]:
        """Bytes and last interval of each gradient that exists now and that the step clears, by the key of its storage."""
        record, found = self.recorder, dict[int, tuple[int, int]]()
        cleared = {r for r, _ in gradients.cleared}
        places = [(r, [leaf for k, leaf in record.runs[r].leaves if (r, k) in gradients.cleared]) for r in cleared]
        if not record.keeps_eager_gradients:  # the new gradients of the record take their place
            own = {id(t) for run in record.runs for _, leaf in run.leaves if (t := leaf()) is not None}
            eager = [leaf for key, leaf in record.eager_leaves.items() if key not in own]
            places.append((next((record.runs.index(run) for run, backward in record.segments if backward), 0), eager))
        for r, leaves in places:
            begins = record.segments.index((record.runs[r], True)) if leaves else 0
            for part in gradient_parts(leaves):
                _, last = found.get(storage_key(part), (0, begins))
                found[storage_key(part)] = storage_bytes(part), min(last, begins)
        return found

    def kept_bytes(self, gradients: Gradients, storages: dict[int, int]) -> int:
        """Bytes of the gradients that exist before the step and in its backward."""
        cleared = self.cleared_storages(gradients)
        return sum(size for key, size in storages.items() if key not in cleared)

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
        tangents = (tangent for run in self.recorder.runs for tangent in run.planned.tangents)
        return CUDA_ALIGNMENT_BYTES if any(t.device.type == "cuda" for t in tangents) else SCALAR_TANGENT_BYTES

    @property
    def leaves(self) -> list[Callable[[], torch.Tensor | None]]:
        """Leaves that its graphs and eager code read, by weak references."""
        record = self.recorder
        return [*(leaf for run in (*record.runs, *record.abandoned) for _, leaf in run.leaves), *record.eager_leaves.values()]

    def gradient_storages(self) -> dict[int, int]:
        """Bytes of each gradient that exists now, by the key of its storage."""
        return {storage_key(part): storage_bytes(part) for part in gradient_parts(self.leaves)}

    @property
    def eager_bytes(self) -> int:
        """Peak bytes of eager code in the step, its inputs included."""
        return self.recorder.eager_peak_bytes + self.recorder.eager_input_bytes

    @property
    def free_bytes(self) -> int:
        """The most bytes that its only graph and tensors of earlier steps may take, above resident memory."""
        own = self.first.own
        if self.first.replaceable:
            free = own.result.budget_bytes - own.result.peak_bytes + own.memory.peak_bytes
        else:  # the memory of fused ops was measured, and differs from the plan's prediction
            free = own.result.budget_bytes - self.first.interface.graph.resident_bytes
        # No plan leaves room for the gradient of a loss, the loss and similar ones: four scalars.
        free -= self.eager_bytes if self.eager_bytes > 4 * self.scalar_bytes else 0
        return free + self.first.outside_bytes  # outside bytes are among the bytes of earlier steps, and in the peak of the plan

    def facts(self, room: StepRoom, allotments: Allotments) -> StepFacts:
        """The facts that decide how the step runs."""
        runs, first, earlier = self.recorder.runs, self.first, room.earlier
        compiled = [run.planned for run in runs if not run.planned.replaceable]
        is_own_plan = (
            len(runs) == 1
            and first.alone
            and not runs[0].undefined
            and room.gradient_bytes <= first.planned_gradient_bytes
            and {k for k in first.own.accumulated if (0, k) in room.gradients.existing} == room.gradients.accumulated[0]
        )
        keeps_budget = can_shrink = False
        if is_own_plan:
            most, memory = self.most_bytes(allotments), first.own.memory
            keeps_budget = memory.forward_peak_bytes + earlier[1] <= most and memory.backward_peak_bytes + earlier[2] <= most
            less, allotted = most - max(earlier), allotments.get(first.key) if allotments else None
            smaller = less > 0 and (allotted is None or less < allotted.limit.peak_bytes)
            can_shrink = smaller and bool(compiled) and first.ranks is None
        return StepFacts(
            plan_given=any(run.planned.options.plan is not None for run in runs),
            keeps_budget=keeps_budget,
            can_shrink=can_shrink,
            compiled_for_plan=bool(compiled and allotments) and all(planned.key in allotments for planned in compiled),
            from_cache=any(run.planned.joint is None for run in runs),
        )

    def most_bytes(self, allotments: Allotments) -> int:
        """The most bytes that its only graph and tensors of earlier steps may take."""
        allotted = allotments.get(self.first.key) if allotments else None
        # The limit of a graph that was compiled for the plan of its step leaves room for eager code already.
        return self.free_bytes if allotted is None or allotted.order is None else allotted.limit.peak_bytes
