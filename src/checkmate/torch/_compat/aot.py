"""Private names of AOTAutograd and functorch."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
    "overwritten_inputs",
]


def fusible_packets() -> Iterable[Any]:
    """Overload packets of the ops that torch's own min-cut partitioner expects Inductor to fuse."""
    return get_default_op_list().fusible_ops


def overwritten_inputs(count: int) -> frozenset[int] | None:
    """Inputs that the most recently compiled graph overwrites.

    Args:
        count: How many inputs the graph has.

    Returns:
        Their positions, or None where AOTAutograd's metadata does not say.
    """
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != count:  # AOTAutograd merged inputs that alias
        return None
    return frozenset(i for i, known in enumerate(metadata.input_info) if known.mutates_data or known.mutates_metadata)


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
