"""Private names of AOTAutograd and functorch.

Seen and tested in torch 2.13.0; 2.11 is the declared floor.
"""

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
    """Ops that torch's own partitioner counts on Inductor to fuse."""
    return get_default_op_list().fusible_ops


def overwritten_inputs(count: int) -> frozenset[int] | None:
    """Which of so many inputs the graph that was compiled last overwrites; None if that is not known."""
    context = TracingContext.try_get()
    metadata = context.fw_metadata if context is not None else None
    if metadata is None or len(metadata.input_info) != count:  # inputs that alias were merged
        return None
    return frozenset(i for i, known in enumerate(metadata.input_info) if known.mutates_data or known.mutates_metadata)


BoxedRun = Callable[[list[Any]], Any]


"""What takes its arguments as one list and empties it."""


def boxed(module: torch.fx.GraphModule) -> BoxedRun:
    """The module as a callable that takes one list, empties it, and frees every tensor after its last use."""
    module.graph.set_codegen(_BoxedCodeGen())
    module.recompile()
    return as_boxed(module.forward)


def as_boxed(function: BoxedRun) -> BoxedRun:
    """Mark a callable as taking one list that it empties."""

    def run(args: list[Any]) -> Any:
        return function(args)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def is_tangent(node: torch.fx.Node) -> bool:
    """Whether a placeholder of a joint graph is a tangent: the gradient of a forward output."""
    return node.op == "placeholder" and "tangents" in str(node.target)
