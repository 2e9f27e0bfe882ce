"""The effect of Inductor's generated code on memory: the lines of a module, before its kernels are built."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from torch._inductor import ir
from torch._inductor.codegen import wrapper as lines
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.utils import get_dtype_size
from torch.fx import Node

from checkmate.torch._compat.symbolic import largest_value


def calls_are_known() -> bool:
    """Whether this version of PyTorch writes calls of subgraphs in the way that is counted here."""
    call = getattr(lines.PythonWrapperCodegen, "codegen_subgraph_call", None)
    expected = ["self", "subgraph", "outer_inputs", "outer_buffer_name"]
    known = call is not None and list(inspect.signature(call).parameters) == expected
    return known and hasattr(lines.PythonWrapperCodegen, "codegen_invoke_subgraph")


@dataclass(frozen=True, slots=True)
class Allocate:
    """A name is bound to new storages."""

    name: str
    sizes_bytes: tuple[int, ...]  # size of each: one of a tensor, several of a tuple of tensors
    device: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A name is bound to what another name is bound to."""

    name: str
    of: str
    position: int | None = None  # which tensor of a tuple; None for all


@dataclass(frozen=True, slots=True)
class Free:
    """A name is deleted."""

    name: str


@dataclass(frozen=True, slots=True)
class Run:
    """An op of another library runs, and may allocate inside."""

    node: Node | None  # the node of the graph that it computes, where it is one


@dataclass(frozen=True, slots=True)
class Give:
    """Names are put into the list of a call's arguments, which keeps their storages alive until the callee frees them."""

    call: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A subgraph runs, and a name is bound to the tuple of its results."""

    name: str  # the name, which is that of the call
    module: GeneratedModule


Event = Allocate | Alias | Free | Run | Give | Call
"""The effect of a line of a generated module on memory."""


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedModule:
    """A module that Inductor has generated, before its kernels are built."""

    is_backward: bool  # whether it is a backward
    events: tuple[Event, ...]  # what it does to memory, in order
    inputs: Mapping[str, int]  # bytes of each of its inputs, by name, in their order
    outputs: tuple[str | None, ...]  # what its outputs are bound to; None for one that is no tensor of the module
    output_nodes: tuple[str | None, ...]  # names of the nodes that its outputs are
    uncounted: tuple[str, ...]  # lines that may allocate and are not understood


@contextmanager
def watch_generated_modules(seen: Callable[[GeneratedModule], None]) -> Iterator[None]:
    """Call a function with every module that this thread generates, before the module's kernels are built."""
    generate, thread = GraphLowering.codegen, threading.get_ident()
    subgraphs: dict[str, GeneratedModule] = {}

    def codegen(graph: GraphLowering) -> Any:
        text = generate(graph)
        if threading.get_ident() == thread:
            module = _generated(graph, subgraphs)
            if isinstance(graph, SubgraphLowering):
                subgraphs[str(graph.name)] = module
            else:
                subgraphs.clear()
                seen(module)
        return text

    with patch.object(GraphLowering, "codegen", codegen), _calls_marked():
        yield


@dataclass
class _GiveLine(lines.WrapperLine):
    """A mark before the arguments of a call are freed by their own names."""

    call: str
    arguments: tuple[str, ...]

    def codegen(self, code: Any) -> None:
        """Write nothing."""


@dataclass
class _CallLine(lines.WrapperLine):
    """A mark where a subgraph is called."""

    call: str
    subgraph: str

    def codegen(self, code: Any) -> None:
        """Write nothing."""


@contextmanager
def _calls_marked() -> Iterator[None]:
    """Mark calls of subgraphs in the lines of a module: Inductor writes them as text."""
    wrapper = lines.PythonWrapperCodegen
    if not calls_are_known():
        yield
        return
    invoke, call = wrapper.codegen_invoke_subgraph, wrapper.codegen_subgraph_call

    def codegen_invoke_subgraph(self: Any, node: Any) -> None:
        def codegen_subgraph_call(self_: Any, subgraph: Any, *args: Any) -> None:
            self_.writeline(_GiveLine(node.get_name(), tuple(_bound_to(buffer) or "" for buffer in node.inputs)))
            call(self_, subgraph, *args)
            self_.writeline(_CallLine(node.get_name(), subgraph.graph.name))

        with patch.object(wrapper, "codegen_subgraph_call", codegen_subgraph_call):
            invoke(self, node)

    with patch.object(wrapper, "codegen_invoke_subgraph", codegen_invoke_subgraph):
        yield


def _generated(graph: GraphLowering, subgraphs: Mapping[str, GeneratedModule]) -> GeneratedModule:
    events: list[Event] = []
    uncounted: list[str] = []
    kept = set(graph.get_output_names())
    parts: dict[str, list[Any]] = {}  # the tensors of each tuple that a kernel returns, also those that nothing reads
    for buffer in graph.buffers:
        if isinstance(buffer, ir.MultiOutput):
            for source in buffer.inputs:
                parts.setdefault(source.get_name(), []).append(buffer)
    for line in graph.wrapper_code.lines:
        found = _events(graph, line, kept, parts, subgraphs)
        if found is None:
            uncounted.append(type(line).__name__)
        else:
            events += found
    for called in {event.module for event in events if isinstance(event, Call)}:
        uncounted += called.uncounted
    nodes = graph.orig_gm.graph.output_node().args[0]
    return GeneratedModule(
        is_backward=graph.is_backward,
        events=tuple(events),
        inputs={name: buffer_bytes(graph, node) for name, node in graph.graph_inputs.items()},
        outputs=tuple(_bound_to(o) for o in graph.graph_outputs),
        output_nodes=tuple(n.name if isinstance(n, Node) else None for n in nodes),  # type: ignore[union-attr]
        uncounted=tuple(uncounted),
    )


_WITHOUT_MEMORY = frozenset(
    {
        "AssertDivByZeroLine",
        "AssertSizeStrideLine",
        "CommentLine",
        "EnterDeviceContextManagerLine",
        "EnterDeviceContextManagerWithStreamInfoLine",
        "ExitDeviceContextManagerLine",
        "ExitDeviceContextManagerWithStreamInfoLine",
        "KernelCallLine",
        "KernelDefinitionLine",
        "LineContext",
        "NullLine",
        "SymbolicCallArgLine",
        "UnbackedSymbolDefsLine",
        "str",
    }
)
"""Lines that allocate and free nothing, by name: not every version of PyTorch has all of them."""


def _events(
    graph: GraphLowering,
    line: Any,
    kept: set[str],
    parts: Mapping[str, Sequence[Any]],
    subgraphs: Mapping[str, GeneratedModule],
) -> list[Event] | None:
    """The effect of a line on memory; None if that is not known."""
    match line:
        case _GiveLine():
            return [Give(line.call, line.arguments)]
        case _CallLine():
            return [Call(line.call, subgraphs[line.subgraph])]
        case lines.AllocateLine():
            return [Allocate(line.node.get_name(), (_storage_bytes(graph, line.node),), _device(line.node))]
        case lines.ReuseLine():
            old, new = line.node.get_name(), line.reused_as.get_name()
            return [Alias(new, old), *([Free(old)] if line.delete_old and old not in kept else [])]
        case lines.ReinterpretLine():
            return [Alias(line.reused_as.get_name(), line.node.get_name())]
        case lines.FreeIfNotReusedLine():
            return [] if line.is_reused else [Free(line.node.get_name())]
        case lines.FreeLine():
            return [Free(line.node.get_name())]
        case lines.ExternKernelAllocLine():
            return [*_results(graph, line.node, parts.get(line.node.get_name(), ())), Run(line.node.get_origin_node())]
        case lines.ExternKernelOutLine() | lines.ScatterFallbackLine() | lines.IndexPutFallbackLine():
            return [Run(line.node.get_origin_node())]
        case lines.MultiOutputLine():
            names = [part.get_name() for part in parts.get(line.arg_name, ())]
            return [Alias(line.result_name, line.arg_name, names.index(line.result_name) if line.result_name in names else None)]
        case _:
            return [] if type(line).__name__ in _WITHOUT_MEMORY else None


def _results(graph: GraphLowering, node: Any, parts: Sequence[Any]) -> list[Allocate | Alias]:
    """The effect on memory of a kernel that allocates its results."""
    name = node.get_name()
    if isinstance(node.layout, ir.MultiOutputLayout):
        return [Allocate(name, tuple(_storage_bytes(graph, p) for p in parts), _device(parts[0]) if parts else "cpu")]
    if sources := node.get_inputs_that_alias_output():
        return [Alias(name, sources[0])]
    if isinstance(node.layout, (ir.NoneLayout, ir.MutationLayoutSHOULDREMOVE)):
        return []
    return [Allocate(name, (_storage_bytes(graph, node),), _device(node))]


def _storage_bytes(graph: GraphLowering, node: Any) -> int:
    """Bytes of the storage that a buffer is allocated with; symbolic sizes count as the largest that they can be."""
    layout = node.get_output_spec() if isinstance(node, ir.Buffer) else node.get_layout()
    if isinstance(layout, (ir.NoneLayout, ir.MultiOutputLayout)):
        return 0
    sizes, extent = graph.sizevars, graph.get_allocation_storage_size(node)
    if getattr(extent, "free_symbols", None):
        # Inductor names some expressions by symbols of their own.
        largest = largest_value(extent.xreplace(sizes.inv_precomputed_replacements), sizes.shape_env)
        extent = extent if largest is None else largest
    hint = getattr(sizes, "optimization_hint", None) or getattr(sizes, "size_hint")  # noqa: B009
    return int(hint(extent, fallback=0)) * get_dtype_size(node.get_dtype())


def buffer_bytes(graph: GraphLowering, node: Any) -> int:
    """Bytes of the storage of a buffer or of an input of a graph; 0 for what has none."""
    buffer = node
    while isinstance(buffer, (ir.TensorBox, ir.StorageBox)):
        buffer = buffer.data
    return _storage_bytes(graph, buffer) if isinstance(buffer, ir.Buffer) and not isinstance(buffer, ir.TorchBindObject) else 0


def _device(node: Any) -> str:
    device = node.get_device()
    return "cpu" if device is None else device.type


def _bound_to(output: Any) -> str | None:
    """Name of the buffer that an output of a graph is, or views."""
    while isinstance(output, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        output = output.unwrap_view() if isinstance(output, ir.BaseView) else output.data
    return output.get_name() if isinstance(output, (ir.Buffer, ir.Operation)) else None
