"""Cost against budget: plans of one graph for several budgets, each with its bound."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from checkmate.core.errors import PlanError, PlanNotFoundError
from checkmate.core.plan import Plan
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_bytes


class CurvePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point of a curve.

    Attributes:
        budget_bytes: The budget, resident bytes included.
        cost: Cost of the cheapest plan found within it, in the graph's ``cost_unit``.
        overhead: Cost over the cost of computing each op once.
        bound: Proven lower bound on the cost of every plan within the budget.
        gap: ``(cost - bound) / cost``: the share of the cost that may be left to gain.
        peak_bytes: Peak of the plan, resident bytes included.
        plan: The plan.
        elapsed_s: Wall seconds that its own solve took; 0 where the neighbouring points decided it.
    """

    budget_bytes: int
    cost: int
    overhead: float
    bound: float
    gap: float
    peak_bytes: int
    plan: Plan
    elapsed_s: float


class Curve(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Cost and bound against budget. Neither rises with the budget.

    Attributes:
        points: The points, by ascending budget.
        graph_digest: Digest of the graph.
        cost_unit: Unit of costs.
        floor_bytes: Proven: no plan of any order peaks lower. Resident bytes included.
        solver: Which solver, with its options.

    Raises:
        PlanError: The points do not ascend in budget, or cost or bound rises with it.
    """

    points: tuple[CurvePoint, ...]
    graph_digest: str
    cost_unit: str = "ns"
    floor_bytes: int = 0
    solver: str = ""

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "points", tuple(self.points))
        for a, b in pairwise(self.points):
            if not (a.budget_bytes < b.budget_bytes and a.cost >= b.cost and a.bound >= b.bound):
                raise PlanError(
                    f"the points at {a.budget_bytes} and {b.budget_bytes} bytes are no part of a curve",
                    hint="list the points by ascending budget; neither cost nor bound rises with it",
                )

    def plan_within(self, budget: Amount) -> Plan:
        """The cheapest plan of the curve that keeps a budget.

        Args:
            budget: Bytes or text such as ``"8GiB"``, resident bytes included.

        Raises:
            PlanNotFoundError: The budget is below every peak of the curve.
            UnitError: The budget cannot be read.
        """
        budget_bytes = parse_bytes(budget)
        fitting = [point for point in self.points if point.peak_bytes <= budget_bytes]
        if not fitting:
            smallest = min((point.peak_bytes for point in self.points), default=0)
            raise PlanNotFoundError(
                f"no plan of the curve keeps {format_bytes(budget_bytes)}; the smallest peaks at {format_bytes(smallest)}, "
                f"and no plan of any order takes less than {format_bytes(self.floor_bytes)}",
                hint=f"raise the budget to at least {format_at_least(smallest)}, or solve for it",
            )
        return min(fitting, key=lambda point: (point.cost, point.peak_bytes)).plan
