"""Plans a step from what was recorded of it: one problem over all of its graphs, one order for each."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import msgspec
from torch import fx

from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.counted_memory import counted_bytes, resolved_budget
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import planner_for, result_of_order
from checkmate.frontend.step_graph import StepGraph, step_graph
from checkmate.studies.larger_step import plan_of_larger, remember
from checkmate.torch.chunking.choose import ChunkableStep, choose_chunks, with_offer
from checkmate.torch.distributed.plan_on_rank0 import plan_on_rank0
from checkmate.torch.joint.capture import part_of
from checkmate.torch.measure.allocator import ReservedMemory
from checkmate.torch.measure.profiler import announce_measurements
from checkmate.torch.measure.resident import within_room
from checkmate.torch.partition.split import MOST_ROOMS, CapturedJoint
from checkmate.torch.steps.observation import observed_step
from checkmate.torch.steps.program import PlannedGraph, Program
from checkmate.torch.steps.recorder import StepRecorder

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """The plan of a step.

    Attributes:
        graphs: The graph of each forward.
        programs: The program of each forward; None for one whose backward does not run.
        result: Plan of the whole step, with its cost, peak and their bounds.
        graph: The graph of the whole step.
    """

    graphs: tuple[PlannedGraph, ...]
    programs: tuple[Program | None, ...]
    result: Result
    graph: Graph

    @property
    def in_pieces(self) -> bool:
        """Whether regions of any graph run piece by piece."""
        return any(program is not None and program.in_pieces for program in self.programs)


@dataclass(frozen=True, slots=True, eq=False)
class _CapturedStep:
    """The captured graphs of a step and the graph of the whole.

    Attributes:
        joints: The graph of each run.
        windows: The graph of the step, with the windows in which the ops of each graph run.
        graph: The same with the figures that ranks agreed on.
    """

    joints: tuple[CapturedJoint, ...]
    windows: StepGraph
    graph: Graph


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempts:
    """Parameters of planning a step.

    Attributes:
        most: The most times that a step is planned. A plan whose computations had to be moved into the windows of their graphs
            may take more than before; the next one has that much less. In the steps that were tried only views were moved.
    """

    most: int = 3


_ATTEMPTS = Attempts()

_LEAST_LEFT = 0.05
"""Least share of the time limit for a step, whatever the searches for its graphs took."""


def plan_step(
    recorder: StepRecorder,
    gradient_bytes: int,
    existing: frozenset[tuple[int, int]],
    accumulated: Sequence[frozenset[int]],
    carried: Sequence[int] = (),
    *,
    by_call: Mapping[int, Mapping[int, int]] = MappingProxyType({}),
    whole_ops: bool = False,
    final: bool = True,
) -> StepPlan:
    """Plan a step that was recorded.

    Args:
        recorder: The step.
        gradient_bytes: Gradients that exist before it.
        existing: Run and input of the leaves that have a gradient before it.
        accumulated: Inputs to whose gradients the backward adds, for each run.
        carried: Bytes besides what the graphs are given and make, at each gap: tensors of earlier steps, and all others.
        by_call: Bytes of `carried` that are freed in a gap, by the call of a compiled function at whose end that is.
        whole_ops: Whether nothing may run piece by piece.
        final: Whether its refusal is what the user reads: it then says what running ops piece by piece would help.

    Raises:
        InfeasibleBudgetError: No plan keeps the budget.
        PlanNotFoundError: No plan was found in time.
        RankError: The ranks ran different steps, or planning failed on rank 0.
    """
    graphs = tuple(run.planned for run in recorder.runs)
    extra = max(g.resident.total_bytes - g.resident.gradients_bytes - g.outside_bytes for g in graphs)  # `carried` has the latter
    extra += sum(run.planned.random_state_bytes for run in recorder.runs if run.undefined)
    places = [(run.planned, run.undefined, added) for run, added in zip(recorder.runs, accumulated, strict=True)]

    def captured(joints: Sequence[CapturedJoint]) -> _CapturedStep:
        parts = [part_of(joint.capture) for joint in joints]
        windows = step_graph(observed_step(recorder, parts, extra + gradient_bytes, existing, carried, by_call))
        return _CapturedStep(tuple(joints), windows, windows.graph)

    joints, room = [planned.captured(undefined, added) for planned, undefined, added in places], -1
    first = graphs[0]
    if len({g.budget for g in graphs}) > 1:  # all of them hold for the process
        whole = captured(joints).graph
        first = min(graphs, key=lambda g: resolved_budget(g.budget, whole, g.options.counted))

    def room_beside(step: _CapturedStep) -> int:
        room = resolved_budget(first.budget, step.graph, first.options.counted) - step.graph.resident_bytes
        return room - max(carried, default=0) + min(carried, default=0)  # the rest is freed in the step

    spent_s = recorder.searched_s
    for _ in range(MOST_ROOMS):
        if not any(joint.has_estimates for joint in joints):
            break
        more = room_beside(captured([joint.without_guesses() for joint in joints]))
        if more <= room:
            break
        with within_room(room := more):  # a share is one of what workspace takes too
            joints = [planned.measured(undefined, added) for planned, undefined, added in places]
    while True:
        as_it_is = captured(joints)
        chunkable = _chunkable(as_it_is, captured)
        room = room_beside(as_it_is)
        try:
            with within_room(room):
                pieces = None if whole_ops else _in_pieces(first, chunkable, spent_s)
                step, result = pieces or _agreed(first, as_it_is, spent_s)
            break
        except InfeasibleBudgetError as error:
            if first.ranks is None and announce_measurements(joint.capture.joint.graph for joint in joints):
                joints = [planned.measured(undefined, added) for planned, undefined, added in places]
                continue
            if final and error.binding_op and first.offered is not None:
                with within_room(room):
                    raise with_offer(error, chunkable, first.offered) from None
            raise
    remember(first.budget, as_it_is.graph, result, whole=step.joints == as_it_is.joints)
    if isinstance(first.options.counted, ReservedMemory):
        first.options.counted.prepare(step.graph, result.plan)
    orders = step.windows.cut(result.plan.order)
    with within_room(room):
        programs = {
            run: run.planned.program(run.undefined, added, order, joint)
            for run, added, order, joint in zip(recorder.runs, accumulated, orders, step.joints, strict=True)
        }
    forwards = recorder.forwards
    return StepPlan(tuple(f.planned for f in forwards), tuple(programs.get(f) for f in forwards), result, step.graph)


def _agreed(first: PlannedGraph, step: _CapturedStep, spent_s: float) -> tuple[_CapturedStep, Result]:
    """The plan of a step. Where several ranks plan together, rank 0 makes it for all of them."""

    def plan(graph: Graph) -> Result:
        now = replace(step, graph=graph)
        return _of_larger(first.options, now) or _plan(first.options, now, spent_s)

    if first.ranks is None:
        return step, plan(step.graph)
    graph, result = plan_on_rank0(first.ranks, step.graph, f"a budget of {first.budget} for a step", plan)
    return replace(step, graph=graph), result


def _chunkable(
    whole: _CapturedStep, captured: Callable[[Sequence[CapturedJoint]], _CapturedStep]
) -> ChunkableStep[_CapturedStep]:
    """A step whose regions can run piece by piece.

    Args:
        whole: The step as it is.
        captured: The step with other graphs.
    """
    joints = list(dict.fromkeys(whole.joints))  # a graph may run several times in a step

    def changed(modules: Sequence[fx.GraphModule]) -> _CapturedStep:
        pairs = zip(joints, modules, strict=True)
        new = {joint: joint if module is joint.capture.joint else joint.in_pieces(module) for joint, module in pairs}
        return captured([new[joint] for joint in whole.joints])

    return ChunkableStep(whole, tuple(joint.capture.joint for joint in joints), changed)


def _in_pieces(first: PlannedGraph, step: ChunkableStep[_CapturedStep], spent_s: float) -> tuple[_CapturedStep, Result] | None:
    """The fastest plan found if regions may run piece by piece; None if none may, or there is nothing to gain.

    Args:
        first: The graph whose budget and time limit hold.
        step: The step.
        spent_s: Seconds of the time limit that were used before.
    """
    if first.chunks is None:
        return None
    known = _of_larger(first.options, step.whole)
    if known is not None:
        return step.whole, known
    budget_bytes = resolved_budget(first.budget, step.whole.graph, first.options.counted)
    options = replace(first.options, budget=first.budget.with_total(budget_bytes, step.whole.graph))
    left = max(_LEAST_LEFT, 1 - spent_s / options.time_limit_s) if options.time_limit_s else 1.0

    def solve(variant: _CapturedStep, time_s: float | None) -> Result:
        if time_s is None:
            return _plan(options, variant)
        # Plans are stored with the limit and not with what is left of it, which depends on what this process had to search.
        limit_s = time_s / left
        return _plan(replace(options, time_limit_s=limit_s), variant, limit_s - time_s)

    left_s = None if options.time_limit_s is None else left * options.time_limit_s
    return choose_chunks(step, first.chunks, budget_bytes, left_s, solve)


def _of_larger(options: PlanningOptions, step: _CapturedStep) -> Result | None:
    """The plan of a smaller batch of a step that was planned; None where there is none."""
    if options.plan is not None:
        return None
    return plan_of_larger(options.budget, step.graph, options.counted, step.windows.within_windows)


def _plan(options: PlanningOptions, step: _CapturedStep, spent_s: float = 0.0) -> Result:
    """A plan in which every computation runs in a window of the graph that it belongs to.

    Args:
        options: Budget, solver and time limit.
        step: The step.
        spent_s: Seconds of the time limit that were used before.
    """
    graph, windows = step.graph, step.windows
    assert options.budget is not None
    limit = target = resolved_budget(options.budget, graph, options.counted)
    for _ in range(_ATTEMPTS.most):
        now = replace(options, budget=options.budget.with_total(target))
        result = planner_for(now, spent_s)(graph)
        spent_s += result.elapsed_s
        moved = result_of_order(graph, windows.within_windows(result.plan.order))
        taken = counted_bytes(graph, moved, options.counted)
        if taken <= limit:
            return msgspec.structs.replace(
                result,
                plan=moved.plan,
                cost=moved.cost,
                overhead=moved.overhead,
                peak_bytes=moved.peak_bytes,
                budget_bytes=limit,
                gap=max(0.0, 1 - result.bound / moved.cost) if moved.cost else 0.0,
            )
        _log.info("computations moved to the windows of their graphs take %s too much", format_bytes(taken - limit))
        target -= taken - limit
    raise PlanNotFoundError(
        f"no plan of the step within {format_bytes(limit)} was found whose computations run where their graphs do",
        hint=f"raise the budget to at least {format_at_least(limit + (limit - target))}, or find the graph breaks with "
        "torch.compile(..., fullgraph=True)",
    )
