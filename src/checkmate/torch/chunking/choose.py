"""Choose which kinds of regions run piece by piece, so that the plan within the budget is the fastest found.

Each set of kinds is another graph. Kinds are added one after the other, as long as the plan gets faster, or until one keeps the
budget. The bound of the answer is the least of the bounds of all graphs for which a plan was found: it says how far the plan can
be from the best one with any of these sets, and nothing about other sets.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Generic, Protocol, TypeVar

import msgspec
from torch import fx

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.solvers.bounds.floor import floor
from checkmate.torch.chunking.kinds import Kind, kinds_of
from checkmate.torch.chunking.replace import with_regions
from checkmate.torch.graph.copy import copy_graph
from checkmate.torch.passes.loss_picks import make_ones_without_input, pick_before_reducing

_log = logging.getLogger("checkmate.torch")

_TRIALS_SHARE: Final = 0.5
"""Share of the time limit for the plans of all sets of kinds that are tried."""

_LAST_SHARE: Final = 0.5
"""Share of the time limit for the plan of the set that is chosen."""

_MOST_KINDS: Final = 4
"""Kinds that are tried, those that save most."""

_LEAST_GAIN: Final = 0.002
"""Share of the cost that another kind must save. Costs are not known more exactly."""


class HasGraph(Protocol):
    """What was captured of a step."""

    @property
    def graph(self) -> Graph:
        """The graph to plan."""
        ...


CapturedT = TypeVar("CapturedT", bound=HasGraph)


@dataclass(frozen=True, slots=True)
class Chunks:
    """What may run piece by piece.

    Attributes:
        allows: Whether an op may.
        exact: Whether results have to be those of the whole ops to the bit.
    """

    allows: Callable[[fx.Node], bool]
    exact: bool


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
class _Variant(Generic[CapturedT]):
    """A set of kinds with the step that they give, and what planning that gave."""

    kinds: tuple[Kind, ...]
    captured: CapturedT
    result: Result | None

    @property
    def cost(self) -> float:
        return float("inf") if self.result is None else self.result.cost


def choose_chunks(
    step: ChunkableStep[CapturedT], chunks: Chunks, budget_bytes: int, solve: Callable[[CapturedT, float], Result]
) -> tuple[CapturedT, Result] | None:
    """The fastest plan found within a budget over sets of regions that run piece by piece.

    Args:
        step: The step.
        chunks: What may run piece by piece.
        budget_bytes: The budget.
        solve: Plans what was captured, within the budget and a share of the time limit.

    Returns:
        What was planned and its plan, whose overhead is that against computing every op of the given step once; None where
        keeping everything keeps the budget, or there is no region to run piece by piece.

    Raises:
        InfeasibleBudgetError: No plan of any of the graphs keeps the budget.
        PlanNotFoundError: No plan of any of the graphs was found in time.
    """
    if keep_all_bytes(step.whole.graph) <= budget_bytes:
        return None
    variants = _Variants(step, chunks)
    kinds = variants.kinds
    if not kinds:
        return None
    most_trials = 1 + len(kinds) * (len(kinds) + 1) // 2

    def planned(of: tuple[Kind, ...]) -> _Variant[CapturedT]:
        captured = variants.captured(of)
        try:
            return _Variant(of, captured, solve(captured, _TRIALS_SHARE / most_trials))
        except (InfeasibleBudgetError, PlanNotFoundError):
            return _Variant(of, captured, None)

    tried = [planned(())]
    best = tried[0]
    left = list(kinds)
    while left:
        offered = [planned((*best.kinds, kind)) for kind in left]
        tried += offered
        cheapest = min(offered, key=lambda variant: variant.cost)
        if cheapest.result is None and best.result is None:
            # None keeps the budget yet: go on from the one that comes nearest.
            cheapest = min(offered, key=lambda variant: floor(variant.captured.graph).peak_bytes)
        elif cheapest.cost > (1 - _LEAST_GAIN) * best.cost:
            break
        best = cheapest
        left = [kind for kind in left if not any(kind.excludes(chosen) for chosen in best.kinds)]
    # Where no plan was found, the set of kinds with the lowest floor has the rest of the time, and its refusal is raised.
    best = min(tried, key=lambda variant: variant.cost) if any(variant.result for variant in tried) else best
    result = solve(best.captured, _LAST_SHARE)
    bounds = [variant.result.bound for variant in tried if variant.result is not None and variant is not best]
    return best.captured, _with_chunks(result, best.kinds, [*bounds, result.bound], step.whole.graph)


def with_lowest_floor(step: ChunkableStep[CapturedT], chunks: Chunks) -> CapturedT:
    """A step with all kinds of regions piece by piece, if no plan of it as it is can have so small a peak.

    Args:
        step: The step.
        chunks: What may run piece by piece.
    """
    variants = _Variants(step, chunks)
    chosen: list[Kind] = []
    for kind in variants.kinds:
        if not any(kind.excludes(other) for other in chosen):
            chosen.append(kind)
    captured = variants.captured(tuple(chosen)) if chosen else step.whole
    return min(step.whole, captured, key=lambda each: floor(each.graph).peak_bytes)


class _Variants(Generic[CapturedT]):
    """A step by what runs piece by piece in it. The arguments are those of `choose_chunks`.

    Attributes:
        kinds: The kinds of regions to choose from, those that save most.
    """

    def __init__(self, step: ChunkableStep[CapturedT], chunks: Chunks) -> None:
        self._step = step
        self._joints = [_rewritten(joint) for joint in step.joints]
        began = time.perf_counter()
        found = [kind for joint in self._joints for kind in kinds_of(joint.graph, chunks.allows, exact=chunks.exact)]
        self.kinds = _first_kinds(sorted(found, key=lambda kind: kind.saved_bytes, reverse=True))
        _log.debug("found %d kinds of regions in %.1f s", len(found), time.perf_counter() - began)

    def captured(self, kinds: tuple[Kind, ...]) -> CapturedT:
        """The step with some kinds in pieces."""
        if not kinds:
            return self._step.whole
        parts = [part for kind in kinds for part in kind.parts]
        modules = list(self._step.joints)
        for i, joint in enumerate(self._joints):
            mine = [part for part in parts if part.stage.region.seed.graph is joint.graph]
            if mine:
                modules[i] = with_regions(joint, mine)
        return self._step.captured(modules)


def _first_kinds(kinds: Sequence[Kind]) -> list[Kind]:
    """The first kinds, as many as are tried; other ways to run the same regions do not count."""
    first: list[Kind] = []
    for kind in kinds:
        if len(first) < _MOST_KINDS and not any(kind.excludes(other) for other in first):
            first.append(kind)
    return [kind for kind in kinds if any(kind.excludes(other) for other in first)]


def _rewritten(joint: fx.GraphModule) -> fx.GraphModule:
    """A copy of a joint module in which losses can be cut."""
    graph = copy_graph(joint.graph)
    pick_before_reducing(graph)
    make_ones_without_input(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)


def _with_chunks(result: Result, kinds: Sequence[Kind], bounds: Sequence[float], whole: Graph) -> Result:
    """The result of a variant, with figures that refer to the graph without chunks and to all graphs that were planned."""
    remarks = [f"in pieces: {kind.description}" for kind in kinds]
    if kinds:
        remarks.append(f"the bound covers the {len(bounds)} sets of regions in pieces for which a plan was found")
        _log.info("%s", "; ".join(remarks))
    return msgspec.structs.replace(
        result,
        overhead=result.cost / whole.cost,
        bound=min(bounds),
        gap=max(0.0, (result.cost - min(bounds)) / result.cost),
        remarks=(*result.remarks, *remarks),
    )
