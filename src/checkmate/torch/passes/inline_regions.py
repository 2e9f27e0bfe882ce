"""Inline ``nested_compile_region`` calls into the graph that calls them."""

from __future__ import annotations

import operator

from torch import fx

from checkmate.torch._compat.dispatch import invoke_subgraph


def inline_regions(gm: fx.GraphModule) -> int:
    """Replace every call of a ``nested_compile_region`` in a Dynamo graph by the ops of its body.

    AOTAutograd would partition each body separately and identically at every call. A plan over the inlined ops can keep
    values in one layer that it recomputes in the next.

    Args:
        gm: The graph module; changed in place.

    Returns:
        The number of calls replaced.
    """
    calls = 0
    for module in reversed([m for m in gm.modules() if isinstance(m, fx.GraphModule)]):
        found = module.graph.find_nodes(op="call_function", target=invoke_subgraph)
        for call in found:
            _inline(module, call)
        if found:
            module.graph.lint()
            module.recompile()
        calls += len(found)
    return calls


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
