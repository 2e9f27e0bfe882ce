"""Optimizer in backward: each parameter's update as soon as its gradient is complete, in the graph of a whole step.

PyTorch has the same idea for eager mode, as hooks: ``torch.distributed.optim._apply_optimizer_in_backward``.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from checkmate.torch.graph.op_properties import op_properties
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, UPDATE
from checkmate.torch.graph.storages import leaves, storage_key


def apply_optimizer_in_backward(module: fx.GraphModule) -> None:
    """Replace gradient markers by parameter updates, and move every mutation to the earliest position that is correct.

    AOTAutograd places mutations of inputs at the end of the graph, where the markers stand too: all gradients would be
    alive there at once. A mutation commutes with every op that does not read or write the overwritten storage, so that it
    can move up to the last op that does, and gradients are freed one by one.

    Args:
        module: The graph of a whole step as AOTAutograd made it; changed in place. In place of the markers' results it
            returns the loss again, because with dynamic shapes AOTAutograd requires every output to be a tensor.
    """
    graph = module.graph
    markers = graph.find_nodes(op="call_function", target=GRADIENT_READY)
    results = [out for out in graph.output_node().args[0] if out not in markers]  # type: ignore[union-attr]
    for marker in markers:
        loss = results[-1]
        with graph.inserting_before(marker):
            update = graph.call_function(UPDATE, marker.args, {})
        update.meta = {k: v for k, v in marker.meta.items() if k != "val"}
        update.meta["val"] = None
        marker.replace_all_uses_with(loss)  # type: ignore[arg-type]
        graph.erase_node(marker)
    _hoist(graph)
    graph.lint()
    module.recompile()


def _hoist(graph: fx.Graph) -> None:
    """Place each mutation directly after the last of its operands and of the ops that read what it overwrites."""
    readers: dict[int, list[fx.Node]] = {}
    for node in graph.nodes:
        for key in _storages(node.all_input_nodes):
            readers.setdefault(key, []).append(node)
    order = {node: position for position, node in enumerate(graph.nodes)}
    for node in [n for n in graph.nodes if n.op == "call_function" and _moves(n)]:
        target = node.args[0]
        assert isinstance(target, fx.Node)
        before = [r for key in _storages([target]) for r in readers[key] if r is not node and r.op == "call_function"]
        if any(order[r] > order[node] for r in before):
            continue  # a later op reads the new value: moving could pass one that must read the old
        last = max([*before, *node.all_input_nodes], key=order.__getitem__)
        if last.op != "placeholder":
            last.append(node)


def _moves(node: fx.Node) -> bool:
    known = op_properties(node)
    return known.mutates == (0,) and not known.sequenced


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_key(t) for node in nodes for t in leaves(node.meta.get("val"))}
