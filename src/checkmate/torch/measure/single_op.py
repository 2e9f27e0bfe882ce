"""One op of a graph, run alone on tensors of the traced shapes: its inputs, its time, and the memory of this run.

The fastest run counts, because everything else that a machine does only adds time.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from checkmate.torch._compat.dispatch import OpOverload, run_and_save_rng_state, run_with_rng_state
from checkmate.torch._compat.profiler import keep_busy, memory_trace
from checkmate.torch._compat.symbolic import value_at_upper_bounds
from checkmate.torch.graph.op_properties import PIECES, Pieces, makes_views, used_arguments
from checkmate.torch.graph.optimizer_ops import UPDATE, updates_of
from checkmate.torch.graph.storages import concrete, extent, leaves, storage_bytes, storage_key
from checkmate.torch.measure.peak import peaks

INPUTS: ContextVar[Mapping[int, torch.Tensor]] = ContextVar("inputs", default=MappingProxyType({}))
"""The inputs of the graph, by the key of the storage of the traced tensor. Ops read them in place, as in a step: a budget
may leave no room for copies."""


def ready_to_run(node: fx.Node, rows: tuple[int, int] = (0, 0)) -> Callable[[], Any]:
    """A function that runs an op on new inputs and returns its results.

    ``rows``: a number of rows for tensors that have the other number of rows.
    """
    target, args, kwargs = call_of(node)
    fill, given = not makes_views(node), _given(node)  # unwritten pages take no time
    real_args, real_kwargs = fx.map_arg(
        (args, kwargs), lambda n: materialised(n.meta.get("val"), fill=fill, given=given, rows=rows)
    )
    if target is UPDATE:
        parameter, gradient, optimizer, which = real_args
        update = updates_of(optimizer).clone_for_measurement(which, parameter)
        update(parameter, gradient)  # the first call allocates the optimizer's state, which is resident and not workspace
        return functools.partial(update, parameter, gradient)
    if PIECES in node.meta:
        pieces: Pieces = node.meta[PIECES]
        return functools.partial(pieces.run, real_args[0])
    return functools.partial(target, *real_args, **real_kwargs)


def call_of(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keyword arguments to measure; of ops with a random state, the op inside."""
    if node.target is run_and_save_rng_state:
        return node.args[0], tuple(node.args[1:]), dict(node.kwargs)
    if node.target is run_with_rng_state:
        return node.args[1], tuple(node.args[2:]), dict(node.kwargs)
    return node.target, used_arguments(node), dict(node.kwargs)


def needed_bytes(node: fx.Node) -> int:
    """Bytes of the results of an op and of its arguments other than inputs of the graph, each with its own storage."""
    given, arguments = _given(node), list[torch.Tensor]()
    fx.map_arg(call_of(node)[1:], lambda n: arguments.extend(leaves(n.meta.get("val"))))
    own = sum(extent(*layout(t)) * t.dtype.itemsize for t in arguments if storage_key(t) not in given)
    return own + new_bytes(node)


def new_bytes(node: fx.Node) -> int:
    """Bytes of output storages that are no storages of inputs: the part of an op's peak that is not workspace."""
    read: set[int] = set()
    fx.map_arg(call_of(node)[1:], lambda n: read.update(storage_key(t) for t in leaves(n.meta.get("val"))))
    made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
    return sum(size for key, size in made.items() if key not in read)


def on_cuda(node: fx.Node) -> bool:
    """Whether an op makes a tensor on a CUDA device."""
    return any(t.device.type == "cuda" for t in leaves(node.meta.get("val")))


def layout(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    """Shape and strides of a traced tensor."""
    return [concrete(s) for s in tensor.shape], [concrete(s) for s in tensor.stride()]


def materialised(
    value: Any, *, fill: bool = True, given: Mapping[int, torch.Tensor] = MappingProxyType({}), rows: tuple[int, int] = (0, 0)
) -> Any:
    """A real tensor with the shape and strides of a traced one (expanded dimensions stay expanded), or a plain number.

    A tensor whose storage key is in ``given`` is a view of that input. Other tensors are written if ``fill`` is true.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = layout(value)
        if rows[0] and shape and shape[0] == rows[1]:
            shape[0] = rows[0]
        if storage_key(value) in given and (real := _view(given[storage_key(value)], value, shape, stride)) is not None:
            return real
        flat = torch.empty(extent(shape, stride), dtype=value.dtype, device=value.device)
        if fill:  # time hardly depends on values, but denormals and NaN are slow; 0 is a valid index, and true masks nothing
            flat.fill_(0.5 if flat.dtype.is_floating_point or flat.dtype.is_complex else flat.dtype is torch.bool)
        return flat.as_strided(shape, stride)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        largest = value_at_upper_bounds(value)
        return value.node.hint if largest is None else largest
    if isinstance(value, (list, tuple)):
        return type(value)(materialised(v, fill=fill, given=given, rows=rows) for v in value)
    return value


def _given(node: fx.Node) -> Mapping[int, torch.Tensor]:
    """Inputs of the graph that an op is measured with, by storage key; empty for an op that changes its arguments."""
    target = call_of(node)[0]
    return INPUTS.get() if isinstance(target, OpOverload) and not target._schema.is_mutable else {}


def _view(real: torch.Tensor, traced: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor | None:
    """The part of an input that a traced tensor is a view of; None if its type differs or the input is smaller now."""
    offset = concrete(traced.storage_offset())
    size = (offset + extent(shape, stride)) * real.element_size()
    if real.dtype is not traced.dtype or size > real.untyped_storage().nbytes():
        return None
    return real.detach().as_strided(shape, stride, offset)


Clock = Callable[[], int]
Memory = npt.NDArray[np.uint8]

LONG_NS = 250_000_000
"""An op that takes longer runs once: disturbances are small against it, and heads of language models have many long ops."""


def cpu_clock() -> Clock:
    """The clock for ops on the CPU.

    On one thread, the process's CPU time excludes other processes. Several threads need wall time: a run then waits tens of
    milliseconds for any worker thread that the scheduler preempted.
    """
    return time.process_time_ns if torch.get_num_threads() == 1 else time.perf_counter_ns


def other_memory() -> Memory:
    """Memory to read between two runs of an op on a CPU, about a last-level cache: the other ops of a step read as much.

    In a step, the operands of an op are partly in the cache; an op that runs repeatedly finds all of them there
    (docs/decisions/0009). The memory is a part of the file of PyTorch's library: a budget may leave no room for a tensor.
    """
    files = [path for path in (Path(torch.__file__).parent / "lib").iterdir() if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    return np.asarray(np.memmap(largest, np.uint8, "r", shape=(min(32 << 20, largest.stat().st_size),)))


def measure_on_cpu(node: fx.Node, other: Memory, clock: Clock) -> tuple[int, int]:
    """Nanoseconds of an op on the CPU, from up to six runs, and its workspace: its peak less its results."""
    run = ready_to_run(node)
    other.max()
    with memory_trace() as trace:
        best_ns = _timed(run, clock)
    if best_ns <= LONG_NS:
        best_ns = min(best_ns, least_ns(run, other, clock, most=5))
    return best_ns, max(0, trace.peak() - new_bytes(node))


def least_ns(run: Callable[[], Any], other: Memory, clock: Clock, most: int) -> int:
    """Nanoseconds of the fastest of some runs, until they took 50 ms: readings of one op vary by about a tenth."""
    readings: list[int] = []
    while len(readings) < most and sum(readings) <= 50_000_000:
        other.max()
        readings.append(_timed(run, clock))
    return min(readings)


def _timed(run: Callable[[], Any], clock: Clock) -> int:
    began = clock()
    run()
    return clock() - began


def measure_on_cuda(node: fx.Node) -> tuple[float, int]:
    """Nanoseconds and workspace of an op on a CUDA device."""
    run = ready_to_run(node)
    with peaks(torch.device("cuda")) as (parts, _):
        out = run()
    del out
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best_ns = float("inf")
    for _ in range(5):
        # The GPU is busy for half a millisecond while the op is launched, so only its kernels are timed, not launches.
        keep_busy(1_000_000)
        begin.record()
        out = run()
        end.record()
        end.synchronize()
        del out
        best_ns = min(best_ns, begin.elapsed_time(end) * 1e6)
    return best_ns, max(0, parts[0][0] - new_bytes(node))
