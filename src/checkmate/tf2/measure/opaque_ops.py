"""Measures the bytes of loops, branches, nested functions and tensor lists, which no shape tells, in one run of the step.

A loop, as in `LSTM`, is one op of the graph. Allocations of its body, and the tensor lists that it fills for the backward
pass, have no static shape: the lists are of the type ``variant``. They were 80 % of the step of a small LSTM. The run computes
everything once, in the order of the graph, and each allocation has the name of the op that requested it.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Sequence
from dataclasses import replace

import msgspec
import tensorflow as tf

from checkmate.cost.store import CostStore, OpCost, quantise
from checkmate.frontend import progress
from checkmate.frontend.planner import keep_everything
from checkmate.tf2._compat import TraceEvent, grappler_off, trace_events
from checkmate.tf2.apply_plan import IMPORTED, build_function
from checkmate.tf2.capture import Capture
from checkmate.tf2.measure.peak import default_device, has_memory_stats, restored
from checkmate.tf2.measure.profiler import environment, synthetic_batch
from checkmate.tf2.op_properties import OPAQUE, output_bytes

_log = logging.getLogger("checkmate.tf2")


def with_opaque_measured(capture: Capture, batch: Sequence[tf.Tensor] | None = None) -> Capture:
    """The same step with measured costs, workspaces and outputs of the ops whose inside is not in the graph.

    The step runs twice on the flat tensors of a batch, or on synthetic ones, with all variables saved before and restored
    afterwards, unless an earlier process has measured the same graph.
    """
    opaque = [o for o, op in enumerate(capture.members) if op.type in OPAQUE or any(t.dtype == tf.variant for t in op.outputs)]
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
        store.add({keys[o]: cost for o, (cost, _) in measured.items()})
        store.add({f"{keys[o]} retained": OpCost(retained, 0) for o, (_, retained) in measured.items()})
        known = store.get(wanted)
    ops, values = list(capture.graph.ops), list(capture.graph.values)
    for o, key in keys.items():
        cost, retained = known[key], known[f"{key} retained"].cost_ns
        ops[o] = msgspec.structs.replace(ops[o], cost=cost.cost_ns, workspace_bytes=cost.workspace_bytes)
        member = capture.members[o]
        lists = [v for v, tensor in zip(ops[o].outputs, member.outputs, strict=True) if tensor.dtype == tf.variant]
        share, rest = divmod(max(0, retained - output_bytes(member)), len(lists) or 1)
        for i, v in enumerate(lists):  # the backward loop reads them together
            values[v] = msgspec.structs.replace(values[v], size_bytes=share + (rest if i == 0 else 0))
    return replace(capture, graph=msgspec.structs.replace(capture.graph, ops=tuple(ops), values=tuple(values)))


def _measure(capture: Capture, opaque: Sequence[int], batch: Sequence[tf.Tensor]) -> dict[int, tuple[OpCost, int]]:
    """Cost of each op, and the bytes that it leaves allocated: run the step once to create its kernels and once to trace it."""
    function = build_function(capture, keep_everything(capture.graph).plan)
    with progress.shown("measuring loops and nested functions"), restored(capture.trace.variables), grappler_off():
        function(*batch)
        events = trace_events(lambda: function(*batch))
    owners = _owners(capture, opaque, events)
    blocks: dict[int, tuple[int | None, int]] = {}  # address -> op that allocated it, and bytes
    changes: list[int] = []  # of the allocated bytes, by each event
    last = {owner: position for position, owner in enumerate(owners)}
    retained: dict[int, int] = {}
    for position, (event, owner) in enumerate(zip(events, owners, strict=True)):
        address = int(event.stats.get("addr") or 0)
        if event.name == "MemoryAllocation":
            blocks[address] = owner, event.requested_bytes
            changes.append(event.requested_bytes)
        else:
            changes.append(-blocks.pop(address, (None, 0))[1] if event.name == "MemoryDeallocation" else 0)
        if owner is not None and last[owner] == position:
            retained[owner] = sum(size for allocator, size in blocks.values() if allocator == owner)
    held = [0, *itertools.accumulate(changes)]  # allocated bytes before each event, and at the end
    found: dict[int, tuple[OpCost, int]] = {o: (OpCost(1, 0), 0) for o in opaque}  # an op without nodes has no events
    for owner, kept in retained.items():
        first, end = owners.index(owner), last[owner] + 1
        # A backward loop frees the lists that it reads while it runs; the plan counts these until its end.
        peak = max(kept, max(held[first + 1 : end + 1]) - held[first])
        took = max(event.end_ns for event in events[first:end]) - events[first].begin_ns
        found[owner] = OpCost(quantise(took), peak - kept), kept
    return found


def _owners(capture: Capture, opaque: Sequence[int], events: Sequence[TraceEvent]) -> list[int | None]:
    """The op to which each event belongs, or None, by its name: the op's or a name of a node in the op's function."""
    # All names of the trace: an op in the scope of a loop, like its counter, need not be in the loop.
    named: dict[str, int | None] = {f"{IMPORTED}/{op.name}": None for op in capture.trace.ops}
    named.update({f"{IMPORTED}/{capture.members[o].name}": o for o in opaque})
    found: list[int | None] = []
    for event in events:
        name = str(event.stats.get("tf_op") or "") if event.name.startswith("Memory") else event.name.rpartition(":")[0]
        while name and name not in named:
            # TensorFlow names a node of a body "loop/body/_1/node" and a node of a call "call/node".
            name = name.rpartition("/")[0]
        found.append(named.get(name))
    return found
