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
from typing import Final

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
from checkmate.torch.joint.capture import Capture
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

Solve = Callable[[Graph, int, float], Result]
"""Plans a graph within bytes and a share of the time limit."""


@dataclass(frozen=True, eq=False, slots=True)
class _Variant:
    """A set of kinds with its graph and what planning it gave."""

    kinds: tuple[Kind, ...]
    capture: Capture
    result: Result | None

    @property
    def cost(self) -> float:
        return float("inf") if self.result is None else self.result.cost


def choose_chunks(
    capture: Capture,
    budget_bytes: int,
    recapture: Callable[[fx.GraphModule], Capture],
    solve: Solve,
    allows: Callable[[fx.Node], bool],
    *,
    exact: bool,
) -> tuple[Capture, Result] | None:
    """The fastest plan found within a budget over sets of regions that run piece by piece.

    Args:
        capture: The captured graph, in which nothing does.
        budget_bytes: The budget.
        recapture: Captures a changed joint module in the same way.
        solve: Plans a graph.
        allows: Whether an op may run piece by piece.
        exact: Whether results have to be those of the whole ops to the bit.

    Returns:
        The capture that was planned and its plan, whose overhead is that against computing every op of the given graph once; None
        where keeping everything keeps the budget, or there is no region to run piece by piece.

    Raises:
        InfeasibleBudgetError: No plan of any of the graphs keeps the budget.
        PlanNotFoundError: No plan of any of the graphs was found in time.
    """
    if keep_all_bytes(capture.graph) <= budget_bytes:
        return None
    joint = _rewritten(capture.joint)
    began = time.perf_counter()
    kinds = _first_kinds(kinds_of(joint.graph, allows, exact=exact))
    _log.debug("found %d kinds of regions in %.1f s", len(kinds), time.perf_counter() - began)
    if not kinds:
        return None
    most_trials = 1 + len(kinds) * (len(kinds) + 1) // 2
    search = _Search(budget_bytes, joint, recapture, solve, _TRIALS_SHARE / most_trials)
    tried = [search.planned((), capture)]
    best = tried[0]
    left = list(kinds)
    while left:
        offered = [search.plan((*best.kinds, kind)) for kind in left]
        tried += offered
        cheapest = min(offered, key=lambda variant: variant.cost)
        if cheapest.result is None and best.result is None:
            # None keeps the budget yet: go on from the one that comes nearest.
            cheapest = min(offered, key=lambda variant: floor(variant.capture.graph).peak_bytes)
        elif cheapest.cost > (1 - _LEAST_GAIN) * best.cost:
            break
        best = cheapest
        left = [kind for kind in left if not any(kind.excludes(chosen) for chosen in best.kinds)]
    # Where no plan was found, the set of kinds with the lowest floor has the rest of the time, and its refusal is raised.
    best = min(tried, key=lambda variant: variant.cost) if any(variant.result for variant in tried) else best
    result = solve(best.capture.graph, budget_bytes, _LAST_SHARE)
    bounds = [variant.result.bound for variant in tried if variant.result is not None and variant is not best]
    return best.capture, _with_chunks(result, best.kinds, [*bounds, result.bound], capture.graph)


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


@dataclass(frozen=True, eq=False, slots=True)
class _Search:
    """Plans sets of kinds; the attributes are arguments of `choose_chunks`, and the share of the time limit for each plan."""

    budget_bytes: int
    joint: fx.GraphModule
    recapture: Callable[[fx.GraphModule], Capture]
    solve: Solve
    share: float

    def plan(self, kinds: tuple[Kind, ...]) -> _Variant:
        parts = [part for kind in kinds for part in kind.parts]
        return self.planned(kinds, self.recapture(with_regions(self.joint, parts)))

    def planned(self, kinds: tuple[Kind, ...], capture: Capture) -> _Variant:
        try:
            return _Variant(kinds, capture, self.solve(capture.graph, self.budget_bytes, self.share))
        except (InfeasibleBudgetError, PlanNotFoundError):
            return _Variant(kinds, capture, None)


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
