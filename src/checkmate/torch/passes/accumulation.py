"""Have a backward add gradients to existing ones as soon as they are computed.

Autograd adds what a compiled backward returns to ``.grad`` only after that backward, and until then every gradient exists twice.
This pass puts a node behind each gradient that adds it to the existing one; the new one is then freed like any other value. To
a planner the node reads the gradient and allocates nothing: the existing gradient is resident.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Set

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.graph.copy import copy_graph


class Accumulate:
    """Target of a node that adds a gradient to an existing one: it gets the position of the input, and its new gradient.

    Attributes:
        adding: What a call does, for each thread: autograd runs the backwards of several devices at once.
    """

    __name__ = "accumulate"  # FX writes it into the code of a module

    def __init__(self) -> None:
        self.adding = threading.local()

    def __call__(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that the backward returns: the sum, or the new gradient where there is none to add it to."""
        add: Callable[[int, torch.Tensor], torch.Tensor] = self.adding.add
        return add(position, gradient)

    def __str__(self) -> str:
        """The kind of the op in a graph, which is the same in every process."""
        return "checkmate.accumulate"


ACCUMULATE = Accumulate()


def accumulating(joint: fx.GraphModule, num_fwd_outputs: int, positions: Set[int]) -> fx.GraphModule:
    """A copy of a joint module whose backward adds the gradients of some inputs to existing ones, and of no others.

    Args:
        joint: The joint module; it is not changed.
        num_fwd_outputs: How many of its outputs are outputs of the forward.
        positions: Inputs, by their position.
    """
    graph = copy_graph(joint.graph)
    for node in list(graph.nodes):
        if node.target is ACCUMULATE:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    output = graph.output_node()
    results = list(output.args[0])  # type: ignore[arg-type]
    last_placeholder = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for k in sorted(positions):
        gradient = results[num_fwd_outputs + k]
        if not isinstance(gradient, fx.Node):
            continue
        with graph.inserting_after(last_placeholder if is_tangent(gradient) else gradient):
            added = graph.call_function(ACCUMULATE, (k, gradient))  # type: ignore[arg-type]
        where = ("stack_trace", "fwd_stack_trace", "nn_module_stack", "fwd_nn_module_stack", "autograd_backward", "seq_nr")
        added.meta = {key: gradient.meta[key] for key in where if key in gradient.meta}
        added.meta |= {"val": None, "partitioner_tag": "is_backward"}
        results[num_fwd_outputs + k] = added
    output.args = (tuple(results),)
    graph.lint()
    return fx.GraphModule(joint, graph)


def accumulated_inputs(joint: fx.GraphModule) -> frozenset[int]:
    """Inputs to whose gradients the backward of a joint module adds, by their position."""
    return frozenset(n.args[0] for n in joint.graph.nodes if n.target is ACCUMULATE)  # type: ignore[misc]
