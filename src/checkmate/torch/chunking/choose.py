"""Chooses the groups of regions that run piece by piece, so as to find the fastest plan within the budget.

Each set of groups is another graph. First, groups are added until the floor is within the budget, each time the group that lowers
it most. Then each further group is added if the plan gets faster. At last, each group is removed if the plan gets no slower.

The bound of the answer is the least of the bounds of all graphs for which a plan was found. It says how far the plan can be from
the best plan with any of these sets, and nothing about other sets.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from torch import fx

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.planner import near_smallest
from checkmate.solvers.bounds.floor import floor
from checkmate.torch.chunking.program import NotChunkable
from checkmate.torch.chunking.region_groups import Chunks, RegionGroup, region_groups
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.graph.traced import copy_graph
from checkmate.torch.measure.resident import beyond_room
from checkmate.torch.passes.losses import fill_without_input, pick_before_reducing

_log = logging.getLogger("checkmate.torch")

_LEAST_GAIN: Final = 0.002
"""Share of a cost or of a peak that another set must save. Costs are not known more exactly."""

_SMALLEST_S: Final = 1.0
"""Most seconds of a search for a plan of a small peak."""


class HasGraph(Protocol):
    """A captured step."""

    @property
    def graph(self) -> Graph:
        """The graph to plan."""
        ...


CapturedT = TypeVar("CapturedT", bound=HasGraph)


@dataclass(frozen=True, eq=False, slots=True)
class ChunkableStep(Generic[CapturedT]):
    """A step whose joint modules can be changed before it is planned."""

    whole: CapturedT  # as captured: nothing runs piece by piece
    joints: tuple[fx.GraphModule, ...]
    captured: Callable[[Sequence[fx.GraphModule]], CapturedT]  # captures the step with other joint modules


def cuttable(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint module in which losses can be cut."""
    graph = copy_graph(joint.graph)
    pick_before_reducing(graph)
    fill_without_input(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)


class ChunkChoices(Generic[CapturedT]):
    """Variants of a step: each set of groups that run piece by piece gives another graph to plan.

    After ``until``, a value of ``time.perf_counter()``, a new set raises `TimeoutError`.
    """

    def __init__(self, step: ChunkableStep[CapturedT], chunks: Chunks, until: float | None = None) -> None:
        self._step, self._chunks, self._until = step, chunks, until
        self._known: dict[frozenset[RegionGroup], CapturedT] = {frozenset(): step.whole}

    @cached_property
    def groups(self) -> list[RegionGroup]:
        """The groups to choose from: the four that save most bytes, and other ways to run the same regions."""
        began = time.perf_counter()
        found: list[RegionGroup] = []
        for joint in self._joints:
            found += region_groups(joint.graph, self._chunks)
        _log.debug("found %d groups of regions in %.1f s", len(found), time.perf_counter() - began)
        found.sort(key=lambda group: group.saved_bytes, reverse=True)
        first: list[RegionGroup] = []
        for group in found:
            if len(first) < 4 and not any(group.excludes(other) for other in first):
                first.append(group)
        return [group for group in found if any(group.excludes(other) for other in first)]

    @cached_property
    def _joints(self) -> list[fx.GraphModule]:
        return [cuttable(joint) for joint in self._step.joints]

    def captured(self, groups: tuple[RegionGroup, ...]) -> CapturedT:
        """The step with some groups in pieces.

        Raises `NotChunkable` if regions of these groups wait for each other.
        """
        if self._until is not None and time.perf_counter() > self._until:
            raise TimeoutError
        key = frozenset(groups)
        if key not in self._known:
            chunk_ops = [op for group in groups for op in group.chunk_ops]
            modules = list(self._step.joints)
            for i, joint in enumerate(self._joints):
                inside = [op for op in chunk_ops if op.stage.region.seed.graph is joint.graph]
                if inside:
                    modules[i] = with_regions(joint, inside)
            self._known[key] = self._step.captured(modules)
        return self._known[key]

    def below(self, budget_bytes: int) -> tuple[RegionGroup, ...]:
        """Groups with which the floor is within a budget, or as low as possible, by adding the group that lowers it most."""
        chosen: list[RegionGroup] = []
        lowest = self._bytes(chosen, _floor_bytes)
        while lowest > budget_bytes:
            added: list[tuple[RegionGroup, ...]] = [(group,) for group in self._addable(chosen)]
            floors = {groups: self._bytes([*chosen, *groups], _floor_bytes) for groups in added}
            best = min(floors, key=floors.__getitem__, default=())
            if floors.get(best, lowest) >= lowest:  # the first layer and the others, for example, may need as much
                best = self._compatible(chosen)
                floors[best] = self._bytes([*chosen, *best], _floor_bytes)
                if floors[best] >= lowest:
                    break
            chosen += best
            lowest = floors[best]
        return tuple(chosen)

    def smallest(self, search_s: float = _SMALLEST_S) -> tuple[RegionGroup, ...]:
        """Groups with which the smallest peak is low: those that lower the floor, and perhaps others that lower the peak further.

        Quick searches choose the latter groups, and can be wrong by more than these save. Therefore a search of ``search_s``
        seconds each decides whether they are added.
        """
        below = self.below(0)
        chosen = list(below)
        lowest = self._bytes(chosen, _smallest_bytes)
        for group in [group for group in self.groups if group.most_pieces]:
            if group in self._addable(chosen):
                peak = self._bytes([*chosen, group], _smallest_bytes)
                if peak < (1 - _LEAST_GAIN) * lowest:
                    chosen.append(group)
                    lowest = peak
        if len(chosen) == len(below):
            return below
        searched = partial(_smallest_bytes, search_s=search_s, enough_bytes=0)
        return min((below, tuple(chosen)), key=lambda groups: self._bytes(groups, searched))

    def floors(self) -> list[int]:
        """The floors of all steps that were captured."""
        return [_floor_bytes(captured.graph) for captured in self._known.values()]

    def _addable(self, chosen: Sequence[RegionGroup]) -> list[RegionGroup]:
        """Groups in their most pieces, without those that share an op with the chosen groups."""
        return [group for group in self.groups if group.most_pieces and not any(group.excludes(other) for other in chosen)]

    def _compatible(self, chosen: Sequence[RegionGroup]) -> tuple[RegionGroup, ...]:
        """Groups that can be added together."""
        found: list[RegionGroup] = []
        for group in self._addable(chosen):
            if not any(map(group.excludes, found)):
                found.append(group)
        return tuple(found)

    def _bytes(self, groups: Sequence[RegionGroup], of: Callable[[Graph], int]) -> int:
        try:
            return of(self.captured(tuple(groups)).graph)
        except NotChunkable:
            return sys.maxsize


def _floor_bytes(graph: Graph) -> int:
    return floor(graph).peak_bytes


def _smallest_bytes(graph: Graph, search_s: float = _SMALLEST_S, enough_bytes: int | None = None) -> int:
    return near_smallest(graph, search_s, enough_bytes).peak_bytes


@dataclass(frozen=True, eq=False, slots=True)
class _Trial(Generic[CapturedT]):
    """A set of groups with the plan that was found for it, or the smallest peak."""

    captured: CapturedT
    groups: tuple[RegionGroup, ...]
    result: Result | None
    smallest_bytes: int

    def is_better_than(self, other: _Trial[CapturedT]) -> bool:
        """Whether its plan is faster, or its smallest peak is lower if neither has a plan."""
        if self.result is None:
            return other.result is None and self.smallest_bytes < (1 - _LEAST_GAIN) * other.smallest_bytes
        return other.result is None or self.result.cost < (1 - _LEAST_GAIN) * other.result.cost


def choose_chunks(
    step: ChunkableStep[CapturedT],
    chunks: Chunks,
    budget_bytes: int,
    time_limit_s: float | None,
    solve: Callable[[CapturedT, float | None], Result],
) -> tuple[CapturedT, Result] | None:
    """The fastest plan found within a budget over sets of regions that run piece by piece, with the step that it plans.

    Its overhead refers to computing every op of the given step once. None if keeping everything keeps the budget.

    Raises `InfeasibleBudgetError`, whose floor holds for all graphs, or `PlanNotFoundError` if none has a plan for the budget.
    """
    if keep_all_bytes(step.whole.graph) <= budget_bytes:
        return None
    choices = ChunkChoices(step, chunks)

    def planned(groups: tuple[RegionGroup, ...], time_s: float | None) -> _Trial[CapturedT]:
        try:
            captured = choices.captured(groups)
        except NotChunkable:
            return _Trial(step.whole, groups, None, sys.maxsize)
        # A quarter of the time goes to whether there is a plan: a refusal would search for the smallest peak for much longer.
        smallest = near_smallest(captured.graph, min(_SMALLEST_S, _share(0.25, time_s) or _SMALLEST_S), budget_bytes).peak_bytes
        try:
            result = solve(captured, _share(0.75, time_s)) if smallest <= budget_bytes else None
        except PlanNotFoundError:  # its windows are too narrow for the plan
            result = None
        return _Trial(captured, groups, result, smallest)

    whole: Result | None = None
    if chunks.exact:
        # The test of the bits of exact pieces takes seconds, which is not worth it if a plan of whole ops is cheap.
        whole = planned((), _share(0.1, time_limit_s)).result
        time_limit_s = _share(0.9, time_limit_s)
        if whole is not None and whole.overhead <= 1.1:
            return step.whole, solve(step.whole, time_limit_s)
    with beyond_room(whole is None):
        groups = choices.groups
    if not groups:
        return step.whole, solve(step.whole, time_limit_s)
    trial_s = _share(0.5 / (1 + 2 * len(groups)), time_limit_s)
    tried = _trials(choices, budget_bytes, lambda of: planned(of, trial_s))
    best = tried[0]
    if best.result is None:
        # Its refusal names a budget. For that budget this set is chosen again if no other set has a plan.
        best = planned(choices.smallest(_share(0.2, time_limit_s) or _SMALLEST_S), trial_s)
        tried.append(best)
    try:
        result = solve(best.captured, _share(0.5, time_limit_s))
    except InfeasibleBudgetError as error:
        raise _refusal(error, choices.floors()) from None
    bounds = [trial.result.bound for trial in tried if trial.result is not None and trial is not best]
    return best.captured, _with_bounds(result, best.groups, [*bounds, result.bound], step.whole.graph)


def _trials(
    choices: ChunkChoices[CapturedT], budget_bytes: int, planned: Callable[[tuple[RegionGroup, ...]], _Trial[CapturedT]]
) -> list[_Trial[CapturedT]]:
    """All sets of groups that were planned, the best first."""
    best = planned(choices.below(budget_bytes))
    tried = [best]
    for group in choices.groups:
        # Fewer pieces of a region take more memory: they are tried for a region that runs in pieces anyway.
        if group not in best.groups and (group.most_pieces or any(map(group.is_fewer_pieces_of, best.groups))):
            tried.append(planned((*(other for other in best.groups if not other.excludes(group)), group)))
            best = tried[-1] if tried[-1].is_better_than(best) else best
    for group in best.groups if len(best.groups) > 1 else ():
        tried.append(planned(tuple(other for other in best.groups if other is not group)))
        best = best if best.is_better_than(tried[-1]) else tried[-1]
    return [best, *(trial for trial in tried if trial is not best)]


def _share(share: float, time_s: float | None) -> float | None:
    """Part of a time, if the time is limited."""
    return None if time_s is None else share * time_s


def with_smallest_peak(step: ChunkableStep[CapturedT], chunks: Chunks, budget_bytes: int | None = None) -> CapturedT:
    """A step with the groups of regions piece by piece that lower its smallest peak.

    The bits of exact pieces have to be tested. Exact pieces are tried only if a budget is known, and no plan within the budget is
    found quickly.
    """
    if chunks.exact and (
        budget_bytes is None or near_smallest(step.whole.graph, _SMALLEST_S, budget_bytes).peak_bytes <= budget_bytes
    ):
        return step.whole
    choices = ChunkChoices(step, chunks)
    with beyond_room(allowed=True):
        return choices.captured(choices.smallest())


def with_offer(error: InfeasibleBudgetError, step: ChunkableStep[CapturedT], chunks: Chunks) -> InfeasibleBudgetError:
    """A refusal that says how much running ops piece by piece would help: in bytes, if that is known within three seconds."""
    within_s = 3.0
    try:
        if 3 * step.whole.graph.cost > within_s * 1e9:  # to measure the ops that run its regions would take about as long
            raise TimeoutError
        choices = ChunkChoices(step, chunks, time.perf_counter() + within_s)
        peak = _smallest_bytes(choices.captured(choices.smallest()).graph)
    except TimeoutError:
        return error.with_hint(f'{error.hint}; chunking="auto" may need less: it runs ops piece by piece')
    if peak >= (error.smallest_bytes or error.floor_bytes):
        return error
    enough = "this budget" if peak <= error.budget_bytes else format_at_least(peak)
    return error.with_hint(f'{error.hint}; with chunking="auto", which runs ops piece by piece, {enough} is enough')


def _refusal(error: InfeasibleBudgetError, floors: Sequence[int]) -> InfeasibleBudgetError:
    """The refusal of one set of regions in pieces, with a floor that holds for all sets that were tried."""
    least = min(floors)
    if least >= error.floor_bytes:
        return error
    return InfeasibleBudgetError(
        f"{error.message}; other regions in pieces, for which no such plan was found, take at least {format_bytes(least)}",
        hint=error.hint,
        budget_bytes=error.budget_bytes,
        floor_bytes=least,
        smallest_bytes=error.smallest_bytes,
        binding_op=error.binding_op,
    )


def _with_bounds(result: Result, groups: Sequence[RegionGroup], bounds: Sequence[float], whole: Graph) -> Result:
    """The result of a set, with figures that refer to the graph without chunks and to all graphs that were planned."""
    pieces = [f"in pieces: {group.description}" for group in groups]
    covered = f"the bound covers the {len(bounds)} sets of regions in pieces for which a plan was found"
    if groups:
        _log.info("%s", "; ".join([*pieces, covered]))
    return msgspec.structs.replace(
        result,
        overhead=result.cost / whole.cost,
        bound=min(bounds),
        gap=max(0.0, (result.cost - min(bounds)) / result.cost),
        remarks=(*result.remarks, *pieces, covered) if groups else result.remarks,
    )
