"""The effect of Inductor's generated code on memory: the lines of a module, before its kernels are built."""

from __future__ import annotations

import ast
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch._inductor import ir
from torch._inductor.codegen import wrapper as lines
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.utils import get_dtype_size
from torch.fx import Node

from checkmate.torch._compat import replaced


class Allocate(NamedTuple):
    """A name is bound to new storages."""

    name: str
    sizes_bytes: tuple[int, ...]  # one of a tensor, several of a tuple of tensors
    device: str


class Alias(NamedTuple):
    """A name is bound to the storage of another name, or to the storages of several names."""

    name: str
    of: tuple[str, ...]
    position: int | None = None  # which tensor of a tuple; None for all


class Free(NamedTuple):
    """A name is deleted."""

    name: str


class LibraryCall(NamedTuple):
    """An op of another library runs, and may allocate inside."""

    node: Node | None  # the node of the graph that it computes, if there is one


class Loop(NamedTuple):
    """A kernel that Inductor generated runs, and reads and writes so many bytes."""

    size_bytes: int


Event = Allocate | Alias | Free | LibraryCall | Loop
"""The effect of a line of a generated module on memory, or a kernel that the module calls."""


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedModule:
    """A module that Inductor has generated, before its kernels are built; the events of its subgraphs are included."""

    is_backward: bool
    events: tuple[Event, ...]
    inputs: Mapping[str, int]  # bytes of each of its inputs, by name, in their order
    outputs: tuple[str | None, ...]  # the names of its outputs; None for an output that is no tensor of the module
    output_nodes: tuple[str | None, ...]  # AOTAutograd names the inputs of a backward as the nodes that the forward saves
    counted: bool  # whether every line that may allocate is understood


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

    with replaced(GraphLowering, "codegen", codegen):
        yield


def _generated(graph: GraphLowering, subgraphs: Mapping[str, GeneratedModule]) -> GeneratedModule:
    kept = set(graph.get_output_names())
    parts: dict[str, list[Any]] = {}  # the tensors of each tuple that a kernel returns, also tensors without a reader
    for buffer in graph.buffers:
        if isinstance(buffer, ir.MultiOutput):
            for source in buffer.inputs:
                parts.setdefault(source.get_name(), []).append(buffer)
    calls = _Calls(subgraphs)
    events = [
        calls.events(line) if isinstance(line, str) else _events(graph, line, kept, parts) for line in graph.wrapper_code.lines
    ]
    nodes = graph.orig_gm.graph.output_node().args[0]
    return GeneratedModule(
        is_backward=graph.is_backward,
        events=(*_kernels(graph), *(event for found in events if found for event in found)),
        inputs={name: buffer_bytes(graph, node) for name, node in graph.graph_inputs.items()},
        outputs=tuple(_bound_to(o) for o in graph.graph_outputs),
        output_nodes=tuple(n.name if isinstance(n, Node) else None for n in nodes),  # type: ignore[union-attr]
        counted=None not in events and all(module.counted for module in subgraphs.values()),
    )


def _kernels(graph: GraphLowering) -> Iterator[Loop | LibraryCall]:
    """The kernels that Inductor generated for a module; those of templates compute an op of another library."""
    for node in graph.scheduler.nodes:
        if node.is_template():
            yield LibraryCall(node.get_template_node_or_throw().get_origin_node())
        elif not node.is_extern() and (moved := node.get_read_write_buffers_sizes()):
            yield Loop(moved)


class _Calls:
    """The calls of subgraphs, which Inductor writes as text: a list of arguments, lines that free their names, and the call."""

    def __init__(self, subgraphs: Mapping[str, GeneratedModule]) -> None:
        self._subgraphs = subgraphs
        self._scopes: list[str] = []  # the prefix of the names inside of each call

    def events(self, line: str) -> list[Event]:
        """The effect of a line of text. The list of arguments keeps their storages alive until the subgraph frees its inputs."""
        given = re.fullmatch(r"(\w+)_args = (\[.*\])", line)
        if given and given[1] in self._subgraphs:
            self._scopes.append(f"{given[1]} call {len(self._scopes)}: ")
            arguments = ast.parse(given[2], mode="eval").body.elts  # type: ignore[attr-defined]
            inputs = self._subgraphs[given[1]].inputs
            return [Alias(self._scopes[-1] + i, (_name_in(a),)) for i, a in zip(inputs, arguments, strict=True)]
        called = re.fullmatch(r"(\w+) = (\w+)\(\2_args\)", line)
        if called and called[2] in self._subgraphs:
            return _inside(self._subgraphs[called[2]], self._scopes[-1], called[1])
        return []


def _inside(module: GeneratedModule, scope: str, result: str) -> list[Event]:
    """The events of a called subgraph, with names that begin with a scope, and the binding of its results."""
    events: list[Event] = []
    for event in module.events:
        match event:
            case Alias():
                events.append(Alias(scope + event.name, tuple(scope + name for name in event.of), event.position))
            case LibraryCall() | Loop():
                events.append(event)
            case _:
                events.append(event._replace(name=scope + event.name))
    events.append(Alias(result, tuple(scope + (name or "") for name in module.outputs)))
    names = [scope + name for name in module.inputs] + [e.name for e in events[:-1] if isinstance(e, (Allocate, Alias))]
    return [*events, *map(Free, dict.fromkeys(names))]


def _name_in(argument: ast.expr) -> str:
    """The name of the buffer that an argument is or views."""
    while isinstance(argument, ast.Call) and argument.args:
        argument = argument.args[0]
    return argument.id if isinstance(argument, ast.Name) else ""


_WITHOUT_MEMORY = frozenset(
    {
        "AssertDivByZeroLine",
        "AssertSizeStrideLine",
        "CommentLine",
        "EnterDeviceContextManagerLine",
        "EnterDeviceContextManagerWithStreamInfoLine",
        "ExitDeviceContextManagerLine",
        "ExitDeviceContextManagerWithStreamInfoLine",
        "GroupedAssertSizeStrideLine",
        "KernelCallLine",
        "KernelDefinitionLine",
        "LineContext",
        "NullLine",
        "SymbolicCallArgLine",
        "UnbackedSymbolDefsLine",
    }
)
"""Lines that allocate and free nothing, by name: not every version of PyTorch has all of them."""


def _events(graph: GraphLowering, line: Any, kept: set[str], parts: Mapping[str, Sequence[Any]]) -> list[Event] | None:
    """The effect of a line on memory; None if it is not known. Outputs of the module are kept, and tuples have parts."""
    match line:
        case lines.AllocateLine():
            return [Allocate(line.node.get_name(), (_storage_bytes(graph, line.node),), _device(line.node))]
        case lines.ReuseLine():
            old, new = line.node.get_name(), line.reused_as.get_name()
            return [Alias(new, (old,)), *([Free(old)] if line.delete_old and old not in kept else [])]
        case lines.ReinterpretLine():
            return [Alias(line.reused_as.get_name(), (line.node.get_name(),))]
        case lines.FreeIfNotReusedLine():
            return [] if line.is_reused else [Free(line.node.get_name())]
        case lines.FreeLine():
            return [Free(line.node.get_name())]
        case lines.ExternKernelAllocLine():
            return [*_results(graph, line.node, parts.get(line.node.get_name(), ())), LibraryCall(line.node.get_origin_node())]
        case lines.ExternKernelOutLine() | lines.ScatterFallbackLine() | lines.IndexPutFallbackLine():
            return [LibraryCall(line.node.get_origin_node())]
        case lines.MultiOutputLine():
            names = [part.get_name() for part in parts.get(line.arg_name, ())]
            at = names.index(line.result_name) if line.result_name in names else None
            return [Alias(line.result_name, (line.arg_name,), at)]
        case _:
            return [] if type(line).__name__ in _WITHOUT_MEMORY else None


def _results(graph: GraphLowering, node: Any, parts: Sequence[Any]) -> list[Allocate | Alias]:
    """The effect on memory of a kernel that allocates its results."""
    name = node.get_name()
    if isinstance(node.layout, ir.MultiOutputLayout):
        return [Allocate(name, tuple(_storage_bytes(graph, p) for p in parts), _device(parts[0]) if parts else "cpu")]
    if sources := node.get_inputs_that_alias_output():
        return [Alias(name, (sources[0],))]
    if isinstance(node.layout, (ir.NoneLayout, ir.MutationLayoutSHOULDREMOVE)):
        return []
    return [Allocate(name, (_storage_bytes(graph, node),), _device(node))]


def _storage_bytes(graph: GraphLowering, node: Any) -> int:
    """Bytes of the storage that a buffer is allocated with."""
    layout = node.get_output_spec() if isinstance(node, ir.Buffer) else node.get_layout()
    if isinstance(layout, (ir.NoneLayout, ir.MultiOutputLayout)):
        return 0
    extent = graph.get_allocation_storage_size(node)
    return int(graph.sizevars.optimization_hint(extent, fallback=0)) * get_dtype_size(node.get_dtype())


def buffer_bytes(graph: GraphLowering, node: Any) -> int:
    """Bytes of the storage of a buffer or of an input of a graph; 0 for other objects."""
    buffer = node
    while isinstance(buffer, (ir.TensorBox, ir.StorageBox)):
        buffer = buffer.data
    return _storage_bytes(graph, buffer) if isinstance(buffer, ir.Buffer) and not isinstance(buffer, ir.TorchBindObject) else 0


def _device(node: Any) -> str:
    device = node.get_device()
    return "cpu" if device is None else device.type


def _bound_to(output: Any) -> str | None:
    """Name of the buffer that an output of a graph is or views."""
    while isinstance(output, (ir.TensorBox, ir.StorageBox, ir.BaseView)):
        output = output.unwrap_view() if isinstance(output, ir.BaseView) else output.data
    return output.get_name() if isinstance(output, (ir.Buffer, ir.Operation)) else None
