"""Private names of AOTAutograd and functorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._functorch.config as functorch_config
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import default_partition, get_default_op_list
from torch._guards import TracingContext
from torch.fx.graph import _BoxedCodeGen

__all__ = [
    "BoxedRun",
    "aot_autograd",
    "as_boxed",
    "boxed",
    "default_partition",
    "functorch_config",
    "fusible_packets",
    "is_tangent",
    "keep_undefined",
    "overwritten_inputs",
    "regions_as_hints",
    "saved_symbols",
]


def fusible_packets() -> Iterable[Any]:
    """Overload packets of the ops that torch's own min-cut partitioner expects Inductor to fuse."""
    return get_default_op_list().fusible_ops


def overwritten_inputs(count: int) -> frozenset[int] | None:
    """Inputs that the most recently compiled graph overwrites."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != count:  # AOTAutograd merged inputs that alias
        return None
    return frozenset(i for i, known in enumerate(metadata.input_info) if known.mutates_data or known.mutates_metadata)


def regions_as_hints() -> AbstractContextManager[Any]:
    """Context in which AOTAutograd recomputes no region under ``torch.utils.checkpoint`` by itself.

    In a graph with a backward in it, a whole step, it would do so before the graph is planned, and refuse regions with dropout.
    """
    name = "remat_using_tags_for_fwd_loss_bwd_graph"
    return functorch_config.patch(name, False) if hasattr(functorch_config, name) else nullcontext()


BoxedRun = Callable[[list[Any]], Any]
"""A callable in AOTAutograd's boxed calling convention: it takes one list of arguments and clears it.

Only so can an argument be freed before the call returns: the caller's list holds no reference any more.
"""


def boxed(module: torch.fx.GraphModule) -> BoxedRun:
    """The module in the boxed calling convention; its code frees every tensor after the tensor's last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return as_boxed(module.forward)


def as_boxed(function: BoxedRun) -> BoxedRun:
    """Mark a callable as one of the boxed calling convention, the mark that AOTAutograd looks for."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a node is a tangent of a joint graph: a placeholder for the gradient of a forward output."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def saved_symbols(forward: torch.fx.GraphModule, num_outputs: int) -> int:
    """How many symbolic sizes a forward module returns last, for its backward, which gets them first."""
    saved = list(forward.graph.output_node().args[0])[num_outputs:]  # type: ignore[arg-type]
    return sum(isinstance(n.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)) for n in saved)


def keep_undefined(outputs: Iterable[Any]) -> None:
    """Have autograd pass None to a compiled backward for the gradients of outputs into which no gradient flows.

    By default it allocates zeros for them (``ctx.set_materialize_grads``). The node of a compiled function is its ``ctx``.
    """
    for output in outputs:
        node = output.grad_fn if isinstance(output, torch.Tensor) else None
        if node is not None and not hasattr(node, "set_materialize_grads"):  # the output is a view, made after the function
            node = node.next_functions[0][0] if node.next_functions else None
        if hasattr(node, "set_materialize_grads"):
            node.set_materialize_grads(False)  # type: ignore[union-attr]
