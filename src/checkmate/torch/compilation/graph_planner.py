"""Second step of a compilation: the plan of a captured graph, which is a whole step, a part of one, or an evaluation."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Set
from dataclasses import replace

import msgspec
from torch import fx

from checkmate.core.budget import Budget, fixed_bytes, keep_all_bytes
from checkmate.core.errors import InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes, parse_bytes
from checkmate.frontend.counted_memory import counted_bytes, resolved_budget
from checkmate.frontend.options import PlanningOptions
from checkmate.frontend.planner import GivenPlan, keep_everything, near_smallest, order_of, planner_for, result_of_order
from checkmate.solvers.bounds.floor import floor
from checkmate.studies.larger_step import plan_of_larger, remember
from checkmate.torch.chunking.choose import ChunkableStep, Chunks, choose_chunks, with_offer, with_smallest_peak
from checkmate.torch.compilation.resident_account import Hooks, ResidentAccount
from checkmate.torch.distributed.consensus import Ranks, plan_on_rank0
from checkmate.torch.graph.op_properties import op_names
from checkmate.torch.graph.storages import is_scalar_tangent
from checkmate.torch.joint.capture import Capture, Costs
from checkmate.torch.measure.allocator import ReservedMemory
from checkmate.torch.options import Options
from checkmate.torch.partition.copies import measured_host
from checkmate.torch.partition.split import Recapture
from checkmate.torch.steps.coordinator import coordinator
from checkmate.torch.steps.program import StepAllotment

_log = logging.getLogger("checkmate.torch")
Plan = Callable[[Capture, Recapture], tuple[Capture, Result]]


class GraphPlanner:
    """Plans the captures of one Dynamo graph, for all ranks that plan together."""

    def __init__(self, options: Options, account: ResidentAccount, hooks: Hooks, ranks: Ranks | None) -> None:
        self._all, self._account, self._hooks, self.ranks = options, account, hooks, ranks

    @functools.cached_property
    def options(self) -> PlanningOptions:
        """The options that all front ends share, and the host with its rates if a plan is made that copies."""
        options = replace(self._all.planning, counted=self._account.counted)
        if self._all.host is None or self._hooks.captured is not None:
            return options
        host = measured_host(self._account.device, parse_bytes(self._all.host))
        if not self._hooks.whole:  # a forward hands nothing on the host to its backward
            host = HostMemory(host.bytes, 0, host.in_bytes_per_s)
        return replace(options, counted=None, host=host)

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
        held_bytes = coordinator().held_bytes()
        # A share is taken of all graphs of the step that are known so far.
        keep_all = keep_all_bytes(graph) + held_bytes
        budget_bytes = self.options.budget.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=keep_all)
        return budget_bytes - graph.resident_bytes - held_bytes

    def plan(self, capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
        """The plan of a capture, and the capture that was planned: with regions in pieces, or figures that ranks agreed on."""
        step = _chunkable_step(capture, recapture)
        if self._hooks.captured is not None:
            self._hooks.captured(step)
        budget = self.options.budget
        if not self.is_alone(capture.graph):
            if self.chunks is not None and not self.keeps_everything:
                capture = with_smallest_peak(step, self.chunks, budget.total_bytes if budget else None)
            early = self._account.early_ops(capture)
            graph, result = self.agreed(capture.graph, lambda graph: self._plan_of_part(graph, early))
            return replace(capture, graph=graph), result
        try:
            planned, result = self._in_pieces(step) or self._whole(capture)
        except InfeasibleBudgetError as error:
            # If tensors that stay to the end set the floor, no op is too large.
            if error.binding_op and self._all.chunking != "auto" and (offered := self._chunkable(exact=False)) is not None:
                raise with_offer(error, step, offered) from None
            raise
        remember(budget, capture.graph, result, whole=planned.joint is capture.joint)
        return planned, result

    def agreed(self, graph: Graph, plan: Callable[[Graph], Result]) -> tuple[Graph, Result]:
        """The plan of a graph. If several ranks plan together, rank 0 makes it for all of them, from figures they agree on."""
        if self.ranks is None:
            return graph, plan(graph)
        return plan_on_rank0(self.ranks, graph, f"a budget of {self.options.budget}", plan)

    def _whole(self, capture: Capture) -> tuple[Capture, Result]:
        """The plan of a whole step."""
        graph, result = self.agreed(capture.graph, self._plan_within_budget)
        return replace(capture, graph=graph), result

    def _plan_within_budget(self, graph: Graph) -> Result:
        if self._all.copies:
            return self._plan_with_copies(graph)
        known = plan_of_larger(self.options.budget, graph, self.options.counted) if self.options.plan is None else None
        return planner_for(self.options)(graph) if known is None else known

    def _plan_with_copies(self, graph: Graph) -> Result:
        """A plan that fetches weights, and in a whole step copies values to the host."""
        self._refuse_ranks()
        given = self.options.plan
        planner = planner_for(self.options) if given is None else GivenPlan(given, self.options.budget, copies=True)
        result = planner(graph)
        if not self._hooks.whole:
            order_of(result.plan)  # raises if a given plan copies values to the host
        return result

    def _refuse_ranks(self) -> None:
        if self._all.host is not None and self.ranks is not None:
            raise OptionError("host needs one device: no rank knows what another one copies", hint="leave out host")

    def _plan_of_part(self, graph: Graph, early: Set[int]) -> Result:
        """A plan of nearly the smallest peak for one of several graphs of a step, or keeping all.

        Some ops may be computed ``early`` only, in the forward; see `reads_of_overwritable`.
        """
        self._refuse_ranks()
        if self.keeps_everything:
            return result_of_order(graph, range(len(graph.ops)))
        total = self.options.budget.total_bytes if self.options.budget is not None else None
        # The other graphs of the step and eager code may free the outputs at once.
        part = msgspec.structs.replace(graph, values=tuple(msgspec.structs.replace(v, kept=False) for v in graph.values))
        host = self.options.host
        if total is not None and floor(part, copies=host is not None).peak_bytes > total:
            try:
                return planner_for(self.options)(part)
            except InfeasibleBudgetError as error:  # the bytes of the other graphs are not known
                least = format_at_least(error.smallest_bytes or error.floor_bytes)
                raise error.with_hint(
                    f"this graph alone needs at least {least}, and the step may need more, which is known when it has run once: "
                    'try a budget of "100%", or lower the batch size'
                ) from None
        # This plan runs once or twice, and the number of graphs of the step is not known.
        limit_s = self.options.time_limit_s
        smallest = near_smallest(_in_forward(graph, early), 1.0 if limit_s is None else min(1.0, limit_s / 8), total, host)
        return result_of_order(graph, order_of(smallest.plan), host)

    @functools.cached_property
    def chunks(self) -> Chunks | None:
        """The ops that may run piece by piece, if there is a budget to keep; None if none may."""
        return None if self._all.chunking == "off" else self._chunkable(exact=self._all.chunking == "exact")

    def _chunkable(self, *, exact: bool) -> Chunks | None:
        options, allows = self._all, self._allowed_in_pieces()
        reserved = isinstance(self.options.counted, ReservedMemory)
        eager = options.compiler == "eager" and options.host is None and not reserved
        return None if options.budget is None or not eager or allows is None else Chunks(exact, allows)

    @property
    def in_pieces(self) -> Callable[[fx.Node], bool] | None:
        """The ops that run piece by piece under Inductor, in regions that compute nothing twice; None if none may."""
        return self._allowed_in_pieces() if self._all.chunking == "auto" else None

    def _allowed_in_pieces(self) -> Callable[[fx.Node], bool] | None:
        if self.ranks is not None or self._all.checkpoints != "hints" or self._all.plan is not None:
            return None
        excluded = frozenset(self._all.no_recompute)
        return lambda op: excluded.isdisjoint(op_names(op))

    def _in_pieces(self, step: ChunkableStep[Capture]) -> tuple[Capture, Result] | None:
        """The fastest plan found if regions may run piece by piece; None if none may, or there is nothing to gain."""
        options, budget = self.options, self.options.budget
        if self.chunks is None or budget is None or budget.keeps_everything:
            return None
        known = plan_of_larger(budget, step.whole.graph, options.counted)
        if known is not None:
            return step.whole, known
        budget_bytes = resolved_budget(budget, step.whole.graph, options.counted)
        within = replace(options, budget=budget.with_total(budget_bytes, step.whole.graph))

        def solve(capture: Capture, time_s: float | None) -> Result:
            try:
                return planner_for(replace(within, time_limit_s=time_s))(capture.graph)
            except PlanNotFoundError:
                # The search for the smallest peak, which chooses the regions, finds plans that this one misses.
                least = near_smallest(capture.graph, 1.0, budget_bytes)
                if counted_bytes(capture.graph, least, options.counted) > budget_bytes:
                    raise
                return msgspec.structs.replace(least, budget_bytes=budget_bytes)

        return choose_chunks(step, self.chunks, budget_bytes, options.time_limit_s, solve)

    def evaluation(self, budget: Budget, measured: Costs, estimated: Costs) -> tuple[Costs, Plan]:
        """The costs and the plan of a graph without a backward: keeping everything, or nearly the smallest peak.

        Estimated workspace may be too large: a graph that seems to exceed the budget is measured.
        """
        costs = estimated

        def plan(capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
            nonlocal costs
            budget_bytes = budget.resolve(capture.graph)
            if keep_all_bytes(capture.graph) > budget_bytes:
                costs = measured
                capture = recapture(capture.joint)
            if keep_all_bytes(capture.graph) <= budget_bytes:
                return capture, keep_everything(capture.graph)
            smallest = near_smallest(capture.graph, 1.0, budget_bytes, self.options.host)
            if smallest.peak_bytes > budget_bytes > 0 and self.chunks is not None:
                capture = with_smallest_peak(_chunkable_step(capture, recapture), self.chunks, budget_bytes)
                smallest = near_smallest(capture.graph, 1.0, budget_bytes, self.options.host)
            if smallest.peak_bytes > budget_bytes > 0:
                _log.warning(
                    "a call without gradients takes up to %s, more than its budget of %s",
                    format_bytes(smallest.peak_bytes),
                    self.options.budget,
                )
            return capture, smallest

        return lambda nodes: costs(nodes), plan


def _chunkable_step(capture: Capture, recapture: Recapture) -> ChunkableStep[Capture]:
    return ChunkableStep(capture, (capture.joint,), lambda modules: recapture(modules[0]))


def _in_forward(graph: Graph, single: Set[int]) -> Graph:
    """A graph in which some ops are never computed after its boundary."""
    if not single:
        return graph
    assert graph.boundary is not None
    late = (graph.boundary,)
    ops = (msgspec.structs.replace(op, clobbered_by=late) if o in single else op for o, op in enumerate(graph.ops))
    return msgspec.structs.replace(graph, ops=tuple(ops))
