"""The plan of one captured graph within the budget: of a whole step, of a part of one, or of an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Set
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from checkmate.core.budget import Budget, fixed_bytes, keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import Amount, format_at_least, format_bytes, parse_bytes
from checkmate.frontend.counted_memory import counted_bytes
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import GivenPlan, keep_everything, near_smallest, planner_for, result_of_order
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.solve import unit_question
from checkmate.studies.larger_step import plan_of_larger
from checkmate.torch.graph.storages import is_scalar_tangent
from checkmate.torch.partition.copies import measured_host
from checkmate.torch.steps.coordinator import coordinator
from checkmate.torch.steps.program import StepAllotment

_log = logging.getLogger("checkmate.torch")


@dataclass(slots=True)
class GraphPlanner:
    """Plans the graphs of one compilation."""

    options: PlanningOptions  # with the memory that counts against the budget on the device
    host: Amount | None = None  # the option of that name
    device: Any = None  # its copies to the host are measured; None unless the graph is a whole step on one device

    @property
    def keeps_everything(self) -> bool:
        """Whether the budget keeps everything."""
        return self.options.budget is not None and self.options.budget.keeps_everything

    def is_alone(self, graph: Graph) -> bool:
        """Whether a graph is taken for a whole step: its only tangent is the tangent of a loss, and no graph is in flight."""
        if self.options.budget is None or graph.boundary is None or self.options.plan is not None:
            return True
        tangents = [graph.values[v] for v in graph.ops[graph.boundary].outputs]
        return len(tangents) == 1 and is_scalar_tangent(tangents[0]) and not coordinator().in_flight

    def allotment(self, graph: Graph) -> StepAllotment | None:
        """The bytes that a graph may take in the plan of its step; None if no step with this graph has been planned."""
        return coordinator().steps.allotment(graph, self.options.budget) if self.options.budget is not None else None

    def room(self, graph: Graph) -> int:
        """Bytes that the budget leaves for measurements, next to live tensors and graphs in flight."""
        assert self.options.budget is not None
        # A share is taken of all graphs of the step that are known so far.
        keep_all = keep_all_bytes(graph) + coordinator().keep_all_saved_bytes()
        budget_bytes = self.options.budget.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=keep_all)
        return budget_bytes - graph.resident_bytes - coordinator().held_bytes()

    def plan(self, graph: Graph, early: Set[int] = frozenset()) -> Result:
        """A plan for the budget if the graph is a step by itself; else a plan of nearly the smallest peak, or keeping all.

        Some ops may be computed ``early`` only, in the forward; see `reads_of_overwritable`.
        """
        given, budget = self.options.plan, self.options.budget
        if self.host is not None or (given is not None and given.host is not None):
            return self._plan_with_host(graph)
        if self.is_alone(graph):
            known = plan_of_larger(budget, graph, self.options.counted) if given is None else None
            return planner_for(self.options)(graph) if known is None else known
        assert budget is not None
        if self.keeps_everything:
            return result_of_order(graph, range(len(graph.ops)))
        total = budget.total_bytes
        if total is not None and floor(part := part_of_a_step(graph)).peak_bytes > total:
            return self._refused(part, budget)
        # This plan runs once or twice, and the number of graphs of the step is not known.
        limit_s = self.options.time_limit_s
        smallest = near_smallest(_in_forward(graph, early), 1.0 if limit_s is None else min(1.0, limit_s / 8), total)
        return result_of_order(graph, smallest.plan.order)

    def plan_within(self, graph: Graph, budget: Budget, budget_bytes: int, time_s: float | None) -> Result:
        """A plan of a graph with regions in pieces, for a budget of known bytes."""
        try:
            return planner_for(replace(self.options, budget=budget, time_limit_s=time_s))(graph)
        except PlanNotFoundError:
            # The search for the smallest peak, which chooses the regions, finds plans that this one misses.
            least = near_smallest(graph, 1.0, budget_bytes)
            if counted_bytes(graph, least, self.options.counted) > budget_bytes:
                raise
            return msgspec.structs.replace(least, budget_bytes=budget_bytes)

    def _plan_with_host(self, graph: Graph) -> Result:
        """A plan with copies to the host, in whole steps only."""
        if self.device is None:
            raise OptionError(
                "host needs a whole step on one device: which values are away is not known to another graph or another rank",
                hint="use checkmate.torch.compile(model, loss, optimizer, example=..., budget=..., host=...), or leave out host",
            )
        if self.options.plan is not None:
            return GivenPlan(self.options.plan, self.options.budget, copies=True)(graph)
        host = measured_host(self.device, parse_bytes(self.host or 0))
        return planner_for(replace(self.options, counted=None, host=host))(graph)

    def _refused(self, graph: Graph, budget: Budget) -> Result:
        """Refuse a budget that one of several graphs of a step exceeds by itself; the bytes of the others are not known."""
        try:
            return planner_for(self.options)(graph)
        except InfeasibleBudgetError as error:
            least = format_at_least(error.smallest_bytes or error.floor_bytes)
            asked = unit_question(budget, error.budget_bytes, error.smallest_bytes or 0)
            raise error.with_hint(
                f"{asked}this graph alone needs at least {least}, and the step may need more, which is known when it has run "
                'once: try a budget of "100%", or lower the batch size'
            ) from None

    def plan_evaluation(self, graph: Graph, budget: Budget) -> Result:
        """A plan within a budget, or a plan of nearly the smallest peak with a warning."""
        if keep_all_bytes(graph) <= budget.resolve(graph):
            return keep_everything(graph)
        try:
            return planner_for(replace(self.options, budget=budget))(graph)
        except (InfeasibleBudgetError, PlanNotFoundError):
            smallest = near_smallest(graph, 1.0)
        _log.warning(
            "a call without gradients takes up to %s, more than its budget of %s",
            format_bytes(smallest.peak_bytes),
            self.options.budget,
        )
        return smallest


def part_of_a_step(graph: Graph) -> Graph:
    """A graph that does not hold its outputs: the other graphs of a step and eager code may free them at once."""
    return msgspec.structs.replace(graph, values=tuple(msgspec.structs.replace(v, kept=False) for v in graph.values))


def _in_forward(graph: Graph, single: Set[int]) -> Graph:
    """A graph in which some ops are never computed after its boundary."""
    if not single:
        return graph
    assert graph.boundary is not None
    late = (graph.boundary,)
    ops = (msgspec.structs.replace(op, clobbered_by=late) if o in single else op for o, op in enumerate(graph.ops))
    return msgspec.structs.replace(graph, ops=tuple(ops))
