"""Traced FX graphs: producer, readers and size of a tensor; copies of graphs, and results of added ops."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx

from checkmate.solvers.walks import reached
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch.graph.storages import leaves, storage_bytes


def copy_graph(graph: fx.Graph) -> fx.Graph:
    """A copy of a graph: new nodes, whose metadata dictionaries are shallow copies."""
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    return copy


def in_backward(graph: fx.Graph) -> set[fx.Node]:
    """The nodes of the backward of a joint graph: tagged by AOTAutograd, tangents, and all nodes that depend on either."""
    starts = [n for n in graph.nodes if "backward" in str(n.meta.get("partitioner_tag", "")) or is_tangent(n)]
    return reached(starts, lambda node: node.users)


def retraced(node: fx.Node, mode: AbstractContextManager[Any]) -> Any:
    """The result of an op for the traced values of its arguments, in their fake mode, with separate storages."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with mode, torch.no_grad():
        return node.target(*args, **kwargs)  # type: ignore[operator]


def caller(graph: fx.Graph, like: fx.Node) -> Callable[..., fx.Node]:
    """A function that adds a node with the metadata of another, and traces it."""
    mode = leaves(like.meta["val"])[0].fake_mode  # type: ignore[attr-defined]

    def call(target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
        node = graph.call_function(target, args, kwargs)
        node.meta = {key: value for key, value in like.meta.items() if key != "val"}
        node.meta["val"] = retraced(node, mode)
        return node

    return call


def results(module: fx.GraphModule) -> tuple[Any, ...]:
    """The results of the graph of a module: nodes, numbers or None."""
    return tuple(module.graph.output_node().args[0])  # type: ignore[arg-type]


def producer(value: fx.Node) -> fx.Node:
    """The op that makes a tensor: the node itself, or the op whose output a getitem selects."""
    while value.target is operator.getitem:
        value = value.args[0]  # type: ignore[assignment]
    return value


def outputs(op: fx.Node) -> list[fx.Node | None]:
    """The node of each output tensor of an op, in order; None for an output that no node selects."""
    made = op.meta.get("val")
    if isinstance(made, torch.Tensor):
        return [op]
    selected = {u.args[1]: u for u in op.users if u.target is operator.getitem}
    return [selected.get(i) for i in range(len(made))] if isinstance(made, (tuple, list)) else []


def inputs(op: fx.Node) -> list[fx.Node]:
    """The nodes of the tensors among the arguments of an op, in the order of its arguments, with repetitions."""
    found: list[fx.Node] = []
    fx.map_arg((op.args, op.kwargs), found.append)
    return [a for a in found if isinstance(a.meta.get("val"), torch.Tensor)]


def shape_only(op: fx.Node) -> frozenset[int]:
    """Positions in `inputs` of the tensors of which an op uses only the shape.

    The gradient of a convolution's input depends only on the other gradient and the weight, but torch's op takes the input.
    """
    if op.target is torch.ops.aten.convolution_backward.default and op.args[10] == [True, False, False]:
        return frozenset({1})
    return frozenset()


def readers(op: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Each output of an op with each op that reads it; the graph's output node is a reader."""
    for value in outputs(op):
        if value is not None:
            for user in value.users:
                if user.target is not operator.getitem:
                    yield value, user


def ancestors(nodes: Iterable[fx.Node], since: fx.Node | None = None) -> set[fx.Node]:
    """All nodes on which some nodes depend, directly or not; without nodes before ``since`` in the order of the graph."""
    read = (i for node in nodes for i in node.all_input_nodes)
    return reached(read, lambda node: node.all_input_nodes, lambda node: since is None or node >= since)


def descendants(nodes: Iterable[fx.Node], within: Set[fx.Node]) -> set[fx.Node]:
    """The nodes of a set that depend on some nodes, directly or through other nodes of the set."""
    return reached((user for node in nodes for user in node.users), lambda node: node.users, within.__contains__)


def tensor(value: fx.Node) -> torch.Tensor:
    """The traced tensor of a node."""
    found = value.meta["val"]
    assert isinstance(found, torch.Tensor)
    return found


def size_bytes(value: fx.Node) -> int:
    """Bytes of the storage that a tensor keeps alive."""
    return storage_bytes(tensor(value))


def held_bytes(value: fx.Node) -> int:
    """Bytes of memory of the elements of a tensor; expanded elements share memory."""
    return min(own_bytes(value), size_bytes(value))


def own_bytes(value: fx.Node) -> int:
    """Bytes of the elements of a tensor; fewer than its storage has if the tensor is a slice."""
    return tensor(value).numel() * tensor(value).element_size()
