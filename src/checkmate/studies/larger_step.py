"""Plans of smaller batches: at once, from the plan of a larger batch of the same step.

The last batch of an epoch is smaller than the others. If its graph has the same ops, and none of its sizes is larger, the order
of the larger graph's plan keeps the same number of bytes, and if the batch is small enough, so does keeping everything. A search
for a better plan would stop training for as long as the first search, once for each smaller batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from checkmate.core.budget import Budget
from checkmate.core.errors import PlanError
from checkmate.core.evaluate import evaluate
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result


class _Planned(NamedTuple):
    """A step that was planned."""

    budget: Budget  # the object in the options of a compiled function: another function has another object
    graph: Graph  # nothing in it runs piece by piece
    result: Result  # its plan may be of another graph, with regions in pieces
    whole: bool  # whether the plan is of this graph


_planned: deque[_Planned] = deque(maxlen=16)


def remember(budget: Budget | None, graph: Graph, result: Result, *, whole: bool) -> None:
    """Remember a planned step for smaller batches of it; ``whole`` if the plan is of this graph, without regions in pieces."""
    if budget is not None:
        _planned.append(_Planned(budget, graph, result, whole and result.plan.host is None))


def bytes_of_larger(budget: Budget, graph: Graph) -> int | None:
    """Bytes of a budget as they were resolved for a larger batch of a step; None if there was none."""
    larger = _larger(budget, graph)
    if larger is None:
        return None
    grown = 0 if budget.percentage is None else max(0, graph.resident_bytes - larger.graph.resident_bytes)
    return larger.result.budget_bytes + grown


def plan_of_larger(
    budget: Budget | None,
    graph: Graph,
    counted: Callable[[Graph, Plan], int] | None = None,
    moved: Callable[[Sequence[int]], Sequence[int]] = lambda order: order,
) -> Result | None:
    """The cheaper plan within the budget of a larger batch: keeping everything, or the order of the larger batch's plan.

    ``counted`` gives the bytes of a plan that count against the budget, by default its peak of live bytes; ``moved`` adapts an
    order to the programs that run it. None if there was no larger batch, or neither plan keeps the budget.
    """
    larger = None if budget is None else _larger(budget, graph)
    limit = None if budget is None else bytes_of_larger(budget, graph)
    if larger is None or limit is None:
        return None
    for order in (range(len(graph.ops)), larger.result.plan.order if larger.whole else ()):
        if order:
            try:
                found = evaluate(graph, Plan.from_order(graph, moved(order)))
            except PlanError:  # the same ops read other values
                continue
            if (found.peak_bytes if counted is None else counted(graph, found.plan)) <= limit:
                return msgspec.structs.replace(found, budget_bytes=limit, solver="the plan of a larger batch")
    return None


def _larger(budget: Budget, graph: Graph) -> _Planned | None:
    """The newest planned step with the ops of a graph; no op writes fewer bytes than in the graph, and some write more."""
    written = _written(graph)
    for planned in reversed(_planned):
        if planned.budget is budget and len(planned.graph.ops) == len(graph.ops):
            pairs = [*zip(written, _written(planned.graph), strict=True)]
            if all(a[:2] == b[:2] and a[2] <= b[2] for a, b in pairs) and any(a[2] < b[2] for a, b in pairs):
                return planned
    return None


def _written(graph: Graph) -> list[tuple[str, str, int]]:
    """Kind, phase and bytes of the outputs of each op."""
    return [(op.kind, op.phase, sum(graph.values[v].size_bytes for v in op.outputs)) for op in graph.ops]
