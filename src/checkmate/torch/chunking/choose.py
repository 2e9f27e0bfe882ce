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
from typing import Final, Generic

import msgspec

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.frontend.planner import near_smallest
from checkmate.torch.chunking.kinds import Kind
from checkmate.torch.chunking.program import NotChunkable
from checkmate.torch.chunking.variants import LEAST_GAIN, SMALLEST_S, CapturedT, ChunkableStep, Chunks, Variants
from checkmate.torch.measure.resident import beyond_room

_log = logging.getLogger("checkmate.torch")

_TRIALS_SHARE: Final = 0.5
"""Share of the time limit for the plans of all sets of kinds that are tried."""

_QUICK_SHARE: Final = 0.25
"""Share of the time for the plan of a set that is for whether there is one."""

_SMALLEST_SHARE: Final = 0.2
"""Share of the time limit for a search of the smallest peak, of which there are two where no set has a plan."""

_LAST_SHARE: Final = 0.5
"""Share of the time limit for the plan of the set that is chosen."""

_CHEAP: Final = 1.1
"""Overhead of a plan of whole ops up to which no exact pieces are looked for: their bits are tested, which takes seconds."""

_CHEAP_SHARE: Final = 0.1
"""Share of the time limit for that plan. A search of the same step continues from it."""

_OFFER_S: Final = 3.0
"""Most seconds after which a refusal still looks for how much memory would be enough."""

_RUNS: Final = 3
"""How many times the seconds of the step it may take to measure the ops that run its regions."""


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
            return other.result is None and self.smallest_bytes < (1 - LEAST_GAIN) * other.smallest_bytes
        return other.result is None or self.result.cost < (1 - LEAST_GAIN) * other.result.cost


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
    variants = Variants(step, chunks)

    def planned(of: tuple[Kind, ...], time_s: float | None) -> _Variant[CapturedT]:
        try:
            captured = variants.captured(of)
        except NotChunkable:
            return _Variant(of, step.whole, None, sys.maxsize)
        quick_s = min(SMALLEST_S, _share(_QUICK_SHARE, time_s) or SMALLEST_S)
        smallest = near_smallest(captured.graph, quick_s, budget_bytes).peak_bytes
        if smallest > budget_bytes:  # a refusal would search for the smallest peak for much longer
            return _Variant(of, captured, None, smallest)
        try:
            return _Variant(of, captured, solve(captured, _share(1 - _QUICK_SHARE, time_s)), smallest)
        except PlanNotFoundError:  # its windows are too narrow for the plan
            return _Variant(of, captured, None, smallest)

    whole: Result | None = None
    if chunks.exact:
        whole = planned((), _share(_CHEAP_SHARE, time_limit_s)).result
        time_limit_s = _share(1 - _CHEAP_SHARE, time_limit_s)
        if whole is not None and whole.overhead <= _CHEAP:
            return step.whole, solve(step.whole, time_limit_s)
    with beyond_room(whole is None):
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
        best = planned(variants.smallest(_share(_SMALLEST_SHARE, time_limit_s) or SMALLEST_S), trial_s)
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
    variants = Variants(step, chunks)
    with beyond_room(allowed=True):
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
        variants = Variants(step, chunks, until)
        return near_smallest(variants.captured(variants.smallest()).graph, SMALLEST_S).peak_bytes
    except TimeoutError:
        return None


def _exceeds(graph: Graph, budget_bytes: int | None) -> bool:
    """Whether no plan within a budget is found quickly."""
    return budget_bytes is not None and near_smallest(graph, SMALLEST_S, budget_bytes).peak_bytes > budget_bytes


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
