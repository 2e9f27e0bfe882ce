"""All uses of private TensorFlow names, as they are in TensorFlow 2.21."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.autograph.core import ag_ctx
from tensorflow.python.client import device_lib
from tensorflow.python.eager import context, execute
from tensorflow.python.eager.polymorphic_function import autograph_util, polymorphic_function
from tensorflow.python.framework import op_def_registry
from tensorflow.python.ops import resource_variable_ops


class TraceEvent(NamedTuple):
    """An event of TensorFlow's profiler."""

    name: str  # `MemoryAllocation`, `MemoryDeallocation`, or `op name:op type` of an op that ran
    stats: dict[str, Any]  # statistics of the event (`XStat`) by name
    begin_ns: int
    end_ns: int

    @property
    def requested_bytes(self) -> int:
        """Bytes that an allocation requests, and less than nothing for a deallocation; 0 for another event."""
        sign = {"MemoryAllocation": 1, "MemoryDeallocation": -1}.get(self.name, 0)
        return sign * int(self.stats.get("requested_bytes") or 0)


@contextlib.contextmanager
def grappler_off() -> Iterator[None]:
    """Disable Grappler and automatic XLA clustering, so that functions run with the nodes and edges they were built with.

    Grappler is TensorFlow's graph optimizer (tensorflow/core/grappler/optimizers/meta_optimizer.cc). Its arithmetic rewrites
    change results bitwise, and its common-subexpression pass can merge a recomputation with the first computation.

    Applies to calls of this thread inside the block.
    """
    current: Any = context.context()
    before = current.function_call_options
    config = tf.compat.v1.ConfigProto()
    config.CopyFrom(current.config)
    config.graph_options.rewrite_options.disable_meta_optimizer = True
    config.graph_options.optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.OFF
    current.function_call_options = context.FunctionCallOptions(config_proto=config)
    try:
        yield
    finally:
        current.function_call_options = before


def trace_events(run: Callable[[], object]) -> list[TraceEvent]:
    """Profile a call: the ops that ran and every allocation with its size, sorted by start time.

    The result of the call is held until profiling ends; freeing it is then no event.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
        with _no_stderr():
            tf.profiler.experimental.start(folder, options=options)
        try:
            result = run()
        finally:
            with _no_stderr():
                tf.profiler.experimental.stop()
        del result
        space: Any = xplane_pb2.XSpace()  # pyright: ignore[reportAttributeAccessIssue]
        for path in Path(folder).rglob("*.xplane.pb"):
            space.MergeFromString(path.read_bytes())
    found: list[tuple[int, TraceEvent]] = []
    for plane in space.planes:
        names, stats = plane.event_metadata, plane.stat_metadata
        for line in plane.lines:
            for event in line.events:
                event_stats = {stats[s.metadata_id].name: _stat(s, stats) for s in event.stats}
                begin = line.timestamp_ns * 1000 + event.offset_ps
                end = begin + event.duration_ps
                traced = TraceEvent(names[event.metadata_id].name, event_stats, begin // 1000, end // 1000)
                found.append((begin, traced))
    return [event for _, event in sorted(found, key=lambda pair: pair[0])]


@contextlib.contextmanager
def _no_stderr() -> Iterator[None]:
    """Drop what C++ code writes to stderr: a session of the profiler logs a dozen lines, and measuring costs takes a hundred."""
    before, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def run_op(op: tf.Operation, inputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Outputs of an op of a graph that is run alone, on other inputs."""
    attributes = [part for a in op.op_def.attr for part in (a.name, _types_as_numbers(op.get_attr(a.name)))]
    return execute.execute(op.type, len(op.outputs), inputs=list(inputs), attrs=tuple(attributes), ctx=context.context())


def stateful_kinds(op: tf.Operation) -> set[str]:
    """Types of the stateful ops in the functions that an op of a graph calls; a call among them is stateful."""
    graph: Any = op.graph
    functions = [graph._get_function(op.get_attr(a.name).name) for a in op.op_def.attr if a.type == "func"]
    kinds = {node.op for function in functions for node in function.definition.node_def}
    return {kind for kind in kinds if (found := op_def_registry.get(kind)) is None or found.is_stateful}


def _types_as_numbers(value: Any) -> Any:
    if isinstance(value, list):
        return [_types_as_numbers(part) for part in value]
    return value.as_datatype_enum if isinstance(value, tf.DType) else value


@contextlib.contextmanager
def inlined_functions() -> Iterator[None]:
    """While the block traces, functions of `tf.function` that XLA does not compile are traced in their caller."""
    kind: Any = polymorphic_function.Function
    original = kind.__call__

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if tf.executing_eagerly() or function._jit_compile:
            return original(function, *args, **kwargs)
        code = function.python_function
        with ag_ctx.ControlStatusCtx(ag_ctx.Status.UNSPECIFIED):  # its caller need not be converted
            return (autograph_util.py_func_from_autograph(code) if function._autograph else code)(*args, **kwargs)

    kind.__call__ = call
    try:
        yield
    finally:
        kind.__call__ = original


def created_outside(create: Callable[..., Any], **arguments: Any) -> Any:
    """Create a variable outside of the traced function, which is then traced once; inside if it depends on a traced tensor."""
    if tf.is_symbolic_tensor(arguments["initial_value"]):
        return create(**arguments)
    with tf.init_scope():
        return resource_variable_ops.default_variable_creator_v2(**arguments)


def memory_limit_bytes(device: str) -> int | None:
    """Most bytes that TensorFlow allocates on a GPU (``"GPU:0"``), or None if it does not report a limit."""
    wanted = tf.DeviceSpec.from_string(device)
    for found in device_lib.list_local_devices():
        spec = tf.DeviceSpec.from_string(found.name)
        if spec.device_type == wanted.device_type and spec.device_index == (wanted.device_index or 0):
            return int(found.memory_limit)
    return None


def _stat(stat: Any, names: Any) -> Any:
    kind = stat.WhichOneof("value")
    return names[stat.ref_value].name if kind == "ref_value" else getattr(stat, kind) if kind else None
