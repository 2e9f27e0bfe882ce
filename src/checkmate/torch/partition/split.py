"""From AOTAutograd's graph to the modules that run: prepare, capture, plan, apply the plan, partition, check the peak."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec
from torch import fx

from checkmate.core.errors import GraphError, InfeasibleBudgetError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.cost.store import OpCost
from checkmate.frontend.counted_memory import Counted
from checkmate.torch._compat.aot import default_partition, is_tangent
from checkmate.torch.graph.optimizer_ops import in_loops
from checkmate.torch.joint.capture import Capture, Costs, capture_joint
from checkmate.torch.measure.profiler import announce_measurements, is_guessed, lacked_room
from checkmate.torch.measure.resident import within_room
from checkmate.torch.partition.apply_plan import apply_plan, eliminate_dead_rng, remake_views
from checkmate.torch.partition.check_peak import SplitError, peak_of_split, peak_of_whole_step
from checkmate.torch.partition.update_groups import call_in_groups, group_updates
from checkmate.torch.passes.batch_norm import use_cudnn_batch_norm
from checkmate.torch.passes.gradients import accumulating, apply_optimizer_in_backward
from checkmate.torch.passes.prepare import join_convolution_backward, prepare

Recapture = Callable[[fx.GraphModule], Capture]
"""Captures a changed joint module as the original was captured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Settings for planning and partitioning one graph."""

    costs: Costs
    # Maps the capture to a plan, and to the capture of that plan: with other costs or more memory if ranks agreed on them, or of
    # a changed joint module. It may leave hints for a compiler in the metadata of captured nodes.
    plan: Callable[[Capture, Recapture], tuple[Capture, Result]]
    hold_outputs: bool  # the caller holds the forward's outputs to the end of the backward
    honours_checkpoints: bool  # checkpointed regions are recomputed, and never held
    no_recompute: frozenset[str]  # names of ops that must run once
    extra_resident_bytes: int  # besides the graph's inputs
    on_planned: Callable[[CapturedJoint, Result], None]  # called before anything runs
    on_unplannable: Callable[[GraphError], None]  # raises, or returns and the graph runs as in PyTorch
    hold_last: int = 0  # how many copies of the results exist besides: those of the step before, which the caller holds
    most_workspace_bytes: int | None = sys.maxsize  # temporary tensors of one call for several updates; None for no such calls
    counted: Counted | None = None  # bytes of a plan that count against the budget
    room: Callable[[Graph], int] | None = None  # free bytes for measuring a graph captured without costs
    measures_beyond: bool = True  # whether ops without room are measured if no plan keeps the budget
    accumulated: Callable[[int], frozenset[int]] = lambda count: frozenset()  # inputs (of ``count``) whose gradients it adds up
    remakes_views: bool = False  # whether the backward makes the views that it reads, as is best if ops are fused
    read_from_host: Callable[[fx.Graph], None] = lambda graph: None  # has a graph read frozen weights by `ON_DEVICE`
    relabel: Callable[[fx.Graph], None] = lambda graph: None  # moves fake tensors to another device, in place
    refuse: Callable[[fx.Graph], None] = lambda graph: None  # raises if the graph of a whole step cannot run as it has to
    layout_pass: Callable[[fx.Graph], fx.Graph] = lambda graph: graph  # returns a graph whose tensors have other layouts
    examine: Callable[[fx.Graph], None] = lambda graph: None  # marks ops whose results depend on more than their inputs

    def planned(self, module: fx.GraphModule, num_fwd_outputs: int | None) -> tuple[int, Capture, Capture, Result]:
        """The room of measurements, the capture of a prepared module, the capture that is planned, and the plan."""
        recapture = self.captured(num_fwd_outputs)
        if self.room is None:
            whole = recapture(module)
            return sys.maxsize, whole, *self.plan(whole, recapture)
        bare = replace(self, costs=lambda nodes: [OpCost(0, 0)] * len(nodes)).captured(num_fwd_outputs)(module)
        whole, more, room = bare, self.room(bare.graph), -sys.maxsize
        for _ in range(3):  # measurements of ops, each in the room of a share by the costs known by then
            if more <= room:
                break
            with within_room(room := more):
                whole = recapture(module)
            more = self.room(_without_guesses(whole).graph)  # a share counts workspace too
        try:
            with within_room(room):
                return room, whole, *self.plan(whole, recapture)
        except InfeasibleBudgetError:
            if not (self.measures_beyond and announce_measurements([whole.joint.graph])):
                raise
        whole = recapture(module)
        with within_room(room := self.room(whole.graph)):
            return room, whole, *self.plan(whole, recapture)

    def captured(self, num_fwd_outputs: int | None) -> Recapture:
        """A function that captures joint modules; they are whole steps if ``num_fwd_outputs`` is None."""
        return functools.partial(
            capture_joint,
            num_fwd_outputs=num_fwd_outputs,
            costs=self.costs,
            hold_outputs=self.hold_outputs,
            hold_last=self.hold_last,
            no_recompute=self.no_recompute,
            extra_resident_bytes=self.extra_resident_bytes,
        )


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    task: Task,
    **rest: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that run a plan: a ``partition_fn`` of AOTAutograd, which passes no inputs for bodies of ops.

    ``rest`` is passed on to ``default_partition``.

    Raises:
        GraphError: The graph, for example the body of a higher-order op, cannot be planned, and the task does not allow that.
        SplitError: The modules would take more memory than planned.
        CheckmateError: No plan was found.
    """
    try:
        return _partition(joint, joint_inputs, num_fwd_outputs, task, rest)
    except GraphError as error:
        task.on_unplannable(error)
        return default_partition(joint, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)


def _partition(
    joint: fx.GraphModule, joint_inputs: Sequence[Any], num_fwd_outputs: int, task: Task, rest: Mapping[str, Any]
) -> tuple[fx.GraphModule, fx.GraphModule]:
    if not joint_inputs:
        raise GraphError(
            "the step has a higher-order op whose body AOTAutograd differentiates by itself, which cannot be planned",
            hint="exclude the module that calls it from compilation: torch.compiler.disable(module)",
        )
    prepared = prepare(
        joint,
        honours_checkpoints=task.honours_checkpoints,
        no_recompute=task.no_recompute,
        layout_pass=task.layout_pass,
        examine=task.examine,
    )
    task.read_from_host(prepared.graph)
    task.relabel(prepared.graph)
    use_cudnn_batch_norm(prepared.graph)
    inputs = [n for n in prepared.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    accumulated = task.accumulated(len(inputs))
    if accumulated:
        prepared = accumulating(prepared, num_fwd_outputs, accumulated)
    room, whole, capture, result = task.planned(prepared, num_fwd_outputs)
    planned = CapturedJoint(capture, whole, task, rest)
    with within_room(room):
        forward, backward = planned.split(result)
    task.on_planned(planned, result)
    return forward, backward


@dataclass(frozen=True, slots=True, eq=False)
class CapturedJoint:
    """A captured joint graph, which any of its plans can split into a forward and a backward module."""

    capture: Capture
    whole: Capture  # before ops replaced regions to run them in pieces; `capture` itself without pieces
    task: Task
    rest: Mapping[str, Any]  # arguments of AOTAutograd for ``default_partition``

    def changed(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> CapturedJoint:
        """The result of ``change`` on the whole joint module, captured in the same way."""
        capture = self._captured(change(self.whole.joint))
        return CapturedJoint(capture, capture, self.task, self.rest)

    @property
    def has_estimates(self) -> bool:
        """Whether there was no room to measure some op."""
        return any(lacked_room(node) for node in self.whole.joint.graph.nodes)

    def measured(self) -> CapturedJoint:
        """The same if all ops were measured; otherwise captured again: there may be more room now."""
        return self.changed(lambda joint: joint) if self.has_estimates else self

    def without_guesses(self) -> CapturedJoint:
        """The same without the workspace of ops that were not even measured by a slice: estimates may be too large."""
        return replace(self, capture=_without_guesses(self.capture))

    def in_pieces(self, joint: fx.GraphModule) -> CapturedJoint:
        """The same with another joint module to plan, with regions in pieces."""
        return CapturedJoint(self._captured(joint), self.whole, self.task, self.rest)

    def _captured(self, joint: fx.GraphModule) -> Capture:
        return self.task.captured(self.capture.num_fwd_outputs)(joint)

    def split(self, result: Result) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward modules that run a plan."""
        capture, task, count = self.capture, self.task, self.capture.num_fwd_outputs
        # The partitioner needs the inputs only for decisions, and a plan leaves it none.
        imposed = apply_plan(capture, result.plan)
        if task.remakes_views:
            remake_views(imposed)
        forward, backward = default_partition(imposed, (), num_fwd_outputs=count, **self.rest)
        eliminate_dead_rng(backward)
        _check_peak(capture, result, peak_of_split(forward, backward, count, task.costs, hold_outputs=task.hold_outputs))
        join_convolution_backward(backward)
        return forward, backward


def _without_guesses(capture: Capture) -> Capture:
    members = zip(capture.graph.ops, capture.members, strict=True)
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=0) if m.node and is_guessed(m.node) else op for op, m in members)
    return replace(capture, graph=msgspec.structs.replace(capture.graph, ops=ops))


def plan_whole_step(module: fx.GraphModule, task: Task) -> fx.GraphModule:
    """The module of a whole step that runs a plan; the given module, from AOTAutograd's inference compiler, is not changed.

    Raises:
        SplitError: The module would take more memory than planned.
        CheckmateError: No plan was found.
    """
    prepared = prepare(module, layout_pass=task.layout_pass, examine=task.examine)
    apply_optimizer_in_backward(prepared)
    task.read_from_host(prepared.graph)
    task.refuse(prepared.graph)
    task.relabel(prepared.graph)
    use_cudnn_batch_norm(prepared.graph)
    room, whole, capture, result = task.planned(prepared, None)
    budget_bytes, most = 0 if in_loops(prepared.graph) else result.budget_bytes, task.most_workspace_bytes
    result, groups = (result, []) if most is None else group_updates(capture.graph, result, budget_bytes, task.counted, most)
    imposed = apply_plan(capture, result.plan)
    call_in_groups(imposed, groups)
    with within_room(room):
        _check_peak(capture, result, peak_of_whole_step(imposed, task.costs))
    join_convolution_backward(imposed)
    task.on_planned(CapturedJoint(capture, whole, task, {}), result)
    return imposed


def _check_peak(capture: Capture, result: Result, counted: int) -> None:
    planned = result.peak_bytes - capture.graph.resident_bytes
    if counted > planned + 64:  # four scalars of the widest type are no reason to stop a step
        raise SplitError(
            f"the partitioned step takes {format_bytes(counted)} ({counted} bytes) above resident memory, and its plan "
            f"{format_bytes(planned)} ({planned} bytes); nothing has run",
            hint="this is a bug of checkmate: please report it with the model, and compile without a budget until it is fixed",
        )
