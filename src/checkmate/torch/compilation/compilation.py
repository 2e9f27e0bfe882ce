"""Compiles one Dynamo graph in three steps: its resident memory, its plan, and its executable."""

from __future__ import annotations

import functools
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from checkmate.core.errors import GraphError
from checkmate.torch._compat.dynamo import takes_gradients
from checkmate.torch.compilation.executable import Executable
from checkmate.torch.compilation.graph_planner import GraphPlanner
from checkmate.torch.compilation.hooks import Hooks
from checkmate.torch.compilation.plan_request import PlanRequest
from checkmate.torch.compilation.resident_account import ResidentAccount
from checkmate.torch.distributed.consensus import job_ranks
from checkmate.torch.joint.hidden_state import mark_hidden_state
from checkmate.torch.measure.estimates import estimated_costs
from checkmate.torch.measure.profiler import Profiler
from checkmate.torch.options import Options
from checkmate.torch.partition.split import Task
from checkmate.torch.steps.coordinator import coordinator

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
        planning = replace(options.planning, counted=account.counted)
        copying = account.device if hooks.whole and self.ranks is None else None
        self.planner = GraphPlanner(planning, options.host, copying)
        self.request = PlanRequest(options, self.planner, self.ranks, account, hooks.captured)
        self.executable = Executable(account, self.request, hooks)
        # If no step compiled by Inductor kept the budget, the least budget that one of them would keep.
        self.least_fused_bytes: int | None = None
        self.resident = account.resident

    @functools.cached_property
    def task(self) -> Task:
        """How the graph is planned and partitioned."""
        options, target, account = self.options, self.hooks.target, self._account
        measured = options.costs == "measured"
        task = Task(
            costs=Profiler(inputs=account.inputs) if measured else estimated_costs,
            plan=self.request.plan,
            hold_outputs=options.outputs == "held",
            hold_last=self.hooks.whole and options.outputs == "held",
            honours_checkpoints=options.checkpoints == "respected",
            no_recompute=frozenset(options.no_recompute),
            extra_resident_bytes=account.resident.total_bytes,
            # AOTAutograd merges equal inputs, which changes their positions.
            accumulated=lambda count: account.accumulated if count == len(account.inputs) else frozenset(),
            on_planned=self.executable.on_planned,
            on_unplannable=self._unplannable,
            room=self.planner.room if account.is_bounded and self._budget is not None else None,
            measures_beyond=self.ranks is None,
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
        if known is None:
            return None
        budget = self._budget.with_total(max(0, known - coordinator().held_bytes()))
        costs, plan = self.request.evaluation(budget, self.task.costs, estimated_costs)
        return replace(self.task, costs=costs, plan=plan, on_planned=lambda joint, result: None)

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
