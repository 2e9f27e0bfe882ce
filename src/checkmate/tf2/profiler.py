"""Measured time and workspace of ops on the user's device. Each distinct op is measured once; a store keeps the result.

A loop, as in `LSTM`, is one op of the graph. What its body allocates, tensor lists (of the type ``variant``), and sizes that
depend on the data have no static shape. They are measured in one run of the step, which computes everything once, in the order of
the graph; each allocation has the name of the op that requested it.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, get_args

import msgspec
import numpy as np
import tensorflow as tf

from checkmate.core.budget import keep_all_bytes
from checkmate.core.errors import OptionError
from checkmate.core.graph import Value
from checkmate.cost.store import MeasuredCosts, OpCost, Store, library_variables, processor, quantise
from checkmate.frontend import progress
from checkmate.frontend.options import CostSource
from checkmate.tf2._compat import TraceEvent, grappler_off, run_op, trace_events
from checkmate.tf2.apply_plan import IMPORTED, build_function
from checkmate.tf2.capture import Capture, base_tensor, capture_trace, named_by
from checkmate.tf2.op_properties import (
    CONSTANT_BYTES,
    EMPTY_LISTS,
    LOOPS,
    OPAQUE,
    estimated,
    is_open,
    output_bytes,
    static_shape_values,
    tensor_bytes,
)
from checkmate.tf2.peak import default_device, has_memory_stats, reserve, restored
from checkmate.tf2.trace import Trace

_log = logging.getLogger("checkmate.tf2")


def measured_costs(ops: Sequence[tf.Operation]) -> list[OpCost]:
    """Costs of ops of a traced step, measured or read from the user's cost cache; ops of the same signature are measured once."""
    here = environment()

    def measure(ops: Mapping[str, tf.Operation], _known: object) -> dict[str, OpCost]:
        each = progress.counted(ops.items(), "measuring costs")
        return {key: cost for key, op in each if (cost := _measure(op)) is not None}  # without those that cannot be run alone

    return MeasuredCosts[tf.Operation](signature=lambda op: signature(op, here), measure=measure, estimate=estimated)(ops)


def estimated_costs(ops: Sequence[tf.Operation]) -> list[OpCost]:
    """Costs estimated from the bytes that ops read and write; nothing runs."""
    return [estimated(op) for op in ops]


def capture_with_costs(trace: Trace, costs: CostSource, name: str, batch: Sequence[tf.Tensor] | None = None) -> Capture:
    """A captured step with measured costs, also of ops whose inside is not in the graph, or with estimated costs."""
    if costs not in get_args(CostSource):
        raise OptionError(
            f"costs={costs!r} is not one of {', '.join(get_args(CostSource))}",
            hint="pass costs='measured', or costs='estimated' to run nothing",
        )
    if costs == "estimated":
        return capture_trace(trace, estimated_costs, name)
    reserve(2 * sum(map(output_bytes, trace.ops)))
    return _with_opaque_measured(capture_trace(trace, measured_costs, name), batch)


def signature(op: tf.Operation, environment: str) -> str | None:
    """Key of an op's cost in the store: everything that its cost depends on. None if the op cannot be run alone."""
    if op.op_def.is_stateful or op.type in OPAQUE:
        return None
    if any(t.dtype in (tf.resource, tf.variant) or not t.shape.is_fully_defined() for t in op.inputs):
        return None
    values = [_static_value(t) for t in op.inputs]  # which can determine an op's cost (axes, shapes)
    digests = ["" if v is None else hashlib.sha256(np.ascontiguousarray(v).tobytes()).hexdigest()[:12] for v in values]
    inputs = [f"{t.dtype.name}{t.shape.as_list()}={d}" for t, d in zip(op.inputs, digests, strict=True)]
    ignored = ("_class", "_output_shapes", "_gradient_op_type", "_collective_manager_ids")  # they do not affect the cost
    given = [(k, v) for k, v in op.node_def.attr.items() if k not in ignored]
    attributes = sorted(f"{k}={v.SerializeToString(deterministic=True).hex()}" for k, v in given)
    return " ".join([op.type, *inputs, *attributes, environment])


def environment() -> str:
    """Device, versions and settings that determine which kernel runs and how fast."""
    device = default_device()
    model = ""
    if device.startswith("GPU"):
        found = tf.config.list_physical_devices("GPU")[0]
        model = tf.config.experimental.get_device_details(found).get("device_name", "")
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    # TensorFlow chooses kernels by variables such as `TF_ENABLE_ONEDNN_OPTS`.
    variables = library_variables("TF_ENABLE_", "TF_CUDNN_", "TF_DETERMINISTIC_", "TF_XLA_FLAGS", "XLA_FLAGS")
    settings = tf.config.experimental.tensor_float_32_execution_enabled(), variables
    counted = has_memory_stats(device)
    return f"{device} {model} {processor()} tf={tf.__version__} threads={threads} counted={counted} settings={settings}"


def _measure(op: tf.Operation) -> OpCost | None:
    try:
        # Indices, axes and shapes must be valid for an op to run, and have their values. Other inputs are synthetic.
        values = [_static_value(t) for t in op.inputs]
        inputs = [synthetic(t) if v is None else tf.constant(v, t.dtype) for t, v in zip(op.inputs, values, strict=True)]
        run = functools.partial(run_op, op, inputs)
        run()
        return OpCost(quantise(_time_ns(run)), _workspace_bytes(run))
    except (tf.errors.OpError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        _log.info("%s (%s) could not be measured; its time is estimated, its workspace taken as 0: %s", op.name, op.type, reason)
        return None


def _static_value(tensor: tf.Tensor) -> Any:
    """Value of a tensor that is known before the step, or None."""
    op = tensor.op
    known = static_shape_values(op)
    if known is not None:
        return known[tensor.value_index]
    value = tf.get_static_value(tensor)
    if value is not None or not op.inputs or op.op_def.is_stateful or output_bytes(op) > CONSTANT_BYTES:
        return value
    values = [_static_value(t) for t in op.inputs]
    if any(v is None for v in values):
        return None
    inputs = [tf.constant(v, t.dtype) for t, v in zip(op.inputs, values, strict=True)]
    return run_op(op, inputs)[tensor.value_index].numpy()


def synthetic(tensor: tf.Tensor) -> tf.Tensor:
    """A tensor of the shape and type of a traced one: uniform random floats, or zeros."""
    if tensor.dtype.is_floating:  # away from 0 and 1: no denormals, no NaN, and no element that a kernel could skip
        return tf.random.stateless_uniform([d or 0 for d in tensor.shape.as_list()], (1, 2), 0.1, 0.9, tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)


def _time_ns(run: Callable[[], Any]) -> float:
    """The fastest of five runs, or of fewer that took 40 ms together: everything else on a machine only adds time."""
    took: list[int] = []
    while len(took) < 5 and sum(took) < 40_000_000:
        began = time.perf_counter_ns()
        result = run()
        if default_device().startswith("GPU"):  # which runs asynchronously
            for tensor in tf.nest.flatten(result):
                tensor.numpy()
        took.append(time.perf_counter_ns() - began)
    return min(took)


def _workspace_bytes(run: Callable[[], Any]) -> int:
    """Peak of the bytes that an op requests, above its outputs; 0 if TensorFlow reports no memory statistics."""
    if not has_memory_stats(default_device()):
        return 0
    held = [0, *itertools.accumulate(event.requested_bytes for event in trace_events(run))]
    return max(held) - held[-1]


def _with_opaque_measured(capture: Capture, batch: Sequence[tf.Tensor] | None) -> Capture:
    """The same step with measured costs, workspaces and outputs of the ops that no shape or single run describes.

    The step runs twice on the flat tensors of a batch, or on synthetic ones, with all variables saved before and restored
    afterwards, unless an earlier process has measured the same graph, and no size depends on the data.
    """
    members, graph = [*map(named_by, capture.members)], capture.graph
    unsized = [o for o, op in enumerate(members) if any(map(is_open, (*op.inputs, *op.outputs)))]
    # oneDNN's kernel of `MaxPoolGrad` in a graph, for example, needs no workspace, and the one that runs alone does.
    own = keep_all_bytes(graph) - graph.resident_bytes
    large = [o for o, op in enumerate(graph.ops) if 100 * op.workspace_bytes > own]
    opaque = sorted({*unsized, *large, *(o for o, op in enumerate(members) if op.type in OPAQUE)})
    if not opaque or not has_memory_stats(default_device()):
        return capture
    store = Store("opaque ops", _OpaqueCost, "loops and nested functions are measured again in every process")
    keys = {o: f"{o} of {graph.digest} {environment()}" for o in opaque}
    data = [*map(synthetic, capture.trace.arguments)] if batch is None else batch
    by_data = any(t.dtype != tf.variant and is_open(t) for o in unsized for t in members[o].outputs)
    known = {} if by_data else store.get(keys.values())
    if len(known) < len(keys):
        try:
            measured = _measure_opaque(capture, opaque, data)
        except tf.errors.ResourceExhaustedError:
            _log.warning("loops and nested functions could not be measured: a step that keeps everything does not fit")
            return capture
        known |= {keys[o]: cost for o, cost in measured.items()}
        store.add(known)
    ops, values = list(graph.ops), list(graph.values)
    for o, key in keys.items():
        cost, workspace_bytes, retained = known[key]
        ops[o] = msgspec.structs.replace(ops[o], cost=cost, workspace_bytes=workspace_bytes)
        if o not in unsized:
            # For its gradient, oneDNN's kernel of `MaxPool` puts out indices that the op does not have.
            more = retained - sum(values[v].size_bytes for v in ops[o].outputs)
            if more > 0 and members[o].type not in OPAQUE and values[v := ops[o].outputs[0]].base is None:
                values[v] = msgspec.structs.replace(values[v], size_bytes=values[v].size_bytes + more)
            continue
        outputs = [(v, t) for t in members[o].outputs if values[v := capture.values[t.name]].base is None]
        unknown = [v for v, t in outputs if is_open(t)]
        retained = max(0, retained - sum(tensor_bytes(t) for _, t in outputs if not is_open(t)))
        largest = max(ops[o].inputs, key=lambda v: values[v].size_bytes, default=None)
        if any(t.dtype == tf.variant for _, t in outputs):
            _size_lists(capture, o, values, retained)
            continue
        if not retained and largest is not None and ops[o].recomputable:  # it wrote into an input that the step has read
            retained = values[largest].size_bytes * len(unknown)
        for v in unknown:
            values[v] = msgspec.structs.replace(values[v], size_bytes=-(-retained // len(unknown)))
    resident = graph.resident_bytes + sum(map(tensor_bytes, data)) - sum(map(tensor_bytes, capture.trace.arguments))
    return replace(capture, graph=msgspec.structs.replace(graph, ops=tuple(ops), values=tuple(values), resident_bytes=resident))


def _size_lists(capture: Capture, o: int, values: list[Value], retained_bytes: int) -> None:
    """Give the tensor lists that an op makes the bytes that it leaves allocated, as one storage: they share tensors.

    A list that a loop is given, and returns at the same position for a reader, is the same list. What a loop of the forward pass
    keeps for the backward pass shares tensors with the largest list that it is given. The rows of a tensor may be views of it.
    """
    (*makers, op), node = capture.members[o], capture.graph.ops[o]
    owners = {name: v if (base := values[v].base) is None else base for name, v in capture.values.items()}
    bases = [base_tensor(t, capture.kinds) for t in op.inputs]
    # The rows of a list that is made for the loop may be views of a tensor.
    rows = [base_tensor(maker.inputs[0], capture.kinds) for maker in makers if maker.outputs[0].dtype == tf.variant]
    retained_bytes += sum(values[owners[b.name]].size_bytes for b in rows if b.name in owners)
    given = [None if b.op.type in EMPTY_LISTS else owners.get(b.name) for b in bases]
    held = [u for u, b in zip(given, bases, strict=True) if u is not None and (b.dtype == tf.variant or not retained_bytes)]
    home = max(held, key=lambda u: values[u].size_bytes, default=None)
    if retained_bytes and (op.type not in LOOPS or node.phase == "backward"):
        home = None
    if home is not None:
        values[home] = msgspec.structs.replace(values[home], size_bytes=values[home].size_bytes + retained_bytes)
    for tensor in op.outputs:
        v = capture.values[tensor.name]
        if is_open(tensor) and v != home and capture.graph.readers[v]:
            same = given[tensor.value_index] if op.type in LOOPS else None
            base = home if same is None else same
            home = v if base is None else home
            values[v] = msgspec.structs.replace(values[v], size_bytes=retained_bytes if base is None else 0, base=base)


class _OpaqueCost(NamedTuple):
    """Cost, workspace, and the bytes that an op leaves allocated."""

    cost_ns: int
    workspace_bytes: int
    retained_bytes: int


def _measure_opaque(capture: Capture, opaque: Sequence[int], batch: Sequence[tf.Tensor]) -> dict[int, _OpaqueCost]:
    """Cost of each op, and the bytes that it leaves allocated: run the step once to create its kernels and once to trace it."""
    function = build_function(capture, range(len(capture.members)))
    with progress.shown("measuring loops and nested functions"), restored(capture.trace.variables), grappler_off():
        function(*batch)
        events = trace_events(lambda: function(*batch))
    owners = _owners(capture, opaque, events)
    begins = [event.begin_ns for event in events]
    starts = {owner: position for position, owner in reversed([*enumerate(owners)]) if owner is not None}
    ends: dict[int | None, int] = {}  # nanoseconds: what an op frees at its end has no name
    for event, owner in zip(events, owners, strict=True):
        ends[owner] = max(ends.get(owner, 0), event.end_ns)
    blocks: dict[int, tuple[int | None, int]] = {}  # address -> op that allocated it, and bytes
    held, retained = [0], Counter[int | None]()  # allocated bytes before each event, and at the end; bytes that each op leaves
    for event, owner in zip(events, owners, strict=True):
        address, change = int(event.stats.get("addr") or 0), 0
        if event.name == "MemoryAllocation":
            blocks[address], change = (owner, event.requested_bytes), event.requested_bytes
            retained[owner] += change
        elif event.name == "MemoryDeallocation":
            allocator, size = blocks.pop(address, (None, 0))
            change = -size
            retained[allocator] -= size if event.begin_ns <= ends.get(allocator, 0) else 0
        held.append(held[-1] + change)
    found = {o: _OpaqueCost(1, 0, 0) for o in opaque}  # an op without nodes has no events
    for owner, first in starts.items():
        end, kept = bisect.bisect_right(begins, ends[owner]), retained[owner]
        # A backward loop frees the lists that it reads while it runs; the plan counts these until its end.
        peak = max(kept, max(held[first + 1 : end + 1]) - held[first])
        found[owner] = _OpaqueCost(quantise(ends[owner] - events[first].begin_ns), peak - kept, kept)
    return found


def _owners(capture: Capture, opaque: Sequence[int], events: Sequence[TraceEvent]) -> list[int | None]:
    """The op to which each event belongs, or None, by its name: the op's or a name of a node in the op's function."""
    # All names of the trace: an op in the scope of a loop, like its counter, need not be in the loop.
    named: dict[str, int | None] = {f"{IMPORTED}/{op.name}": None for op in capture.trace.ops}
    named.update({f"{IMPORTED}/{op.name}": o for o in opaque for op in capture.members[o]})
    found: list[int | None] = []
    for event in events:
        name = str(event.stats.get("tf_op") or "") if event.name.startswith("Memory") else event.name.rpartition(":")[0]
        while name and name not in named:
            # TensorFlow names a node of a body "loop/body/_1/node" and a node of a call "call/node".
            name = name.rpartition("/")[0]
        found.append(named.get(name))
    return found
