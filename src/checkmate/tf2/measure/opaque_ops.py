"""Measures the bytes of loops, branches, nested functions and tensor lists, which no shape tells, in one run of the step.

A loop such as that of `LSTM` is one op of the graph. What its body allocates, and the tensor lists that it fills for the backward
pass, have no static shape: the lists are of the type ``variant``. They were 80 % of the step of a small LSTM. The run computes
everything once, in the order of the graph, and each allocation has the name of the op that requested it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import tensorflow as tf

from checkmate.cost.store import CostStore, OpCost, quantise
from checkmate.frontend import progress
from checkmate.frontend.planner import keep_everything
from checkmate.tf2._compat import TraceEvent, grappler_off, trace_events
from checkmate.tf2.apply_plan import IMPORTED, build_function
from checkmate.tf2.graph.capture import Capture
from checkmate.tf2.graph.op_properties import CALLS, CONTROL_FLOW, tensor_bytes
from checkmate.tf2.measure.peak import default_device, has_memory_stats
from checkmate.tf2.measure.profiler import environment, synthetic_batch
from checkmate.tf2.measure.saved_variables import restored

_log = logging.getLogger("checkmate.tf2")


@dataclass(frozen=True, slots=True)
class _Opaque:
    """Measurements of an op.

    Attributes:
        cost_ns: Nanoseconds from the first event of the op to its last.
        peak_bytes: Largest number of allocated bytes while the op runs, above those allocated before it.
        retained_bytes: Bytes allocated by the op that are still allocated after its last event: its outputs.
    """

    cost_ns: int
    peak_bytes: int
    retained_bytes: int


def with_opaque_measured(capture: Capture, batch: Sequence[tf.Tensor] | None = None) -> Capture:
    """The same step with measured costs, workspaces and outputs of the ops whose inside is not in the graph.

    The step runs twice, with all variables saved before and restored afterwards, unless an earlier process has measured the same
    graph.

    Args:
        capture: The captured step.
        batch: The flat tensors to run on; synthetic ones by default.
    """
    opaque = [o for o, op in enumerate(capture.members) if _is_opaque(op)]
    if not opaque or not has_memory_stats(default_device()):
        return capture
    store = CostStore()
    keys = {o: f"opaque {o} of {capture.graph.digest} {environment()}" for o in opaque}
    wanted = [key + part for key in keys.values() for part in ("", " retained")]
    known = store.get(wanted)
    if len(known) < len(wanted):
        try:
            measured = _measure(capture, opaque, synthetic_batch(capture.trace.arguments) if batch is None else batch)
        except tf.errors.ResourceExhaustedError:
            _log.warning("loops and nested functions could not be measured: a step that keeps everything does not fit")
            return capture
        unseen = _Opaque(1, 0, 0)  # an op without events, such as a call of a function without nodes
        measured = {o: measured.get(o, unseen) for o in opaque}
        store.add({keys[o]: OpCost(m.cost_ns, m.peak_bytes - m.retained_bytes) for o, m in measured.items()})
        store.add({f"{keys[o]} retained": OpCost(m.retained_bytes, 0) for o, m in measured.items()})
        known = store.get(wanted)
    ops, values = list(capture.graph.ops), list(capture.graph.values)
    for o, key in keys.items():
        cost, retained = known[key], known[f"{key} retained"].cost_ns
        ops[o] = msgspec.structs.replace(ops[o], cost=cost.cost_ns, workspace_bytes=cost.workspace_bytes)
        outputs = capture.members[o].outputs
        lists = [v for v, tensor in zip(ops[o].outputs, outputs, strict=True) if tensor.dtype == tf.variant]
        share, rest = divmod(max(0, retained - sum(map(tensor_bytes, outputs))), len(lists) or 1)
        for i, v in enumerate(lists):  # they are read together, by the backward loop
            values[v] = msgspec.structs.replace(values[v], size_bytes=share + (rest if i == 0 else 0))
    return replace(capture, graph=msgspec.structs.replace(capture.graph, ops=tuple(ops), values=tuple(values)))


def _is_opaque(op: tf.Operation) -> bool:
    return op.type in CONTROL_FLOW | CALLS or any(t.dtype == tf.variant for t in op.outputs)


def _measure(capture: Capture, opaque: Sequence[int], batch: Sequence[tf.Tensor]) -> dict[int, _Opaque]:
    """Run the step once to create its kernels and once to trace it."""
    function = build_function(capture, keep_everything(capture.graph).plan)
    with progress.shown("measuring loops and nested functions"), restored(capture.trace.variables), grappler_off():
        function(*batch)
        events = trace_events(lambda: function(*batch))
    owners = _Owners(capture, opaque)
    owner_of = [owners.of(event) for event in events]
    spans: dict[int, tuple[int, int]] = {}  # op -> positions of its first and last event
    for position, owner in enumerate(owner_of):
        if owner is not None:
            spans[owner] = spans.get(owner, (position, position))[0], position
    blocks: dict[int, tuple[int | None, int]] = {}  # address -> op that allocated it, and bytes
    held: list[int] = []  # allocated bytes after each event
    retained: dict[int, int] = {}
    for position, (event, owner) in enumerate(zip(events, owner_of, strict=True)):
        change, address = 0, int(event.stats.get("addr") or 0)
        if event.name == "MemoryAllocation":
            change = int(event.stats.get("requested_bytes") or 0)
            blocks[address] = owner, change
        elif event.name == "MemoryDeallocation":
            change = -blocks.pop(address, (None, 0))[1]
        held.append((held[-1] if held else 0) + change)
        if owner is not None and spans[owner][1] == position:
            retained[owner] = sum(size for allocator, size in blocks.values() if allocator == owner)
    found: dict[int, _Opaque] = {}
    for owner, (first, last) in spans.items():
        # A backward loop frees the lists that it reads while it runs; the plan counts these until its end.
        peak = max(held[first : last + 1]) - (held[first - 1] if first else 0)
        took = max(event.end_ns for event in events[first : last + 1]) - events[first].begin_ns
        found[owner] = _Opaque(quantise(took), max(peak, retained[owner]), retained[owner])
    return found


class _Owners:
    """Finds the op to which an event belongs, by its name: that of the op, or of a node in the op's function.

    Args:
        capture: The captured step.
        opaque: The ops to find.
    """

    def __init__(self, capture: Capture, opaque: Sequence[int]) -> None:
        # All names of the trace: one inside the scope of a loop need not be in the loop, such as that of its counter.
        self._place: dict[str, int | None] = {f"{IMPORTED}/{op.name}": None for op in capture.trace.ops}
        self._place.update({f"{IMPORTED}/{capture.members[o].name}": o for o in opaque})

    def of(self, event: TraceEvent) -> int | None:
        """The op, or None."""
        name = str(event.stats.get("tf_op") or "") if event.name.startswith("Memory") else event.name.rpartition(":")[0]
        while name and name not in self._place:
            # TensorFlow names the nodes of a body "loop/body/_1/node" and those of a call "call/node".
            name = name.rpartition("/")[0]
        return self._place.get(name)
