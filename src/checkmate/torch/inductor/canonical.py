"""Plans whose layers are ordered alike.

A search for plans orders the ops of equal layers differently where that makes no difference to it. To Inductor it makes one:
layers that are equal op for op are compiled once (see `repeats`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Plan
from checkmate.core.simulate import simulate
from checkmate.core.validate import validate

_LEAST_REACH = 4
"""How many computations before and after one that takes too much keep their old order, at first."""


def in_graph_order(graph: Graph, order: Sequence[int], limit_bytes: int) -> tuple[int, ...]:
    """The computations of a plan in the order of the graph wherever that keeps a limit.

    Every op is computed first where the graph has it, and again just before it is read. Where that takes more than the limit,
    the computations around keep the order that they have.

    Examples:
        >>> from checkmate.core.graph import Op, Value
        >>> ops = (Op("a", (), (0,), 1), Op("b", (0,), (1,), 1), Op("c", (0,), (2,), 1), Op("d", (1, 2), (3,), 1))
        >>> graph = Graph(ops, (Value("a", 4), Value("b", 4), Value("c", 4), Value("d", 4, kept=True)))
        >>> in_graph_order(graph, (0, 2, 1, 3), 12)
        (0, 1, 2, 3)
    """
    order = tuple(order)
    places = _on_demand(graph, order)  # of the computations in the given order
    if len(places) < len(order):
        return order
    over: set[int] = set()
    reach = _LEAST_REACH
    while reach < 2 * len(order):
        mixed = list(places)
        for begin, end in _around(over, reach, len(order)):
            mixed[begin:end] = sorted(places[begin:end])
        found = tuple(order[p] for p in mixed)
        plan = Plan.from_order(graph, found)
        if found == order or validate(graph, plan):
            return order
        held = _bytes_by_computation(plan, simulate(graph, plan).bytes.tolist())
        still = {p for p, size in enumerate(held) if size > limit_bytes}
        if not still:
            return found
        over |= still
        reach *= 2
    return order


def _on_demand(graph: Graph, order: Sequence[int]) -> list[int]:
    """Places in an order: first computations in the order of the graph, and every other one before its first reader."""
    newest: dict[int, int] = {}
    first: dict[int, int] = {}
    sources: list[list[int]] = []
    for p, o in enumerate(order):
        made_by = {graph.producer[v] for v in graph.ops[o].inputs}
        sources.append(sorted((newest[m] for m in made_by if m in newest), key=lambda s: (order[s], s)))
        newest[o] = p
        first.setdefault(o, p)
    found: dict[int, None] = {}
    for o in sorted(first):
        stack = [first[o]]
        while stack:
            missing = [s for s in sources[stack[-1]] if s not in found]
            if missing:
                stack += reversed(missing)
            else:
                found[stack.pop()] = None
    return list(found)


def _around(places: Iterable[int], reach: int, count: int) -> Iterator[tuple[int, int]]:
    """Intervals that contain every place and those in reach; they do not overlap."""
    begin = end = 0
    for p in sorted(places):
        if p - reach > end:
            if end:
                yield begin, end
            begin = p - reach
        end = min(count, p + reach + 1)
    if end:
        yield max(0, begin), end


def _bytes_by_computation(plan: Plan, by_step: Sequence[int]) -> list[int]:
    """The most bytes from each computation to the next."""
    found: list[int] = []
    for step, held in zip(plan.steps, by_step, strict=True):
        if isinstance(step, Compute):
            found.append(held)
        elif found:
            found[-1] = max(found[-1], held)
    return found
