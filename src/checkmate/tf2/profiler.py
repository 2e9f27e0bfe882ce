"""Measured time and workspace of ops on the user's device, each distinct op once in a lifetime."""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from checkmate.cost.store import CostStore, OpCost, quantise
from checkmate.tf2._compat import trace_events
from checkmate.tf2.op_properties import CALLS, CONTROL_FLOW, SMALL, estimate_ns, new_bytes, static_values
from checkmate.tf2.peak import counts, default_device

_log = logging.getLogger("checkmate.tf2")
_REPEATS = 5
_ENOUGH_NS = 40_000_000
_IGNORED = frozenset({"_class", "_output_shapes", "_gradient_op_type", "_collective_manager_ids"})


class Profiler:
    """Costs of ops, measured or from the store.

    Args:
        store: Where measures are kept.
    """

    def __init__(self, store: CostStore | None = None) -> None:
        self.store = CostStore() if store is None else store

    def __call__(self, ops: Sequence[tf.Operation]) -> list[OpCost]:
        """Cost of each op; ops of the same signature share one measure."""
        place = _place()
        keys = [signature(op, place) for op in ops]
        distinct = {k: op for k, op in zip(keys, ops, strict=True) if k is not None}
        known = self.store.get(distinct)
        missing = {k: op for k, op in distinct.items() if k not in known}
        if missing:
            began = time.perf_counter()
            measured = {k: m for k, op in missing.items() if (m := _measured(op)) is not None}
            self.store.add(measured)
            known.update({k: OpCost(estimate_ns(op), 0) for k, op in missing.items()})
            # Another process may have measured the same op meanwhile: what is in the store counts.
            known.update(self.store.get(missing))
            _log.info("measured %d ops in %.1f s", len(missing), time.perf_counter() - began)
        return [OpCost(estimate_ns(op), 0) if k is None else known[k] for k, op in zip(keys, ops, strict=True)]


def estimated(ops: Sequence[tf.Operation]) -> list[OpCost]:
    """Costs from bytes alone; nothing runs, and no workspace is known."""
    return [OpCost(estimate_ns(op), 0) for op in ops]


def signature(op: tf.Operation, place: str) -> str | None:
    """What the cost of an op depends on, as text; None for what is not run alone."""
    if op.op_def.is_stateful or op.type in CONTROL_FLOW | CALLS or not hasattr(tf.raw_ops, op.type):
        return None
    if any(t.dtype in (tf.resource, tf.variant) or not t.shape.is_fully_defined() for t in op.inputs):
        return None
    inputs = [f"{t.dtype.name}{t.shape.as_list()}{_digest(_static(t))}" for t in op.inputs]
    attributes = sorted(f"{k}={_text(v)}" for k, v in op.node_def.attr.items() if k not in _IGNORED)
    return " ".join([op.type, *inputs, *attributes, place])


def _place() -> str:
    """Device, versions and whatever else decides which kernel runs."""
    device = default_device()
    model = ""
    if device.startswith("GPU"):
        found = tf.config.list_physical_devices("GPU")[0]
        model = tf.config.experimental.get_device_details(found).get("device_name", "")
    onednn = os.environ.get("TF_ENABLE_ONEDNN_OPTS", "")
    threads = tf.config.threading.get_intra_op_parallelism_threads()
    return f"{device} {model} tf={tf.__version__} threads={threads} onednn={onednn} counted={counts(device)}"


def _text(value: Any) -> str:
    return value.SerializeToString(deterministic=True).hex()


def _digest(value: Any) -> str:
    if value is None:
        return ""
    array = np.ascontiguousarray(value)
    return "=" + hashlib.sha256(array.tobytes()).hexdigest()[:12]


def _measured(op: tf.Operation) -> OpCost | None:
    try:
        run = _prepared(op)
        run()
        return OpCost(quantise(_time_ns(run)), _workspace_bytes(run))
    except (tf.errors.OpError, TypeError, ValueError, AttributeError, NotImplementedError, StopIteration) as error:
        _log.info("%s (%s) could not be measured and is estimated: %s", op.name, op.type, str(error).splitlines()[0])
        return None


def _prepared(op: tf.Operation) -> Callable[[], Any]:
    """A call of one op on tensors of the right shapes; what is constant has its value."""
    function = getattr(tf.raw_ops, op.type)
    takes = list(inspect.signature(function).parameters)
    tensors = iter([_real(t) for t in op.inputs])
    known = {a.name for a in (*op.op_def.input_arg, *op.op_def.attr)}
    renamed = iter([name for name in takes if name not in known and name != "name"])  # such as reduction_indices, now axis
    arguments: dict[str, Any] = {}
    for argument in op.op_def.input_arg:
        name = argument.name if argument.name in takes else next(renamed)
        if argument.number_attr:
            arguments[name] = [next(tensors) for _ in range(op.get_attr(argument.number_attr))]
        elif argument.type_list_attr:
            arguments[name] = [next(tensors) for _ in op.get_attr(argument.type_list_attr)]
        else:
            arguments[name] = next(tensors)
    for attribute in op.op_def.attr:
        if attribute.name in takes:
            arguments[attribute.name] = op.get_attr(attribute.name)
    return lambda: function(**arguments)


def _static(tensor: tf.Tensor) -> Any:
    """The value of a tensor that is known before the step, or None: indices, axes and shapes must be valid to be run."""
    op = tensor.op
    known = static_values(op)
    if known is not None:
        return known[tensor.value_index]
    value = tf.get_static_value(tensor)
    runs = op.inputs and not op.op_def.is_stateful and hasattr(tf.raw_ops, op.type) and new_bytes(op) <= SMALL
    if value is None and runs and all(_static(t) is not None for t in op.inputs):
        return tf.nest.flatten(_prepared(op)())[tensor.value_index].numpy()
    return value


def _real(tensor: tf.Tensor) -> tf.Tensor:
    value = _static(tensor)
    if value is not None:
        return tf.constant(value, tensor.dtype)
    if tensor.dtype.is_floating:  # no denormals, no NaN, nothing masked
        return tf.random.stateless_uniform([d or 0 for d in tensor.shape.as_list()], (1, 2), 0.1, 0.9, tensor.dtype)
    return tf.zeros(tensor.shape, tensor.dtype)


def _time_ns(run: Callable[[], Any]) -> float:
    took: list[int] = []
    while len(took) < _REPEATS and sum(took) < _ENOUGH_NS:
        began = time.perf_counter_ns()
        _settle(run())
        took.append(time.perf_counter_ns() - began)
    return min(took)


def _settle(made: Any) -> None:
    """Wait for a device that works on its own."""
    if default_device().startswith("GPU"):
        for tensor in tf.nest.flatten(made):
            tensor.numpy()


def _workspace_bytes(run: Callable[[], Any]) -> int:
    """Bytes asked for at the peak of an op beyond what it leaves; 0 where TensorFlow does not count."""
    if not counts(default_device()):
        return 0
    held = peak = 0
    for event in trace_events(run):
        if event.name == "MemoryAllocation":
            held += int(event.facts.get("requested_bytes") or 0)
        elif event.name == "MemoryDeallocation":
            held -= int(event.facts.get("requested_bytes") or 0)
        peak = max(peak, held)
    return peak - held
