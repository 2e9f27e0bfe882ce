"""The peak that no plan can go below, from one op at a time, in exact bytes."""

from __future__ import annotations

from typing import NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes


class Floor(NamedTuple):
    """A proven lower bound on the peak of every plan: resident bytes included, with the op that sets it and the reason in words.

    The op is None if the kept values at the end set the bound.
    """

    peak_bytes: int
    op: int | None
    why: str


def floor(graph: Graph, *, copies: bool = False) -> Floor:
    """The largest working set of an op, or the kept values at the end if they are larger.

    In every plan of any order these are in memory at once:

    - while an op runs: its inputs, its outputs and its workspace;
    - while the op runs for the first time, also each value of an ancestor that may run only once, if a descendant reads the
      value or it is kept. The only instance exists by then and is still needed;
    - at the end: every kept value; with ``copies`` not those that are on the host before the step.

    The bound is often reached: five of the six networks on which it was first tried have a plan that peaks at exactly
    this many bytes. It is loose if two branches must be held at once.
    """
    # Views of one storage hold its bytes once. Therefore every set below is a set of storage owners.
    ends = {graph.root[v] for v, value in enumerate(graph.values) if value.kept and not (copies and value.on_host)}
    kept = sum(graph.values[v].size_bytes for v in ends)
    pinned = _Pinned(graph, copies=copies)
    worst, most = None, kept
    for o, op in enumerate(graph.ops):
        own = set[int]().union(*_storages(graph, o))
        need = sum(graph.values[v].size_bytes for v in own) + op.workspace_bytes + pinned.bytes_at(o, own)
        if need > most:
            worst, most = o, need
    if worst is None:
        return Floor(graph.resident_bytes + kept, None, f"{format_bytes(kept)} of kept values must be there at the end")
    inputs, outputs = _storages(graph, worst)
    why = _describe(graph, worst, inputs, outputs, pinned.at(worst, inputs | outputs))
    return Floor(graph.resident_bytes + most, worst, why)


def _storages(graph: Graph, o: int) -> tuple[set[int], set[int]]:
    """Storages that an op reads, and storages that it makes."""
    op = graph.ops[o]
    return {graph.root[v] for v in op.inputs}, {v for v in op.outputs if graph.values[v].base is None}


class _Pinned:
    """Values that are made only once, and the ops during which they are surely live.

    Sets are the bits of integers, so that a union is one operation. Only the 4096 largest values are counted: two bits for each
    value and op are 100 MB on 100,000 ops. The other values would only raise the bound.
    """

    def __init__(self, graph: Graph, *, copies: bool) -> None:
        once = [v for v, x in enumerate(graph.values) if x.size_bytes and not graph.ops[graph.producer[v]].recomputable]
        if copies:  # the values may be on the host
            once = []
        once = sorted(once, key=lambda v: (-graph.values[v].size_bytes, v))[:4096]
        self._size = [graph.values[v].size_bytes for v in once]
        self._bit = {v: 1 << i for i, v in enumerate(once)}
        self._sums: dict[int, int] = {}
        count = len(graph.ops)
        made, read = [0] * count, [0] * count
        kept = sum(bit for v, bit in self._bit.items() if graph.values[v].kept)
        for v, bit in self._bit.items():
            made[graph.producer[v]] |= bit
            # ``graph.readers`` has only reads of the owner itself, not reads of its views. A storage that only views need
            # later is therefore left out, which loosens the bound and never makes it wrong.
            for reader in graph.readers[v]:
                read[reader] |= bit
        # Made by a strict ancestor of each op, and read by a strict descendant.
        before, after = [0] * count, [kept] * count
        if once:
            parents = parents_of(graph)
            for o in range(count):
                for p in parents[o]:
                    before[o] |= before[p] | made[p]
            for o in range(count - 1, -1, -1):
                for p in parents[o]:
                    after[p] |= after[o] | read[o]
        self._there = [b & a for b, a in zip(before, after, strict=True)]

    def at(self, o: int, own: set[int]) -> set[int]:
        """Values live while an op first runs, besides its own storages."""
        return {v for v, bit in self._bit.items() if self._there[o] & bit and v not in own}

    def bytes_at(self, o: int, own: set[int]) -> int:
        """Bytes of these values."""
        there = self._there[o]
        if there not in self._sums:  # neighbours have the same values
            self._sums = {there: sum(size for i, size in enumerate(self._size) if there >> i & 1)}
        counted = sum(self._size[self._bit[v].bit_length() - 1] for v in own if self._bit.get(v, 0) & there)
        return self._sums[there] - counted


def _describe(graph: Graph, o: int, inputs: set[int], outputs: set[int], waiting: set[int]) -> str:
    op = graph.ops[o]

    def total(values: set[int]) -> str:
        return format_bytes(sum(graph.values[v].size_bytes for v in values))

    def some(noun: str, values: set[int]) -> str:
        return f"its {noun} ({total(values)})" if len(values) == 1 else f"its {len(values)} {noun}s ({total(values)})"

    parts = [some("input", inputs)]
    if outputs:  # an output that takes the place of an input needs nothing
        parts.append(some("output", outputs))
    if op.workspace_bytes:
        parts.append(f"{format_bytes(op.workspace_bytes)} of workspace")
    if waiting:
        parts.append(f"{total(waiting)} that cannot be made again")
    needed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    beside = f", beside {format_bytes(graph.resident_bytes)} that no plan can change" if graph.resident_bytes else ""
    return f"{name_of(graph, o)} alone needs {needed} at once{beside}"


def name_of(graph: Graph, o: int) -> str:
    """Name of an op, with its place in the source if that is known."""
    op = graph.ops[o]
    return f"`{op.name}` ({op.source})" if op.source else f"`{op.name}`"


def parents_of(graph: Graph) -> list[set[int]]:
    """For each op, the ops whose first computation comes before its own.

    Data, `order` and `clobbered_by` imply this: an op that overwrites another's input comes after it. All three hold in every
    plan, and leaving one out would only loosen a bound.
    """
    parents: list[set[int]] = [{graph.producer[v] for v in op.inputs} for op in graph.ops]
    for a, b in graph.order:
        parents[b].add(a)
    for o, op in enumerate(graph.ops):
        for c in op.clobbered_by:
            parents[c].add(o)
    return parents
