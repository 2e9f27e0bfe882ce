"""Values of a joint graph: allocations, views of them, and the FX node of each.

A value of `checkmate.core.graph.Graph` that allocates is a storage; a view of it has 0 bytes and keeps the storage alive. FX
graphs have tensors instead, several per storage, and aliasing has to be recovered. The recovery is exact because fake tensors
share storages as the real ones will: two tensors alias if and only if their storage keys are equal. Without it a view would count
as a second allocation, or be freed separately from its base.

Cases in which equal keys alone would mislead:

- A parameter, buffer, input or constant is allocated before the step; it and its views cost nothing (`_EXTERNAL`).
- Two calls of one nested region are traced once and show the same fake results. Each call allocates at run time: a result shares
  storage with its op's inputs or not at all, even if an earlier op had the same key.
- An op that writes in place returns the storage of its input, and is a view of it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import fx

from checkmate.core.graph import Value
from checkmate.torch._compat.aot import is_tangent
from checkmate.torch._compat.dispatch import HigherOrderOperator
from checkmate.torch.graph.host_weights import weights_on_host
from checkmate.torch.graph.op_properties import UNDEFINED, used_inputs
from checkmate.torch.graph.storages import is_scalar, leaves, storage_bytes, storage_key

_EXTERNAL = -1  # owner of a storage that exists before the step


class Values:
    """Values in the order in which ops write them."""

    def __init__(self) -> None:
        self.of_node: dict[fx.Node, int] = {}
        self.scalar_tangents: set[int] = set()
        self._inside: dict[fx.Node, list[int]] = {}  # node -> all values that its op writes
        self._owner: dict[int, int] = {}  # storage key -> value that allocates it
        self._made: list[tuple[str, int, int | None]] = []  # name, bytes, base of each value

    def root(self, value: int) -> int:
        """The value that allocates the storage of a value: the value itself, or its base."""
        base = self._made[value][2]
        return value if base is None else base

    def all(self, kept: set[int], on_host: set[int]) -> tuple[Value, ...]:
        """All values; those in ``kept`` must be live at the end of the step, and the host has those in ``on_host`` before it."""
        facts = ((v, name, size, base) for v, (name, size, base) in enumerate(self._made))
        return tuple(Value(name, size, base=base, kept=v in kept, on_host=v in on_host) for v, name, size, base in facts)

    def add_external(self, nodes: Sequence[fx.Node]) -> int:
        """Record all storages that exist before the step; return their bytes on the device, each storage once."""
        given = [node for node in nodes if node.op in ("placeholder", "get_attr") and not is_tangent(node)]
        sizes = {storage_key(t): storage_bytes(t) for node in given for t in leaves(node.meta.get("val"))}
        self._owner.update(dict.fromkeys(sizes, _EXTERNAL))
        for node in weights_on_host(nodes[0].graph) if nodes else ():
            sizes[storage_key(node.meta["val"])] = 0
        return sum(sizes.values())

    def outputs(self, node: fx.Node, getitems: Sequence[fx.Node]) -> tuple[int, ...]:
        """Add the values of an op, one per output tensor; outputs without readers are allocated too."""
        names = {_path(g, node): g.name for g in reversed(getitems)}
        # A higher-order op never returns views of its inputs. An equal key comes from another call with the same trace.
        sources = [] if isinstance(node.target, HigherOrderOperator) else node.all_input_nodes
        shared = {storage_key(t) for read in sources for t in leaves(read.meta.get("val"))}
        made: dict[tuple[int, ...], int] = {}
        for path, tensor in _tensors(node.meta.get("val")):
            if storage_key(tensor) not in shared:
                self._owner.pop(storage_key(tensor), None)  # a new allocation, even if an earlier op had this key
                shared.add(storage_key(tensor))
            made[path] = self._add(tensor, names.get(path, ".".join(map(str, (node.name, *path)))))
        if not made:
            made[()] = len(self._made)
            self._made.append((node.name, 0, None))
        self.of_node.update((each, made[path]) for each in (node, *getitems) if (path := _path(each, node)) in made)
        self._inside[node] = list(made.values())
        return tuple(made.values())

    def tangents(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """Add the tangents: values that the boundary writes."""
        made: list[int] = []
        for node in [node for node in nodes if is_tangent(node) and not node.meta.get(UNDEFINED)]:
            for tensor in leaves(node.meta.get("val")):
                self.of_node[node] = self._add(tensor, node.name)
                made.append(self.of_node[node])
                if is_scalar(tensor):
                    self.scalar_tangents.add(made[-1])
        return tuple(made)

    def read_by(self, node: fx.Node) -> tuple[int, ...]:
        """Values that an op reads, without duplicates."""
        # A node with several outputs may be passed as one tuple.
        read = ([self.of_node[n]] if n in self.of_node else self._inside.get(n, []) for n in used_inputs(node))
        return tuple(dict.fromkeys(itertools.chain.from_iterable(read)))

    def _add(self, tensor: torch.Tensor, name: str) -> int:
        value = len(self._made)
        owner = self._owner.setdefault(storage_key(tensor), value)
        if owner == value:
            self._made.append((name, storage_bytes(tensor), None))
        else:
            self._made.append((name, 0, None if owner == _EXTERNAL else owner))
        return value


def _tensors(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], torch.Tensor]]:
    """Path and tensor of every tensor in a nested result; a path is the indices of successive getitems."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (list, tuple)):
        for position, inside in enumerate(value):
            yield from _tensors(inside, (*path, position))


def _path(node: fx.Node, producer: fx.Node) -> tuple[int, ...]:
    """Path of a chain of getitems through the result of ``producer``."""
    path: list[int] = []
    while node is not producer:
        path.append(node.args[1])  # type: ignore[arg-type]
        node = node.args[0]  # type: ignore[assignment]
    return tuple(reversed(path))
