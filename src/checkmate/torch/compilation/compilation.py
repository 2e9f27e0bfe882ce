"""Compiles one Dynamo graph: computes its resident memory, plans it, and wraps the result in budget checks."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import msgspec
import torch
from torch import fx

from checkmate.core.budget import Budget, ResidentMemory, fixed_bytes, keep_all_bytes
from checkmate.core.errors import GraphError, InfeasibleBudgetError, OptionError, PlanNotFoundError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes, parse_bytes
from checkmate.frontend.counted_memory import counted_bytes, resolved_budget
from checkmate.frontend.planner import GivenPlan, keep_everything, near_smallest, planner_for, result_of_order
from checkmate.frontend.step_memory import StepMemory
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.solve import unit_question
from checkmate.studies.larger_step import plan_of_larger, remember
from checkmate.torch._compat.aot import BoxedRun, as_boxed, keep_undefined, saved_symbols
from checkmate.torch._compat.dynamo import recompile_current_frame, takes_gradients, untraced
from checkmate.torch.chunking.choose import ChunkableStep, Chunks, choose_chunks, with_offer, with_smallest_peak
from checkmate.torch.compilation.torch_errors import NO_GRADIENT, NO_GRADIENT_HINT
from checkmate.torch.distributed.consensus import job_ranks
from checkmate.torch.distributed.plan_on_rank0 import plan_on_rank0
from checkmate.torch.distributed.wrappers import wrapper_memory
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.graph.op_properties import op_names
from checkmate.torch.graph.storages import is_scalar_tangent
from checkmate.torch.joint.capture import Capture, Costs, part_of, reads_of_overwritable
from checkmate.torch.joint.hidden_state import mark_hidden_state
from checkmate.torch.measure.allocator import ReservedMemory, counted_memory, warm_up
from checkmate.torch.measure.device_memory import LookDue, state_to_come_bytes
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.measure.resident import cuda_device, gradient_bytes
from checkmate.torch.options import Options
from checkmate.torch.partition.copies import measured_host
from checkmate.torch.partition.split import CapturedJoint, Recapture, Task
from checkmate.torch.passes.gradients import accumulated_inputs
from checkmate.torch.steps.coordinator import COORDINATOR
from checkmate.torch.steps.program import GraphInterface, PlannedGraph, Program, Share, weakly

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks and settings of a compilation for callers inside this package.

    Attributes:
        captured: Called with the captured step in place of planning it, and ends the compilation; by default it is planned.
        planned: Called with the interface of the captured graph and its plan before anything runs.
        before_forward: Called before every run of a compiled forward; may raise.
        inference: Whether graphs without gradients are compiled; they are refused otherwise.
        whole: Whether the graph is a whole step, with the backward and the updates.
        returned_bytes: Bytes of what the last run of a whole step returned, as far as it exists.
        target: The device to plan for; by default the one at hand.
    """

    captured: Callable[[ChunkableStep[Capture]], NoReturn] | None = None
    planned: Callable[[GraphInterface, Result], None] = lambda interface, result: None
    before_forward: Callable[[], None] | None = None
    inference: bool = True
    whole: bool = False
    returned_bytes: int = 0
    target: EmulatedDevice | None = None


class Compilation:
    """The compilation of one Dynamo graph.

    Args:
        graph: The graph.
        example_inputs: Its inputs.
        options: The user's options.
        hooks: Callbacks and settings of the caller.

    Attributes:
        options: As given.
        hooks: As given.
        budget: The budget, or None.
        planning: The options of planning, with what counts against the budget on the device.
        ranks: The ranks that plan together, or None.
        resident: Memory besides the graph's own inputs that no plan can change.
        planned: The graph with its program, once it is planned for a budget.
        least_fused_bytes: Where no step compiled by Inductor kept the budget, the least budget that one of them would keep.
    """

    def __init__(self, graph: fx.Graph, example_inputs: Sequence[Any], options: Options, hooks: Hooks) -> None:
        self.options = options
        self.hooks = hooks
        self.budget = options.planning.budget
        warm_up(cuda := cuda_device(example_inputs, options))
        counted = None if self.budget is None or hooks.target is not None else counted_memory(options.budget_of, cuda)
        self.planning = replace(options.planning, counted=counted)
        self.ranks = job_ranks() if options.ranks == "together" and self.budget is not None and hooks.captured is None else None
        self._wrapped = wrapper_memory(example_inputs, options.accumulate)
        tensors = [t for t in example_inputs if isinstance(t, torch.Tensor)]
        self._device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        # In a traced step nothing exists yet; without a budget or a plan nothing is promised.
        asked = self.budget is not None or options.plan is not None
        self._bounded = asked and hooks.captured is None and hooks.target is None
        device = cuda or torch.device("cpu")
        trained = [t for t in tensors if t.is_leaf and t.requires_grad]
        self._counted_bytes = self._wrapped.counted_bytes(device)
        counted_elsewhere = self._counted_bytes + hooks.returned_bytes
        self.resident = ResidentMemory(
            gradients_bytes=gradient_bytes(example_inputs, options.accumulate),
            optimizer_bytes=state_to_come_bytes(trained, device) if self._bounded and trained else 0,
            wrappers_bytes=self._wrapped.held_bytes,
            reserve_bytes=options.reserve_bytes,
            other_bytes=max(0, COORDINATOR.outside_bytes(tensors, device) - counted_elsewhere) if self._bounded else 0,
        )
        self._num_inputs = len(example_inputs)
        self._takes_gradients = takes_gradients(graph)
        self._inputs = [weakly(a) for a in example_inputs]
        # Eager code may overwrite the batch and buffers between forward and backward, such as the queue of a momentum encoder.
        state = {id(t) for t in (*trained, *(t for t in tensors if isinstance(t, torch.nn.Parameter)))}
        self._overwritable = {k for k, t in enumerate(example_inputs) if id(t) not in state}
        self._accumulated = self._accumulating(example_inputs)
        self.planned: PlannedGraph | None = None
        self._recompile = recompile_current_frame()
        self._searched_s = 0.0
        self._runs = 0
        self._budget_bytes: int | None = None
        self.least_fused_bytes: int | None = None
        self._whole: Result | None = None  # of a graph that the coordinator does not run
        self._last_bytes = 0  # of what the step before returned, which is planned for
        self._look, self._announced, self._count_device = LookDue(), False, device

    @functools.cached_property
    def task(self) -> Task:
        """How the graph is planned and partitioned."""
        options, target = self.options, self.hooks.target
        task = Task(
            costs=costs_of(options, self._inputs),
            plan=self._plan,
            hold_outputs=options.outputs == "held",
            hold_last=self.hooks.whole and options.outputs == "held",
            split_convolutions=options.split_convolutions,
            honours_checkpoints=options.checkpoints == "respected",
            no_recompute=frozenset(options.no_recompute),
            extra_resident_bytes=self.resident.total_bytes,
            # AOTAutograd merges inputs that are equal, and then their positions are others.
            accumulated=lambda count: self._accumulated if count == self._num_inputs else frozenset(),
            on_planned=self._planned,
            on_unplannable=self._unplannable,
            room=self._room if self._bounded and self.budget is not None else None,
            measures_beyond=self.ranks is None,
            examine=functools.partial(mark_hidden_state, runs=options.costs == "measured" and target is None),
        )
        if target is None:
            return task
        resident = task.extra_resident_bytes + target.device.blas_workspace_bytes
        return replace(task, costs=target.costs, relabel=target.relabel, extra_resident_bytes=resident)

    @property
    def task_without_backward(self) -> Task | None:
        """How a graph is planned that has no backward; None where nothing is promised for it.

        A function that takes its gradients itself, such as by `torch.func.grad`, is a whole step. Any other is an evaluation,
        which may take what its training step may: a share is known when that has been planned.
        """
        if self.budget is None or self._keeps_everything or self.options.plan is not None:
            return None
        if self._takes_gradients:
            return self.task
        known = COORDINATOR.budget_bytes(self.budget)
        if known is None:
            return None
        budget, costs = self.budget.with_total(max(0, known - COORDINATOR.held_bytes())), estimated_costs

        def plan(capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
            nonlocal costs
            if keep_all_bytes(capture.graph) > budget.resolve(capture.graph):
                costs = self.task.costs  # estimates may be too large
                capture = recapture(capture.joint)
            return capture, self._plan_evaluation(capture.graph, budget)

        return replace(self.task, costs=lambda nodes: costs(nodes), plan=plan, on_planned=lambda joint, result: None)

    def _plan_evaluation(self, graph: Graph, budget: Budget) -> Result:
        """A plan within a budget, or one of nearly the smallest peak, with a warning."""
        if keep_all_bytes(graph) <= budget.resolve(graph):
            return keep_everything(graph)
        try:
            return planner_for(replace(self.planning, budget=budget))(graph)
        except (InfeasibleBudgetError, PlanNotFoundError):
            smallest = near_smallest(graph, _SMALLEST.most_s)
        _log.warning(
            "a call without gradients takes up to %s, more than its budget of %s",
            format_bytes(smallest.peak_bytes),
            self.budget,
        )
        return smallest

    def forward(self, run: BoxedRun, module: fx.GraphModule | None = None) -> BoxedRun:
        """A compiled forward that the coordinator runs.

        Args:
            run: The forward of the plan, in AOTAutograd's boxed calling convention.
            module: Its module, where sizes may be symbolic.
        """
        planned = self.planned
        if planned is not None:
            planned.own.forward = run
            if module is not None:
                planned.num_symbols = planned.own.num_symbols = saved_symbols(module, planned.num_outputs)

        def guarded(args: list[Any]) -> Any:
            if self.hooks.before_forward is not None:
                self.hooks.before_forward()
            if isinstance(self.planning.counted, ReservedMemory) and self._budget_bytes is not None:
                if self._runs == 1:  # the first step is over
                    self.planning.counted.check(self._budget_bytes)
                self._runs += 1
            if self.ranks is not None:
                self.ranks.record_forward()
            if self._whole is not None and self.budget is not None and self.budget.total_bytes is not None and self._look:
                self._announce_growth(self._whole, args)
            return run(args) if planned is None else COORDINATOR.forward(planned, args)

        return as_boxed(guarded)

    def _announce_growth(self, result: Result, args: Sequence[Any]) -> None:
        """Warn before a whole step runs that leaves too little room for what was made after it was compiled."""
        tensors = [a for a in args if isinstance(a, torch.Tensor)]
        outside = max(0, COORDINATOR.outside_bytes(tensors, self._count_device) - self._counted_bytes)
        self._look.looked(outside)
        growth = outside - self.resident.other_bytes - self.resident.optimizer_bytes - self._last_bytes
        excess = growth - (result.budget_bytes - result.peak_bytes) - self.options.reserve_bytes
        if excess > 0 and not self._announced:
            self._announced = True
            _log.warning(
                "tensors that were made after the step was compiled take %s more than its budget of %s leaves: the step may "
                "exceed the budget by as much\nhint: compile the step when they exist, or set reserve=%r",
                format_bytes(excess),
                self.budget,
                format_at_least(growth),
            )

    def backward(self, run: BoxedRun) -> BoxedRun:
        """A compiled backward that the coordinator runs.

        Args:
            run: The backward of the plan, in AOTAutograd's boxed calling convention.
        """
        planned = self.planned
        if planned is None:
            return run
        planned.own.backward = run
        return as_boxed(untraced(functools.partial(COORDINATOR.backward, planned)))

    def differentiable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The compiled graph, whose backward is told into which of its outputs no gradient flows.

        Args:
            run: The graph as AOTAutograd compiled it.
        """
        if self.planned is None or not self.planned.replaceable or self.planned.dynamic:
            return run

        def observed(*args: Any) -> Any:
            outputs = run(*args)
            keep_undefined(outputs)
            return outputs

        return observed

    def guard(
        self,
        interface: GraphInterface,
        joint: CapturedJoint | None,
        result: Result,
        memory: StepMemory,
        *,
        replaceable: bool,
        num_symbols: int = 0,
    ) -> None:
        """Have the coordinator run a graph.

        Args:
            interface: The graph, and how its forward and backward are called.
            joint: The captured joint graph; None for code from a cache.
            result: Its plan.
            memory: Memory of the plan, predicted or measured.
            replaceable: Whether a program of another plan can take the place of this one without compiling again.
            num_symbols: How many symbolic sizes the forward saves for the backward, where that is known already.
        """
        accumulated = frozenset[int]() if joint is None else accumulated_inputs(joint.capture.joint)
        gradients = self.resident.gradients_bytes + self._wrapped.bucket_view_bytes
        self.planned = PlannedGraph(
            interface=interface,
            joint=joint,
            own=Program(result, memory, accumulated=accumulated, num_symbols=num_symbols),
            alone=self.alone(interface.graph) or self.share(interface.graph) is not None,
            options=self.planning,
            resident=self.resident,
            planned_gradient_bytes=gradients,
            outside_bytes=self.resident.optimizer_bytes + self.resident.other_bytes,
            counted_bytes=self._counted_bytes,
            device=self._device,
            ranks=self.ranks,
            recompile=self._recompile,
            searched_s=self._searched_s,
            replaceable=replaceable,
            num_symbols=num_symbols,
            chunks=self._chunks,
            offered=self._offered,
        )

    def share(self, graph: Graph) -> Share | None:
        """The part of a graph in the plan of its step, where one has been made for a graph like it."""
        return COORDINATOR.steps.share(graph, self.budget) if self.budget is not None else None

    def agreed(self, graph: Graph, plan: Callable[[Graph], Result]) -> tuple[Graph, Result]:
        """The plan of a graph. Where several ranks plan together, rank 0 makes it for all of them.

        Args:
            graph: The graph as captured on this rank.
            plan: Called with the graph; its resident bytes are the largest of any rank.

        Returns:
            The graph with the figures that the ranks agreed on, and its plan.

        Raises:
            RankError: A rank failed, or the ranks captured different graphs.
        """
        if self.ranks is None:
            return graph, plan(graph)
        return plan_on_rank0(self.ranks, graph, f"a budget of {self.budget}", plan)

    def agree_to_run(self) -> None:
        """Wait until every rank has compiled its graph; a rank that ran without the others would block in its first collective.

        Raises:
            RankError: A rank failed to compile.
        """
        if self.ranks is not None and (self.planned is not None or self.hooks.whole):
            self.ranks.decide("running it", b"", lambda said: b"")

    def refuse_inference(self) -> None:
        """Refuse a graph without gradients, unless `Hooks.inference` allows it.

        Raises:
            GraphError: The hooks do not allow it.
        """
        if not self.hooks.inference:
            raise GraphError(NO_GRADIENT, hint=NO_GRADIENT_HINT)

    def _accumulating(self, inputs: Sequence[Any]) -> frozenset[int]:
        """Inputs to whose gradients the backward adds: those that have one; with the option ``accumulate`` all that can."""
        options = self.options
        if self.budget is None or options.plan is not None or options.compiler != "eager" or self.hooks.whole:
            return frozenset()
        leaves = [(k, t) for k, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad]
        coming = {k for k, t in leaves if t.grad is None and not t._backward_hooks} if options.accumulate else set[int]()
        return frozenset(coming | {k for k, t in leaves if COORDINATOR.steps.origins.accumulates(t)})

    def _plan(self, capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
        planned, result = self._planned_now(capture, recapture)
        if self.alone(capture.graph):
            remember(self.budget, capture.graph, result, whole=planned.joint is capture.joint)
        return planned, result

    def _planned_now(self, capture: Capture, recapture: Recapture) -> tuple[Capture, Result]:
        step = ChunkableStep(capture, (capture.joint,), lambda modules: recapture(modules[0]))
        if self.hooks.captured is not None:
            self.hooks.captured(step)
        try:
            if self._chunks is not None and not self._keeps_everything:
                if not self.alone(capture.graph):
                    capture = with_smallest_peak(step, self._chunks, self.budget.total_bytes if self.budget else None).captured
                elif (chosen := self._in_pieces(step, self._chunks)) is not None:
                    return chosen
            early = frozenset[int]()
            # AOTAutograd merges inputs that are equal, and then their positions are others.
            if not self.alone(capture.graph) and len((part := part_of(capture)).readers) == self._num_inputs:
                early = reads_of_overwritable(part, self._overwritable)
            graph, result = self.agreed(capture.graph, lambda graph: self._plan_graph(graph, early))
        except InfeasibleBudgetError as error:
            # Where what stays at the end sets the floor, no op is too large.
            if error.binding_op and self._offered is not None:
                alone = self.alone(capture.graph)
                part = ChunkableStep(_part(capture), step.joints, lambda modules: _part(recapture(modules[0])))
                raise with_offer(error, step if alone else part, self._offered, part=not alone) from None
            raise
        return replace(capture, graph=graph), result

    @property
    def _keeps_everything(self) -> bool:
        return self.budget is not None and self.budget.keeps_everything

    @functools.cached_property
    def _chunks(self) -> Chunks | None:
        """Which ops may run piece by piece, where there is a budget to keep; None if none may."""
        return None if self.options.chunking == "off" else self._chunkable(exact=self.options.chunking == "exact")

    @property
    def _offered(self) -> Chunks | None:
        """Which ops could run piece by piece, where not all that can are asked for."""
        return None if self.options.chunking == "auto" else self._chunkable(exact=False)

    def _chunkable(self, *, exact: bool) -> Chunks | None:
        """Which ops can run piece by piece as the options and the job are, whether or not it is asked for; None if none can."""
        options = self.options
        if options.budget is None or options.compiler != "eager":
            return None
        if options.host is not None or options.budget_of == "reserved":
            return None
        allows = self._allowed_in_pieces()
        return None if allows is None else Chunks(exact, allows)

    @property
    def in_pieces(self) -> Callable[[fx.Node], bool] | None:
        """Which ops run piece by piece under Inductor where they are in regions that compute nothing twice; None if none may."""
        return self._allowed_in_pieces() if self.options.chunking == "auto" else None

    def _allowed_in_pieces(self) -> Callable[[fx.Node], bool] | None:
        options = self.options
        if self.ranks is not None or options.checkpoints != "hints" or options.plan is not None:
            return None
        excluded = frozenset(options.no_recompute)
        return lambda op: excluded.isdisjoint(op_names(op))

    def _in_pieces(self, step: ChunkableStep[Capture], chunks: Chunks) -> tuple[Capture, Result] | None:
        """The fastest plan found if regions may run piece by piece; None if there is nothing to gain."""
        options = self.planning
        assert options.budget is not None
        known = plan_of_larger(options.budget, step.whole.graph, options.counted)
        if known is not None:
            return step.whole, known
        budget_bytes = resolved_budget(options.budget, step.whole.graph, options.counted)
        within = options.budget.with_total(budget_bytes, step.whole.graph)

        def solve(capture: Capture, time_s: float | None) -> Result:
            try:
                return planner_for(replace(options, budget=within, time_limit_s=time_s))(capture.graph)
            except PlanNotFoundError:
                # The search for the smallest peak, which chooses the regions, finds plans that this one misses.
                least = near_smallest(capture.graph, _SMALLEST.most_s, budget_bytes)
                if counted_bytes(capture.graph, least, options.counted) > budget_bytes:
                    raise
                return msgspec.structs.replace(least, budget_bytes=budget_bytes)

        return choose_chunks(step, chunks, budget_bytes, options.time_limit_s, solve)

    def _plan_graph(self, graph: Graph, early: frozenset[int]) -> Result:
        """A plan for the budget if the graph is a step by itself; otherwise one of nearly the smallest peak, unless all is kept.

        Args:
            graph: The graph.
            early: Ops that are computed in the forward only, see `reads_of_overwritable`.

        Raises:
            InfeasibleBudgetError: No plan keeps the budget, which is proven.
            PlanNotFoundError: No plan was found in time.
        """
        given = self.options.planning.plan
        if self.options.host is not None or (given is not None and given.host is not None):
            return self._plan_with_host(graph, given)
        if self.alone(graph):
            known = plan_of_larger(self.planning.budget, graph, self.planning.counted) if given is None else None
            return planner_for(self.planning)(graph) if known is None else known
        assert self.budget is not None
        if self._keeps_everything:
            return result_of_order(graph, range(len(graph.ops)))
        total = self.budget.total_bytes
        if total is not None and floor(part := _part_of_a_step(graph)).peak_bytes > total:
            return self._refused(part)
        smallest = near_smallest(
            _in_forward(graph, early), _SMALLEST.time_s(self.options.time_limit_s, COORDINATOR.searched_s()), total
        )
        self._searched_s = smallest.elapsed_s
        return result_of_order(graph, smallest.plan.order)

    def _plan_with_host(self, graph: Graph, given: Plan | None) -> Result:
        """A plan with copies to the host, in whole steps only."""
        if not self.hooks.whole or self.ranks is not None:
            raise OptionError(
                "host needs a whole step on one device: which values are away is not known to another graph or another rank",
                hint="use checkmate.torch.compile(model, loss, optimizer, example=..., budget=..., host=...), or leave out host",
            )
        if given is not None:
            return GivenPlan(given, self.budget, copies=True)(graph)
        host = measured_host(self._device, parse_bytes(self.options.host or 0))
        return planner_for(replace(self.options.planning, host=host))(graph)

    def _refused(self, graph: Graph) -> Result:
        """Refuse a budget that one graph of a step of several exceeds by itself; what the others add is not known."""
        try:
            return planner_for(self.planning)(graph)
        except InfeasibleBudgetError as error:
            least = format_at_least(error.smallest_bytes or error.floor_bytes)
            asked = "" if self.budget is None else unit_question(self.budget, error.budget_bytes, error.smallest_bytes or 0)
            raise error.with_hint(
                f"{asked}this graph alone needs at least {least}, and the step may need more, which is known when it has run "
                'once: try a budget of "100%", or lower the batch size'
            ) from None

    def alone(self, graph: Graph) -> bool:
        """Whether a graph is taken for a whole step: what it returns has one gradient, that of a loss, and none is in flight.

        Args:
            graph: The graph as captured.
        """
        if self.budget is None or graph.boundary is None or self.options.plan is not None:
            return True
        tangents = [graph.values[v] for v in graph.ops[graph.boundary].outputs]
        return len(tangents) == 1 and is_scalar_tangent(tangents[0]) and not COORDINATOR.in_flight()

    def may_be_cached(self) -> bool:
        """Whether code that an earlier process compiled for this graph may run: nothing of this one has a part in its plan."""
        hooks = self.hooks
        inside = hooks.whole or hooks.captured is not None or hooks.target is not None
        apart = self.ranks is None and self.options.plan is None and not inside
        return apart and COORDINATOR.steps.begin_as_compiled and not COORDINATOR.in_flight()

    def _room(self, graph: Graph) -> int:
        """Bytes that the budget leaves for measurements: beside what exists, graphs in flight too."""
        assert self.budget is not None
        # A share is one of all graphs of the step, as far as they are known.
        keep_all = keep_all_bytes(graph) + COORDINATOR.keep_all_saved_bytes()
        budget_bytes = self.budget.within(fixed_bytes=fixed_bytes(graph), keep_all_bytes=keep_all)
        return budget_bytes - graph.resident_bytes - COORDINATOR.held_bytes()

    def _unplannable(self, error: GraphError) -> None:
        """Have a graph that cannot be planned run as it is, where keeping everything keeps the budget.

        Raises:
            GraphError: It need not.
        """
        inside = self.hooks.whole or not self.hooks.inference or self.hooks.captured is not None or self.options.plan is not None
        if inside or not (self.budget is None or self._keeps_everything):
            raise error
        _log.warning("this graph runs without a plan: %s", error.message)

    def _planned(self, joint: CapturedJoint, result: Result) -> None:
        # A graph without a boundary is a whole step: when it returns, nothing of it is in flight.
        interface, graph = GraphInterface.of(joint), joint.capture.graph
        if self.budget is not None and graph.boundary is None:
            self._whole = result
            self._last_bytes = fixed_bytes(graph) - graph.resident_bytes if self.task.hold_last else 0
            self._look.looked(self.resident.other_bytes)
        if self.budget is not None and graph.boundary is not None:
            memory = StepMemory.of(graph, result.plan, self._wrapped.transient_gradient_bytes)
            self.guard(interface, joint, result, memory, replaceable=True)
        _log.info(
            "resident memory %s, of which besides the graph's inputs: %s", format_bytes(graph.resident_bytes), self.resident
        )
        if isinstance(self.planning.counted, ReservedMemory):
            self._budget_bytes = result.budget_bytes
            self.planning.counted.prepare(graph, result.plan)
        self.hooks.planned(interface, result)


@dataclass(frozen=True, slots=True, kw_only=True)
class SmallestTime:
    """Time for the plan of a graph whose step is not known yet: it runs once or twice.

    Attributes:
        most_s: Seconds of one search.
        share: Share of the time limit for the searches of all graphs of a step together; the plan of the step has the rest.
        next_share: Share of what is left of that for the next graph: how many there will be is not known.
        least_share: Share of the time limit that a search has at least.
    """

    most_s: float = 1.0
    share: float = 0.5
    next_share: float = 0.25
    least_share: float = 0.005

    def time_s(self, limit_s: float | None, spent_s: float) -> float:
        """Seconds for the next search.

        Args:
            limit_s: The time limit.
            spent_s: What the searches for the graphs before took.
        """
        if limit_s is None:
            return self.most_s
        return min(self.most_s, max(self.least_share * limit_s, self.next_share * (self.share * limit_s - spent_s)))


_SMALLEST = SmallestTime()


def _part_of_a_step(graph: Graph) -> Graph:
    """A graph that holds nothing it returns: the other graphs of a step and eager code may free that at once."""
    return msgspec.structs.replace(graph, values=tuple(msgspec.structs.replace(v, kept=False) for v in graph.values))


def _in_forward(graph: Graph, single: Set[int]) -> Graph:
    """A graph in which some ops are never computed after its boundary."""
    if not single:
        return graph
    assert graph.boundary is not None
    late = (graph.boundary,)
    ops = (msgspec.structs.replace(op, clobbered_by=late) if o in single else op for o, op in enumerate(graph.ops))
    return msgspec.structs.replace(graph, ops=tuple(ops))


def _part(capture: Capture) -> Capture:
    """A capture with the graph of `_part_of_a_step`."""
    return replace(capture, graph=_part_of_a_step(capture.graph))


def costs_of(options: Options, inputs: Sequence[Callable[[], Any]] = ()) -> Costs:
    """The source of the costs of ops that the options name: measurements, or estimates.

    Args:
        options: The options.
        inputs: Functions that return the inputs of the graph, which ops may read while they are measured.
    """
    return Profiler(inputs=inputs) if options.costs == "measured" else estimated_costs
