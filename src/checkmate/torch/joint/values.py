"""The values of a joint graph: storages, views of them, and which node stands for which."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import fx

from checkmate.core.graph import Value
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import HigherOrderOperator
from checkmate.torch.graph.op_properties import used_inputs
from checkmate.torch.graph.storages import SCALAR_TANGENT_BYTES, leaves, storage_bytes, storage_key

_EXTERNAL = -1  # storage of a parameter, buffer, batch or constant: resident


class Values:
    """Values in the order in which ops make them.

    Attributes:
        of_node: Value that a node stands for.
        scalar_tangents: Tangents of scalars.
    """

    def __init__(self) -> None:
        self.of_node: dict[fx.Node, int] = {}
        self.scalar_tangents: set[int] = set()
        self._inside: dict[fx.Node, list[int]] = {}  # node that returns several -> its values
        self._owner: dict[int, int] = {}  # storage -> value that owns it
        self._made: list[tuple[str, int, int | None]] = []

    def root(self, value: int) -> int:
        """Value that owns the storage of a value."""
        base = self._made[value][2]
        return value if base is None else base

    def all(self, kept: set[int]) -> tuple[Value, ...]:
        """The values, those of ``kept`` as kept."""
        return tuple(Value(name, size, base=base, kept=v in kept) for v, (name, size, base) in enumerate(self._made))

    def add_external(self, nodes: Sequence[fx.Node]) -> int:
        """Note every storage that is there before the step; return their bytes."""
        total = 0
        for node in nodes:
            if node.op not in ("placeholder", "get_attr") or is_tangent(node):
                continue
            for tensor in leaves(node.meta.get("val")):
                if storage_key(tensor) not in self._owner:
                    self._owner[storage_key(tensor)] = _EXTERNAL
                    total += storage_bytes(tensor)
        return total

    def outputs(self, node: fx.Node, getitems: Sequence[fx.Node]) -> tuple[int, ...]:
        """Make the values of an op, also of outputs that nobody reads."""
        names = {_path(g, node): g.name for g in reversed(getitems)}
        # Calls of one nested region are traced once: later ones show the same storages, and make new ones.
        sources = [] if isinstance(node.target, HigherOrderOperator) else node.all_input_nodes
        shared = {storage_key(t) for read in sources for t in leaves(read.meta.get("val"))}
        made: dict[tuple[int, ...], int] = {}
        for path, tensor in _tensors(node.meta.get("val")):
            if storage_key(tensor) not in shared:
                self._owner.pop(storage_key(tensor), None)
                shared.add(storage_key(tensor))
            made[path] = self._add(tensor, names.get(path, ".".join(map(str, (node.name, *path)))))
        if not made:  # a number that other ops read
            made[()] = len(self._made)
            self._made.append((node.name, 0, None))
        for each in (node, *getitems):
            value = made.get(_path(each, node))
            if value is not None:
                self.of_node[each] = value
        self._inside[node] = list(made.values())
        return tuple(made.values())

    def tangents(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """Make the values that the boundary writes."""
        made: list[int] = []
        for node in nodes:
            if not is_tangent(node):
                continue
            for tensor in leaves(node.meta.get("val")):
                self.of_node[node] = self._add(tensor, node.name)
                made.append(self.of_node[node])
                if storage_bytes(tensor) <= SCALAR_TANGENT_BYTES:
                    self.scalar_tangents.add(made[-1])
        return tuple(made)

    def read_by(self, node: fx.Node) -> tuple[int, ...]:
        """Values that an op reads, each once."""
        found: dict[int, None] = {}
        for read in used_inputs(node):
            if read in self.of_node:
                found[self.of_node[read]] = None
            else:  # a tuple read as a whole
                found.update(dict.fromkeys(self._inside.get(read, ())))
        return tuple(found)

    def _add(self, tensor: torch.Tensor, name: str) -> int:
        value = len(self._made)
        owner = self._owner.setdefault(storage_key(tensor), value)
        if owner == value:
            self._made.append((name, storage_bytes(tensor), None))
        else:
            self._made.append((name, 0, None if owner == _EXTERNAL else owner))
        return value


def _tensors(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """(path, tensor) of every tensor in what an op returns."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for position, inside in enumerate(value):
            yield from _tensors(inside, (*path, position))


def _path(node: fx.Node, producer: fx.Node) -> tuple[int, ...]:
    """Where in what ``producer`` returns a chain of getitems ends."""
    path: list[int] = []
    while node is not producer:
        path.append(node.args[1])  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return tuple(reversed(path))
