"""Third step of a compilation: the compiled forward and backward, with a check of the budget before each run."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from torch import fx

from checkmate.core.budget import fixed_bytes
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.frontend.step_memory import StepMemory
from checkmate.torch._compat.aot import BoxedRun, as_boxed, keep_undefined, saved_symbols
from checkmate.torch._compat.dynamo import recompile_current_frame, untraced
from checkmate.torch.compilation.hooks import Hooks
from checkmate.torch.compilation.plan_request import PlanRequest
from checkmate.torch.compilation.resident_account import ResidentAccount
from checkmate.torch.measure.allocator import ReservedMemory
from checkmate.torch.partition.split import CapturedJoint
from checkmate.torch.passes.gradients import accumulated_inputs
from checkmate.torch.steps.coordinator import coordinator, run_backward
from checkmate.torch.steps.program import GraphInterface, PlannedGraph, Program

_log = logging.getLogger("checkmate.torch")


class Executable:
    """The forward and the backward of one Dynamo graph."""

    def __init__(self, account: ResidentAccount, request: PlanRequest, hooks: Hooks) -> None:
        self._account, self._request, self._hooks = account, request, hooks
        self._counted = request.planner.options.counted
        self._recompile = recompile_current_frame()
        self.planned: PlannedGraph | None = None  # once the graph is planned for a budget
        self._whole: Result | None = None  # of a graph that the coordinator does not run
        self._last_bytes = 0  # of the results of the step before, for which the plan has room
        self._runs = 0
        self._budget_bytes: int | None = None

    def forward(self, run: BoxedRun, module: fx.GraphModule | None = None) -> BoxedRun:
        """A compiled forward that the coordinator runs; of a module, if sizes may be symbolic."""
        planned, budget = self.planned, self._request.planner.options.budget
        if planned is not None:
            planned.own.forward = run
            if module is not None:
                planned.num_symbols = planned.own.num_symbols = saved_symbols(module, planned.num_outputs)

        def guarded(args: list[Any]) -> Any:
            if self._hooks.before_forward is not None:
                self._hooks.before_forward()
            if isinstance(self._counted, ReservedMemory) and self._budget_bytes is not None:
                if self._runs == 1:  # the first step is over
                    self._counted.check(self._budget_bytes)
                self._runs += 1
            if self._request.ranks is not None:
                self._request.ranks.record_forward()
            if self._whole is not None and budget is not None and budget.total_bytes is not None:
                self._account.announce_growth(self._whole, self._last_bytes, args)
            return run(args) if planned is None else coordinator().forward(planned, args)

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
        num_symbols: int = 0,
    ) -> None:
        """Have the coordinator run a graph; its joint graph is None for code from a cache."""
        accumulated = frozenset[int]() if joint is None else accumulated_inputs(joint.capture.joint)
        account, request = self._account, self._request
        self.planned = PlannedGraph(
            interface=interface,
            joint=joint,
            own=Program(result, memory, accumulated=accumulated, num_symbols=num_symbols),
            alone=request.planner.is_alone(interface.graph) or request.planner.allotment(interface.graph) is not None,
            options=request.planner.options,
            resident=account.resident,
            planned_gradient_bytes=account.resident.gradients_bytes + account.wrapped.bucket_view_bytes,
            outside_bytes=account.resident.optimizer_bytes + account.resident.other_bytes,
            counted_bytes=account.counted_bytes,
            device=account.device,
            ranks=request.ranks,
            recompile=self._recompile,
            replaceable=replaceable,
            num_symbols=num_symbols,
            chunks=request.chunks,
            offered=request.offered,
        )

    def on_planned(self, joint: CapturedJoint, result: Result) -> None:
        """Take over the plan of the graph, before anything runs."""
        interface, graph = GraphInterface.of(joint), joint.capture.graph
        if self._request.planner.options.budget is not None:
            if graph.boundary is None:  # a whole step: nothing of it is in flight when it returns
                self._whole = result
                self._account.look.looked(self._account.resident.other_bytes)
                self._last_bytes = fixed_bytes(graph) - graph.resident_bytes if joint.task.hold_last else 0
            else:
                memory = StepMemory.of(graph, result.plan, self._account.wrapped.transient_gradient_bytes)
                self.guard(interface, joint, result, memory, replaceable=True)
        resident = self._account.resident
        _log.info("resident memory %s, of which besides the graph's inputs: %s", format_bytes(graph.resident_bytes), resident)
        if isinstance(self._counted, ReservedMemory):
            self._budget_bytes = result.budget_bytes
            self._counted.prepare(graph, result.plan)
        self._hooks.planned(interface, result)
