"""Plans a step from its record: one problem over all of its graphs, one order for each graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
from torch import fx

from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Fetch
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.counted_memory import counted_bytes, resolved_budget
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import order_of, planner_for, result_of_order
from checkmate.studies.larger_step import plan_of_larger, remember
from checkmate.torch.chunking.choose import ChunkableStep, choose_chunks
from checkmate.torch.distributed.consensus import plan_on_rank0
from checkmate.torch.joint.capture import CapturedGraph, captured_graph
from checkmate.torch.measure.allocator import ReservedMemory
from checkmate.torch.measure.profiler import announce_measurements
from checkmate.torch.measure.resident import within_room
from checkmate.torch.partition.split import CapturedJoint
from checkmate.torch.steps.program import PlannedGraph, Program
from checkmate.torch.steps.recorder import StepRecorder
from checkmate.torch.steps.run import Seen, SeenStorage
from checkmate.torch.steps.step_graph import ObservedStep, Segment, StepGraph, Storage, step_graph


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients that exist before a step."""

    existing: frozenset[int]  # identities of the leaves whose gradients exist in the backward, too
    # Inputs to whose gradients the backward of each run adds. Autograd adds to the others.
    accumulated: tuple[frozenset[int], ...]
    cleared: frozenset[int] = frozenset()  # leaves whose gradients are set to None before it, as by ``optimizer.zero_grad()``


@dataclass(frozen=True, slots=True)
class StepRoom:
    """Memory besides the step itself that a plan leaves room for."""

    gradients: Gradients
    gradient_bytes: int  # of those that exist in the backward too
    earlier: tuple[int, ...]  # by interval: bytes of earlier steps and of all else outside of the step


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The plan of a step."""

    graphs: tuple[PlannedGraph, ...]  # of each forward
    programs: tuple[Program | None, ...]  # of each forward; None for one whose backward does not run
    result: Result  # of the whole step
    graph: Graph

    @property
    def in_pieces(self) -> bool:
        """Whether regions of any graph run piece by piece."""
        return any(program is not None and program.in_pieces for program in self.programs)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    """The captured graphs of a step and the graph of the whole."""

    joints: tuple[CapturedJoint, ...]  # of each run
    stitched: StepGraph
    graph: Graph  # the same with the figures that ranks agreed on


def plan_step(recorder: StepRecorder, room: StepRoom, *, whole_ops: bool = False) -> StepPlan:
    """Plan a step that was recorded. With ``whole_ops`` nothing runs piece by piece."""
    return _StepPlanner(recorder, room).plan(whole_ops)


class _StepPlanner:
    def __init__(self, recorder: StepRecorder, room: StepRoom) -> None:
        self._recorder, self._room = recorder, room
        graphs = [run.planned for run in recorder.runs]
        self._runs = list(zip(recorder.runs, room.gradients.accumulated, strict=True))
        self._joints = [run.planned.captured(run.undefined, added) for run, added in self._runs]
        self._first = graphs[0]
        if len({g.budget for g in graphs}) > 1:  # all of them hold for the process
            whole = self._captured(self._joints).graph
            self._first = min(graphs, key=lambda g: resolved_budget(g.budget, whole, g.options.counted))

    def _captured(self, joints: Sequence[CapturedJoint]) -> _CapturedStep:
        stitched = step_graph(_Observation(self._recorder, self._room).step([captured_graph(joint.capture) for joint in joints]))
        return _CapturedStep(tuple(joints), stitched, stitched.graph)

    def _measurable_bytes(self, step: _CapturedStep) -> int:
        """Bytes that the budget leaves for measurements in addition to the step."""
        earlier = self._room.earlier
        budget_bytes = resolved_budget(self._first.budget, step.graph, self._first.options.counted)
        return budget_bytes - step.graph.resident_bytes - max(earlier) + min(earlier)  # the rest is freed in the step

    def _measure(self) -> None:
        self._joints = [run.planned.measured(run.undefined, added) for run, added in self._runs]

    def _measure_in_room(self) -> None:
        room = -1
        for _ in range(3):
            if not any(joint.has_estimates for joint in self._joints):
                return
            more = self._measurable_bytes(self._captured([joint.without_guesses() for joint in self._joints]))
            if more <= room:
                return
            with within_room(room := more):  # a share counts workspace too
                self._measure()

    def plan(self, whole_ops: bool) -> StepPlan:
        first = self._first
        self._measure_in_room()
        all_measured = False
        while True:
            as_it_is = self._captured(self._joints)
            room_bytes = self._measurable_bytes(as_it_is)
            try:
                with within_room(room_bytes):
                    step, result = self._solved(as_it_is, whole_ops)
                break
            except InfeasibleBudgetError:
                graphs = (joint.capture.joint.graph for joint in self._joints)
                if all_measured or first.ranks is not None or not announce_measurements(graphs):
                    raise
                self._measure()
                all_measured = True
        remember(first.budget, as_it_is.graph, result, whole=step.joints == as_it_is.joints)
        if isinstance(first.options.counted, ReservedMemory):
            first.options.counted.prepare(step.graph, result)
        orders = step.stitched.cut(order_of(result.plan))
        with within_room(room_bytes):
            programs = {
                run: run.planned.program(run.undefined, added, order, joint)
                for (run, added), order, joint in zip(self._runs, orders, step.joints, strict=True)
            }
        forwards = self._recorder.forwards
        return StepPlan(tuple(f.planned for f in forwards), tuple(programs.get(f) for f in forwards), result, step.graph)

    def _solved(self, step: _CapturedStep, whole_ops: bool) -> tuple[_CapturedStep, Result]:
        """The plan of a step. If several ranks plan together, rank 0 makes it for all of them."""
        first, options = self._first, self._first.options
        if first.ranks is not None:

            def plan(graph: Graph) -> Result:
                now = replace(step, graph=graph)
                return _of_larger(options, now) or _plan(options, now)

            graph, result = plan_on_rank0(first.ranks, step.graph, f"a budget of {first.budget} for a step", plan)
            return replace(step, graph=graph), result
        known = _of_larger(options, step)
        if known is not None or whole_ops or first.chunks is None:
            return step, known or _plan(options, step)
        budget_bytes = resolved_budget(first.budget, step.graph, options.counted)
        within = replace(options, budget=first.budget.with_total(budget_bytes, step.graph))

        def solve(variant: _CapturedStep, time_s: float | None) -> Result:
            return _plan(replace(within, time_limit_s=time_s), variant)

        pieces = choose_chunks(self._chunkable(step), first.chunks, budget_bytes, options.time_limit_s, solve)
        return pieces or (step, _plan(options, step))

    def _chunkable(self, whole: _CapturedStep) -> ChunkableStep[_CapturedStep]:
        """The step, with regions that can run piece by piece."""
        joints = list(dict.fromkeys(whole.joints))  # a graph may run several times in a step

        def changed(modules: Sequence[fx.GraphModule]) -> _CapturedStep:
            pairs = zip(joints, modules, strict=True)
            new = {joint: joint if module is joint.capture.joint else joint.in_pieces(module) for joint, module in pairs}
            return self._captured([new[joint] for joint in whole.joints])

        return ChunkableStep(whole, tuple(joint.capture.joint for joint in joints), changed)


def _of_larger(options: PlanningOptions, step: _CapturedStep) -> Result | None:
    """The plan of a smaller batch of a step that was planned; None if there is none."""
    if options.plan is not None or options.host is not None:
        return None

    def moved(order: Sequence[int]) -> list[int]:
        return [o for o in step.stitched.within_segments(order) if not isinstance(o, Fetch)]

    return plan_of_larger(options.budget, step.graph, options.counted, moved)


def _plan(options: PlanningOptions, step: _CapturedStep) -> Result:
    """A plan in which every computation runs in a segment of the graph that it belongs to."""
    graph = step.graph
    assert options.budget is not None
    limit = resolved_budget(options.budget, graph, options.counted)
    result = planner_for(replace(options, budget=options.budget.with_total(limit)))(graph)
    # In the steps that were tried only views were moved.
    moved = result_of_order(graph, step.stitched.within_segments(order_of(result.plan)), options.host)
    taken = counted_bytes(graph, moved, options.counted)
    if taken > limit:
        raise PlanNotFoundError(
            f"no plan of the step within {format_bytes(limit)} was found whose computations run where their graphs do",
            hint=f"raise the budget to at least {format_at_least(taken)}, or find the graph breaks with "
            "torch.compile(..., fullgraph=True)",
        )
    return msgspec.structs.replace(
        result,
        plan=moved.plan,
        cost=moved.cost,
        overhead=moved.overhead,
        peak_bytes=moved.peak_bytes,
        budget_bytes=limit,
        gap=max(0.0, 1 - result.bound / moved.cost) if moved.cost else 0.0,
    )


_Span = tuple[int, int]
"""First and last interval in which a storage is alive."""


class _Observation:
    """A recorded step as data for planning, after its end."""

    def __init__(self, record: StepRecorder, room: StepRoom) -> None:
        self._record, self._room, self._count = record, room, len(record.segments)
        self._number = {seen: number for number, seen in enumerate(record.storages)}
        # Bytes that earlier steps left and that are freed in this one, by interval.
        self._released = [now - then for now, then in zip(room.earlier, room.earlier[1:], strict=False)] + [0]
        self._spans: dict[SeenStorage, _Span] = {}  # of results of segments, and of storages that eager code held over one
        for seen in record.storages:
            last = self._count if seen.last is None else seen.last
            if seen.source is not None:
                self._spans[seen] = seen.source + 1, max(seen.source + 1, last)
            elif seen.eager is not None and not seen.brief:
                self._spans[seen] = seen.eager, last

    def step(self, graphs: Sequence[CapturedGraph]) -> ObservedStep:
        """The step, with the captured graph of each run."""
        record, room, index = self._record, self._room, {run: r for r, run in enumerate(self._record.runs)}
        segments = tuple(
            Segment(
                captured=index[run],
                backward=backward,
                given=self._numbers(run.tangents if backward else run.given),
                made=self._numbers(run.gradients if backward else run.made),
                eager_bytes=self._transient_bytes(w),
            )
            for w, (run, backward) in enumerate(record.segments)
        )
        crossing = {s for segment in segments for s in (*segment.given, *segment.made) if s is not None}
        storages = {number: self._storage(record.storages[number]) for number in crossing}
        released = (Storage(size_bytes=n, first=0, last=at, released=at > 0) for at, n in enumerate(self._released) if n > 0)
        for storage in (*self._eager_storages(crossing), *released):
            storages[len(record.storages) + len(storages)] = storage
        existing = room.gradients.existing
        gradients = [run.gradients[k] for run in record.runs for k in run.places(existing)]
        for run in record.runs:
            for k in run.places(run.existing - existing):  # it was added to a gradient, and now becomes the gradient itself
                if (gradient := run.gradients[k]) is not None:
                    number = self._number[gradient]
                    storages[number] = replace(storages[number], last=self._count)
        # The bytes that graphs looked up when they were compiled are among the bytes of earlier steps.
        resident = [run.planned.resident.total_bytes - run.planned.resident.gradients_bytes for run in record.runs]
        extra = max(size - run.planned.outside_bytes for size, run in zip(resident, record.runs, strict=True))
        extra += sum(run.planned.random_state_bytes for run in record.runs if run.undefined)
        return ObservedStep(
            graphs=tuple(graphs),
            segments=segments,
            storages=storages,
            eager_bytes=self._transient_bytes(self._count),
            resident_bytes=record.input_bytes + room.earlier[-1] + extra + room.gradient_bytes,
            accumulated=frozenset(self._number[s] for s in gradients if s and s.last is not None and s.last < self._count),
        )

    def _numbers(self, storages: Seen) -> tuple[int | None, ...]:
        return tuple(None if seen is None else self._number[seen] for seen in storages)

    def _storage(self, seen: SeenStorage) -> Storage:
        first, last = self._spans.get(seen, (None, self._count if seen.last is None else seen.last))
        return Storage(
            size_bytes=seen.size_bytes,
            first=None if seen.eager is None else first,
            last=last,
            overwritten=seen.overwritten,
            released=self._is_released(seen),
        )

    def _is_released(self, seen: SeenStorage) -> bool:
        """Whether a storage was freed between two segments in which eager code was seen.

        It may be freed before or after eager code allocates there. The peak of both together is known (`_transient_bytes`).
        """
        return self._record.watched and seen.freed_between

    def _eager_storages(self, crossing: set[int]) -> list[Storage]:
        """Storages that eager code alone uses: one for each pair of intervals between which it is alive."""
        sizes: dict[tuple[_Span, bool], int] = {}
        for seen, span in self._spans.items():
            if seen.eager is not None and self._number[seen] not in crossing:
                kind = span, self._is_released(seen)
                sizes[kind] = sizes.get(kind, 0) + seen.size_bytes
        return [
            Storage(size_bytes=size, first=first, last=last, released=early) for ((first, last), early), size in sizes.items()
        ]

    def _transient_bytes(self, interval: int) -> int:
        """Peak bytes in an interval, besides the storages that are alive there by the account of `step_graph`.

        The account has the results of earlier segments, as long as they live and at least to the interval after their segment,
        and the storages of eager code. Outputs of an earlier step are still held while the call runs that makes the new ones.
        """
        listed = sum(
            seen.size_bytes
            for seen, (first, last) in self._spans.items()
            if first <= interval <= last and not (last == interval and self._is_released(seen))
        )
        record, released = self._record, max(0, self._released[interval])
        inside = record.call_peaks[interval] + released if interval in record.call_peaks else 0
        return max(0, max(inside, record.peaks.get(interval, 0)) - listed)
