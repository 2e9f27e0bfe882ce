"""Choose which kinds of regions run piece by piece, so that the plan within the budget is the fastest found.

Each set of kinds is another graph. First kinds are added until the floor is within the budget, each time the one that lowers it
most; then one after the other if that makes the plan faster; then those are left out again without which it is no slower.

The bound of the answer is the least of the bounds of all graphs for which a plan was found: it says how far the plan can be from
the best one with any of these sets, and nothing about other sets.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
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
from checkmate.torch.chunking.kinds import Kind, kinds_of
from checkmate.torch.chunking.program import NotChunkable
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.measure.errors import ProfilerBusyError
from checkmate.torch.passes.loss_picks import make_ones_without_input, pick_before_reducing

_log = logging.getLogger("checkmate.torch")

_TRIALS_SHARE: Final = 0.5
"""Share of the time limit for the plans of all sets of kinds that are tried."""

_QUICK_SHARE: Final = 0.25
"""Share of the time for the plan of a set that is for whether there is one."""

_LAST_SHARE: Final = 0.5
"""Share of the time limit for the plan of the set that is chosen."""

_SMALLEST_S: Final = 1.0
"""Most seconds of a search for a plan of a small peak."""

_MOST_KINDS: Final = 4
"""Kinds that are tried, those that save most."""

_CHEAP: Final = 1.1
"""Overhead of a plan of whole ops up to which no exact pieces are looked for: their bits are tested, which takes seconds."""

_CHEAP_SHARE: Final = 0.1
"""Share of the time limit for that plan. A search of the same step continues from it."""

_LEAST_GAIN: Final = 0.002
"""Share of the cost that another kind must save. Costs are not known more exactly."""

_OFFER_S: Final = 3.0
"""Most seconds after which a refusal still looks for how much memory would be enough."""

_RUNS: Final = 3
"""How many times the seconds of the step it may take to measure the ops that run its regions."""


class HasGraph(Protocol):
    """A captured step."""

    @property
    def graph(self) -> Graph:
        """The graph to plan."""
        ...


CapturedT = TypeVar("CapturedT", bound=HasGraph)


@dataclass(frozen=True, slots=True)
class Chunks:
    """Which ops may run piece by piece.

    Attributes:
        exact: Whether results have to be those of the whole ops to the bit.
        allows: Whether an op may; all may by default.
    """

    exact: bool
    allows: Callable[[fx.Node], bool] = lambda op: True


@dataclass(frozen=True, eq=False, slots=True)
class ChunkableStep(Generic[CapturedT]):
    """A step whose joint modules can be changed before it is planned.

    Attributes:
        whole: The step as it was captured, in which nothing runs piece by piece.
        joints: Its joint modules.
        captured: Captures the step with other joint modules.
    """

    whole: CapturedT
    joints: tuple[fx.GraphModule, ...]
    captured: Callable[[Sequence[fx.GraphModule]], CapturedT]


@dataclass(frozen=True, eq=False, slots=True)
class InPieces(Generic[CapturedT]):
    """A captured step, and the kinds of regions that run piece by piece in it."""

    captured: CapturedT
    kinds: tuple[Kind, ...]


@dataclass(frozen=True, eq=False, slots=True)
class _Variant(Generic[CapturedT]):
    """A set of kinds with the step that they give, and what planning that gave: a plan, or the smallest peak that was found."""

    kinds: tuple[Kind, ...]
    captured: CapturedT
    result: Result | None
    smallest_bytes: int

    def is_better_than(self, other: _Variant[CapturedT]) -> bool:
        """Whether its plan is faster, or its smallest peak is lower where neither has a plan."""
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
    """The fastest plan found within a budget over sets of regions that run piece by piece.

    Args:
        step: The step.
        chunks: What may run piece by piece.
        budget_bytes: The budget.
        time_limit_s: Seconds of wall time, or None for no limit.
        solve: Plans what was captured, within the budget and so many seconds.

    Returns:
        What was planned and its plan, whose overhead is that against computing every op of the given step once; None where
        keeping everything keeps the budget.

    Raises:
        InfeasibleBudgetError: No plan of any of the graphs was found that keeps the budget; its floor holds for all of them.
        PlanNotFoundError: No plan of any of the graphs was found in time.
    """
    if keep_all_bytes(step.whole.graph) <= budget_bytes:
        return None
    variants = _Variants(step, chunks)

    def planned(of: tuple[Kind, ...], time_s: float | None) -> _Variant[CapturedT]:
        try:
            captured = variants.captured(of)
        except NotChunkable:
            return _Variant(of, step.whole, None, sys.maxsize)
        quick_s = min(_SMALLEST_S, _share(_QUICK_SHARE, time_s) or _SMALLEST_S)
        smallest = near_smallest(captured.graph, quick_s, budget_bytes).peak_bytes
        if smallest > budget_bytes:  # a refusal would search for the smallest peak for much longer
            return _Variant(of, captured, None, smallest)
        try:
            return _Variant(of, captured, solve(captured, _share(1 - _QUICK_SHARE, time_s)), smallest)
        except PlanNotFoundError:  # its windows are too narrow for the plan
            return _Variant(of, captured, None, smallest)

    if chunks.exact:
        whole = planned((), _share(_CHEAP_SHARE, time_limit_s)).result
        time_limit_s = _share(1 - _CHEAP_SHARE, time_limit_s)
        if whole is not None and whole.overhead <= _CHEAP:
            return step.whole, solve(step.whole, time_limit_s)
    kinds = variants.kinds
    if not kinds:
        return step.whole, solve(step.whole, time_limit_s)
    trial_s = _share(_TRIALS_SHARE / (1 + 2 * len(kinds)), time_limit_s)
    best = planned(variants.below(budget_bytes), trial_s)
    tried = [best]
    for kind in kinds:
        # Fewer pieces of a region take more memory: they are for one that runs in pieces anyway.
        if kind not in best.kinds and (kind.most_pieces or any(map(kind.is_fewer_pieces_of, best.kinds))):
            tried.append(planned((*(other for other in best.kinds if not other.excludes(kind)), kind), trial_s))
            best = tried[-1] if tried[-1].is_better_than(best) else best
    for kind in best.kinds if len(best.kinds) > 1 else ():
        tried.append(planned(tuple(other for other in best.kinds if other is not kind), trial_s))
        best = best if best.is_better_than(tried[-1]) else tried[-1]
    if best.result is None:
        # Its refusal names a budget, for which this set is chosen again if no other has a plan.
        best = planned(variants.smallest(), trial_s)
        tried.append(best)
    try:
        result = solve(best.captured, _share(_LAST_SHARE, time_limit_s))
    except InfeasibleBudgetError as error:
        raise _refusal(error, variants.floors()) from None
    bounds = [variant.result.bound for variant in tried if variant.result is not None and variant is not best]
    return best.captured, _with_chunks(result, best.kinds, [*bounds, result.bound], step.whole.graph)


def _share(share: float, time_s: float | None) -> float | None:
    """Part of a time, where there is a limit to it."""
    return None if time_s is None else share * time_s


def with_smallest_peak(step: ChunkableStep[CapturedT], chunks: Chunks, budget_bytes: int | None = None) -> InPieces[CapturedT]:
    """A step with those kinds of regions piece by piece that make its smallest peak lower.

    Args:
        step: The step.
        chunks: What may run piece by piece.
        budget_bytes: The budget, if it is known in bytes. Exact pieces, whose bits have to be tested, are for a step that exceeds
            it otherwise.
    """
    if chunks.exact and not _exceeds(step.whole.graph, budget_bytes):
        return InPieces(step.whole, ())
    variants = _Variants(step, chunks)
    kinds = variants.smallest()
    return InPieces(variants.captured(kinds), kinds)


def with_pieces(result: Result, whole: Graph, kinds: Sequence[Kind]) -> Result:
    """The figures of a plan with its overhead against the step in which nothing runs piece by piece.

    Args:
        result: The plan.
        whole: That step.
        kinds: What runs piece by piece.
    """
    remarks = [f"in pieces: {kind.description}" for kind in kinds]
    return msgspec.structs.replace(result, overhead=result.cost / whole.cost, remarks=(*result.remarks, *remarks))


def with_offer(
    error: InfeasibleBudgetError, step: ChunkableStep[CapturedT], chunks: Chunks, *, part: bool = False
) -> InfeasibleBudgetError:
    """A refusal that says what it would help if ops ran piece by piece: in bytes, where that is known soon.

    Args:
        error: The refusal, of a step in which none does.
        step: The step.
        chunks: What could run piece by piece.
        part: Whether that is only a part of the step, and the rest is not known yet.
    """
    peak = _offered_bytes(step, chunks)
    if peak is None:
        return error.with_hint(f'{error.hint}; chunking="auto" may need less: it runs ops piece by piece')
    if peak >= (error.smallest_bytes or error.floor_bytes):
        return error
    enough = "this budget" if peak <= error.budget_bytes else format_at_least(peak)
    enough += " is enough for this graph alone" if part else " is enough"
    return error.with_hint(f'{error.hint}; with chunking="auto", which runs ops piece by piece, {enough}')


def _offered_bytes(step: ChunkableStep[CapturedT], chunks: Chunks) -> int | None:
    """The smallest peak found with regions piece by piece; None if that takes too long, or cannot be measured now."""
    until = time.perf_counter() + _OFFER_S
    if _RUNS * step.whole.graph.cost > _OFFER_S * 1e9:
        return None
    try:
        variants = _Variants(step, chunks, until)
        return near_smallest(variants.captured(variants.smallest()).graph, _SMALLEST_S).peak_bytes
    except (TimeoutError, ProfilerBusyError):
        return None


def _exceeds(graph: Graph, budget_bytes: int | None) -> bool:
    """Whether no plan within a budget is found quickly."""
    return budget_bytes is not None and near_smallest(graph, _SMALLEST_S, budget_bytes).peak_bytes > budget_bytes


class _Variants(Generic[CapturedT]):
    """A step by what runs piece by piece in it.

    Args:
        step: As in `choose_chunks`, like ``chunks``.
        chunks: What may run piece by piece.
        until: Value of ``time.perf_counter()`` from which it raises `TimeoutError`; None for never.
    """

    def __init__(self, step: ChunkableStep[CapturedT], chunks: Chunks, until: float | None = None) -> None:
        self._step, self._chunks, self._until = step, chunks, until
        self._known: dict[frozenset[Kind], CapturedT] = {frozenset(): step.whole}

    @cached_property
    def kinds(self) -> list[Kind]:
        """The kinds of regions to choose from, those that save most."""
        began = time.perf_counter()
        chunks = self._chunks
        found = [kind for joint in self._joints for kind in kinds_of(joint.graph, chunks.allows, exact=chunks.exact)]
        _log.debug("found %d kinds of regions in %.1f s", len(found), time.perf_counter() - began)
        return _first_kinds(sorted(found, key=lambda kind: kind.saved_bytes, reverse=True))

    @property
    def _smallest_kinds(self) -> list[Kind]:
        """Those with which memory gets smallest."""
        return [kind for kind in self.kinds if kind.most_pieces]

    @cached_property
    def _joints(self) -> list[fx.GraphModule]:
        return [cuttable(joint) for joint in self._step.joints]

    def captured(self, kinds: tuple[Kind, ...]) -> CapturedT:
        """The step with some kinds in pieces.

        Raises:
            NotChunkable: Regions of these kinds wait for each other, or exact ones cannot be measured now.
            ProfilerBusyError: Their ops have to be measured, and another torch profiler is active.
        """
        if self._until is not None and time.perf_counter() > self._until:
            raise TimeoutError
        if frozenset(kinds) not in self._known:
            try:
                self._known[frozenset(kinds)] = self._capture(kinds)
            except ProfilerBusyError as error:
                if not self._chunks.exact:
                    raise
                raise NotChunkable(error.message) from error  # the user asked for no pieces
        return self._known[frozenset(kinds)]

    def _capture(self, kinds: tuple[Kind, ...]) -> CapturedT:
        parts = [part for kind in kinds for part in kind.parts]
        modules = list(self._step.joints)
        for i, joint in enumerate(self._joints):
            mine = [part for part in parts if part.stage.region.seed.graph is joint.graph]
            if mine:
                modules[i] = with_regions(joint, mine)
        return self._step.captured(modules)

    def below(self, budget_bytes: int) -> tuple[Kind, ...]:
        """Kinds with which the floor is within a budget, or as low as it gets, by adding the one that lowers it most."""
        chosen: list[Kind] = []
        lowest = self._floor_bytes(chosen)
        while lowest > budget_bytes:
            left = [kind for kind in self._smallest_kinds if not any(kind.excludes(other) for other in chosen)]
            floors = {kind: self._floor_bytes([*chosen, kind]) for kind in left}
            best = min(left, key=floors.__getitem__, default=None)
            if best is None or floors[best] >= lowest:
                break
            chosen.append(best)
            lowest = floors[best]
        return tuple(chosen)

    def smallest(self) -> tuple[Kind, ...]:
        """Kinds with which the smallest peak is low: those that lower the floor, and then the peak of a quick search."""
        chosen = list(self.below(0))
        lowest = self._quick_bytes(chosen)
        for kind in self._smallest_kinds:
            if not any(kind.excludes(other) for other in chosen):
                peak = self._quick_bytes([*chosen, kind])
                if peak < (1 - _LEAST_GAIN) * lowest:
                    chosen.append(kind)
                    lowest = peak
        return tuple(chosen)

    def floors(self) -> list[int]:
        """The floors of all steps that were captured."""
        return [floor(captured.graph).peak_bytes for captured in self._known.values()]

    def _quick_bytes(self, kinds: Sequence[Kind]) -> int:
        return self._bytes(kinds, lambda graph: near_smallest(graph, _SMALLEST_S).peak_bytes)

    def _floor_bytes(self, kinds: Sequence[Kind]) -> int:
        return self._bytes(kinds, lambda graph: floor(graph).peak_bytes)

    def _bytes(self, kinds: Sequence[Kind], of: Callable[[Graph], int]) -> int:
        try:
            return of(self.captured(tuple(kinds)).graph)
        except NotChunkable:
            return sys.maxsize


def _first_kinds(kinds: Sequence[Kind]) -> list[Kind]:
    """The first kinds, as many as are tried; other ways to run the same regions do not count."""
    first: list[Kind] = []
    for kind in kinds:
        if len(first) < _MOST_KINDS and not any(kind.excludes(other) for other in first):
            first.append(kind)
    return [kind for kind in kinds if any(kind.excludes(other) for other in first)]


def cuttable(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint module in which losses can be cut.

    Args:
        joint: The module.
    """
    graph = copy_graph(joint.graph)
    pick_before_reducing(graph)
    make_ones_without_input(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)


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


def _with_chunks(result: Result, kinds: Sequence[Kind], bounds: Sequence[float], whole: Graph) -> Result:
    """The result of a variant, with figures that refer to the graph without chunks and to all graphs that were planned."""
    result = with_pieces(result, whole, kinds)
    covered = f"the bound covers the {len(bounds)} sets of regions in pieces for which a plan was found"
    if kinds:
        _log.info("%s", "; ".join([*result.remarks[-len(kinds) :], covered]))
    return msgspec.structs.replace(
        result,
        bound=min(bounds),
        gap=max(0.0, (result.cost - min(bounds)) / result.cost),
        remarks=(*result.remarks, covered) if kinds else result.remarks,
    )
