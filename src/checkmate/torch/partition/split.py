"""From a graph of AOTAutograd to what runs: capture, plan, apply the plan, split where there is a boundary, count again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from checkmate.core.errors import GraphError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.core.units import format_bytes
from checkmate.torch._compat.aot import default_partition
from checkmate.torch.joint.capture import Capture, Costs, capture_joint
from checkmate.torch.partition.apply_plan import apply_plan, eliminate_dead_rng
from checkmate.torch.partition.check_peak import SplitError, peak_of_split, peak_of_whole_step
from checkmate.torch.passes.optimizer_in_backward import apply_optimizer_in_backward
from checkmate.torch.passes.prepare import prepare

_log = logging.getLogger("checkmate.torch")
_SLACK_BYTES = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """How one graph is to be split.

    Attributes:
        costs: Costs of nodes.
        plan: Finds the plan of what was captured, and says for which graph: with other costs or more memory, if ranks agreed on
            those. May note on captured nodes what a compiler is to mind.
        hold_outputs: Whether the caller holds the forward's outputs until the backward is over.
        split_convolutions: Whether a convolution's backward is made two ops.
        honours_checkpoints: Whether checkpointed regions are recomputed, and never held.
        no_recompute: Names of ops that run once.
        extra_resident_bytes: What is resident besides the graph's inputs.
        on_planned: Told the captured graph and its plan before anything runs.
        relabel: Makes a graph's traced tensors those of another device, in place.
        layout_pass: A graph with other layouts of its tensors.
    """

    costs: Costs
    plan: Callable[[Capture], tuple[Graph, Result]]
    hold_outputs: bool
    split_convolutions: bool
    honours_checkpoints: bool
    no_recompute: frozenset[str]
    extra_resident_bytes: int
    on_planned: Callable[[Capture, Result], None]
    relabel: Callable[[fx.Graph], None] = lambda graph: None
    layout_pass: Callable[[fx.Graph], fx.Graph] = lambda graph: graph


def partition(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    task: Task,
    **rest: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Forward and backward modules that run a plan.

    Args:
        joint: The joint module; untouched if planning fails.
        joint_inputs: Its traced inputs; empty for the body of a higher-order op.
        num_fwd_outputs: How many of its outputs belong to the forward.
        task: How to split.
        rest: What AOTAutograd hands to a partitioner besides.

    Raises:
        GraphError: The graph is the body of a higher-order op.
        SplitError: What would run takes other memory than planned.
        CheckmateError: No plan.
    """
    if not joint_inputs:
        raise GraphError(
            "the step has a higher-order op whose body AOTAutograd differentiates by itself, which cannot be planned",
            hint="take the higher-order op out of what is compiled",
        )
    began = time.perf_counter()
    prepared = prepare(
        joint,
        split_convolutions=task.split_convolutions,
        honours_checkpoints=task.honours_checkpoints,
        no_recompute=task.no_recompute,
        layout_pass=task.layout_pass,
    )
    task.relabel(prepared.graph)
    capture = capture_joint(
        prepared,
        num_fwd_outputs,
        task.costs,
        hold_outputs=task.hold_outputs,
        no_recompute=task.no_recompute,
        extra_resident_bytes=task.extra_resident_bytes,
    )
    capture, result = _planned(capture, task)
    assert result.plan is not None
    imposed = apply_plan(capture, result.plan)
    forward, backward = default_partition(imposed, joint_inputs, num_fwd_outputs=num_fwd_outputs, **rest)
    eliminate_dead_rng(backward)
    _check_peak(capture, result, peak_of_split(forward, backward, num_fwd_outputs, task.costs, hold_outputs=task.hold_outputs))
    task.on_planned(capture, result)
    _log.debug("split in %.1f s", time.perf_counter() - began)
    return forward, backward


def plan_whole_step(module: fx.GraphModule, task: Task) -> fx.GraphModule:
    """The module of a whole step that runs a plan; the one that came is untouched.

    Args:
        module: Forward, backward and marked gradients in one graph, as AOTAutograd hands it to an inference compiler.
        task: How to plan it.

    Raises:
        SplitError: What would run takes other memory than planned.
        CheckmateError: No plan.
    """
    prepared = prepare(module, split_convolutions=task.split_convolutions)
    apply_optimizer_in_backward(prepared)
    task.relabel(prepared.graph)
    capture = capture_joint(
        prepared, None, task.costs, no_recompute=task.no_recompute, extra_resident_bytes=task.extra_resident_bytes
    )
    capture, result = _planned(capture, task)
    assert result.plan is not None
    imposed = apply_plan(capture, result.plan)
    _check_peak(capture, result, peak_of_whole_step(imposed, task.costs))
    task.on_planned(capture, result)
    return imposed


def _planned(capture: Capture, task: Task) -> tuple[Capture, Result]:
    graph, result = task.plan(capture)
    return replace(capture, graph=graph), result


def _check_peak(capture: Capture, result: Result, counted: int) -> None:
    assert result.peak_bytes is not None
    planned = result.peak_bytes - capture.graph.resident_bytes
    if counted > planned + _SLACK_BYTES:
        raise SplitError(
            f"the step as split takes {format_bytes(counted)} ({counted} bytes) above what is resident, and its plan "
            f"{format_bytes(planned)} ({planned} bytes); nothing has run",
            hint="this is a bug of checkmate: please report it with the model",
        )
    # A plan may count more than what runs: a random op's replay where it is not replayed, or running
    # statistics that a recomputation does not make.
    if counted < 0.99 * planned - 65536:
        _log.warning("the step as split takes %s, its plan %s", format_bytes(counted), format_bytes(planned))
