"""The steps that were seen, and which of them is expected and planned when a graph begins."""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from checkmate.core.budget import Budget
from checkmate.core.errors import CheckmateError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes
from checkmate.torch.graph.storages import current_bytes, storage_key, unique_bytes
from checkmate.torch.measure.device_memory import device_memory, state_to_come_bytes
from checkmate.torch.measure.resident import beyond_room
from checkmate.torch.partition.copies import RESIDENTS
from checkmate.torch.steps.accumulation import GradientSources
from checkmate.torch.steps.known_step import KnownPlan, KnownStep, OutlivingStorages
from checkmate.torch.steps.program import PlannedGraph, StepAllotment, key_of
from checkmate.torch.steps.recorder import StepRecorder
from checkmate.torch.steps.state import PlanDecision
from checkmate.torch.steps.step_plan import Gradients, StepPlan, StepRoom, plan_step

_log = logging.getLogger("checkmate.torch")


class KnownSteps:
    """The steps that were seen, and their plans."""

    def __init__(self) -> None:
        self.sources = GradientSources()
        self._outliving = OutlivingStorages()
        self._known: dict[int, list[KnownStep]] = {}  # by the identity of the first graph, the newest last
        self._newest: KnownStep | None = None
        self._expected: KnownStep | None = None  # the present step runs its plan
        self._followed: dict[tuple[int, int], KnownStep] = {}  # by the identities of the step before and of the first graph
        self._allotments: dict[str, StepAllotment] = {}
        self._traces_again = False
        self.bare = False  # whether no leaf of the expected step had a gradient when the step began
        self._warned: set[int] = set()

    def close(self, recorder: StepRecorder) -> None:
        """End the record of a step, complete or not, and note the storages that the step leaves."""
        recorder.leave()
        recorder.close()
        self._outliving.add(recorder)

    def add(self, recorder: StepRecorder) -> bool:
        """Take over a complete step. It is planned when it begins again, since all other live tensors are known then.

        Returns whether eager code was seen in a step of this kind, and this step is not the first one: a step of another kind may
        follow, such as the next micro batch.
        """
        recorder.close()
        first = id(recorder.forwards[0].planned)
        known = self._known.setdefault(first, [])
        before = step = next((k for k in known if k.recorder.sequence == recorder.sequence), None)
        if step is not None:
            self._note_outlived(step, recorder)
        if step is None or (recorder.watched and not step.recorder.watched):
            step = KnownStep(recorder)
            if not all(run.planned.replaceable for run in recorder.runs):
                self._compile_again(step)
        self._note_cleared(step, recorder)
        self._known[first] = [*(k for k in known if k is not before), step]
        self._followed[id(self._newest), first] = step
        self._newest = step
        return before is not None and step.recorder.watched

    def _note_outlived(self, step: KnownStep, recorder: StepRecorder) -> None:
        ignored_bytes = step.ignored_bytes
        if self._outliving.outlived(recorder, ()) <= ignored_bytes:
            return  # as after nearly every step: gradients need not be looked up
        gradients = step.gradient_storages()
        if self._outliving.outlived(recorder, gradients) <= ignored_bytes:
            return
        gc.collect()  # compilation leaves cycles, which hold outputs too
        outlived = self._outliving.outlived(recorder, gradients)
        if outlived <= ignored_bytes:
            return
        self._outliving.held.add(recorder.sequence)
        plans = [known.plan.result for known in step.plans.values() if known.plan is not None]
        if outlived > min((result.budget_bytes - result.peak_bytes for result in plans), default=0):
            self._warn_once(
                step,
                "outputs of the step before were held until this step was over, which may have exceeded its budget of %s by %s: "
                "later steps leave room for them",
                step.budget,
                format_bytes(outlived),
            )

    def _note_cleared(self, step: KnownStep, recorder: StepRecorder) -> None:
        if not recorder.existing:
            return
        missed_bytes = step.note_cleared(recorder)
        expected = self._expected
        if expected is not None and expected is not step and expected.kind == step.kind:
            missed_bytes += expected.note_cleared(recorder)  # its plan was made from these equal graphs
        if missed_bytes:
            _log.warning(
                "gradients that were expected to be set to None before the backward were not, which may have exceeded the budget "
                "of %s by %s: later steps leave room for them",
                step.budget,
                format_bytes(missed_bytes),
            )

    def plan(self, first: PlannedGraph, args: Sequence[Any], *, watched: bool) -> StepPlan | None:
        """The plan of the step that probably begins with a graph: the kind that followed the same step before, or the newest.

        None for a first step, and if its graphs run as they were compiled. ``watched`` is whether eager code is seen in this
        step. If eager code was not seen before, nor in an equal step, the step is planned when it begins once more: until then
        the bytes of its eager code are unknown.
        """
        known = self._known.get(id(first)) or self._compiled_before(first, args)
        step = self._followed.get((id(self._newest), id(first)), known[-1]) if known else None
        if step is not None and not step.recorder.watched and not step.is_alone:
            kind = step.kind
            before = [*known, *self._compiled_before(first, args)]
            seen = (known for known in before if known.recorder.watched and known.kind == kind)
            step = next(seen, None if watched else step)
        if step is not None and step.recorder.forwards[0].planned is not first:
            once = not any(other.compiled_again for other in known)
            step.note_compiled_again()
            if once and first.chunks is not None:  # pieces are made from nodes of a graph: it is recorded again with this one
                step = None
        self._expected = step
        return None if step is None else self._plan_of(step, args)

    def record_to_follow(self, first: PlannedGraph) -> StepRecorder | None:
        """The record that the present step follows, which begins with a graph; None if it is recorded itself."""
        return None if self._expected is None else self._expected.record_to_follow(first)

    def note_compiled_again(self) -> None:
        """Note that the present step runs a graph that is equal to the graph in its plan, but not the same object."""
        if self._expected is not None:
            self._expected.note_compiled_again()

    @property
    def eager_bytes(self) -> int:
        """Peak bytes of eager code in the newest step."""
        return 0 if self._newest is None else self._newest.recorder.eager_peak_bytes

    @property
    def begin_as_compiled(self) -> bool:
        """Whether no graph has to be compiled for the plan of a step that was seen."""
        return not self._allotments and not self._traces_again

    def allotment(self, graph: Graph, budget: Budget) -> StepAllotment | None:
        """The bytes that a graph may take in the plan of its step, for which it is compiled again; None if there is no plan."""
        return self._allotments.get(key_of(graph, budget)) if self._allotments else None

    def _compiled_before(self, first: PlannedGraph, args: Sequence[Any]) -> list[KnownStep]:
        """Steps that began with a graph equal to one that Dynamo has compiled again, and with the same parameters."""
        if not first.replaceable or first.ranks is not None:
            return []
        leaves = {id(a) for a in args if isinstance(a, torch.Tensor) and a.is_leaf and a.requires_grad}
        known = [(step, step.recorder.forwards[0]) for steps in self._known.values() for step in steps]
        return [step for step, run in known if run.planned.key == first.key and {id(leaf()) for _, leaf in run.leaves} == leaves]

    def _plan_of(self, step: KnownStep, args: Sequence[Any]) -> StepPlan | None:
        storages = step.gradient_storages()
        self.bare = not storages
        gradients = step.gradients(self.sources, frozenset() if self.bare else None)
        before, ignored_bytes = step.plans.get(gradients), step.ignored_bytes
        counted = step.first.device.type == "cuda"  # by the allocator
        if counted:
            self._look(step, storages, args)
        earlier = self._earlier(step, storages, gradients)
        has_room = before is not None and before.leaves_room(earlier, ignored_bytes)
        if (not counted and step.look) or (any(earlier) and not has_room):
            gc.collect()  # compilation leaves cycles of frames, which hold outputs of the first step
            self._look(step, storages, args)
            earlier = self._earlier(step, storages, gradients)
        if before is None:
            step.plans[gradients] = self._first_plan(step, gradients, storages, earlier)
        elif not before.leaves_room(earlier, ignored_bytes):
            room = StepRoom(gradients, step.kept_bytes(gradients, storages), earlier)
            step.plans[gradients] = self._planned_for_more(step, room, before)
        return step.plans[gradients].plan

    def _first_plan(self, step: KnownStep, gradients: Gradients, storages: dict[int, int], earlier: tuple[int, ...]) -> KnownPlan:
        """A plan next to the tensors that earlier steps left; if there is none, a plan for which gradients are freed in time."""
        room = StepRoom(gradients, step.kept_bytes(gradients, storages), earlier)
        fewer = step.gradients(self.sources, cleared=gradients.existing | gradients.cleared)
        cleared = StepRoom(fewer, step.kept_bytes(fewer, storages), self._earlier(step, storages, fewer))
        excess_bytes = room.gradient_bytes - cleared.gradient_bytes if step.first.ranks is None else 0
        try:
            with beyond_room(excess_bytes == 0):
                return self._planned(step, room)
        except (InfeasibleBudgetError, PlanNotFoundError):
            if not excess_bytes:
                raise
        plan = self._planned(step, cleared)
        _log.warning(
            "no plan keeps the budget of %s beside the gradients of the step before: it may be exceeded by %s where they exist "
            "in the backward",
            step.budget,
            format_bytes(excess_bytes),
        )
        step.plans[fewer] = plan
        return replace(plan, earlier=earlier)

    def _look(self, step: KnownStep, gradients: dict[int, int], args: Sequence[Any]) -> None:
        """Find out which memory exists besides a step that is about to begin: optimizer state, copies, data, other models.

        The inputs of the step are assumed to exist already, with the sizes that were recorded.
        """
        record, first = step.recorder, step.first
        memory = device_memory(first.device)
        step.look.looked(memory.total_bytes)
        known = gradients | {key: left.size_bytes for key, left in self._outliving.alive(record, gradients).items()}
        known |= {storage_key(copy): current_bytes(copy) for copy in RESIDENTS.of(step.given)}
        inputs = step.resident_bytes
        if first.dynamic:  # the record has the most bytes that inputs can have
            now = [a for a in args if isinstance(a, torch.Tensor)]
            recorded = {seen for seen in record.runs[0].given if seen is not None}
            inputs += unique_bytes(now, current_bytes) - sum(seen.size_bytes for seen in recorded)
        outside = memory.besides(known) - inputs - first.counted_bytes - self._outliving.unseen_bytes(record)
        if first.device.type == "cuda" and outside == step.outside:
            return  # no optimizer has made its state since; to find one takes a look at all objects
        step.outside = outside
        trained = [t for leaf in step.leaves if (t := leaf()) is not None]
        step.outside_bytes = max(0, outside) + state_to_come_bytes(trained, first.device)

    def _earlier(self, step: KnownStep, storages: dict[int, int], gradients: Gradients) -> tuple[int, ...]:
        """Bytes in each interval besides the inputs and results of the step; gradients that the step clears are included."""
        found = self._outliving.bytes_from_earlier_steps(step.recorder, storages)
        earlier = [step.outside_bytes + size for size in found]
        for size, last in step.cleared_storages(gradients).values() if storages else ():
            earlier[: last + 1] = [before + size for before in earlier[: last + 1]]
        # Ranks agree on resident bytes, and stop if their graphs differ.
        return tuple(earlier) if step.first.ranks is None else (max(earlier),) * len(earlier)

    def _planned_for_more(self, step: KnownStep, room: StepRoom, before: KnownPlan) -> KnownPlan:
        """A plan that leaves room for more tensors of earlier steps than the plan before; that plan if there is no other."""
        # If a script holds more and more, such as a list of predictions, more room after each plan makes planning rare.
        more = max(0, *(now - then for now, then in zip(room.earlier, before.earlier, strict=True)))
        ahead = more * (2**before.grown - 1)
        rooms = [replace(room, earlier=tuple(now + ahead for now in room.earlier)), room] if ahead else [room]
        for each in rooms if step.first.ranks is None else []:  # other ranks may have no reason to plan
            with contextlib.suppress(InfeasibleBudgetError, PlanNotFoundError):
                return replace(self._planned(step, each), grown=before.grown + 1)
        self._warn_once(
            step,
            "tensors besides the step, such as optimizer state, copies of the model or outputs that are held, take %s more than "
            "when the step was planned, and no plan was found that keeps the budget of %s beside them: the plan before is used, "
            "and may exceed it by as much",
            format_bytes(more),
            step.budget,
        )
        return KnownPlan(before.plan, room.earlier, grown=before.grown + 1)

    def _warn_once(self, step: KnownStep, message: str, *args: Any) -> None:
        if id(step) not in self._warned:
            self._warned.add(id(step))
            _log.warning(message, *args)

    def _planned(self, step: KnownStep, room: StepRoom) -> KnownPlan:
        """The outcome of the decision about a step."""
        graphs = [run.planned for run in step.recorder.runs]
        allotted = self._allotments.get(step.first.key) if self._allotments else None
        fused = [planned for planned in graphs if not planned.replaceable]
        compiled_for_plan = bool(fused and self._allotments) and all(planned.key in self._allotments for planned in fused)
        match step.facts(room, allotted, compiled_for_plan).decide():
            case PlanDecision.PLAN:
                return self._planned_as_one(step, room)
            case PlanDecision.COMPILE_FOR_LESS:
                less = step.most_bytes(allotted, room.earlier) - max(room.earlier)
                _log.info("compiled again for %s beside what earlier steps hold", format_bytes(less))
                self._allot(step.first, StepAllotment.of_only_graph(less))
            case PlanDecision.TRACE_AGAIN:
                cached = [planned for planned in graphs if planned.joint is None]
                _log.info("compiled again for its step: the code of %d graphs came from a cache", len(cached))
                self._traces_again = True
                for planned in cached:
                    planned.recompile()
            case PlanDecision.KEEP:
                pass
        return KnownPlan(None, room.earlier)

    def _planned_as_one(self, step: KnownStep, room: StepRoom) -> KnownPlan:
        RESIDENTS.forget(step.given)  # ops are measured in the room of the budget
        plan = plan_step(step.recorder, room, whole_ops=step.compiled_again)
        only_graph = len(step.recorder.runs) == 1
        _log.info(
            "the step runs %d graphs: planned as one, peak %s", len(step.recorder.runs), format_bytes(plan.result.peak_bytes)
        )
        if all(planned.replaceable for planned in plan.graphs):
            return KnownPlan(plan, room.earlier)
        free = plan.result.budget_bytes - plan.result.peak_bytes
        for planned, program in zip(plan.graphs, plan.programs, strict=True):
            if program is not None:
                order, memory = program.result.plan.order, program.memory.plus(free)
                # Only eager code runs next to a single graph, which may save other tensors than the plan.
                alone = StepAllotment.of_only_graph(memory.peak_bytes, order, step.eager_bytes)
                self._allot(planned, alone if only_graph else StepAllotment(order, memory))
        return KnownPlan(None, room.earlier)

    def _allot(self, planned: PlannedGraph, allotment: StepAllotment) -> None:
        planned.recompile()  # first: after an interrupt, a graph with an allotment must count as compiled for it
        self._allotments[planned.key] = allotment

    def _compile_again(self, step: KnownStep) -> None:
        """Plan a step now. Those of its graphs that have to be compiled again are compiled at their next call."""
        gradients = step.gradients(self.sources, step.recorder.existing)
        nothing = (step.first.outside_bytes,) * (len(step.recorder.segments) + 1)
        with contextlib.suppress(CheckmateError):  # raised when the step begins again
            step.plans[gradients] = self._planned(step, StepRoom(gradients, step.recorder.gradient_bytes, nothing))
