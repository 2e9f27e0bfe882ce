"""A question to a solver: the cheapest plan of a graph within a budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from checkmate.core.budget import Budget
from checkmate.core.errors import OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.core.units import Amount


@dataclass(frozen=True, slots=True, init=False)
class Problem:
    """Find the cheapest plan of a graph that never holds more than a budget.

    Attributes:
        graph: The graph.
        budget_bytes: The most bytes at any moment, resident bytes included.
        recompute: ``"forward"`` allows only forward ops, and `Graph.view_ops`, to be computed again.
        reorder: False makes first computations follow the graph's own order; only `Graph.view_ops` may move.
        host: Memory of the host to which values may be copied and from which they may be fetched, or None. The cost of a plan is
            then the time at which the step ends.
        budget: The budget as the user wrote it, for messages; ignored when problems are compared.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)])
        >>> Problem(chain, "1KiB").budget_bytes, Problem(chain, "50%").budget_bytes
        (1024, 3)
    """

    graph: Graph
    budget_bytes: int
    recompute: Literal["all", "forward"]
    reorder: bool
    host: HostMemory | None
    budget: Budget = field(compare=False, repr=False)

    def __init__(
        self,
        graph: Graph,
        budget_bytes: Amount | Budget,
        recompute: Literal["all", "forward"] = "all",
        reorder: bool = True,
        host: HostMemory | None = None,
    ) -> None:
        """Make a problem.

        Args:
            graph: The graph.
            budget_bytes: A budget, or text or a number for `Budget.parse`: ``"8GiB"`` is a total, resident bytes included;
                ``"70%"`` is the bytes that no plan can change plus 70 % of those that keeping everything needs above them.
            recompute: Which ops may be computed again.
            reorder: Whether first computations may leave the graph's own order.
            host: Memory of the host and the bus to it, if copies are allowed.

        Raises:
            UnitError: The budget cannot be read.
            OptionError: ``recompute`` is neither ``"all"`` nor ``"forward"``, or copies are allowed and costs are not in ns.
        """
        if recompute not in ("all", "forward"):
            raise OptionError(f"recompute={recompute!r} is neither 'all' nor 'forward'")
        if host is not None and graph.cost_unit != "ns":
            raise OptionError(
                f"copies to the host take nanoseconds, and the costs of graph {graph.name!r} are in {graph.cost_unit!r}",
                hint="measure or estimate the costs in nanoseconds (cost_unit='ns'), or leave out the host",
            )
        budget = budget_bytes if isinstance(budget_bytes, Budget) else Budget.parse(budget_bytes)
        rules = (("recompute", recompute), ("reorder", bool(reorder)), ("host", host), ("budget", budget))
        for name, value in (("graph", graph), ("budget_bytes", budget.resolve(graph)), *rules):
            object.__setattr__(self, name, value)

    def describe_budget(self) -> str:
        """The budget in words; see `Budget.describe`."""
        return self.budget.describe(self.budget_bytes, self.budget.reference(self.graph)[1])

    def replace_budget(self, budget_bytes: int) -> Problem:
        """The same problem with another budget; messages keep the words of this one."""
        return Problem(self.graph, self.budget.with_total(budget_bytes), self.recompute, self.reorder, self.host)

    def without_host(self) -> Problem:
        """The same problem without copies to the host."""
        return Problem(self.graph, self.budget.with_total(self.budget_bytes), self.recompute, self.reorder)
