"""Mutations: which ops of a graph overwrite which storages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from torch import fx

from checkmate.torch.graph.op_properties import OpProperties, used_inputs
from checkmate.torch.graph.storages import leaves, storage_key

Mutators = Mapping[int, Sequence[int]]
"""Storage key to the indices of the ops that overwrite it, ascending."""


def mutators(ops: Iterable[tuple[int, fx.Node, OpProperties]]) -> Mutators:
    """Find the storages that ops overwrite in place.

    Args:
        ops: Index, node and properties of each op, ascending by index.
    """
    found: dict[int, list[int]] = {}
    for o, node, properties in ops:
        for position in properties.mutates:
            target = node.args[position] if position < len(node.args) else None
            for written in target if isinstance(target, (list, tuple)) else (target,):
                if isinstance(written, fx.Node):
                    for tensor in leaves(written.meta.get("val")):
                        found.setdefault(storage_key(tensor), []).append(o)
    return found


def overwriters(node: fx.Node, known: Mutators) -> Iterator[int]:
    """Indices of ops that overwrite a storage that a node reads; before the node or after it.

    The order of the original program must be kept between them and the node: a node that ran on the other side of an
    overwriter would read other numbers.

    Args:
        node: The reader.
        known: The ops that overwrite each storage.
    """
    for read in used_inputs(node):
        for tensor in leaves(read.meta.get("val")):
            yield from known.get(storage_key(tensor), ())
