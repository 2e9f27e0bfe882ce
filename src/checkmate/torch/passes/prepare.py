"""All passes on a joint graph before it is planned.

They widen or narrow the choice of plans. Results are bitwise equal to the original graph's, unless a layout pass changes
the order of sums.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import invoke_subgraph
from checkmate.torch._compat.symbolic import emit_expression
from checkmate.torch.graph.op_properties import OpProperties, op_properties
from checkmate.torch.graph.symbolic import is_size_arithmetic, reads_size
from checkmate.torch.graph.traced import copy_graph, in_backward
from checkmate.torch.passes.activation_checkpoint import honour_checkpoints
from checkmate.torch.passes.losses import correct_loss_storages


def prepare(
    joint: fx.GraphModule,
    *,
    honours_checkpoints: bool = False,
    no_recompute: frozenset[str] = frozenset(),
    layout_pass: Callable[[fx.Graph], fx.Graph] = lambda graph: graph,
    examine: Callable[[fx.Graph], None] = lambda graph: None,
) -> fx.GraphModule:
    """A copy of a joint module with the passes applied: first the layout pass, then ``examine``, which marks ops.

    The module is not changed, except for the sizes corrected by `correct_loss_storages`, because its fake tensors are shared with
    the copy.
    """
    graph = layout_pass(copy_graph(joint.graph))
    examine(graph)
    _read_sizes_from_inputs(graph)
    _merge_equal_ops(graph)
    split_convolution_backward(graph)
    if honours_checkpoints:
        honour_checkpoints(graph, no_recompute)
    correct_loss_storages(graph)
    graph.lint()
    return fx.GraphModule(joint, graph)


def _read_sizes_from_inputs(graph: fx.Graph) -> None:
    """Replace sizes of computed tensors by equal numbers computed only from sizes of inputs, in place.

    With dynamic shapes AOTAutograd asks intermediate tensors for their sizes (``aten.sym_size``). A plan would have to hold
    this tensor, or compute it again, for a number that follows from the inputs.
    """
    known: dict[Any, fx.Node] = {}  # expression over the symbols of the inputs -> the first node with that value
    computed: set[fx.Node] = set()
    for node in list(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt) or is_tangent(node):
            continue
        # Arithmetic on a size that was replaced above has become arithmetic on sizes of inputs.
        if node.op == "placeholder" or is_size_arithmetic(node, computed):
            computed.add(node)
            known.setdefault(value.node.expr, node)
        elif reads_size(node):
            with graph.inserting_before(node):
                same = known.get(value.node.expr) or emit_expression(graph, value, known)
            if same is not None:
                computed.add(same)
                known[value.node.expr] = same
                node.replace_all_uses_with(same)
                graph.erase_node(node)


def _merge_equal_ops(graph: fx.Graph) -> None:
    """Let equal ops of the forward with equal arguments run once, in place, as PyTorch's partitioners do.

    A transformer makes the same mask in each layer. A plan may still compute the merged value again for any reader.
    """
    backward = in_backward(graph)
    returned = set(graph.output_node().all_input_nodes)
    known: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.op == "call_function"]:
        found = op_properties(node)
        if found.effect:
            known.clear()  # what was read before may have been overwritten
        if node in backward or node in returned or "recompute" in node.meta or found != OpProperties():
            continue
        same = known.setdefault(f"{node.target} {node.args} {node.kwargs}", node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)


def split_convolution_backward(graph: fx.Graph) -> None:
    """Replace each ``convolution_backward`` by two ops in place: gradient of the input, and gradients of weight and bias.

    A single op allocates both gradients together, and the weight's is held to the end of the step. As a
    separate op it can be scheduled later; until then only the activations that it reads are held, which are usually
    smaller. Results are bitwise equal.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default, sort=True):
        *given, mask = node.args  # three flags, for the gradients of input, weight and bias
        if not (mask[0] and mask[1]) or any(user.target is not operator.getitem for user in node.users):
            continue
        weights = [user for user in node.users if user.args[1] != 0]
        value = node.meta["val"]
        with graph.inserting_after(node):
            second = graph.call_function(node.target, (*given, [False, mask[1], mask[2]]), dict(node.kwargs))
        second.meta = {**node.meta, "val": (None, *value[1:])}
        node.args = (*given, [True, False, False])
        node.meta = {**node.meta, "val": (value[0], None, None)}
        for user in reversed(weights):
            user.args = (second, user.args[1])
            second.append(user)


def join_convolution_backward(module: fx.GraphModule) -> None:
    """Let both ops of `split_convolution_backward` run in one call, in place, where a plan computes them in a row.

    A call has the peak of both: the kernels make the gradient of the input before they allocate that of the weight.
    """
    calls = [n for n in module.graph.nodes if n.op == "call_function" and n.target is not operator.getitem]
    for first, second in pairwise(calls):
        halves = first.target is second.target is torch.ops.aten.convolution_backward.default
        if halves and first.args == (*second.args[:-1], [True, False, False]):
            first.args = (*second.args[:-1], [True, *second.args[-1][1:]])
            first.meta = {**first.meta, "val": (first.meta["val"][0], *second.meta["val"][1:])}
            second.replace_all_uses_with(first)
            module.graph.erase_node(second)
    module.recompile()


def inline_regions(gm: fx.GraphModule) -> None:
    """Replace every call of a ``nested_compile_region`` in a Dynamo graph by the ops of its body.

    AOTAutograd would partition each body separately and identically at every call. A plan over the inlined ops can keep
    values in one layer that it recomputes in the next.
    """
    for module in reversed([m for m in gm.modules() if isinstance(m, fx.GraphModule)]):
        found = module.graph.find_nodes(op="call_function", target=invoke_subgraph)
        for call in found:
            _inline(module, call)
        if found:
            module.graph.lint()
            module.recompile()


def _inline(module: fx.GraphModule, call: fx.Node) -> None:
    where, _, *operands = call.args
    assert isinstance(where, fx.Node)
    body = module.get_submodule(str(where.target))
    assert isinstance(body, fx.GraphModule)
    inputs = body.graph.find_nodes(op="placeholder")
    copies: dict[fx.Node, fx.Node] = dict(zip(inputs, operands, strict=True))  # type: ignore[arg-type]
    with module.graph.inserting_before(call):
        results = module.graph.graph_copy(body.graph, copies)
    assert isinstance(results, (tuple, list))
    for user in list(call.users):
        assert user.target is operator.getitem
        user.replace_all_uses_with(results[user.args[1]])  # type: ignore[index, arg-type]
        module.graph.erase_node(user)
    module.graph.erase_node(call)
    if not where.users:
        module.graph.erase_node(where)
