"""Measured time and workspace of ops on the user's device; each distinct op is measured once and stored."""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from checkmate.core.errors import GraphError
from checkmate.core.units import format_bytes
from checkmate.cost.store import CostStore, MeasuredCosts, OpCost, quantise
from checkmate.frontend import progress
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import OpOverload, dispatches_in_python, no_dispatch, no_modes
from checkmate.torch._compat.profiler import memory_trace, outside_of_profilers
from checkmate.torch.graph.kernel_settings import kernel_settings
from checkmate.torch.graph.op_properties import PIECES, is_collective
from checkmate.torch.graph.optimizer_ops import UPDATE, updates_of
from checkmate.torch.graph.provenance import source_of
from checkmate.torch.graph.rng import generators_restored
from checkmate.torch.graph.storages import concrete, leaves, storage_bytes, storage_key, unique_bytes
from checkmate.torch.measure.estimates import estimate_ns, estimated_workspace_bytes
from checkmate.torch.measure.resident import free_bytes, holding
from checkmate.torch.measure.single_op import (
    INPUTS,
    LONG_NS,
    Clock,
    Memory,
    call_of,
    cpu_clock,
    layout,
    least_ns,
    materialised,
    measure_on_cpu,
    measure_on_cuda,
    needed_bytes,
    on_cuda,
    other_memory,
    ready_to_run,
)

_log = logging.getLogger("checkmate.torch")

_LACKED_ROOM = "lacked_room"
"""Key in the metadata of a node: whether there was no room to measure it."""


_OF_SLICE: dict[str, int] = {}
"""The least workspace of ops derived from slices of their batch, by signature. Not stored: it depends on the room."""


class Profiler:
    """Costs of FX nodes, measured or read from a store.

    The store is the user's cost cache by default. ``inputs`` are functions that return the inputs of the graph without keeping
    them alive.
    """

    def __init__(self, store: CostStore | None = None, inputs: Sequence[Callable[[], Any]] = ()) -> None:
        self._settings = kernel_settings
        self._costs = MeasuredCosts(
            signature=lambda node: signature(node, self._settings), measure=measure_nodes, estimate=_estimated, store=store
        )
        self._inputs = inputs

    def __call__(self, nodes: Sequence[fx.Node]) -> list[OpCost]:
        """Cost of each node; nodes with the same `signature` share one measurement."""
        self._settings = functools.cache(kernel_settings)  # read once for all nodes, and again at the next call
        for node in nodes:
            node.meta.pop(_LACKED_ROOM, None)
        with holding(INPUTS, self._by_storage(nodes)):
            return self._costs(nodes)

    def _by_storage(self, nodes: Sequence[fx.Node]) -> dict[int, torch.Tensor]:
        placeholders = [n for n in nodes[0].graph.find_nodes(op="placeholder") if not is_tangent(n)] if nodes else []
        if len(placeholders) != len(self._inputs):  # AOTAutograd merges inputs that are equal
            return {}
        pairs = [(n.meta.get("val"), real()) for n, real in zip(placeholders, self._inputs, strict=True)]
        return {
            storage_key(traced): real
            for traced, real in pairs
            if isinstance(traced, torch.Tensor) and isinstance(real, torch.Tensor)
            if real.layout is torch.strided and not dispatches_in_python(real) and not real.is_meta
        }


def _estimated(node: fx.Node) -> OpCost:
    """Cost of an op that is not run in isolation. A collective on the CPU runs in gloo, which copies the result once."""
    if _is_told_by_slice(node):
        return OpCost(estimate_ns(node), _OF_SLICE[signature(node) or ""])
    if is_collective(node):
        return OpCost(estimate_ns(node), 0 if on_cuda(node) else sum(map(storage_bytes, leaves(node.meta.get("val")))))
    return OpCost(estimate_ns(node), estimated_workspace_bytes(node) if isinstance(node.target, OpOverload) else 0)


def signature(node: fx.Node, settings: Callable[[torch.device], str] = kernel_settings) -> str | None:
    """Text of everything on which the cost of an op depends; None for an op that cannot be run in isolation.

    ``settings`` returns the settings of a device that choose its kernels; they are part of the text.
    """
    call = described(node)
    if call is None:
        return None
    tensors = leaves(node.meta.get("val"))
    fx.map_arg(call_of(node)[1:], lambda n: tensors.extend(leaves(n.meta.get("val"))))
    devices = {t.device for t in tensors}
    # The way of measuring is a part: times measured in other ways are not mixed with these.
    return " ".join([call, "least of three passes", *sorted({settings(d) for d in devices or {torch.device("cpu")}})])


def described(node: fx.Node) -> str | None:
    """An op with its arguments, as text; None for an op that cannot be run in isolation."""
    target, args, kwargs = call_of(node)
    if not isinstance(target, OpOverload) or is_collective(node):
        return None
    if target is UPDATE:
        args = (*args[:2], updates_of(args[2]).describe(args[3]))
    return f"{target} {_describe(args)} {_describe(kwargs)}"


def _describe(argument: Any) -> str:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if isinstance(value, torch.Tensor):
            shape, stride = layout(value)
            return f"{value.dtype}{shape}{stride}@{value.device.type}"
        return f"sym {materialised(value)}"
    if isinstance(argument, (list, tuple)):
        return "(" + ",".join(_describe(a) for a in argument) + ")"
    if isinstance(argument, dict):
        return "{" + ",".join(f"{k}:{_describe(v)}" for k, v in sorted(argument.items())) + "}"
    return argument.type if isinstance(argument, torch.device) else repr(argument)


def workspace_bytes(nodes: Sequence[fx.Node]) -> list[int]:
    """Bytes that each op allocates besides its results, measured if known, else estimated."""
    settings = functools.cache(kernel_settings)
    keys = [signature(node, settings) for node in nodes]
    measured = CostStore().get(key for key in keys if key is not None)
    costs = [measured.get(key or "") for key in keys]
    return [estimated_workspace_bytes(n) if c is None else c.workspace_bytes for n, c in zip(nodes, costs, strict=True)]


def measure_nodes(
    nodes: Mapping[str, fx.Node], known: Mapping[str, tuple[fx.Node, OpCost]], clock: Clock | None = None
) -> dict[str, OpCost]:
    """Costs of nodes by signature, measured on tensors of the traced shapes; failures are logged and left out.

    There are three passes over the ops, because a machine can be a fifth slower for a second. It may also be a tenth slower
    today than during the measurement of other ops of the graph. Some of these ``known`` ops are measured again, in turns with the
    nodes, and the times of the nodes are scaled by the new times of the known ops (docs/decisions/0009).
    """
    return outside_of_profilers(lambda: _measure_nodes(nodes, known, clock or cpu_clock()))


def _measure_nodes(nodes: Mapping[str, fx.Node], known: Mapping[str, tuple[fx.Node, OpCost]], clock: Clock) -> dict[str, OpCost]:
    with generators_restored(), no_dispatch(), no_modes(), torch.no_grad():
        other = other_memory()
        found: dict[str, OpCost] = {}
        for key, node in progress.counted([*nodes.items()], "measuring costs"):
            fits = _fits(node)
            node.meta[_LACKED_ROOM] = not fits
            if not fits:
                _log.info("%s (%s) is estimated: the budget leaves no room to measure it", node.name, node.target)
            elif (cost := _measured_or_warned(node, other, clock)) is not None:
                found[key] = cost
        again = {k: nodes[k] for k, cost in found.items() if _is_measured_again(nodes[k], cost)}
        references: dict[str, OpCost] = {}
        if sum(found[k].cost_ns for k in again) >= 20_000_000:  # shorter ones are not worth the time of references
            for key in _references(known):
                node = known[key][0]
                # Its known cost may be an estimate, or there was more room when it was measured.
                if _fits(node) and (cost := _measured_or_warned(node, other, clock)) is not None:
                    references[key], again[key] = cost, node
        fastest_ns = {key: (found.get(key) or references[key]).cost_ns for key in again}
        for _ in range(2):
            for key, node in progress.counted([*again.items()], "measuring costs"):
                fastest_ns[key] = min(fastest_ns[key], least_ns(ready_to_run(node), other, clock, most=2))
        took_ns = sum(fastest_ns[k] for k in references)
        pace = sum(known[k][1].cost_ns for k in references) / took_ns if took_ns else 1.0
        for key in again.keys() & found:
            found[key] = found[key]._replace(cost_ns=quantise(pace * fastest_ns[key]))
    return found


def _is_measured_again(node: fx.Node, known: OpCost) -> bool:
    """Whether an op is measured in a later pass: short ones do not count, and one run of the longest is enough."""
    return 100_000 <= known.cost_ns <= LONG_NS and not on_cuda(node)


def _references(known: Mapping[str, tuple[fx.Node, OpCost]]) -> list[str]:
    """Known ops to measure again: five of the longest that are short enough to be measured in every pass."""
    short = [key for key, (node, cost) in known.items() if cost.cost_ns <= 30_000_000 and _is_measured_again(node, cost)]
    whole = [key for key in short if PIECES not in known[key][0].meta]
    return sorted(whole, key=lambda key: -known[key][1].cost_ns)[:5]


def lacked_room(node: fx.Node) -> bool:
    """Whether a node was estimated for want of room."""
    return bool(node.meta.get(_LACKED_ROOM))


def is_guessed(node: fx.Node) -> bool:
    """Whether a node was estimated for want of room, and not even a slice of its batch was measured."""
    return lacked_room(node) and not _is_told_by_slice(node)


def announce_measurements(graphs: Iterable[fx.Graph]) -> bool:
    """Warn before ops of a step are measured beyond its budget, because no plan keeps the budget with their estimates.

    False if there are no such ops, or the device has no room for them.
    """
    lacking = [node for graph in graphs for node in graph.nodes if lacked_room(node)]
    needed = max(map(_estimated_peak_bytes, lacking), default=0)
    if not lacking or needed > _free_bytes(lacking[0]):
        return False
    _log.warning(
        "no plan keeps the budget with what is estimated for %s: it may be exceeded by up to %s now, once, to measure that",
        f"{len(lacking)} ops" if len(lacking) > 1 else "one op",
        format_bytes(needed),
    )
    return True


def _fits(node: fx.Node) -> bool:
    """Whether there is room to run an op. If not, a slice of its batch may tell that it needs less than was estimated."""
    part = _free_bytes(node) / max(1, _estimated_peak_bytes(node))
    return part >= 1 or (_note_slice(node, part) and _estimated_peak_bytes(node) <= _free_bytes(node))


def _estimated_peak_bytes(node: fx.Node) -> int:
    return needed_bytes(node) + _estimated(node).workspace_bytes


def _note_slice(node: fx.Node, part: float) -> bool:
    """Derive the workspace of an op from a slice of its batch, ``part`` of which there is room for; return whether it can."""
    values = [t for n in (node, *node.all_input_nodes) for t in leaves(n.meta.get("val")) if t.dim() > 1]
    batch = max(1, concrete(max(values, key=storage_bytes).shape[0])) if values else 1
    # Many convolutions of a single row use another kernel, with more workspace.
    rows = max(1, min(batch - 1, max(2, int(part * batch))))
    if on_cuda(node) or PIECES in node.meta or rows > part * batch:
        return False
    try:
        run = ready_to_run(node, (rows, batch))
        with memory_trace() as trace:
            results = run()
            held = unique_bytes(leaves(results))
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError):
        return False
    key, workspace = signature(node) or "", math.ceil(batch / rows) * max(0, trace.peak() - held)
    _OF_SLICE[key] = min(workspace, _OF_SLICE.get(key, workspace))
    return True


def _is_told_by_slice(node: fx.Node) -> bool:
    return bool(_OF_SLICE) and (signature(node) or "") in _OF_SLICE  # a signature reads settings, and there is rarely any


def _free_bytes(node: fx.Node) -> int:
    return free_bytes(torch.device("cuda" if on_cuda(node) else "cpu"))


def _measured_or_warned(node: fx.Node, other: Memory, clock: Clock) -> OpCost | None:
    try:
        time_ns, workspace = measure_on_cuda(node) if on_cuda(node) else measure_on_cpu(node, other, clock)
    except (RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError) as error:
        # The same op runs in the step: on types that do not fit together, the step would fail although tracing does not. But the
        # backward of batch normalisation under autocast is traced with other types than the kernel of its forward returns.
        of_types = re.search(r"\b(dtype|data ?type|scalar type)\b", str(error), re.IGNORECASE) is not None
        if of_types and "backward" not in str(node.target):
            raise _of_types(node, error) from None
        told = "%s (%s) could not be measured; its time and its workspace are estimated: %s"
        _log.log(logging.INFO if of_types else logging.WARNING, told, node.name, node.target, error)
        return None
    return OpCost(quantise(time_ns), workspace)


def _of_types(node: fx.Node, error: Exception) -> GraphError:
    types = [str(t.dtype).removeprefix("torch.") for n in node.all_input_nodes for t in leaves(n.meta.get("val"))]
    odd = min(types, key=types.count)  # the type of the input: there are usually two parameters
    fitting = next((kind for kind in types if kind != odd), odd)
    return GraphError(
        f"{node.target} of {', '.join(types)} cannot run: {str(error).rstrip('.')}, at {source_of(node) or node.name}",
        hint=f"convert what is {odd}, such as x.to(torch.{fitting}), or use torch.autocast",
    )
