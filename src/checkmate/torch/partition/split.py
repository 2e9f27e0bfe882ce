"""From AOTAutograd's graph to the modules that run: prepare, capture, plan, apply the plan, partition, check the peak."""

from __future__ import annotations

import functools
import logging
import sys
import time
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
from checkmate.torch._compat.aot import default_partition, is_tangent
from checkmate.torch.joint.capture import Capture, Costs, capture_joint
from checkmate.torch.measure.profiler import announce_measurements, is_guessed, lacked_room
from checkmate.torch.measure.resident import within_room
from checkmate.torch.partition.apply_plan import apply_plan, eliminate_dead_rng
from checkmate.torch.partition.check_peak import SplitError, peak_of_split, peak_of_whole_step
from checkmate.torch.passes.accumulation import accumulating
from checkmate.torch.passes.optimizer_in_backward import apply_optimizer_in_backward
from checkmate.torch.passes.prepare import prepare

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class PeakTolerance:
    """By how much the peak of the modules may differ from the planned one.

    Attributes:
        above_bytes: A larger excess is a `SplitError`. Room for four scalars of the widest type: an excess that small breaks no
            budget, and is no reason to stop a step.
        below_share: Excess of the plan that is not worth a warning. A plan may count more than runs: the state of a random op
            that is never replayed, and running statistics that a recomputed BatchNorm does not write.
        below_bytes: The same in bytes, for small graphs: thirteen states of the CPU's generator.
    """

    above_bytes: int = 64
    below_share: float = 0.01
    below_bytes: int = 65536


_TOLERANCE = PeakTolerance()


Recapture = Callable[[fx.GraphModule], Capture]
"""Captures a changed joint module as the original was captured."""


MOST_ROOMS = 3
"""How often ops are measured, each time in the room of a budget that is a share of what is known by then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How one graph is to be planned and partitioned.

    Attributes:
        costs: Maps nodes to costs.
        plan: Maps the capture to a plan, and to the capture that the plan is for: with other costs or more memory, if ranks
            agreed on those, or of a changed joint module, which the second argument captures in the same way. It may leave
            hints for a compiler in the metadata of captured nodes.
        hold_outputs: Whether the caller holds the forward's outputs until the backward is over.
        hold_last: Whether the caller still holds what the step before returned.
        split_convolutions: Whether the backward of a convolution is split into one op per gradient.
        honours_checkpoints: Whether checkpointed regions are recomputed, and never held.
        no_recompute: Names of ops that must run once.
        extra_resident_bytes: Resident bytes besides the graph's inputs.
        room: Bytes that are free to measure the costs of a graph that is captured without costs.
        measures_beyond: Whether ops are measured for which there is no room where no plan keeps the budget otherwise.
        accumulated: Inputs to whose gradients the backward adds, of a graph with a given number of inputs.
        on_planned: Called with the captured joint graph and its plan before anything runs.
        on_unplannable: Called with the reason why a graph cannot be planned. It raises, or the graph runs as PyTorch runs it.
        relabel: Moves the fake tensors of a graph to another device, in place.
        layout_pass: Returns a graph whose tensors have other layouts.
        examine: Marks ops whose results depend on more than their inputs.
    """

    costs: Costs
    plan: Callable[[Capture, Recapture], tuple[Capture, Result]]
    hold_outputs: bool
    split_convolutions: bool
    honours_checkpoints: bool
    no_recompute: frozenset[str]
    extra_resident_bytes: int
    on_planned: Callable[[CapturedJoint, Result], None]
    on_unplannable: Callable[[GraphError], None]
    hold_last: bool = False
    room: Callable[[Graph], int] | None = None
    measures_beyond: bool = True
    accumulated: Callable[[int], frozenset[int]] = lambda count: frozenset()
    relabel: Callable[[fx.Graph], None] = lambda graph: None
    layout_pass: Callable[[fx.Graph], fx.Graph] = lambda graph: graph
    examine: Callable[[fx.Graph], None] = lambda graph: None

    def planned(self, module: fx.GraphModule, num_fwd_outputs: int | None) -> tuple[int, Capture, Capture, Result]:
        """The room that measurements have, a module as it was captured, the capture that is planned, and the plan.

        Args:
            module: The prepared module.
            num_fwd_outputs: How many outputs of the module are outputs of the forward; None for whole steps.
        """
        recapture = self.captured(num_fwd_outputs)
        if self.room is None:
            whole = recapture(module)
            return sys.maxsize, whole, *self.plan(whole, recapture)
        bare = replace(self, costs=lambda nodes: [OpCost(0, 0)] * len(nodes)).captured(num_fwd_outputs)(module)
        whole, more, room = bare, self.room(bare.graph), -sys.maxsize
        for _ in range(MOST_ROOMS):
            if more <= room:
                break
            with within_room(room := more):
                whole = recapture(module)
            more = self.room(_without_guesses(whole).graph)  # a share is one of what workspace takes too
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
        """A function that captures joint modules.

        Args:
            num_fwd_outputs: How many outputs of the modules are outputs of the forward; None for whole steps.
        """
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
    """Forward and backward modules that run a plan: a ``partition_fn`` of AOTAutograd.

    Args:
        joint: The joint module; unchanged if planning fails.
        joint_inputs: Its traced inputs; empty for the body of a higher-order op.
        num_fwd_outputs: How many of its outputs are outputs of the forward.
        task: How to plan and partition.
        rest: Further keyword arguments from AOTAutograd, passed on to ``default_partition``.

    Returns:
        The forward module and the backward module.

    Raises:
        GraphError: The graph cannot be planned, such as the body of a higher-order op, and the task does not allow that.
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
    began = time.perf_counter()
    prepared = prepare(
        joint,
        split_convolutions=task.split_convolutions,
        honours_checkpoints=task.honours_checkpoints,
        no_recompute=task.no_recompute,
        layout_pass=task.layout_pass,
        examine=task.examine,
    )
    task.relabel(prepared.graph)
    inputs = [n for n in prepared.graph.nodes if n.op == "placeholder" and not is_tangent(n)]
    accumulated = task.accumulated(len(inputs))
    if accumulated:
        prepared = accumulating(prepared, num_fwd_outputs, accumulated)
    room, whole, capture, result = task.planned(prepared, num_fwd_outputs)
    planned = CapturedJoint(capture, whole, task, rest)
    with within_room(room):
        forward, backward = planned.split(result)
    task.on_planned(planned, result)
    _log.debug("split in %.1f s", time.perf_counter() - began)
    return forward, backward


@dataclass(frozen=True, slots=True, eq=False)
class CapturedJoint:
    """A captured joint graph that any plan of it can split into a forward and a backward module.

    Attributes:
        capture: The captured graph that is planned.
        whole: The same before regions of it were replaced by ops that run them piece by piece; `capture` itself if none were.
        task: How it was captured.
        rest: Keyword arguments of AOTAutograd for ``default_partition``.
    """

    capture: Capture
    whole: Capture
    task: Task
    rest: Mapping[str, Any]

    def changed(self, change: Callable[[fx.GraphModule], fx.GraphModule]) -> CapturedJoint:
        """Another joint graph, captured in the same way.

        Args:
            change: Maps the whole joint module to a new one; it does not change its argument.
        """
        capture = self._captured(change(self.whole.joint))
        return CapturedJoint(capture, capture, self.task, self.rest)

    @property
    def has_estimates(self) -> bool:
        """Whether there was no room to measure some op."""
        return any(lacked_room(node) for node in self.whole.joint.graph.nodes)

    def measured(self) -> CapturedJoint:
        """The same where all ops were measured; otherwise captured again, for which there may be more room now."""
        if not self.has_estimates:
            return self
        capture = self._captured(self.whole.joint)
        return CapturedJoint(capture, capture, self.task, self.rest)

    def without_guesses(self) -> CapturedJoint:
        """The same without the workspace of ops of which not even a slice was measured: estimates may be too large."""
        return replace(self, capture=_without_guesses(self.capture))

    def in_pieces(self, joint: fx.GraphModule) -> CapturedJoint:
        """The same with another joint module to plan, in which regions run piece by piece.

        Args:
            joint: The module.
        """
        return CapturedJoint(self._captured(joint), self.whole, self.task, self.rest)

    def _captured(self, joint: fx.GraphModule) -> Capture:
        return self.task.captured(self.capture.num_fwd_outputs)(joint)

    def split(self, result: Result) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Forward and backward modules that run a plan.

        Args:
            result: The plan, for ``capture.graph``.

        Raises:
            SplitError: The modules would take more memory than planned.
        """
        capture, task, count = self.capture, self.task, self.capture.num_fwd_outputs
        # The partitioner looks at the inputs only if it has decisions to make, and a plan leaves it none.
        forward, backward = default_partition(apply_plan(capture, result.plan), (), num_fwd_outputs=count, **self.rest)
        eliminate_dead_rng(backward)
        _check_peak(capture, result, peak_of_split(forward, backward, count, task.costs, hold_outputs=task.hold_outputs))
        return forward, backward


def _without_guesses(capture: Capture) -> Capture:
    members = zip(capture.graph.ops, capture.members, strict=True)
    ops = tuple(msgspec.structs.replace(op, workspace_bytes=0) if m.node and is_guessed(m.node) else op for op, m in members)
    return replace(capture, graph=msgspec.structs.replace(capture.graph, ops=ops))


def plan_whole_step(module: fx.GraphModule, task: Task) -> fx.GraphModule:
    """The module of a whole step that runs a plan; the given module is not changed.

    Args:
        module: Forward, backward and marked gradients in one graph, as AOTAutograd passes it to an inference compiler.
        task: How to plan it.

    Raises:
        SplitError: The module would take more memory than planned.
        CheckmateError: No plan was found.
    """
    prepared = prepare(module, split_convolutions=task.split_convolutions, layout_pass=task.layout_pass, examine=task.examine)
    apply_optimizer_in_backward(prepared)
    task.relabel(prepared.graph)
    room, whole, capture, result = task.planned(prepared, None)
    imposed = apply_plan(capture, result.plan)
    with within_room(room):
        _check_peak(capture, result, peak_of_whole_step(imposed, task.costs))
    task.on_planned(CapturedJoint(capture, whole, task, {}), result)
    return imposed


def _check_peak(capture: Capture, result: Result, counted: int) -> None:
    planned = result.peak_bytes - capture.graph.resident_bytes
    if counted > planned + _TOLERANCE.above_bytes:
        raise SplitError(
            f"the partitioned step takes {format_bytes(counted)} ({counted} bytes) above resident memory, and its plan "
            f"{format_bytes(planned)} ({planned} bytes); nothing has run",
            hint="this is a bug of checkmate: please report it with the model, and compile without a budget until it is fixed",
        )
    if counted < (1 - _TOLERANCE.below_share) * planned - _TOLERANCE.below_bytes:
        _log.warning("the partitioned step takes %s, its plan %s", format_bytes(counted), format_bytes(planned))
