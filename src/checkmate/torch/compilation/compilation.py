"""Compiles one Dynamo graph in three steps: its resident memory, its plan, and its executable."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from checkmate.core.budget import result_bytes
from checkmate.core.errors import GraphError
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import BoxedRun, as_boxed, keep_undefined, save_any_number, saved_symbols
from checkmate.torch._compat.dynamo import recompile_current_frame, takes_gradients, untraced
from checkmate.torch.compilation.graph_planner import GraphPlanner
from checkmate.torch.compilation.resident_account import Hooks, ResidentAccount
from checkmate.torch.distributed.consensus import job_ranks
from checkmate.torch.joint.hidden_state import mark_hidden_state
from checkmate.torch.measure.allocator import ReservedMemory
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import Options
from checkmate.torch.partition.copies import BUFFERS
from checkmate.torch.partition.split import CapturedJoint, Task
from checkmate.torch.passes.gradients import accumulated_inputs
from checkmate.torch.steps.coordinator import coordinator, run_backward
from checkmate.torch.steps.program import GraphInterface, PlannedGraph, Program

_log = logging.getLogger("checkmate.torch")


class Compilation:
    """The compilation of one Dynamo graph."""

    def __init__(self, graph: fx.Graph, example_inputs: Sequence[Any], options: Options, hooks: Hooks) -> None:
        self.options, self.hooks = options, hooks
        self._budget = options.planning.budget
        self._takes_gradients = takes_gradients(graph)
        account = self._account = ResidentAccount(example_inputs, options, hooks)
        together = options.ranks == "together" and self._budget is not None and hooks.captured is None
        self.ranks = job_ranks() if together else None  # ranks that plan together
        self.planner = GraphPlanner(options, account, hooks, self.ranks)
        self.executable = Executable(account, self.planner, hooks)
        self.resident = account.resident

    @functools.cached_property
    def task(self) -> Task:
        """How the graph is planned and partitioned."""
        options, target, account = self.options, self.hooks.target, self._account
        measured = options.costs == "measured"
        task = Task(
            costs=Profiler(inputs=account.inputs) if measured else estimated_costs,
            plan=self.planner.plan,
            hold_outputs=options.outputs == "held",
            hold_last=int(self.hooks.whole and options.outputs == "held") + (account.replayed is not None),
            honours_checkpoints=options.checkpoints == "respected",
            no_recompute=frozenset(options.no_recompute),
            extra_resident_bytes=account.resident.total_bytes,
            # AOTAutograd merges equal inputs, which changes their positions.
            accumulated=lambda count: account.accumulated if count == len(account.inputs) else frozenset(),
            read_from_host=account.read_from_host,
            on_planned=self.executable.on_planned,
            on_unplannable=self._unplannable,
            most_workspace_bytes=2 ** (20 if options.budget_of == "reserved" else 63),  # a larger request is in other segments
            counted=account.counted,
            room=self.planner.room if account.is_bounded and self._budget is not None else None,
            measures_beyond=self.ranks is None,
            refuse=(lambda graph: None) if account.replayed is None else account.replayed.check,
            examine=functools.partial(mark_hidden_state, runs=measured and target is None),
        )
        if target is None:
            return task
        resident = task.extra_resident_bytes + target.device.blas_workspace_bytes
        return replace(task, costs=target.costs, relabel=target.relabel, extra_resident_bytes=resident)

    @property
    def task_without_backward(self) -> Task | None:
        """How a graph without a backward is planned; None if nothing is promised for it.

        A function that takes its gradients itself, such as by `torch.func.grad`, is a whole step. Any other is an evaluation,
        which may take the memory of its training step: a share is known when the training step has been planned.
        """
        if self._budget is None or self.planner.keeps_everything or self.options.plan is not None:
            return None
        if self._takes_gradients:
            return self.task
        known = coordinator().budget_bytes(self._budget)
        if known is None and not self._account.reads_host:
            return None
        known = known or 0  # a weight on the host has to be fetched: as little memory as possible
        budget = self._budget.with_total(max(0, known - coordinator().held_bytes()))
        costs, plan = self.planner.evaluation(budget, self.task.costs, estimated_costs)
        return replace(self.task, costs=costs, plan=plan, on_planned=self.executable.prepare_copies)

    def agree_to_run(self) -> None:
        """Wait until every rank has compiled its graph: a rank that ran alone would block in its first collective."""
        if self.ranks is not None and (self.executable.planned is not None or self.hooks.whole):
            self.ranks.decide("running it", b"", lambda said: b"")

    def may_be_cached(self) -> bool:
        """Whether code that an earlier process compiled for this graph may run: the plan does not depend on this process."""
        hooks = self.hooks
        inside = hooks.whole or hooks.captured is not None or hooks.target is not None
        separate = self.ranks is None and self.options.plan is None and not inside
        return separate and coordinator().steps.begin_as_compiled and not coordinator().in_flight

    def _unplannable(self, error: GraphError) -> None:
        """Have a graph that cannot be planned run as it is, if keeping everything keeps the budget."""
        inside = self.hooks.whole or not self.hooks.inference or self.hooks.captured is not None or self.options.plan is not None
        if inside or not (self._budget is None or self.planner.keeps_everything):
            raise error
        _log.warning("this graph runs without a plan: %s", error.message)


class Executable:
    """The compiled forward and backward of one Dynamo graph, with a check of the budget before each run."""

    def __init__(self, account: ResidentAccount, planner: GraphPlanner, hooks: Hooks) -> None:
        self._account, self._planner, self._hooks = account, planner, hooks
        self._counted = planner.options.counted
        self._recompile = recompile_current_frame()
        self.planned: PlannedGraph | None = None  # once the graph is planned for a budget
        self._result: Result | None = None  # once the graph is planned, op by op
        self._around: Callable[[], AbstractContextManager[Any]] = nullcontext  # context of each run of a whole step
        self._last_bytes = 0  # of the results of the step before, for which the plan has room

    def forward(self, run: BoxedRun, module: fx.GraphModule | None = None) -> BoxedRun:
        """A compiled forward that the coordinator runs; of a module, if sizes may be symbolic."""
        planned, budget = self.planned, self._planner.options.budget
        if planned is not None:
            planned.own.forward = run
            if module is not None:
                planned.num_symbols = planned.own.num_symbols = saved_symbols(module, planned.interface.num_outputs)
                save_any_number()

        def guarded(args: list[Any]) -> Any:
            if self._hooks.before_forward is not None:
                self._hooks.before_forward()
            if isinstance(self._counted, ReservedMemory) and self._result is not None:
                self._counted.check(self._result.budget_bytes)
            if self._planner.ranks is not None:
                self._planner.ranks.record_forward()
            if planned is not None:
                return coordinator().forward(planned, args)
            if self._result is not None and budget is not None and budget.total_bytes is not None:
                self._account.announce_growth(self._result, self._last_bytes, args)
            if self._account.replayed is not None:
                return self._account.replayed(run, args)
            with self._around():
                return run(args)

        return as_boxed(guarded)

    def backward(self, run: BoxedRun) -> BoxedRun:
        """A compiled backward that the coordinator runs."""
        if self.planned is None:
            return run
        self.planned.own.backward = run
        return as_boxed(untraced(functools.partial(run_backward, self.planned)))

    def differentiable(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """The graph as AOTAutograd compiled it; its backward is told into which of its outputs no gradient flows."""
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
    ) -> None:
        """Have the coordinator run a graph; its joint graph is None for code from a cache."""
        accumulated = frozenset[int]() if joint is None else accumulated_inputs(joint.capture.joint)
        account, planner = self._account, self._planner
        self.planned = PlannedGraph(
            interface=interface,
            joint=joint,
            own=Program(result, memory, accumulated=accumulated),
            alone=planner.is_alone(interface.graph) or planner.allotment(interface.graph) is not None,
            options=planner.options,
            resident=account.resident,
            planned_gradient_bytes=account.resident.gradients_bytes + account.wrapped.bucket_view_bytes,
            outside_bytes=account.resident.optimizer_bytes + account.resident.other_bytes,
            counted_bytes=account.counted_bytes,
            device=account.device,
            ranks=planner.ranks,
            recompile=self._recompile,
            replaceable=replaceable,
            chunks=planner.chunks,
            pin=account.pin_weights,
        )

    def on_planned(self, joint: CapturedJoint, result: Result) -> None:
        """Take over the plan of the graph, before anything runs."""
        interface, graph, self._result = GraphInterface.of(joint), joint.capture.graph, result
        if self._planner.options.budget is not None:
            if graph.boundary is None:  # a whole step: nothing of it is in flight when it returns
                self._account.look.looked(self._account.resident.other_bytes)
                self._last_bytes = joint.task.hold_last * result_bytes(graph)
            else:
                memory = StepMemory.of(graph, result.plan, self._account.wrapped.transient_gradient_bytes)
                self.guard(interface, joint, result, memory, replaceable=True)
        resident = self._account.resident
        _log.info("resident memory %s, of which besides the graph's inputs: %s", format_bytes(graph.resident_bytes), resident)
        if isinstance(self._counted, ReservedMemory):
            with torch.cuda.stream(self._account.stream):  # type: ignore[arg-type]  # None: the caller's
                self._counted.prepare(graph, result)
            self._around = self._counted.running
            if self._account.replayed is not None:
                self._account.replayed.memory, self._account.replayed.budget_bytes = self._counted, result.budget_bytes
        else:
            self.prepare_copies(joint, result)
        self._hooks.planned(interface, result)

    def prepare_copies(self, joint: CapturedJoint, result: Result) -> None:
        """Prepare for runs of a plan with copies."""
        if result.plan.host is not None:
            self._around = BUFFERS.step
            self._account.pin_weights(joint.capture, result.plan)
