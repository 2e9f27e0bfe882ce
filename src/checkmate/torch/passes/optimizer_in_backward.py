"""Updates in the graph of a whole step, each where its gradient is born."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from checkmate.torch.graph.op_properties import op_properties
from checkmate.torch.graph.optimizer_ops import GRADIENT_READY, UPDATE
from checkmate.torch.graph.storages import leaves, storage_key


def apply_optimizer_in_backward(module: fx.GraphModule) -> None:
    """Make an update of every gradient that is marked, and move every mutation as early as it may be.

    AOTAutograd puts what overwrites an input at the end of the graph, and the markers stand there too: all
    gradients would live until then. A mutation may go before all that does not read what it
    overwrites; so gradients are consumed one by one.

    Args:
        module: The graph of a whole step as AOTAutograd made it; changed in place. Instead of what the markers
            returned, it returns the loss again: with dynamic shapes AOTAutograd wants a tensor of every output.
    """
    graph = module.graph
    markers = graph.find_nodes(op="call_function", target=GRADIENT_READY)
    loss = [out for out in graph.output_node().args[0] if out not in markers][-1]  # type: ignore[union-attr]
    for marker in markers:
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
    """Place each mutation right after its operands and the last of those that must come before it."""
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
            continue  # read again after it: it stays where it is
        last = max([*before, *node.all_input_nodes], key=order.__getitem__)
        if last.op != "placeholder":
            last.append(node)


def _moves(node: fx.Node) -> bool:
    known = op_properties(node)
    return known.mutates == (0,) and not known.sequenced


def _storages(nodes: Iterable[fx.Node]) -> set[int]:
    return {storage_key(t) for node in nodes for t in leaves(node.meta.get("val"))}
