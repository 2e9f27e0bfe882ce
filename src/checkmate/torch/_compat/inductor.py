"""Private names of Inductor; imported only where Inductor compiles, since importing it takes a second."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._inductor import config as inductor_config
from torch._inductor import ir
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen import wrapper as lines
from torch._inductor.codegen.cpp import CppKernel, CppOverrides, CppVecOverrides
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InvalidCxxCompiler
from torch._inductor.fx_passes.post_grad import addmm as fuse_addmm
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.utils import get_donated_idxs, get_dtype_size
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._triton import has_triton

from checkmate.torch._compat.symbolic import at_upper_bounds, largest_value

__all__ = [
    "DONATED",
    "Alias",
    "Allocate",
    "Call",
    "CustomPartitionerFn",
    "Free",
    "GeneratedModule",
    "Give",
    "InductorChoices",
    "Run",
    "as_if_compiling",
    "compile_fx",
    "compile_fx_inner",
    "donated_inputs",
    "donated_to_subgraphs",
    "inductor_config",
    "invoke_subgraph",
    "missing_compiler",
    "one_function_for_vectors_and_scalars",
    "prefers_channels_last",
    "stock_patches",
    "sums_for_every_size",
    "trace_functionally",
    "unfused_addmm",
    "use_inductor_choices",
    "watch_generated_modules",
]

use_inductor_choices = V.set_choices_handler
"""Context that installs an `InductorChoices`; the config option of that name is read only once per thread."""


def prefers_channels_last(gm: GraphModule) -> bool:
    """Whether Inductor's own heuristic (device, sizes, configuration) would convert convolutions to channels last."""
    return GraphLowering.decide_layout_opt(gm, is_inference=False)


def stock_patches(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration that ``torch.compile(backend="inductor")`` would compile with.

    Args:
        mode: Its ``mode``.
        options: Its ``options``; they override those of the mode. (`torch.compile` itself takes one of the two, the class that
            it hands them to takes both.)

    Raises:
        RuntimeError: An option is unknown, or its value has another type.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)


def missing_compiler(device_types: Collection[str]) -> str | None:
    """In words, that Inductor has no compiler for one of the devices; None if it has one for each.

    Args:
        device_types: Types of devices.
    """
    if "cuda" in device_types and not has_triton():
        return "Triton is not installed, or does not know the GPU"
    if "cpu" in device_types or not device_types:
        try:
            get_cpp_compiler()
        except InvalidCxxCompiler:
            return "no C++ compiler is installed"
    return None


@contextmanager
def as_if_compiling() -> Iterator[None]:
    """Let torch's optimizers compute as under `torch.compile`: on tensors, and without reading them back."""
    with patch.object(torch.compiler, "_is_compiling_flag", True):
        yield


def trace_functionally(function: Callable[..., None], inputs: Sequence[torch.Tensor]) -> Graph:
    """The ops of a function that overwrites its inputs, as Inductor decomposes them.

    Args:
        function: The function.
        inputs: Fake tensors to trace it on.

    Returns:
        A graph with one placeholder for each input; it overwrites them by ``copy_`` at its end.
    """
    functional = torch.func.functionalize(function, remove="mutations_and_views")
    return make_fx(functional, decomposition_table=select_decomp_table())(*inputs).graph


@contextmanager
def unfused_addmm() -> Iterator[None]:
    """Keep a matrix product apart from the sum that reads it.

    Inductor's pattern replaces both by one ``addmm`` where the sum is. Where a plan computes the product earlier, what the
    product reads then lives until the sum: in a BERT the gradient of the logits until that of the embedding, to which the tied
    weight's gradient is added.
    """
    entries = [entry for passes in pass_patterns for found in passes.patterns.values() for entry in found]
    with ExitStack() as stack:
        for entry in entries:
            if getattr(entry, "handler", None) is fuse_addmm:
                stack.enter_context(patch.object(entry, "extra_check", lambda match: False))
        yield


_FUNCTIONS = (
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1", "lgamma",
    "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "tan", "tanh",
)  # fmt: skip
"""Functions of one number that the C++ library and a vector library compute with different errors."""

_ONE_LANE = """[&](auto x_) {{
    if constexpr (std::is_same_v<decltype(x_), float> || std::is_same_v<decltype(x_), double>) {{
        at::vec::Vectorized<decltype(x_)> v_(x_);
        auto r_ = {vector};
        __at_align__ decltype(x_) o_[at::vec::Vectorized<decltype(x_)>::size()];
        r_.store(o_);
        return o_[0];
    }} else {{
        return {scalar};
    }}
}}({argument})"""


@contextmanager
def one_function_for_vectors_and_scalars() -> Iterator[None]:
    """Have C++ kernels compute exp, tanh and the like for single numbers as for vectors of them.

    Whether a loop, or its last few numbers, is computed with vectors depends on all ops that are fused in it: one with integers
    is enough that none is. A vector's exp is not that of the C++ library in the last bit, so that what is computed would depend
    on what it is fused with, and so on the plan.
    """

    def lane(name: str) -> Callable[..., str]:
        scalar, vector = getattr(CppOverrides, name), getattr(CppVecOverrides, name)

        def function(x: Any) -> str:
            if not pick_vec_isa():
                return str(scalar(x))
            text = _ONE_LANE.format(vector=vector("v_"), scalar=scalar("x_"), argument=x)
            return " ".join(line.strip() for line in text.splitlines())

        return function

    both = [name for name in _FUNCTIONS if name in vars(CppOverrides) and name in vars(CppVecOverrides)]
    with ExitStack() as stack:
        for name in both:
            stack.enter_context(patch.object(CppOverrides, name, staticmethod(lane(name))))
        yield


@contextmanager
def sums_for_every_size() -> Iterator[None]:
    """Have a C++ kernel add in the way of its largest size where sizes are symbolic, instead of guarding on one way.

    Inductor adds more than 4096 numbers in cascades, which are right for fewer as well. Where it guarded on that, code for up to
    512 rows of 64 numbers would serve no fewer than 65 rows, and ``mark_dynamic`` with a range beyond that would be an error.
    """
    decide = CppKernel.need_use_acc_helper

    def decided(kernel: CppKernel, *args: Any, **kwargs: Any) -> bool:
        sizes = V.graph.sizevars
        guard = sizes.guard_or_false

        def at_largest(condition: Any) -> bool:
            largest = at_upper_bounds(condition, sizes.shape_env)
            return bool(guard(condition)) if largest is None else largest

        with patch.object(sizes, "guard_or_false", at_largest):
            return bool(decide(kernel, *args, **kwargs))

    with patch.object(CppKernel, "need_use_acc_helper", decided):
        yield


DONATED = "checkmate_donated"
"""Key in the metadata of a subgraph's module: positions of the inputs that no caller reads after a call."""


def donated_inputs() -> frozenset[int]:
    """Positions of the inputs that the backward being compiled may overwrite: tensors that only it holds."""
    return frozenset(get_donated_idxs() or ())


@contextmanager
def donated_to_subgraphs() -> Iterator[None]:
    """Have subgraphs overwrite the inputs that are donated to them.

    Inductor takes the positions of the inputs that are donated to the backward for those of each subgraph in it, and would
    overwrite tensors that are read later.
    """
    make = GraphLowering.make_subgraph

    def make_subgraph(graph: GraphLowering, gm: GraphModule, *args: Any, **kwargs: Any) -> SubgraphLowering:
        made = make(graph, gm, *args, **kwargs)
        made.bw_donated_idxs = sorted(gm.meta.get(DONATED, ()))
        return made

    with patch.object(GraphLowering, "make_subgraph", make_subgraph):
        yield


@dataclass(frozen=True, slots=True)
class Allocate:
    """A name is bound to new storages.

    Attributes:
        name: The name.
        sizes_bytes: Size of each: one of a tensor, several of a tuple of tensors.
        device: Type of their device.
    """

    name: str
    sizes_bytes: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Alias:
    """A name is bound to what another name is bound to.

    Attributes:
        name: The name.
        of: The other one.
        position: Which tensor of a tuple; None for all.
    """

    name: str
    of: str
    position: int | None = None


@dataclass(frozen=True, slots=True)
class Free:
    """A name is deleted.

    Attributes:
        name: The name.
    """

    name: str


@dataclass(frozen=True, slots=True)
class Run:
    """An op of another library runs, and may allocate inside.

    Attributes:
        node: The node of the graph that it computes, where it is one.
    """

    node: Node | None


@dataclass(frozen=True, slots=True)
class Give:
    """Names are put into the list of a call's arguments, which keeps their storages alive until the callee frees them.

    Attributes:
        call: Name of the call.
        arguments: The names.
    """

    call: str
    arguments: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A subgraph runs, and a name is bound to the tuple of its results.

    Attributes:
        name: The name, which is that of the call.
        module: The subgraph.
    """

    name: str
    module: GeneratedModule


Event = Allocate | Alias | Free | Run | Give | Call
"""What a line of a generated module does to memory."""


@dataclass(frozen=True, slots=True, eq=False)
class GeneratedModule:
    """A module that Inductor has generated, before its kernels are built.

    Attributes:
        is_backward: Whether it is a backward.
        events: What it does to memory, in order.
        inputs: Bytes of each of its inputs, by name, in their order.
        outputs: What its outputs are bound to; None for one that is no tensor of the module.
        output_nodes: Names of the nodes that its outputs are; None for one that is no node. AOTAutograd names the inputs of a
            backward as the nodes of the forward that it saves.
        uncounted: Lines that may allocate and are not understood.
    """

    is_backward: bool
    events: tuple[Event, ...]
    inputs: Mapping[str, int]
    outputs: tuple[str | None, ...]
    output_nodes: tuple[str | None, ...]
    uncounted: tuple[str, ...]


@contextmanager
def watch_generated_modules(seen: Callable[[GeneratedModule], None]) -> Iterator[None]:
    """Call a function with every module that this thread generates, before the module's kernels are built.

    Args:
        seen: The function.
    """
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
        inputs={name: _input_bytes(graph, node) for name, node in graph.graph_inputs.items()},
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
    """The effect of a line on memory; None if that is not known.

    Args:
        graph: The module.
        line: A line of its code.
        kept: Names of its outputs.
        parts: The tensors of each tuple that a kernel returns.
        subgraphs: The subgraphs that were generated so far, by name.
    """
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


def _input_bytes(graph: GraphLowering, node: Any) -> int:
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
