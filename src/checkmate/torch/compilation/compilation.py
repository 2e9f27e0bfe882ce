"""Compiles one Dynamo graph: computes its resident memory, plans it, and wraps the result in budget checks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from checkmate.core.budget import ResidentMemory
from checkmate.core.errors import GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.result import Limits, Result
from checkmate.core.units import format_bytes
from checkmate.frontend.planner import Planner, planner_for, result_of_order
from checkmate.frontend.split_budget import PlanFootprint
from checkmate.studies.min_budget import min_budget
from checkmate.torch._compat.aot import BoxedRun, as_boxed
from checkmate.torch._compat.dynamo import recompile_current_frame
from checkmate.torch.compilation.coordinator import COORDINATOR
from checkmate.torch.compilation.planned_graph import PlannedGraph
from checkmate.torch.distributed.consensus import job_ranks
from checkmate.torch.distributed.plan_on_rank0 import plan_on_rank0
from checkmate.torch.distributed.wrappers import wrapper_memory
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.graph.storages import SCALAR_TANGENT_BYTES
from checkmate.torch.joint.capture import Capture, Costs
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.measure.resident import gradient_bytes, other_allocated_bytes
from checkmate.torch.measure.roofline import estimated_costs
from checkmate.torch.options import Options
from checkmate.torch.partition.split import Task

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks and settings of a compilation for callers inside this package.

    Attributes:
        planner: Makes the plan; the planner of the options by default.
        planned: Called with the capture and its plan before anything runs.
        before_forward: Called before every run of a compiled forward; may raise.
        inference: Whether graphs without gradients are compiled; they are refused otherwise.
        whole: Whether the graph is a whole step, with the backward and the updates.
        target: The device to plan for; by default the one at hand.
    """

    planner: Planner | None = None
    planned: Callable[[Capture, Result], None] = lambda capture, result: None
    before_forward: Callable[[], None] | None = None
    inference: bool = True
    whole: bool = False
    target: EmulatedDevice | None = None


class Compilation:
    """The compilation of one Dynamo graph.

    Args:
        example_inputs: Inputs of the graph.
        options: The user's options.
        hooks: Callbacks and settings of the caller.

    Attributes:
        options: As given.
        hooks: As given.
        budget: The budget, or None.
        ranks: The ranks that plan together, or None.
        resident: Memory besides the graph's own inputs that no plan can change.
        least_fused_bytes: Where no step compiled by Inductor kept the budget, the least budget that one of them would keep.
    """

    def __init__(self, example_inputs: Sequence[Any], options: Options, hooks: Hooks) -> None:
        self.options = options
        self.hooks = hooks
        self.budget = options.planning.budget
        self.ranks = job_ranks() if options.ranks == "together" and self.budget is not None and hooks.planner is None else None
        self._wrapped = wrapper_memory(example_inputs, options.accumulate)
        in_flight = 0 if self.budget is None else COORDINATOR.held_bytes()
        # On CUDA the allocator's count includes what graphs in flight and wrappers hold.
        known = in_flight + self._wrapped.held_bytes
        self.resident = ResidentMemory(
            gradients_bytes=gradient_bytes(example_inputs, options.accumulate),
            wrappers_bytes=self._wrapped.held_bytes,
            in_flight_bytes=in_flight,
            reserve_bytes=options.reserve_bytes,
            other_bytes=max(0, other_allocated_bytes(example_inputs, options) - known),
        )
        self._in_flight_bytes = in_flight
        self._planned_graphs: list[PlannedGraph] = []
        self._recompile = recompile_current_frame()
        self.least_fused_bytes: int | None = None

    @functools.cached_property
    def task(self) -> Task:
        """How the graph is planned and partitioned."""
        options, target = self.options, self.hooks.target
        task = Task(
            costs=costs_of(options),
            plan=self._plan,
            hold_outputs=options.outputs == "held",
            split_convolutions=options.split_convolutions,
            honours_checkpoints=options.checkpoints == "respected",
            no_recompute=frozenset(options.no_recompute),
            extra_resident_bytes=self.resident.total_bytes,
            on_planned=self._planned,
        )
        if target is None:
            return task
        resident = task.extra_resident_bytes + target.device.blas_workspace_bytes
        return replace(task, costs=target.costs, relabel=target.relabel, extra_resident_bytes=resident)

    def forward(self, run: BoxedRun) -> BoxedRun:
        """A compiled forward with the checks of its runs.

        Args:
            run: The forward, in AOTAutograd's boxed calling convention.
        """

        def guarded(args: list[Any]) -> Any:
            if self.hooks.before_forward is not None:
                self.hooks.before_forward()
            if self.ranks is not None:
                self.ranks.record_forward()
            return COORDINATOR.forward(self._planned_graphs[0], run, args) if self._planned_graphs else run(args)

        return as_boxed(guarded)

    def backward(self, run: BoxedRun) -> BoxedRun:
        """A compiled backward that tells the coordinator when it has run.

        Args:
            run: The backward, in AOTAutograd's boxed calling convention.
        """
        return as_boxed(lambda args: COORDINATOR.backward(run, args)) if self._planned_graphs else run

    def guard(self, graph: Graph, footprint: PlanFootprint, budget_bytes: int) -> None:
        """Check every run of a graph against a budget.

        Args:
            graph: The graph that was planned.
            footprint: Its plan, with cost and memory.
            budget_bytes: The budget that the plan was made for, in bytes.
        """
        assert self.budget is not None
        _warn_of_tangents(graph)
        share = COORDINATOR.share(graph, self.budget)
        self._planned_graphs.append(
            PlannedGraph(
                graph=graph,
                footprint=footprint,
                budget=self.budget,
                budget_bytes=share.budget_bytes if share else budget_bytes,
                resident_bytes=graph.resident_bytes - self._in_flight_bytes,
                planned_gradient_bytes=self.resident.gradients_bytes + self._wrapped.bucket_view_bytes,
                transient_gradient_bytes=self._wrapped.transient_gradient_bytes,
                time_limit_s=self.options.time_limit_s,
                recompile=self._recompile,
                ranks=self.ranks,
            )
        )

    def shared_order(self, graph: Graph) -> tuple[int, ...] | None:
        """The order of a graph in a budget that was split over several graphs, or None if the budget was not split."""
        share = COORDINATOR.share(graph, self.budget) if self.budget is not None else None
        return share.order if share is not None else None

    def agreed(self, graph: Graph, plan: Callable[[Graph, int], Result]) -> tuple[Graph, Result]:
        """The plan of a graph. Where several ranks plan together, rank 0 makes it for all of them.

        Args:
            graph: The graph as captured on this rank.
            plan: Called with a graph and the bytes that other graphs in flight hold, which are part of its resident bytes.

        Returns:
            The graph with the figures that the ranks agreed on, and its plan.

        Raises:
            RankError: A rank failed, or the ranks captured different graphs.
        """
        if self.ranks is None:
            return graph, plan(graph, self._in_flight_bytes)
        wanted = f"a budget of {self.budget}"
        agreed = plan_on_rank0(self.ranks, graph, self._in_flight_bytes, wanted, plan)
        self._in_flight_bytes = agreed.in_flight_bytes
        return agreed.graph, agreed.result

    def agree_to_run(self) -> None:
        """Wait until every rank has compiled its graph; a rank that ran without the others would block in its first collective.

        Raises:
            RankError: A rank failed to compile.
        """
        if self.ranks is not None and (self._planned_graphs or self.hooks.whole):
            self.ranks.decide("running it", b"", lambda said: b"")

    def refuse_inference(self) -> None:
        """Refuse a graph without gradients, unless `Hooks.inference` allows it.

        Raises:
            GraphError: The hooks do not allow it.
        """
        if not self.hooks.inference:
            raise GraphError(
                "nothing in this step requires a gradient, so that there is no backward to plan",
                hint="check that parameters have requires_grad=True, and that the loss depends on them",
            )

    def _plan(self, capture: Capture) -> tuple[Graph, Result]:
        if self.hooks.planner is not None:
            return capture.graph, self.hooks.planner(capture.graph)
        return self.agreed(capture.graph, self._plan_beside)

    def _plan_beside(self, graph: Graph, in_flight_bytes: int) -> Result:
        """The graph's plan of a split budget, else a plan for it alone.

        Args:
            graph: The graph; its resident bytes include those in flight.
            in_flight_bytes: Bytes that other graphs in flight hold.
        """
        order = self.shared_order(graph)
        if order is not None:
            return result_of_order(graph, order)
        try:
            return planner_for(self.options.planning)(graph)
        except (InfeasibleBudgetError, PlanNotFoundError):
            if not in_flight_bytes:
                raise
            # Other graphs hold so much that no plan fits beside them. If the smallest plan would fit without them, the first step
            # runs with it, and the budget is split when that step is over.
            smallest = min_budget(graph, limits=Limits(time_s=self.options.time_limit_s))
            assert self.budget is not None
            limit = self.budget.resolve(graph)
            if smallest.peak_bytes - in_flight_bytes > limit:
                raise
            return msgspec.structs.replace(result_of_order(graph, smallest.plan.order), budget_bytes=limit)

    def _planned(self, capture: Capture, result: Result) -> None:
        # A graph without a boundary is a whole step: when it returns, nothing of it is in flight.
        if self.budget is not None and capture.graph.boundary is not None:
            footprint = PlanFootprint.of(capture.graph, result.plan, self._wrapped.transient_gradient_bytes)
            self.guard(capture.graph, footprint, result.budget_bytes)
        resident = format_bytes(capture.graph.resident_bytes)
        _log.info("resident memory %s, of which besides the graph's inputs: %s", resident, self.resident)
        self.hooks.planned(capture, result)


def _warn_of_tangents(graph: Graph) -> None:
    """Warn of the gradients of outputs besides a loss: AOTAutograd allocates them even for outputs that are never used."""
    assert graph.boundary is not None
    sizes = [graph.values[v].size_bytes for v in graph.ops[graph.boundary].outputs]
    large = sum(size for size in sizes if size > SCALAR_TANGENT_BYTES)
    if large and large < sum(sizes):
        _log.warning(
            "what the forward returns beside its loss has gradients of %s, allocated as zeros where they are not used: return "
            "only the loss from the compiled function, or detach the other outputs",
            format_bytes(large),
        )


def costs_of(options: Options) -> Costs:
    """The source of the costs of ops that the options name: measurements, or estimates."""
    return Profiler() if options.costs == "measured" else estimated_costs
