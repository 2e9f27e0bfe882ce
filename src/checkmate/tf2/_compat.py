"""All uses of private TensorFlow names, as they are in TensorFlow 2.21."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow as tf
from tensorflow.python.util import _pywrap_determinism

_lock = threading.Lock()


def op_determinism() -> bool:
    """Whether `tf.config.experimental.enable_op_determinism` was called."""
    return bool(_pywrap_determinism.is_enabled())


class TraceEvent(NamedTuple):
    """An event of TensorFlow's profiler.

    Attributes:
        name: ``MemoryAllocation``, ``MemoryDeallocation``, or ``op name:op type`` of an op that ran.
        stats: The event's statistics (``XStat``) by name, such as ``requested_bytes`` of an allocation.
        begin_ns: When the event began.
        end_ns: When it ended.
    """

    name: str
    stats: dict[str, Any]
    begin_ns: int
    end_ns: int


@contextlib.contextmanager
def grappler_off() -> Iterator[None]:
    """Disable Grappler and automatic XLA clustering, so that functions run with the nodes and edges they were built with.

    Grappler is TensorFlow's graph optimizer (tensorflow/core/grappler/optimizers/meta_optimizer.cc). Its arithmetic rewrites
    change results bitwise, and its common-subexpression pass can merge a recomputation with the first computation.

    Applies to calls of this thread inside the block. If a TensorFlow version lacks the private thread-local option, the
    public option of the process is set under a lock and restored.
    """
    try:
        from tensorflow.python.eager import context

        current: Any = context.context()
        before = current.function_call_options
        config = tf.compat.v1.ConfigProto()
        config.CopyFrom(current.config)
        config.graph_options.rewrite_options.disable_meta_optimizer = True
        config.graph_options.optimizer_options.global_jit_level = tf.compat.v1.OptimizerOptions.OFF
        current.function_call_options = context.FunctionCallOptions(config_proto=config)
    except (ImportError, AttributeError):
        with _process_wide():
            yield
        return
    try:
        yield
    finally:
        current.function_call_options = before


@contextlib.contextmanager
def _process_wide() -> Iterator[None]:
    with _lock:
        before = tf.config.optimizer.get_experimental_options()
        tf.config.optimizer.set_experimental_options({**before, "disable_meta_optimizer": True})
        try:
            yield
        finally:
            # Options can be set but not unset: one that was not there goes back to its default.
            tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False, **before})


def trace_events(run: Any) -> list[TraceEvent]:
    """Profile a call: the ops that ran and every allocation with its size, sorted by start time.

    Args:
        run: A callable without arguments. Its result is held until profiling ends, so that freeing it is no event.

    Raises:
        tf.errors.AlreadyExistsError: Another profiler session is active.
    """
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    with tempfile.TemporaryDirectory() as folder:
        options = tf.profiler.experimental.ProfilerOptions(host_tracer_level=3)
        tf.profiler.experimental.start(folder, options=options)
        try:
            result = run()
        finally:
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
    found.sort(key=lambda pair: pair[0])
    return [event for _, event in found]


def memory_limit_bytes(device: str) -> int | None:
    """Most bytes that TensorFlow allocates on a GPU, or None if it does not report a limit.

    Args:
        device: Name of the device, such as ``"GPU:0"``.
    """
    try:
        from tensorflow.python.client import device_lib
    except ImportError:
        return None
    wanted = tf.DeviceSpec.from_string(device)
    for found in device_lib.list_local_devices():
        spec = tf.DeviceSpec.from_string(found.name)
        if spec.device_type == wanted.device_type and spec.device_index == (wanted.device_index or 0):
            return int(found.memory_limit)
    return None


def is_stateful(op_type: str) -> bool:
    """Whether ops of a type have state or effects."""
    from tensorflow.python.framework import op_def_registry

    definition = op_def_registry.get(op_type)
    return definition is None or definition.is_stateful


def _stat(stat: Any, names: Any) -> Any:
    kind = stat.WhichOneof("value")
    return names[stat.ref_value].name if kind == "ref_value" else getattr(stat, kind) if kind else None
