"""Measured time and workspace of ops on the user's device; each distinct op is measured once and stored."""

from __future__ import annotations

import functools
import itertools
import logging
import math
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import fx

from checkmate.core.errors import GraphError
from checkmate.core.units import format_bytes
from checkmate.cost.store import CostStore, OpCost, quantise
from checkmate.frontend import progress
from checkmate.frontend.measured_costs import MeasuredCosts
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import (
    OpOverload,
    dispatches_in_python,
    no_dispatch,
    no_modes,
    run_and_save_rng_state,
    run_with_rng_state,
)
from checkmate.torch._compat.profiler import keep_busy, memory_trace, outside_of_profilers
from checkmate.torch._compat.symbolic import value_at_upper_bounds
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.graph.op_properties import PIECES, Pieces, is_collective, makes_views, unused_arguments
from checkmate.torch.graph.optimizer_ops import UPDATE, updates_of
from checkmate.torch.graph.provenance import source_of
from checkmate.torch.graph.rng import generators_restored
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key, unique_bytes
from checkmate.torch.measure.estimated_workspace import estimated_workspace_bytes
from checkmate.torch.measure.resident import free_bytes
from checkmate.torch.measure.roofline import estimate_ns
from checkmate.torch.measure.timing import EFFORT, LeastTimes

_log = logging.getLogger("checkmate.torch")

_METHOD = "cache-shared direct"
"""How times are measured, as part of an op's signature: times measured otherwise are not mixed with these."""

_LAUNCHING_CYCLES = 1_000_000
"""Cycles, half a millisecond, for which a GPU is busy while an op is launched, so that its kernels are timed and no launch is."""


class Profiler:
    """Costs of FX nodes, measured or read from a store.

    Args:
        store: Where measured costs are kept; the user's cost cache by default.
        inputs: Functions that return the inputs of the graph, which are not kept alive. Ops read the inputs where they are, since
            a budget may leave no room for copies.
    """

    def __init__(self, store: CostStore | None = None, inputs: Sequence[Callable[[], Any]] = ()) -> None:
        self._settings = kernel_settings
        self._costs = MeasuredCosts(
            signature=lambda node: signature(node, self._settings), measure=measure_nodes, estimate=_without_running, store=store
        )
        self._inputs = inputs

    def __call__(self, nodes: Sequence[fx.Node]) -> list[OpCost]:
        """Cost of each node; nodes with the same `signature` share one measurement."""
        self._settings = functools.cache(kernel_settings)  # read once for all nodes, and again at the next call
        for node in nodes:
            node.meta.pop(_LACKED_ROOM, None)
        token = _INPUTS.set(self._by_storage(nodes))
        try:
            return self._costs(nodes)
        finally:
            _INPUTS.reset(token)

    def _by_storage(self, nodes: Sequence[fx.Node]) -> dict[int, torch.Tensor]:
        """The inputs, by the key of the storage of the traced tensor."""
        placeholders = [n for n in nodes[0].graph.find_nodes(op="placeholder") if not is_tangent(n)] if nodes else []
        if len(placeholders) != len(self._inputs):  # AOTAutograd merges inputs that are equal
            return {}
        pairs = [(n.meta.get("val"), real()) for n, real in zip(placeholders, self._inputs, strict=True)]
        return {
            storage_key(traced): real
            for traced, real in pairs
            if isinstance(traced, torch.Tensor) and isinstance(real, torch.Tensor) and _has_plain_storage(real)
        }


_INPUTS: ContextVar[Mapping[int, torch.Tensor]] = ContextVar("inputs", default=MappingProxyType({}))


def _has_plain_storage(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not dispatches_in_python(tensor) and not tensor.is_meta


def _without_running(node: fx.Node) -> OpCost:
    """Cost of an op that cannot be run in isolation.

    A collective on the CPU runs in gloo, which copies the result once.
    """
    if (known := _cost_by_slice(node)) is not None:
        return known
    if is_collective(node):
        return OpCost(estimate_ns(node), 0 if _on_cuda(node) else sum(map(storage_bytes, leaves(node.meta.get("val")))))
    return OpCost(estimate_ns(node), estimated_workspace_bytes(node) if isinstance(node.target, OpOverload) else 0)


def signature(node: fx.Node, settings: Callable[[torch.device], str] = kernel_settings) -> str | None:
    """Text of all on which the cost of an op depends; None for an op that cannot be run in isolation.

    Args:
        node: The op.
        settings: What chooses the kernels of a device, as text.
    """
    target, args, kwargs = _call(node)
    if not isinstance(target, OpOverload) or is_collective(node):
        return None
    if target is UPDATE:
        args = (*args[:2], updates_of(args[2]).describe(args[3]))
    parts = [str(target), _describe(args), _describe(kwargs)]
    devices = {t.device for t in _tensors(node, args, kwargs)}
    parts += [_METHOD, *["by-piece"] * (PIECES in node.meta)] if any(d.type == "cpu" for d in devices) else []
    parts += ["queued"] * any(d.type == "cuda" for d in devices)
    parts += sorted({settings(d) for d in devices or {torch.device("cpu")}})
    return " ".join(parts)


def workspace_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Bytes that each op allocates besides its results, as measured where that is known, and as estimated elsewhere."""
    settings = functools.cache(kernel_settings)
    keys = [signature(node, settings) for node in nodes]
    measured = CostStore().get(key for key in keys if key is not None)
    costs = [measured.get(key or "") for key in keys]
    return [estimated_workspace_bytes(n) if c is None else c.workspace_bytes for n, c in zip(nodes, costs, strict=True)]


def measure_nodes(nodes: Mapping[str, fx.Node], known: Mapping[str, tuple[fx.Node, OpCost]]) -> dict[str, OpCost]:
    """Measure time and workspace of nodes by running them on tensors of the traced shapes.

    A shared machine may be a tenth slower today, or for some seconds, than when other ops of the graph were measured. Some of
    these are measured again, in turns with the nodes, and times are scaled by what these took then (docs/decisions/0009).

    Args:
        nodes: Signature to node.
        known: Signature to node and cost of other ops of the graph.

    Returns:
        Signature to cost. Nodes that fail are logged and left out.
    """
    return outside_of_profilers(lambda: _measure_nodes(nodes, known))


def _measure_nodes(nodes: Mapping[str, fx.Node], known: Mapping[str, tuple[fx.Node, OpCost]]) -> dict[str, OpCost]:
    with generators_restored(), no_dispatch(), no_modes(), torch.no_grad():
        other = _other_memory()
        times = {key: LeastTimes(node) for key, node in nodes.items()}
        costs: dict[str, OpCost | None] = {}
        for key, node in progress.counted([*nodes.items()], "measuring costs"):
            fits = _fits(node)
            costs[key] = _measured_or_warned(node, other, times[key]) if fits else None
            node.meta[_LACKED_ROOM] = not fits
            if not fits:
                _log.info("%s (%s) is estimated: the budget leaves no room to measure it", node.name, node.target)
        found = {k: cost for k, cost in costs.items() if cost is not None}
        again = {k: nodes[k] for k, cost in found.items() if _is_measured_again(nodes[k], cost)}
        beside = {k: known[k][0] for k in _references(known)} if sum(found[k].cost_ns for k in again) >= EFFORT.matters_ns else {}
        for key, node in [*beside.items()]:
            times[key] = LeastTimes(node)
            # Its known cost may be an estimate, or there was more room when it was measured.
            if not _fits(node) or _measured_or_warned(node, other, times[key]) is None:
                del beside[key]
        if again:
            _repeat(again, beside, times, other)
        took = sum(times[k].total_ns for k in beside)
        pace = sum(known[k][1].cost_ns for k in beside) / took if took else 1.0
        for key in again:
            found[key] = found[key]._replace(cost_ns=quantise(pace * times[key].total_ns))
    return found


Memory = npt.NDArray[np.uint8]


def _other_memory() -> Memory:
    """Memory to read between runs: a part of the file of PyTorch's library, since a budget may leave no room for a tensor."""
    files = [path for path in (Path(torch.__file__).parent / "lib").iterdir() if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size)
    size = min(EFFORT.between_bytes, largest.stat().st_size)
    return np.asarray(np.memmap(largest, np.uint8, "r", shape=(size,)))


def _repeat(nodes: Mapping[str, fx.Node], beside: Mapping[str, fx.Node], times: Mapping[str, LeastTimes], other: Memory) -> None:
    """Measure nodes that were measured once in further passes, and others beside them."""
    began = time.perf_counter()
    for number in itertools.count(2):
        before = sum(times[k].total_ns for k in nodes)
        for key, node in progress.counted([*nodes.items(), *beside.items()], "measuring costs"):
            run_again(node, other, times[key])
        converged = before - sum(times[k].total_ns for k in nodes) <= EFFORT.converged * before
        over = converged or before < EFFORT.matters_ns or time.perf_counter() - began > EFFORT.most_s
        if number >= EFFORT.least_passes and over:
            break


def _references(known: Mapping[str, tuple[fx.Node, OpCost]]) -> list[str]:
    """Ops to measure beside others: the longest that are not too long to be measured in every pass."""
    short = [key for key, (node, cost) in known.items() if cost.cost_ns <= EFFORT.reference_ns and _is_measured_again(node, cost)]
    whole = [key for key in short if PIECES not in known[key][0].meta]
    return sorted(whole, key=lambda key: -known[key][1].cost_ns)[: EFFORT.references]


def _call(node: fx.Node) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    """Target, arguments and keyword arguments to measure; ops that save or replay a random state stand for the op inside."""
    if node.target is run_and_save_rng_state:
        return node.args[0], tuple(node.args[1:]), dict(node.kwargs)
    if node.target is run_with_rng_state:
        return node.args[1], tuple(node.args[2:]), dict(node.kwargs)
    skip = unused_arguments(node)
    return node.target, tuple(None if i in skip else a for i, a in enumerate(node.args)), dict(node.kwargs)


def _describe(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape, stride = _layout(value)
            return f"{value.dtype}{shape}{stride}@{value.device.type}"
        return f"sym {_materialised(value)}"
    if isinstance(argument, (list, tuple)):
        return "(" + ",".join(_describe(a) for a in argument) + ")"
    if isinstance(argument, dict):
        return "{" + ",".join(f"{k}:{_describe(v)}" for k, v in sorted(argument.items())) + "}"
    return repr(argument)


def _layout(tensor: torch.Tensor) -> tuple[list[int], list[int]]:
    return [concrete(s) for s in tensor.shape], [concrete(s) for s in tensor.stride()]


def _tensors(node: fx.Node, args: Any, kwargs: Any) -> list[torch.Tensor]:
    found = leaves(node.meta.get("val"))
    fx.map_arg((args, kwargs), lambda n: found.extend(leaves(n.meta.get("val"))))
    return found


def _on_cuda(node: fx.Node) -> bool:
    return any(t.device.type == "cuda" for t in leaves(node.meta.get("val")))


def _materialised(value: Any, *, fill: bool = True, given: Mapping[int, torch.Tensor] = MappingProxyType({})) -> Any:
    """A real tensor with the shape and strides of a traced one (expanded dimensions stay expanded), or a plain number.

    Args:
        value: The traced value.
        fill: Whether the content of a tensor is read.
        given: Tensors to use, by the key of the storage of a traced one.
    """
    if isinstance(value, torch.Tensor):
        shape, stride = _layout(value)
        rows, of = _ROWS.get()
        if rows and shape and shape[0] == of:
            shape[0] = rows
        if storage_key(value) in given and (real := _view(given[storage_key(value)], value, shape, stride)) is not None:
            return real
        flat = torch.empty(_extent(shape, stride), dtype=value.dtype, device=value.device)
        # Time hardly depends on values, except denormals and NaN, which are slow on CPUs. Integers are 0, so that they are
        # valid indices, and booleans are true, so that a mask masks nothing.
        if not fill:
            pass  # pages that are not written take no time
        elif value.dtype.is_floating_point or value.dtype.is_complex:
            flat.fill_(0.5) if value.dtype.itemsize == 1 or value.dtype.is_complex else _fill(flat)
        else:
            flat.fill_(value.dtype is torch.bool)
        return flat.as_strided(shape, stride)
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        largest = value_at_upper_bounds(value)
        return value.node.hint if largest is None else largest
    if isinstance(value, (list, tuple)):
        return type(value)(_materialised(v, fill=fill, given=given) for v in value)
    return value


def _view(real: torch.Tensor, traced: torch.Tensor, shape: list[int], stride: list[int]) -> torch.Tensor | None:
    """The part of an input that a traced tensor is a view of; None where it is seen as another type, or is smaller now."""
    offset = concrete(traced.storage_offset())
    if (
        real.dtype is not traced.dtype
        or (offset + _extent(shape, stride)) * real.element_size() > real.untyped_storage().nbytes()
    ):
        return None
    return real.detach().as_strided(shape, stride, offset)


_OF_SLICE: dict[str, OpCost] = {}
"""The least costs that slices of the batch have told, by the signature of the op."""

_LACKED_ROOM = "lacked_room"
"""Key in the metadata of a node for whether there was no room to measure it."""

_SLICES = 2
"""Slices of the batch of an op that are tried: the first is as large as an estimate allows, the second as the first one does."""

_LEAST_ROWS = 2
"""Rows of the smallest slice of a larger batch: many convolutions of a single row run by another kernel, with more workspace."""

_ROWS: ContextVar[tuple[int, int]] = ContextVar("rows", default=(0, 0))
"""Rows that tensors are made with, and the rows of those that have others instead; zero for all as they are."""


def lacked_room(node: fx.Node) -> bool:
    """Whether a node was estimated for want of room."""
    return bool(node.meta.get(_LACKED_ROOM))


def is_guessed(node: fx.Node) -> bool:
    """Whether a node was estimated for want of room, and not even a slice of its batch told what it takes."""
    return lacked_room(node) and _cost_by_slice(node) is None


def announce_measurements(graphs: Iterable[fx.Graph]) -> bool:
    """Warn before ops of a step are measured beyond its budget: with what they are estimated to take, no plan keeps it.

    Args:
        graphs: The graphs of the step.

    Returns:
        Whether there are such ops, for which the device has the room.
    """
    lacking = [node for graph in graphs for node in graph.nodes if lacked_room(node)]
    needed = [_needed_bytes(node) + _without_running(node).workspace_bytes for node in lacking]
    if not lacking or max(needed) > _free_bytes(lacking[0]):
        return False
    _log.warning(
        "no plan keeps the budget with what is estimated for %s: it may be exceeded by up to %s now, once, to measure that",
        f"{len(lacking)} ops" if len(lacking) > 1 else "one op",
        format_bytes(max(needed)),
    )
    return True


def _fits(node: fx.Node) -> bool:
    """Whether there is room to run an op. If not, slices of its batch may have told what it takes."""
    room, needed = _free_bytes(node), _needed_bytes(node)
    for attempts_left in reversed(range(_SLICES + 1)):
        most = needed + _without_running(node).workspace_bytes
        if most <= room:
            return True
        rows, batch = _slice_of(node, room / max(1, most))
        if not attempts_left or most * rows // batch > room or (cost := _cost_of_slice(node, rows, batch)) is None:
            return False
        _note_slice(node, cost)
    raise AssertionError("the last attempt returns")


def _free_bytes(node: fx.Node) -> int:
    return free_bytes(torch.device("cuda" if _on_cuda(node) else "cpu"))


def _needed_bytes(node: fx.Node) -> int:
    """Bytes of the results of an op, and of those of its arguments that are no inputs of the graph, each with its own storage."""
    given, arguments = _given(node), list[torch.Tensor]()
    fx.map_arg(_call(node)[1:], lambda n: arguments.extend(leaves(n.meta.get("val"))))
    made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
    read = {storage_key(t) for t in arguments}
    own = sum(_extent(*_layout(t)) * t.dtype.itemsize for t in arguments if storage_key(t) not in given)
    return own + sum(size for key, size in made.items() if key not in read)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Elements from the first to the last of a tensor."""
    return 1 + sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) if all(shape) else 0


def _given(node: fx.Node) -> Mapping[int, torch.Tensor]:
    """Inputs of the graph that an op is measured with, by the key of their storages: those of an op that changes none."""
    target = _call(node)[0]
    return _INPUTS.get() if isinstance(target, OpOverload) and not target._schema.is_mutable else {}


def _cost_by_slice(node: fx.Node) -> OpCost | None:
    """The least cost that slices of the batch of an op have told; None where there was none."""
    return _OF_SLICE.get(signature(node) or "") if _OF_SLICE else None  # a signature reads settings, and there is rarely any


def _note_slice(node: fx.Node, cost: OpCost) -> None:
    key, known = signature(node), _cost_by_slice(node)
    if key is not None and (known is None or cost.workspace_bytes < known.workspace_bytes):
        _OF_SLICE[key] = cost


def _slice_of(node: fx.Node, part: float) -> tuple[int, int]:
    """Rows of a slice of the batch of an op, and of the batch.

    Args:
        node: The op.
        part: The part of the batch for which there is room.
    """
    values = [t for n in (node, *node.all_input_nodes) for t in leaves(n.meta.get("val")) if t.dim() > 1]
    batch = max(1, concrete(max(values, key=storage_bytes).shape[0])) if values else 1
    sliced = not _on_cuda(node) and PIECES not in node.meta
    return (max(1, min(batch - 1, max(_LEAST_ROWS, int(part * batch)))), batch) if sliced else (1, 1)


def _cost_of_slice(node: fx.Node, rows: int, batch: int) -> OpCost | None:
    """Estimated time of an op, and its workspace by what a slice of its batch takes; None where it takes no slice."""
    token = _ROWS.set((rows, batch))
    try:
        run = ready_to_run(node)
        with memory_trace() as trace:
            *_, results = run()
            held = unique_bytes(leaves(results))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError):
        return None
    finally:
        _ROWS.reset(token)
    # It is not stored: another time would make another plan in the next process.
    return OpCost(estimate_ns(node), math.ceil(batch / rows) * max(0, trace.peak() - held))


def _fill(flat: torch.Tensor) -> None:
    """Fill a tensor with random numbers that repeat."""
    block = flat[: EFFORT.block].uniform_(0.1, 0.9)
    for part in flat[block.numel() :].split(block.numel()):
        part.copy_(block[: part.numel()])


def ready_to_run(node: fx.Node) -> Callable[[], Iterator[Any]]:
    """A function that runs an op on new inputs: it yields at the end of each part, see `LeastTimes`, and the results at last.

    Args:
        node: The op.
    """
    target, args, kwargs = _call(node)
    fill = not makes_views(node)
    given = _given(node)
    real_args, real_kwargs = fx.map_arg((args, kwargs), lambda n: _materialised(n.meta.get("val"), fill=fill, given=given))
    if target is UPDATE:
        parameter, gradient, optimizer, which = real_args
        update = updates_of(optimizer).clone_for_measurement(which, parameter)
        update(parameter, gradient)  # the first call allocates the optimizer's state, which is resident and not workspace
        return lambda: _in_one(update, parameter, gradient)
    if PIECES in node.meta:
        pieces: Pieces = node.meta[PIECES]
        return lambda: pieces.run(real_args[0])
    return lambda: _in_one(target, *real_args, **real_kwargs)


def _in_one(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[Any]:
    yield call(*args, **kwargs)


_OF_TYPES = re.compile(r"\b(dtype|data ?type|scalar type)\b", re.IGNORECASE)
"""Words of kernels for types that do not fit together. Fake tensors take them."""


def _measured_or_warned(node: fx.Node, other: Memory, times: LeastTimes) -> OpCost | None:
    try:
        time_ns, workspace_bytes = _cuda_cost(node) if _on_cuda(node) else _cpu_cost(node, other, times)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError) as error:
        # What runs is the same op: the step would fail where tracing it does not. But the backward of batch normalisation under
        # autocast is traced with other types than the kernel of its forward returns.
        of_types = _OF_TYPES.search(str(error)) is not None
        if of_types and "backward" not in str(node.target):
            types = [str(t.dtype).removeprefix("torch.") for n in node.all_input_nodes for t in leaves(n.meta.get("val"))]
            odd = min(types, key=types.count)  # the input's: of the parameters there are two, as a rule
            fitting = next((kind for kind in types if kind != odd), odd)
            raise GraphError(
                f"{node.target} of {', '.join(types)} cannot run: {str(error).rstrip('.')}, at {source_of(node) or node.name}",
                hint=f"convert what is {odd}, such as x.to(torch.{fitting}), or use torch.autocast",
            ) from None
        told = "%s (%s) could not be measured; its time and its workspace are estimated: %s"
        _log.log(logging.INFO if of_types else logging.WARNING, told, node.name, node.target, error)
        return None
    return OpCost(quantise(time_ns), workspace_bytes)


def _cpu_cost(node: fx.Node, other: Memory, times: LeastTimes) -> tuple[int, int]:
    """Nanoseconds and workspace of an op on the CPU; other memory is read between runs, which are added to the times."""
    run = ready_to_run(node)
    slow = max(EFFORT.slow_factor * estimate_ns(node), EFFORT.slow_ns)
    other.max()
    with memory_trace() as trace:
        first = times.measure(run)
    # Workspace is the peak of the allocator, less the outputs.
    workspace = max(0, trace.peak() - _new_bytes(node))
    took: list[int] = []
    fastest = first
    while not (EFFORT.once_ns < fastest <= slow):
        other.max()
        took.append(times.measure(run))
        fastest = min(first, *took)
        agreeing = sum(t <= EFFORT.agreement * fastest for t in took)
        suspected = fastest > slow and agreeing < EFFORT.repeats
        repeats = EFFORT.slow_repeats if suspected else EFFORT.repeats
        limit_ns = EFFORT.slow_limit_ns if suspected else EFFORT.limit_ns
        agreed = first if first <= EFFORT.agreement * fastest else 0
        if len(took) >= repeats or agreed + sum(took) > limit_ns:
            break
    return times.total_ns, workspace


def _is_measured_again(node: fx.Node, known: OpCost) -> bool:
    """Whether an op is measured in a later pass: short ones do not count, and one run of the longest is enough."""
    return EFFORT.again_ns <= known.cost_ns <= EFFORT.once_ns and not _on_cuda(node)


def run_again(node: fx.Node, other: Memory, times: LeastTimes) -> None:
    """Run an op on the CPU in a later pass.

    Args:
        node: The op.
        other: Memory that is read before each run.
        times: What the runs are added to.
    """
    run = ready_to_run(node)
    took: list[int] = []
    while len(took) < EFFORT.later_repeats and sum(took) <= EFFORT.limit_ns:
        other.max()
        took.append(times.measure(run))


def _cuda_cost(node: fx.Node) -> tuple[float, int]:
    return _cuda_time_ns(ready_to_run(node)), int(_cuda_workspace(node))


def _cuda_time_ns(run: Callable[[], Iterator[Any]]) -> float:
    list(run())
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = float("inf")
    for _ in range(EFFORT.repeats):
        keep_busy(_LAUNCHING_CYCLES)
        begin.record()
        *_, out = run()
        end.record()
        end.synchronize()
        del out
        best = min(best, begin.elapsed_time(end) * 1e6)
    return best


def _cuda_workspace(node: fx.Node) -> float:
    run = ready_to_run(node)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    *_, out = run()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del out
    return max(0, peak - _new_bytes(node))


def _new_bytes(node: fx.Node) -> int:
    """Bytes of output storages that are not storages of inputs: the part of an op's peak that is not workspace."""
    _, args, kwargs = _call(node)
    given: set[int] = set()
    fx.map_arg((args, kwargs), lambda n: given.update(storage_key(t) for t in leaves(n.meta.get("val"))))
    made = {storage_key(t): storage_bytes(t) for t in leaves(node.meta.get("val"))}
    return sum(size for key, size in made.items() if key not in given)
