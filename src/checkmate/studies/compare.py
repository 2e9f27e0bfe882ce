"""Differences between two plans of one graph."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from checkmate.core.errors import printable
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes, format_cost
from checkmate.studies.explain import Held, Remat, held_at, listed, more_often


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Differences between two plans; `str` gives them as text.

    Attributes:
        peak_bytes: Peak of each, resident bytes included.
        cost: Cost of each, in ``cost_unit``.
        overhead: Cost of each over the cost of computing each op once.
        cost_unit: Unit of costs.
        again: Number of recomputations in each.
        more_in_a: Ops that the first plan computes more often, with the difference, the most costly first.
        more_in_b: The same for the second.
        held_in_a: Storages live at the first plan's peak and not at the second's, largest first.
        held_in_b: Storages live at the second plan's peak and not at the first's, largest first.
    """

    peak_bytes: tuple[int, int]
    cost: tuple[int, int]
    overhead: tuple[float, float]
    cost_unit: str
    again: tuple[int, int]
    more_in_a: tuple[Remat, ...]
    more_in_b: tuple[Remat, ...]
    held_in_a: tuple[Held, ...]
    held_in_b: tuple[Held, ...]

    def render(self, most: int = 5) -> str:
        """The differences as text.

        Args:
            most: Most lines of each list.
        """
        (peak_a, peak_b), (cost_a, cost_b) = self.peak_bytes, self.cost
        lines = [
            f"peak  {format_bytes(peak_a)} -> {format_bytes(peak_b)}",
            f"cost  {format_cost(cost_a, self.cost_unit)} -> {format_cost(cost_b, self.cost_unit)}, "
            f"overhead {self.overhead[0]:.4f} -> {self.overhead[1]:.4f}",
            f"computed again  {self.again[0]} -> {self.again[1]}",
        ]
        for title, ops in (("computed more often by the first", self.more_in_a), ("by the second", self.more_in_b)):
            if ops:
                lines.append(f"{title}: {format_cost(sum(r.cost for r in ops), self.cost_unit)}")
            rows = [(r.cost, f"{r.name}, {r.times} x") for r in ops]
            lines += listed(rows, lambda cost: format_cost(cost, self.cost_unit), most)
        for title, held in (("held only at the first's peak", self.held_in_a), ("only at the second's", self.held_in_b)):
            if held:
                lines.append(f"{title}: {format_bytes(sum(h.size_bytes for h in held))}")
            lines += listed([(h.size_bytes, f"{h.name}: {h.why}") for h in held], format_bytes, most)
        return "\n".join(printable(line) for line in lines)

    def __str__(self) -> str:
        """The text of `render`."""
        return self.render()


def compare(graph: Graph, plan_a: Plan, plan_b: Plan) -> Comparison:
    """Differences between two plans: peaks, costs, recomputations, and storages live at the peaks.

    Args:
        graph: The graph of both.
        plan_a: The first plan.
        plan_b: The second plan.

    Raises:
        PlanError: A plan cannot be run.
        WrongGraphError: A plan was made for another graph.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 2, 3], size_bytes=[4, 2, 1], edges=[(0, 1), (0, 2), (1, 2)], names=list("abc"))
        >>> once, twice = Plan.from_order(chain, [0, 1, 2]), Plan.from_order(chain, [0, 1, 0, 2])
        >>> print(compare(chain, once, twice))
        peak  7 B -> 7 B
        cost  6 ns -> 7 ns, overhead 1.0000 -> 1.1667
        computed again  0 -> 1
        by the second: 1 ns
                 1 ns  a, 1 x
    """
    a, b = simulate(graph, plan_a), simulate(graph, plan_b)
    times_a, times_b = Counter(plan_a.order), Counter(plan_b.order)
    held_a, held_b = (held_at(graph, timeline.plan, timeline.peak_step) for timeline in (a, b))
    return Comparison(
        peak_bytes=(a.peak_bytes, b.peak_bytes),
        cost=(a.cost, b.cost),
        overhead=(a.graph.overhead(a.cost), b.graph.overhead(b.cost)),
        cost_unit=graph.cost_unit,
        again=(times_a.total() - len(times_a), times_b.total() - len(times_b)),
        more_in_a=more_often(graph, times_a, times_b),
        more_in_b=more_often(graph, times_b, times_a),
        held_in_a=_only(held_a, held_b),
        held_in_b=_only(held_b, held_a),
    )


def _only(held: tuple[Held, ...], other: tuple[Held, ...]) -> tuple[Held, ...]:
    """Entries of one peak that the other lacks; an old and a new instance of one value count as two."""
    left = Counter((h.kind, h.value, h.op) for h in other)
    found: list[Held] = []
    for entry in held:
        key = (entry.kind, entry.value, entry.op)
        if left[key]:
            left[key] -= 1
        else:
            found.append(entry)
    return tuple(found)
