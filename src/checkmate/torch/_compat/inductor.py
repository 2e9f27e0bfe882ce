"""Private names of Inductor; imported only if Inductor compiles, since importing it takes a second.

Some of Inductor's methods would undo a plan. `under_a_plan` puts the functions of this module in their place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch._higher_order_ops.invoke_subgraph import invoke_subgraph
from torch._inductor import compile_fx as compilation
from torch._inductor import config as inductor_config
from torch._inductor.choices import InductorChoices
from torch._inductor.codegen.cpp import CppOverrides, CppScheduling, CppVecOverrides
from torch._inductor.codegen.wrapper import SubgraphPythonWrapperCodegen
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.custom_graph_pass import CustomPartitionerFn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.dependencies import StarDep, WeakDep
from torch._inductor.fx_passes.post_grad import addmm as fuse_addmm
from torch._inductor.fx_passes.post_grad import pass_patterns
from torch._inductor.graph import GraphLowering, SubgraphLowering
from torch._inductor.scheduler import SchedulerNode
from torch._inductor.utils import copy_misaligned_inputs, get_donated_idxs
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._ordered_set import OrderedSet

from checkmate.torch._compat import replaced
from checkmate.torch._compat.generated_code import buffer_bytes

__all__ = ["CustomPartitionerFn", "InductorChoices", "compile_fx", "compile_fx_inner", "inductor_config", "invoke_subgraph"]


def prefers_channels_last(gm: GraphModule) -> bool:
    """Whether Inductor's own heuristic (device, sizes, configuration) would convert convolutions to channels last."""
    return GraphLowering.decide_layout_opt(gm, is_inference=False)


def stock_patches(mode: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration of ``torch.compile(backend="inductor")``; options override the settings of the mode.

    `torch.compile` itself takes either a mode or options, and the class that it passes them to takes both. A RuntimeError says
    that an option is unknown, or that its value has another type.
    """
    return dict(torch._TorchCompileInductorWrapper(mode, dict(options), None).config)


def as_if_compiling() -> AbstractContextManager[None]:
    """Let torch's optimizers compute as under `torch.compile`: on tensors, and without reading them back."""
    return replaced(torch.compiler, "_is_compiling_flag", True)


def trace_functionally(function: Callable[..., None], inputs: Sequence[torch.Tensor]) -> Graph:
    """The ops of a function that overwrites its inputs, as Inductor decomposes them; they end with a ``copy_`` to each input."""
    functional = torch.func.functionalize(function, remove="mutations_and_views")
    return make_fx(functional, decomposition_table=select_decomp_table())(*inputs).graph


DONATED = "checkmate_donated"
"""Key in the metadata of a subgraph's module: positions of the inputs that no caller reads after a call."""


def donated_inputs() -> frozenset[int]:
    """Positions of the inputs that the backward being compiled may overwrite: tensors that only it holds."""
    return frozenset(get_donated_idxs() or ())


@contextmanager
def under_a_plan(choices: InductorChoices | None) -> Iterator[None]:
    """Let Inductor generate code that has the bits, the order and the memory of a plan; without choices, only correct code."""
    with ExitStack() as stack:
        stack.enter_context(replaced(SchedulerNode, "recompute_size_and_body", _recompute_and_order))
        stack.enter_context(replaced(SchedulerNode, "decide_inplace_update", _write_over_what_dies))
        stack.enter_context(replaced(compilation, "cudagraphify", _unless_on_trial))
        if choices is None:
            yield
            return
        # The config option of that name is read only once per thread.
        stack.enter_context(V.set_choices_handler(choices))
        for owner, name, value in (
            (CppScheduling, "codegen_node", _free_between_loops),
            (GraphLowering, "make_subgraph", _donate_to_subgraph),
            # The caller checks its own inputs, and made all others: 500 checks a step in a GPT-2, a tenth of a millisecond.
            (SubgraphPythonWrapperCodegen, "codegen_input_size_asserts", lambda wrapper: None),
            *((CppOverrides, name, staticmethod(_as_in_a_vector(name))) for name in _FUNCTIONS),
            *((entry, "extra_check", lambda match: False) for entry in _addmm_patterns()),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


def without_graphs() -> AbstractContextManager[None]:
    """Context of trial steps, in all threads: compiled code runs without CUDA graphs, whose memory would stay."""
    return replaced(_TRIALS, "running", True)


_TRIALS = SimpleNamespace(running=False)
_cudagraphify: Callable[..., Any] = compilation.cudagraphify


def _unless_on_trial(model: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
    """A compiled module that CUDA graphs replay, except in trial steps."""
    graphed = _cudagraphify(model, *args, **kwargs)

    def run(inputs: list[Any]) -> Any:
        if not _TRIALS.running:
            return graphed(inputs)
        copy_misaligned_inputs(inputs, [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)])  # as graphs do
        return model(inputs)

    return run


_recompute_size_and_body = SchedulerNode.recompute_size_and_body


def _recompute_and_order(node: SchedulerNode, *args: Any, **kwargs: Any) -> None:
    """Keep a loop that reads a tensor after the op that adds to it in place, also if a fusion computes the loop again.

    PyTorch 2.11 to 2.13 lose that dependency (https://github.com/pytorch/pytorch/issues/185509). In a ResNet-50 whose first ReLU
    is computed again, the gradient of the pooling before it was read before it was scattered into its zeros: the gradients of the
    first convolution were zero. PyTorch 2.11 also loses what the loop has to wait for: the readers of what it overwrites.
    """
    waits_for: OrderedSet[Any] = OrderedSet(read for read in node.read_writes.reads if isinstance(read, (StarDep, WeakDep)))
    _recompute_size_and_body(node, *args, **kwargs)
    node.set_read_writes(node.read_writes.with_read(waits_for).rename(getattr(node, "mutation_renames", {})))


_decide_inplace_update = SchedulerNode.decide_inplace_update


def _write_over_what_dies(node: SchedulerNode) -> None:
    """Let a loop write its result over an operand that nothing reads later, as PyTorch 2.13 does with two exceptions.

    Inductor counts an op that only has to run later as a reader. In a whole step a parameter's update waits for every product
    with the parameter, and nothing was written over a product: the gradient of the logits took another tensor of their size.

    Inductor may also choose an operand that exists only in registers, and allocates its memory for the result: in the backward of
    a gated MLP it chose the sigmoid of the gate, although the gate itself could have been written over.
    """
    in_registers = _made_in_registers(node)
    with ExitStack() as stack:
        for name in {read.name for read in node.read_writes.reads}:
            buffer = node.scheduler.name_to_buf.get(name)
            if buffer is not None:
                readers = [user for user in buffer.users if name not in in_registers and not _only_waits(user, name)]
                stack.enter_context(replaced(buffer, "users", readers))
        _decide_inplace_update(node)


def _made_in_registers(node: SchedulerNode) -> set[str]:
    """Buffers that only the loop of a node writes and reads, if it is one loop of pointwise ops."""
    fused = node.scheduler.get_fused_node(node).get_nodes()
    if any(each.group != node.group or each.is_reduction() for each in fused):
        return set()
    inside = OrderedSet(each.get_name() for each in fused)
    made = (buffer.get_name() for each in fused for buffer in each.get_outputs())
    return {name for name in made if node.scheduler.can_buffer_be_removed_through_fusion(name, inside)}


def _only_waits(user: Any, name: str) -> bool:
    """Whether an op has to run after the op that writes a buffer, and does not read the buffer."""
    reads = getattr(getattr(user.node, "read_writes", None), "reads", ())
    named = [read for read in reads if read.name == name]
    return user.is_weak and bool(named) and all(getattr(read, "is_fake", False) for read in named)


_codegen_node = CppScheduling.codegen_node


def _free_between_loops(scheduling: CppScheduling, node: Any) -> None:
    """Free the last operands of a C++ loop before the next loop allocates its results.

    Inductor collects loops in a row in one function, even if they are not fused: it allocates all of their results before the
    function is called, and frees all of their operands after. In a U-Net the gradient of a normalization is computed next to
    the operand of the next convolution, which is computed again: 3 of 58 MiB exceeded the plan.
    """
    _codegen_node(scheduling, node)
    freed_bytes = sum(_freeable_bytes(name, node.scheduler) for name in node.last_usage)
    if freed_bytes >= 1 << 18:  # reading these bytes takes several times as long as a function call
        scheduling._set_flush_status(True)


def _freeable_bytes(name: str, scheduler: Any) -> int:
    """Bytes of a buffer, or of an input of the graph."""
    buffer = getattr(scheduler.name_to_buf.get(name), "node", None) or V.graph.graph_inputs.get(name)
    return 0 if buffer is None or name in V.graph.removed_buffers else buffer_bytes(V.graph, buffer)


def _addmm_patterns() -> list[Any]:
    """Inductor's patterns that replace a matrix product and the sum that reads it by one ``addmm`` in the sum's place.

    If a plan computes the product earlier, the operands of the product then live until the sum. In a BERT the gradient of the
    logits lives until the gradient of the embedding, to which the tied weight's gradient is added.
    """
    entries = (entry for passes in pass_patterns for found in passes.patterns.values() for entry in found)
    return [entry for entry in entries if getattr(entry, "handler", None) is fuse_addmm]


_FUNCTIONS = tuple(
    name
    for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "exp2", "expm1",
        "lgamma", "log", "log10", "log1p", "log2", "rsqrt", "sigmoid", "sin", "sinh", "tan", "tanh",
    )
    if name in vars(CppOverrides) and name in vars(CppVecOverrides)
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


def _as_in_a_vector(name: str) -> Callable[[Any], str]:
    """The C++ code that computes a function, such as exp or tanh, for one number with the bits of its vector version.

    All ops that are fused in a loop decide whether the loop, or its last few numbers, is computed with vectors: with one op on
    integers it is not. A vector's exp differs from the C++ library's exp in the last bit. Without this code, bits would depend on
    fusion, and so on the plan.
    """
    scalar, vector = getattr(CppOverrides, name), getattr(CppVecOverrides, name)

    def function(x: Any) -> str:
        if not pick_vec_isa():
            return str(scalar(x))
        text = _ONE_LANE.format(vector=vector("v_"), scalar=scalar("x_"), argument=x)
        return " ".join(line.strip() for line in text.splitlines())

    return function


_make_subgraph = GraphLowering.make_subgraph


def _donate_to_subgraph(graph: GraphLowering, gm: GraphModule, *args: Any, **kwargs: Any) -> SubgraphLowering:
    """Have a subgraph overwrite the inputs that are donated to it.

    Inductor applies the positions of the inputs that are donated to the backward to each subgraph in it, and would overwrite
    tensors that are read later.
    """
    made = _make_subgraph(graph, gm, *args, **kwargs)
    made.bw_donated_idxs = sorted(gm.meta.get(DONATED, ()))
    return made
