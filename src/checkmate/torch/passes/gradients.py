"""Gradients of a backward: added to existing ones, read by an optimizer, or not computed at all."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Set

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.graph.op_properties import UNDEFINED, op_properties
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, UPDATE
from checkmate.torch.graph.storages import extent, leaves, storage_key
from checkmate.torch.graph.traced import caller, copy_graph, results, retraced

aten = torch.ops.aten


class Accumulate:
    """Target of a node that adds a gradient to an existing one: arguments: position of the input, new gradient."""

    __name__ = "accumulate"  # FX writes it into the code of a module

    def __init__(self) -> None:
        self.adding = threading.local()  # the action of a call, by thread: autograd runs several devices' backwards at once

    def __call__(self, position: int, gradient: torch.Tensor) -> torch.Tensor:
        """The gradient that the backward returns: the sum, or the new gradient if there is none to add it to."""
        add: Callable[[int, torch.Tensor], torch.Tensor] = self.adding.add
        return add(position, gradient)

    def __str__(self) -> str:
        """The kind of the op in a graph, equal in every process."""
        return "checkmate.accumulate"


ACCUMULATE = Accumulate()


def accumulating(joint: fx.GraphModule, num_fwd_outputs: int, positions: Set[int]) -> fx.GraphModule:
    """A copy of a joint module whose backward adds the gradients of some inputs, and only of these, to existing ones.

    Autograd adds the results of a compiled backward to ``.grad`` only after that backward, and until then every gradient exists
    twice. A node after each gradient adds it to the existing one at once; the new one is then freed like any other value. For a
    planner the node reads the gradient and allocates nothing: the existing gradient is resident.
    """
    graph = copy_graph(joint.graph)
    for node in list(graph.nodes):
        if node.target is ACCUMULATE:
            node.replace_all_uses_with(node.args[1])
            graph.erase_node(node)
    output = graph.output_node()
    returned = list(output.args[0])  # type: ignore[arg-type]
    last_placeholder = [n for n in graph.nodes if n.op == "placeholder"][-1]
    for k in sorted(positions):
        gradient = returned[num_fwd_outputs + k]
        if not isinstance(gradient, fx.Node):
            continue
        with graph.inserting_after(last_placeholder if is_tangent(gradient) else gradient):
            added = graph.call_function(ACCUMULATE, (k, gradient))  # type: ignore[arg-type]
        where = ("stack_trace", "fwd_stack_trace", "nn_module_stack", "fwd_nn_module_stack", "autograd_backward", "seq_nr")
        added.meta = {key: gradient.meta[key] for key in where if key in gradient.meta}
        added.meta |= {"val": None, "partitioner_tag": "is_backward"}
        returned[num_fwd_outputs + k] = added
    output.args = (tuple(returned),)
    graph.lint()
    return fx.GraphModule(joint, graph)


def accumulated_inputs(joint: fx.GraphModule) -> frozenset[int]:
    """Positions of the inputs to whose gradients the backward of a joint module adds."""
    return frozenset(n.args[0] for n in joint.graph.nodes if n.target is ACCUMULATE)  # type: ignore[misc]


def without_tangents(joint: fx.GraphModule, undefined: Set[int]) -> fx.GraphModule:
    """A copy of a joint module without nodes that depend only on tangents that are None; ``undefined`` has their positions.

    AOTAutograd traces a backward for every differentiable output of a graph, and allocates zeros if autograd has no gradient
    for an output. Autograd itself computes nothing for this output, and neither does the copy: undefined tangents are marked and
    have no users, and a gradient that is zero is None.

    A backward is linear in its tangents, and each of its nodes is linear in all operands together that depend on tangents. A node
    is therefore zero if all of these operands are, whatever else it reads. A sum of a zero and a defined gradient is the
    defined one. Any other node with both kinds of operand reads zeros that are made for it.
    """
    graph = copy_graph(joint.graph)
    tangents = [n for n in graph.nodes if is_tangent(n)]
    zero = {n for t, n in enumerate(tangents) if t in undefined}
    for node in zero:
        node.meta[UNDEFINED] = True
    depends = set(tangents)
    for node in list(graph.nodes):
        if node.op != "call_function":
            continue
        operands = [n for n in node.all_input_nodes if n in depends]
        if not operands:
            continue
        depends.add(node)
        undefined_operands = [n for n in operands if n in zero]
        if len(undefined_operands) == len(operands) and not op_properties(node).effect:
            zero.add(node)
        elif undefined_operands and (summand := _summand(node, zero)) is not None:
            _copy_layout(node, summand)
            zero.add(node)  # it has no users left, and is erased with the zeros
        elif undefined_operands:
            for operand in undefined_operands:
                node.replace_input_with(operand, _zeros(node, operand))
    output = graph.output_node()
    output.args = (fx.map_arg(output.args[0], lambda n: None if n in zero else n),)
    for node in reversed(list(graph.nodes)):
        if node in zero and node.op == "call_function" and not node.users:
            graph.erase_node(node)
    graph.lint()
    return fx.GraphModule(joint, graph)


def _summand(node: fx.Node, zero: Set[fx.Node]) -> fx.Node | None:
    """The defined operand of a sum of a gradient and a zero, if the sum is equal to it; None otherwise."""
    is_sum = node.target in (aten.add.Tensor, aten.add_.Tensor)
    if not is_sum or node.kwargs.get("alpha", 1) != 1 or len(node.args) != 2:
        return None
    first, second = node.args
    other = second if first in zero else first
    if not isinstance(other, fx.Node) or other in zero:
        return None
    mine, its = node.meta["val"], other.meta["val"]
    alike = mine.shape == its.shape and mine.dtype == its.dtype
    return other if alike and (mine.stride() == its.stride() or mine.is_contiguous()) else None


def _copy_layout(node: fx.Node, summand: fx.Node) -> None:
    """Replace a sum by its defined operand, in the layout of the sum: later views depend on it."""
    strides = node.meta["val"].stride()
    if summand.meta["val"].stride() != strides:
        with node.graph.inserting_before(node):
            summand = caller(node.graph, node)(aten.clone.default, summand, memory_format=torch.contiguous_format)
        assert summand.meta["val"].stride() == strides
    node.replace_all_uses_with(summand)


def _zeros(before: fx.Node, like: fx.Node) -> fx.Node:
    """A node of zeros with the layout of an undefined operand."""
    value, call = like.meta["val"], caller(before.graph, like)
    with before.graph.inserting_before(before):
        flat = call(aten.full.default, [extent(value.shape, value.stride())], 0, dtype=value.dtype, device=value.device)
        return call(aten.as_strided.default, flat, list(value.shape), list(value.stride()))


def apply_optimizer_in_backward(module: fx.GraphModule) -> None:
    """Replace gradient markers of a whole step by parameter updates, each as soon as its gradient is complete, in place.

    AOTAutograd places mutations of inputs, and the markers too, at the end of the graph: all gradients would be alive there at
    once. A mutation commutes with every op that neither reads nor writes the overwritten storage. It can therefore move up to
    the last op that does, and gradients are freed one by one. PyTorch has the same idea for eager mode, as hooks:
    ``torch.distributed.optim._apply_optimizer_in_backward``.

    A function that steps its optimizers itself copies the markers' results to the parameters, for later ops and at its end: these
    ops read the parameter. Other results are returned, with dynamic shapes as tensors: the module returns the loss again.
    """
    graph = module.graph
    markers = graph.find_nodes(op="call_function", target=GRADIENT_READY)
    others, copies = [out for out in results(module) if out not in markers], set[int]()  # the storages of copies
    for marker in markers:
        parameter = marker.args[0]
        with graph.inserting_before(marker):
            update = graph.call_function(UPDATE, marker.args, {})
        update.meta = {k: v for k, v in marker.meta.items() if k != "val"}
        update.meta["val"] = None
        for user in [user for user in marker.users if user.op != "output"]:
            if user.target in (aten.copy.default, aten.copy_.default):
                copies.update(_storages([user]) - _storages([parameter]))
                user.replace_all_uses_with(parameter)
                graph.erase_node(user)
            else:
                user.replace_input_with(marker, parameter)
        marker.replace_all_uses_with(others[-1] if others else None)
        graph.erase_node(marker)
    for node in list(graph.nodes) if copies else ():
        if node.target is aten.copy_.default and node.args[0] is node.args[1]:  # after the last of several updates
            graph.erase_node(node)
        elif node.op == "call_function" and not copies.isdisjoint(_storages([node])):  # a view of a copy, now of the parameter
            node.meta["val"] = retraced(node, leaves(node.meta["val"])[0].fake_mode)  # type: ignore[attr-defined]
    _hoist(graph)
    graph.lint()
    module.recompile()


def _hoist(graph: fx.Graph) -> None:
    """Place each mutation directly after the last of its operands and of the readers of the storage that it overwrites."""
    readers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for key in _storages(node.all_input_nodes):
            readers.setdefault(key, []).append(node)
    order = {node: position for position, node in enumerate(graph.nodes)}
    calls = [n for n in graph.nodes if n.op == "call_function"]
    for node in [n for n in calls if (known := op_properties(n)).mutates == (0,) and not known.sequenced]:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        before = [r for key in _storages([target]) for r in readers[key] if order[r] < order[node] and r.op == "call_function"]
        last = max([*before, *node.all_input_nodes], key=order.__getitem__)
        if last.op != "placeholder":
            last.append(node)


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_key(t) for node in nodes for t in leaves(node.meta.get("val"))}
