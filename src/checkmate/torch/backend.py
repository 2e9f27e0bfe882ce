"""The Dynamo backend: ``torch.compile(model, backend="checkmate", options={"budget": "8GiB"})``."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import CheckmateError
from checkmate.core.graph import Graph
from checkmate.core.result import Result
from checkmate.torch.capture import Capture, Costs
from checkmate.torch.compat import Carrier, aot_autograd, boxed, functorch_config
from checkmate.torch.options import Options
from checkmate.torch.partition import Task, partition
from checkmate.torch.planning import plan_graph
from checkmate.torch.profile import Profiler
from checkmate.torch.roofline import estimated
from checkmate.torch.sizes import unique_bytes

_log = logging.getLogger("checkmate.torch")

Observer = Callable[[Capture, Result], None]


def checkmate(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Backend for ``torch.compile`` that keeps a memory budget.

    Args:
        gm: The graph that Dynamo traced.
        example_inputs: Its traced inputs.
        mode: Not used; any value but None is refused.
        options: See `Options`.
        kwargs: Options given as keywords.

    Raises:
        CheckmateError: An option is wrong, or no plan keeps the budget; the model is untouched.
    """
    try:
        return compile_graph(gm, example_inputs, Options.of({**(options or {}), **kwargs}))
    except CheckmateError as error:
        raise Carrier(error) from error


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    *,
    observer: Observer | None = None,
) -> Callable[..., Any]:
    """Compile one graph of Dynamo under options; ``observer`` is told its plan."""

    def planned(capture: Capture, result: Result) -> None:
        if observer is not None:
            observer(capture, result)

    task = Task(
        costs=costs_of(options),
        plan=functools.partial(plan_graph, options=options),
        hold_outputs=options.outputs == "held",
        extra_resident_bytes=options.reserve_bytes + gradient_bytes(example_inputs),
        on_planned=planned,
    )
    compile_with_aot = aot_autograd(
        fw_compiler=lambda module, inputs: boxed(module),
        bw_compiler=lambda module, inputs: boxed(module),
        partition_fn=functools.partial(partition, task=task),
        keep_inference_input_mutations=True,
    )
    # A hit of AOTAutograd's cache would skip the partition function, and with it the plan.
    with functorch_config.patch(enable_autograd_cache=False):
        return compile_with_aot(gm, example_inputs)


def costs_of(options: Options) -> Costs:
    """Where the costs of ops come from."""
    return Profiler() if options.costs == "measured" else lambda nodes: estimated(list(nodes))


def gradient_bytes(example_inputs: Sequence[Any]) -> int:
    """Bytes of gradients that are there when a graph is compiled."""
    return unique_bytes(t.grad for t in example_inputs if isinstance(t, torch.Tensor) and t.is_leaf and t.grad is not None)
