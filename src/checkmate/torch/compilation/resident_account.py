"""First step of a compilation: the memory in addition to a graph's inputs that no plan can change."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx

from checkmate.core.budget import ResidentMemory
from checkmate.core.plan import Fetch, Plan
from checkmate.core.result import Result
from checkmate.core.units import format_at_least, format_bytes
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import no_modes, traced_parts
from checkmate.torch.chunking.choose import ChunkableStep
from checkmate.torch.compilation.cuda_graph import replayed_step
from checkmate.torch.distributed.wrappers import wrapper_memory
from checkmate.torch.emulate.device import EmulatedDevice
from checkmate.torch.graph.host_weights import ON_DEVICE, ON_HOST, frozen_weights, read_on_device
from checkmate.torch.graph.optimizer_ops import Updates, uncompiled_reason
from checkmate.torch.graph.storages import storage_key, strided_parts
from checkmate.torch.joint.capture import Capture, captured_graph, reads_of_overwritable
from checkmate.torch.measure.allocator import counted_memory, warm_up
from checkmate.torch.measure.device_memory import LookDue, optimizers_without_state, state_to_come_bytes
from checkmate.torch.measure.resident import cuda_device, gradient_bytes
from checkmate.torch.options import Options
from checkmate.torch.partition.copies import RESIDENTS, pin_weight, side_stream
from checkmate.torch.steps.coordinator import coordinator
from checkmate.torch.steps.program import GraphInterface, weakly

_log = logging.getLogger("checkmate.torch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hooks:
    """Callbacks and settings of a compilation."""

    captured: Callable[[ChunkableStep[Capture]], NoReturn] | None = None  # called in place of planning, and ends the compilation
    planned: Callable[[GraphInterface, Result], None] = lambda interface, result: None  # called before anything runs
    before_forward: Callable[[], None] | None = None  # called before every run of a compiled forward; may raise
    inference: bool = True  # whether graphs without gradients are compiled; they are refused otherwise
    whole: bool = False  # whether the graph is a whole step, with the backward and the updates
    returned_bytes: int = 0  # bytes of the live results of the last run of a whole step
    target: EmulatedDevice | None = None  # the device to plan for; by default the one at hand


class ResidentAccount:
    """The inputs of one graph, and the other memory that exists while it runs."""

    def __init__(self, inputs: Sequence[Any], options: Options, hooks: Hooks) -> None:
        self._options, budget = options, options.planning.budget
        warm_up(cuda := cuda_device(inputs, options.device))
        self.replayed = replayed_step(inputs, options, whole=hooks.whole)  # its buffers are tensors besides the inputs
        # Steps are captured on a stream; the allocator gives a block only to the stream that it was made on.
        self.stream = side_stream(cuda, "capture") if self.replayed is not None and cuda is not None else None
        if self.stream is not None:
            warm_up(cuda, self.stream)
        budget_of = options.budget_of if self.stream is None else "reserved"  # a CUDA graph keeps its pool
        # In a traced step nothing exists yet; without a budget or a plan nothing is promised.
        asked = budget is not None or options.plan is not None
        self.is_bounded = asked and hooks.captured is None and hooks.target is None
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        trained = [t for t in tensors if t.is_leaf and t.requires_grad]
        if self.is_bounded and budget_of == "reserved":
            _create_state(trained)  # it would be cut from the memory that is reserved for the step
        counts = budget is not None and hooks.target is None
        self.counted = counted_memory(budget_of, cuda, tensors, whole=self.stream or hooks.whole) if counts else None
        self.device = next((t.device for t in tensors if t.device.type != "cpu"), torch.device("cpu"))
        self._count_device = cuda or torch.device("cpu")
        self.wrapped = wrapper_memory(inputs, options.accumulate)
        self.counted_bytes = self.wrapped.counted_bytes(self._count_device)  # included in a count of the device's tensors
        self.resident = ResidentMemory(
            gradients_bytes=gradient_bytes(inputs, options.accumulate),
            optimizer_bytes=state_to_come_bytes(trained, self._count_device) if self.is_bounded and trained else 0,
            wrappers_bytes=self.wrapped.held_bytes,
            reserve_bytes=options.reserve_bytes,
            other_bytes=max(0, self._outside_bytes(inputs) - hooks.returned_bytes) if self.is_bounded else 0,
        )
        self.inputs = [weakly(a) for a in inputs]
        # Eager code may overwrite the batch and buffers between forward and backward, such as the queue of a momentum encoder.
        state = {id(t) for t in (*trained, *(t for t in tensors if isinstance(t, torch.nn.Parameter)))}
        self._overwritable = {k for k, t in enumerate(inputs) if id(t) not in state}
        weights = frozen_weights(inputs, self.device) if options.copies else []
        for part in (p for t in tensors for p in strided_parts(t)) if ON_HOST else ():  # a weight may be trained now
            ON_HOST.pop(storage_key(part), None)
        self._weights = [None if t is None else weakly(t) for t in weights]  # that a plan may fetch, by input of the graph
        self.reads_host = any(weight is not None for weight in self._weights)
        self.accumulated = frozenset[int]()  # inputs to whose gradients the backward adds
        if budget is not None and options.plan is None and options.compiler == "eager" and not hooks.whole:
            self.accumulated = _accumulating(inputs, options.accumulate)
        self.look, self._announced = LookDue(), False

    def _outside_bytes(self, inputs: Sequence[Any]) -> int:
        tensors = [t for t in inputs if isinstance(t, torch.Tensor)]
        parts = [part for t in tensors for part in traced_parts(t)]
        return coordinator().outside_bytes([*tensors, *parts, *RESIDENTS.of(parts)], self._count_device) - self.counted_bytes

    def early_ops(self, capture: Capture) -> frozenset[int]:
        """Ops of a part of a step that are computed in the forward only; see `reads_of_overwritable`."""
        captured = captured_graph(capture)
        # AOTAutograd merges equal inputs, which changes their positions.
        same = len(captured.readers) == len(self.inputs)
        return reads_of_overwritable(captured, self._overwritable) if same else frozenset()

    def read_from_host(self, graph: fx.Graph) -> None:
        """Have a graph read the frozen weights that a plan may fetch by `ON_DEVICE`."""
        given = graph.find_nodes(op="placeholder")
        inputs = [node for node in given if not is_tangent(node)]
        # AOTAutograd merges equal inputs, which changes their positions.
        if self.reads_host and len(inputs) == len(self._weights):
            known = zip(inputs, self._weights, strict=True)
            on_host = {node: tensor for node, weight in known if weight is not None and (tensor := weight()) is not None}
            read_on_device(on_host, given[-1].next, self.device)

    def pin_weights(self, capture: Capture, plan: Plan) -> None:
        """Pin the weights that a plan fetches, which takes longer than their copies."""
        inputs = capture.joint.graph.find_nodes(op="placeholder")
        fetched = {step.value for step in plan.steps if isinstance(step, Fetch)}
        for node, value in capture.value_of.items():
            if node.target is ON_DEVICE and value in fetched:
                weight = self._weights[inputs.index(node.all_input_nodes[0])]
                assert weight is not None
                pin_weight(weight(), self.device)

    def announce_growth(self, result: Result, last_bytes: int, args: Sequence[Any]) -> None:
        """Warn before a whole step runs if tensors made after its compilation leave it too little room.

        ``last_bytes`` is the size of the results of the step before, for which the plan has room.
        """
        if not self.look:
            return
        outside = max(0, self._outside_bytes(args))
        self.look.looked(outside)
        growth = outside - self.resident.other_bytes - self.resident.optimizer_bytes - last_bytes
        excess = growth - (result.budget_bytes - result.peak_bytes) - self._options.reserve_bytes
        if excess > 0 and not self._announced:
            self._announced = True
            _log.warning(
                "tensors that were made after the step was compiled take %s more than its budget of %s leaves: the step may "
                "exceed the budget by as much\nhint: compile the step when they exist, or set reserve=%r",
                format_bytes(excess),
                self._options.planning.budget,
                format_at_least(growth),
            )


def _accumulating(inputs: Sequence[Any], accumulate: bool) -> frozenset[int]:
    """Inputs to whose gradients the backward can add: those with a gradient; with ``accumulate``, all that can get one."""
    leaves = [(k, t) for k, t in enumerate(inputs) if isinstance(t, torch.Tensor) and t.is_leaf and t.requires_grad]
    coming = {k for k, t in leaves if t.grad is None and not t._backward_hooks} if accumulate else set[int]()
    return frozenset(coming | {k for k, t in leaves if coordinator().steps.sources.accumulates(t)})


def _create_state(parameters: Sequence[torch.Tensor]) -> None:
    """Create the state of optimizers of some parameters as their first step would, if it is known and they have none."""
    with no_modes(), torch.no_grad():
        for updates in [Updates(o) for o in optimizers_without_state(parameters) if uncompiled_reason(o) is None]:
            for which in range(len(updates.parameters)):
                updates.state(which)
