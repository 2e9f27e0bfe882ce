"""Which ops are computed in their own turn, in which order, and which only when somebody asks."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.simulate import simulate
from checkmate.solvers.orders import late_sinks, on_demand_ops

_LOWER = 0.99
"""An order of list scheduling is worth a search if its peak is this share of the given one's, or less."""


class Start(NamedTuple):
    """What a search starts from.

    Attributes:
        order: Every op, in the order of first computations.
        on_demand: Ops that run only when somebody asks.
    """

    order: tuple[int, ...]
    on_demand: frozenset[int]


def target_lists(problem: Problem) -> list[frozenset[int]]:
    """Sets of ops to compute on demand, the most promising first; one empty set without reordering."""
    if not problem.reorder:
        return [frozenset()]
    asked = on_demand_ops(problem.graph)
    sinks = late_sinks(problem.graph)
    return [asked | sinks, asked] if sinks else [asked]


def scheduled(problem: Problem, targets: Sequence[int]) -> bool:
    """Whether targets are not in the graph's own order."""
    return problem.reorder and any(a > b for a, b in pairwise(targets))


def starts(problem: Problem, seed: int) -> list[Start]:
    """Starts of searches, the most promising first: an order of list scheduling if it is lower, and the given order.

    Args:
        problem: A problem whose views are folded.
        seed: Seed of the list scheduling.
    """
    from checkmate.solvers.evict.schedule import low_order

    graph = problem.graph
    given = tuple(range(len(graph.ops)))
    lists = target_lists(problem)
    found = [Start(given, late) for late in lists]
    if problem.reorder:
        low = tuple(low_order(graph, seed))
        peaks = [simulate(graph, Plan.from_order(graph, order)).peak_bytes - graph.resident_bytes for order in (low, given)]
        if peaks[0] < _LOWER * peaks[1]:
            found.insert(0, Start(low, frozenset()))
    return found
