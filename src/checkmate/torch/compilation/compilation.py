"""One graph of Dynamo on its way to a compiled step: what it is planned beside, how, and what guards its runs."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from checkmate.core.errors import GraphError, InfeasibleBudgetError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Result
from checkmate.core.simulate import simulate
from checkmate.core.units import format_bytes
from checkmate.solvers.given import run_order
from checkmate.studies.min_budget import min_budget
from checkmate.studies.split_budget import Choice
from checkmate.torch._compat.aot import BoxedRun, as_boxed
from checkmate.torch._compat.dynamo import recompile_current_frame
from checkmate.torch.compilation.coordinator import IN_FLIGHT
from checkmate.torch.compilation.planned_graph import Account
from checkmate.torch.compilation.planning import plan_graph
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
        plan: Finds the plan of a graph instead of the options.
        planned: Told the graph and its plan before anything runs.
        gate: Called before every run of a forward; may raise.
        inference: Whether graphs without gradients are compiled; otherwise they are refused.
        whole: Whether the graph is a whole step, its backward and its updates in it.
        target: The device that the step is planned for, where that is not the one at hand.
    """

    plan: Callable[[Graph], Result] | None = None
    planned: Callable[[Capture, Result], None] = lambda capture, result: None
    gate: Callable[[], None] | None = None
    inference: bool = True
    whole: bool = False
    target: EmulatedDevice | None = None


class Compilation:
    """One graph on its way to a compiled step.

    Args:
        example_inputs: Its inputs.
        options: What is asked for.
        hooks: How a caller inside this package takes part.

    Attributes:
        options: As given.
        hooks: As given.
        ranks: Those that plan together, if there are several.
        least_fused_bytes: The least budget that a step compiled by Inductor would have kept, where none kept what was asked for.
    """

    def __init__(self, example_inputs: Sequence[Any], options: Options, hooks: Hooks) -> None:
        self.options = options
        self.hooks = hooks
        budgeted = options.budget is not None
        self.ranks = job_ranks() if options.ranks == "together" and budgeted and hooks.plan is None else None
        self._gradient_bytes = gradient_bytes(example_inputs, options.accumulate)
        self._wrapped = wrapper_memory(example_inputs, options.accumulate)
        self._in_flight_bytes = IN_FLIGHT.held_bytes() if budgeted else 0
        # On CUDA what is in flight, or held by wrappers, is among what is allocated.
        known = self._in_flight_bytes + self._wrapped.held_bytes
        self._elsewhere_bytes = max(known, other_allocated_bytes(example_inputs, options))
        self._accounts: list[Account] = []
        self._forget = recompile_current_frame()
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
            extra_resident_bytes=options.reserve_bytes + self._gradient_bytes + self._elsewhere_bytes,
            on_planned=self._planned,
        )
        if target is None:
            return task
        resident = task.extra_resident_bytes + target.device.blas_workspace_bytes
        return replace(task, costs=target.costs, relabel=target.relabel, extra_resident_bytes=resident)

    def forward(self, run: BoxedRun) -> BoxedRun:
        """A compiled forward, guarded."""

        def guarded(args: list[Any]) -> Any:
            if self.hooks.gate is not None:
                self.hooks.gate()
            if self.ranks is not None:
                self.ranks.record_forward()
            return IN_FLIGHT.forward(self._accounts[0], run, args) if self._accounts else run(args)

        return as_boxed(guarded)

    def backward(self, run: BoxedRun) -> BoxedRun:
        """A compiled backward, guarded."""
        return as_boxed(lambda args: IN_FLIGHT.backward(run, args)) if self._accounts else run

    def account(self, graph: Graph, choice: Choice) -> None:
        """Note what a graph takes while it is in flight."""
        budget = self.options.budget
        assert budget is not None
        _mind_tangents(graph)
        share = IN_FLIGHT.share(graph, budget)
        self._accounts.append(
            Account(
                graph=graph,
                choice=choice,
                budget=budget,
                budget_bytes=share.budget_bytes if share else Problem(graph, budget).budget_bytes,
                resident_bytes=graph.resident_bytes - self._in_flight_bytes,
                planned_gradient_bytes=self._gradient_bytes + self._wrapped.bucket_view_bytes,
                passing_bytes=self._wrapped.transient_gradient_bytes,
                time_limit_s=self.options.time_limit_s,
                forget=self._forget,
                ranks=self.ranks,
            )
        )

    def shared_order(self, graph: Graph) -> tuple[int, ...] | None:
        """The order that a division over several graphs gave a graph, if there was one."""
        share = IN_FLIGHT.share(graph, self.options.budget) if self.options.budget is not None else None
        return share.order if share is not None else None

    def agreed(self, graph: Graph, plan: Callable[[Graph, int], Result]) -> tuple[Graph, Result]:
        """The plan of a graph, and the graph that it is for: where several ranks plan together that of rank 0, for all.

        Args:
            graph: The graph.
            plan: Plans a graph beside some bytes in flight.
        """
        if self.ranks is None:
            return graph, plan(graph, self._in_flight_bytes)
        wanted = f"a budget of {self.options.budget}"
        agreed = plan_on_rank0(self.ranks, graph, self._in_flight_bytes, wanted, plan)
        self._in_flight_bytes = agreed.in_flight_bytes
        return agreed.graph, agreed.result

    def agree_to_run(self) -> None:
        """Go on only if every rank has compiled what is planned together.

        Raises:
            RankError: One has not.
        """
        if self.ranks is not None and (self._accounts or self.hooks.whole):
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
        if self.hooks.plan is not None:
            return capture.graph, self.hooks.plan(capture.graph)
        return self.agreed(capture.graph, self._plan_alone)

    def _plan_alone(self, graph: Graph, in_flight_bytes: int) -> Result:
        """The plan that a division gave a graph, else one for it alone beside what is in flight."""
        order = self.shared_order(graph)
        if order is not None:
            return run_order(graph, order)
        try:
            return plan_graph(graph, self.options)
        except (InfeasibleBudgetError, PlanNotFoundError):
            if not in_flight_bytes:
                raise
            # Too much is in flight, which a division will mend once the step is over.
            smallest = min_budget(graph, limits=Limits(time_s=self.options.time_limit_s))
            assert self.options.budget is not None
            budget = Problem(graph, self.options.budget).budget_bytes
            if smallest.plan is None or simulate(graph, smallest.plan).peak_bytes - in_flight_bytes > budget:
                raise
            return run_order(graph, smallest.plan.order)

    def _planned(self, capture: Capture, result: Result) -> None:
        # A whole step is over when it returns: nothing of it is in flight.
        if self.options.budget is not None and capture.graph.boundary is not None:
            assert result.plan is not None
            choice = Choice.of(capture.graph, result.plan, self._wrapped.transient_gradient_bytes)
            self.account(capture.graph, choice)
        self.hooks.planned(capture, result)


def _mind_tangents(graph: Graph) -> None:
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
