"""Read sizes from a graph's inputs instead of from the tensors that it computes.

With dynamic shapes AOTAutograd asks intermediate tensors for their sizes (``aten.sym_size``). A plan would have to hold such a
tensor, or compute it again, for a number that is known from the inputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.symbolic import emit_expression
from checkmate.torch.graph.symbolic import is_size_arithmetic, reads_size


def read_sizes_from_inputs(graph: fx.Graph) -> None:
    """Replace sizes of computed tensors by equal numbers that are computed from sizes of inputs alone.

    Args:
        graph: A joint graph; changed in place.
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
