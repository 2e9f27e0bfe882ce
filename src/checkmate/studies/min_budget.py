"""The smallest budget within which a graph can be run."""

from __future__ import annotations

from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget
from checkmate.solvers.evict.smallest import smallest_peak


def min_budget(graph: Graph, *, limits: Limits | None = None, reorder: bool = True, host: HostMemory | None = None) -> MinBudget:
    """The smallest peak found, with its plan and a proven floor. Ctrl-C returns the best so far.

    Args:
        graph: The graph.
        limits: Time and seed; 20 seconds by default.
        reorder: Whether first computations may leave the graph's own order.
        host: Memory of the host to which values may be copied, and from which weights may be fetched.

    Returns:
        The smallest budget found. The cost of its plan is not minimised; solve with this peak as the budget for a cheaper plan.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1, 1], size_bytes=[4, 4, 4], edges=[(0, 1), (0, 2), (1, 2)])
        >>> smallest = min_budget(chain)
        >>> smallest.peak_bytes, smallest.floor_bytes, smallest.proven
        (12, 12, True)
    """
    problem = Problem(graph, graph.resident_bytes, reorder=reorder, host=host)
    if host is None:
        return smallest_peak(problem, limits, keep_interrupted=True)
    from checkmate.solvers.offload.streams import smallest_with_fetches

    return smallest_with_fetches(problem, limits, keep_interrupted=True)
