"""A question to a solver: the cheapest plan of a graph within a budget."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.units import Amount, parse_bytes


@dataclass(frozen=True, slots=True, init=False)
class Problem:
    """Find the cheapest plan of a graph that never holds more than a budget.

    Attributes:
        graph: The graph.
        budget_bytes: The most bytes at any moment, resident bytes included.
        recompute: ``"forward"`` allows only forward ops, and `Graph.view_ops`, to be computed again.
        reorder: False makes first computations follow the graph's own order; only `Graph.view_ops` may move.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)])
        >>> Problem(chain, "1KiB").budget_bytes, Problem(chain, "50%").budget_bytes
        (1024, 3)
    """

    graph: Graph
    budget_bytes: int
    recompute: Literal["all", "forward"]
    reorder: bool

    def __init__(
        self, graph: Graph, budget_bytes: Amount | Budget, recompute: Literal["all", "forward"] = "all", reorder: bool = True
    ) -> None:
        """Make a problem.

        Args:
            graph: The graph.
            budget_bytes: A budget, or what `Budget.parse` reads: ``"8GiB"`` is a total, resident bytes included;
                ``"70%"`` is what no plan can change plus 70 % of what keeping everything needs above that.
            recompute: Which ops may be computed again.
            reorder: Whether first computations may leave the graph's own order.

        Raises:
            UnitError: The budget cannot be read.
            OptionError: ``recompute`` is neither ``"all"`` nor ``"forward"``.
        """
        if recompute not in ("all", "forward"):
            raise OptionError(f"recompute={recompute!r} is neither 'all' nor 'forward'")
        if isinstance(budget_bytes, str):
            budget_bytes = Budget.parse(budget_bytes)
        resolved = budget_bytes.resolve(graph) if isinstance(budget_bytes, Budget) else parse_bytes(budget_bytes)
        for name, value in (("graph", graph), ("budget_bytes", resolved), ("recompute", recompute), ("reorder", bool(reorder))):
            object.__setattr__(self, name, value)

    def replace_budget(self, budget_bytes: int) -> Problem:
        """The same question with another budget."""
        return Problem(self.graph, budget_bytes, self.recompute, self.reorder)
