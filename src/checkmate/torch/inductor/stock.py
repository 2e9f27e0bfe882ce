"""PyTorch's own partitions of a captured step, as plans of its graph.

Stock Inductor saves the values of a minimum cut through the forward, or those of a knapsack for a given
``activation_memory_budget``, and computes the others again. Inside a fused kernel that may cost nothing, since the kernel reads
the operands anyway. Op by op every computation counts. Therefore the code of such plans is counted too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

import msgspec
from torch import fx

from checkmate.core.errors import CheckmateError
from checkmate.frontend.planner import result_of_order
from checkmate.torch._compat.aot import equal_nodes_merged, min_cut_partition
from checkmate.torch.graph.traced import copy_graph
from checkmate.torch.joint.capture import Capture
from checkmate.torch.partition.split import Recapture

Partitions = Callable[[float], tuple[int, ...] | None]
"""Maps an ``activation_memory_budget`` to an order of the ops of a graph; None if the graph does not allow the partition."""


def as_stock(capture: Capture, recapture: Recapture) -> tuple[Capture, Partitions | None]:
    """A capture with the freedom that stock Inductor has, and PyTorch's partitions of it.

    Equal ops are merged, and an op of the backward that reads values of the forward alone may be computed in the forward. A whole
    step stays as it is, and has no partitions.
    """
    if capture.graph.boundary is None:
        return capture, None
    capture = recapture(fx.GraphModule(capture.joint, equal_nodes_merged(capture.joint.graph)))
    graph = capture.graph
    movable = {(graph.boundary, o) for o, op in enumerate(graph.ops) if op.recomputable and not op.clobbered_by}
    graph = msgspec.structs.replace(graph, order=tuple(pair for pair in graph.order if pair not in movable))
    capture = replace(capture, graph=graph)
    return capture, functools.partial(_partition, capture)


def _partition(capture: Capture, budget: float) -> tuple[int, ...] | None:
    joint = fx.GraphModule(capture.joint, copy_graph(capture.joint.graph))
    op_of = {member.node.name: o for o, member in enumerate(capture.members) if member.node is not None}
    modules = min_cut_partition(joint, budget, capture.num_fwd_outputs)
    forward, backward = ([op_of[n.name] for n in m.graph.nodes if n.op == "call_function" and n.name in op_of] for m in modules)
    assert capture.graph.boundary is not None
    try:
        return result_of_order(capture.graph, (*forward, capture.graph.boundary, *backward)).plan.order
    except CheckmateError:  # it computes an op again that has to run once
        return None
