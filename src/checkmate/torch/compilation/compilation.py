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
    """How a caller inside this package takes part in a compilation.

    Attributes:
        planner: Plans a graph instead of the options.
        planned: Told the graph and its plan before anything runs.
        before_forward: Called before every run of a compiled forward; may raise.
        inference: Whether graphs without gradients are compiled; otherwise they are refused.
        whole: Whether the graph is a whole step, its backward and its updates in it.
        target: The device that the step is planned for, where that is not the one at hand.
    """

    planner: Planner | None = None
    planned: Callable[[Capture, Result], None] = lambda capture, result: None
    before_forward: Callable[[], None] | None = None
    inference: bool = True
    whole: bool = False
    target: EmulatedDevice | None = None


class Compilation:
    """One graph on its way to a compiled step.

    Args:
        example_inputs: Its inputs.
        options: The user's options.
        hooks: How a caller inside this package takes part.

    Attributes:
        options: As given.
        hooks: As given.
        ranks: The ranks that plan together, if there are several.
        resident: Memory beside the graph's own inputs that no plan can change.
        least_fused_bytes: The least budget that a step compiled by Inductor would have kept, where none kept what was asked for.
    """

    def __init__(self, example_inputs: Sequence[Any], options: Options, hooks: Hooks) -> None:
        self.options = options
        self.hooks = hooks
        self.budget = options.planning.budget
        self.ranks = job_ranks() if options.ranks == "together" and self.budget is not None and hooks.planner is None else None
        self._wrapped = wrapper_memory(example_inputs, options.accumulate)
        in_flight = 0 if self.budget is None else COORDINATOR.held_bytes()
        # On CUDA what is in flight, or held by wrappers, is among what is allocated.
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
        """How the graph is to be split."""
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
        """A compiled forward, guarded."""

        def guarded(args: list[Any]) -> Any:
            if self.hooks.before_forward is not None:
                self.hooks.before_forward()
            if self.ranks is not None:
                self.ranks.record_forward()
            return COORDINATOR.forward(self._planned_graphs[0], run, args) if self._planned_graphs else run(args)

        return as_boxed(guarded)

    def backward(self, run: BoxedRun) -> BoxedRun:
        """A compiled backward, guarded."""
        return as_boxed(lambda args: COORDINATOR.backward(run, args)) if self._planned_graphs else run

    def guard(self, graph: Graph, footprint: PlanFootprint, budget_bytes: int) -> None:
        """Check every run of a graph against a budget.

        Args:
            graph: The graph that was planned.
            footprint: Its plan, and the memory of that.
            budget_bytes: The budget that it was planned for.
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
        """The order that a division over several graphs gave a graph, if there was one."""
        share = COORDINATOR.share(graph, self.budget) if self.budget is not None else None
        return share.order if share is not None else None

    def agreed(self, graph: Graph, plan: Callable[[Graph, int], Result]) -> tuple[Graph, Result]:
        """The plan of a graph, and the graph that it is for: where several ranks plan together that of rank 0, for all.

        Args:
            graph: The graph.
            plan: Plans a graph beside some bytes in flight.
        """
        if self.ranks is None:
            return graph, plan(graph, self._in_flight_bytes)
        wanted = f"a budget of {self.budget}"
        agreed = plan_on_rank0(self.ranks, graph, self._in_flight_bytes, wanted, plan)
        self._in_flight_bytes = agreed.in_flight_bytes
        return agreed.graph, agreed.result

    def agree_to_run(self) -> None:
        """Go on only if every rank has compiled what is planned together.

        Raises:
            RankError: One has not.
        """
        if self.ranks is not None and (self._planned_graphs or self.hooks.whole):
            self.ranks.decide("running it", b"", lambda said: b"")

    def refuse_inference(self) -> None:
        """Refuse a graph without gradients where a step is wanted.

        Raises:
            GraphError: It is.
        """
        if not self.hooks.inference:
            raise GraphError(
                "nothing in this step requires a gradient, so that there is no backward to plan",
                hint="check requires_grad of the parameters, and that the loss depends on them",
            )

    def _plan(self, capture: Capture) -> tuple[Graph, Result]:
        if self.hooks.planner is not None:
            return capture.graph, self.hooks.planner(capture.graph)
        return self.agreed(capture.graph, self._plan_beside)

    def _plan_beside(self, graph: Graph, in_flight_bytes: int) -> Result:
        """The plan that a division gave a graph, else one for it alone beside what is in flight."""
        order = self.shared_order(graph)
        if order is not None:
            return result_of_order(graph, order)
        try:
            return planner_for(self.options.planning)(graph)
        except (InfeasibleBudgetError, PlanNotFoundError):
            if not in_flight_bytes:
                raise
            # Too much is in flight, which a division will mend once the step is over.
            smallest = min_budget(graph, limits=Limits(time_s=self.options.time_limit_s))
            assert self.budget is not None
            limit = self.budget.resolve(graph)
            if smallest.peak_bytes - in_flight_bytes > limit:
                raise
            return msgspec.structs.replace(result_of_order(graph, smallest.plan.order), budget_bytes=limit)

    def _planned(self, capture: Capture, result: Result) -> None:
        # A whole step is over when it returns: nothing of it is in flight.
        if self.budget is not None and capture.graph.boundary is not None:
            footprint = PlanFootprint.of(capture.graph, result.plan, self._wrapped.transient_gradient_bytes)
            self.guard(capture.graph, footprint, result.budget_bytes)
        _log.info("%s, of it beside the graph's inputs: %s", format_bytes(capture.graph.resident_bytes), self.resident)
        self.hooks.planned(capture, result)


def _warn_of_tangents(graph: Graph) -> None:
    """Say what gradients of outputs beside a loss cost: AOTAutograd makes them even for outputs that nobody uses."""
    assert graph.boundary is not None
    sizes = [graph.values[v].size_bytes for v in graph.ops[graph.boundary].outputs]
    large = sum(size for size in sizes if size > SCALAR_TANGENT_BYTES)
    if large and large < sum(sizes):
        _log.warning(
            "what the forward returns beside its loss has gradients of %s, zeros if nobody uses them: compile what returns "
            "the loss alone, or detach the rest",
            format_bytes(large),
        )


def costs_of(options: Options) -> Costs:
    """Where the costs of ops come from."""
    return Profiler() if options.costs == "measured" else estimated_costs
