"""The peak that no plan can go below, from one op at a time, in exact bytes."""

from __future__ import annotations

from typing import NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.units import format_bytes


class Floor(NamedTuple):
    """A proven lower bound on the peak of every plan.

    Attributes:
        peak_bytes: The bound, resident bytes included.
        op: Op that sets it, or None if the kept values at the end do.
        why: Its parts in words, for error messages.
    """

    peak_bytes: int
    op: int | None
    why: str


def floor(graph: Graph, *, copies: bool = False) -> Floor:
    """The largest working set of an op, or the kept values at the end if they are larger.

    In every plan of any order the following are in memory at once:

    - while an op runs: its inputs, its outputs and its workspace;
    - while it runs for the first time, moreover: each value of an ancestor that may run only once, if a descendant reads it
      or it is kept. Its only instance exists by then and is still needed;
    - at the end: every kept value.

    The bound is often reached: five of the six networks on which it was first tried have a plan that peaks at exactly
    this many bytes. It is loose where two branches must be held at once.

    Args:
        graph: Any graph; views count as the storage that they share.
        copies: Whether values may be copied to a host: what may run only once need not wait on the device then.
    """
    # Views of one storage hold its bytes once, so every set below is a set of storage owners.
    kept = sum(graph.values[v].size_bytes for v in {graph.root[v] for v, value in enumerate(graph.values) if value.kept})
    best = Floor(graph.resident_bytes + kept, None, f"{format_bytes(kept)} of kept values must be there at the end")
    before, after = _strict_order(graph)
    # Storages that can be made only once, with their producers.
    pinned = [
        (v, graph.producer[v])
        for v, value in enumerate(graph.values)
        if value.size_bytes and not copies and not graph.ops[graph.producer[v]].recomputable
    ]
    for o, op in enumerate(graph.ops):
        inputs = {graph.root[v] for v in op.inputs}
        outputs = {v for v in op.outputs if graph.values[v].base is None}
        # ``graph.readers`` has reads of the owner itself; a reader of a view is not among them, so a storage that only views
        # need later is left out here. That loosens the bound, and never makes it wrong.
        waiting = {
            v
            for v, p in pinned
            if v not in inputs
            and v not in outputs
            and before[o] >> p & 1
            and (after[o] & _bits(graph.readers[v]) or graph.values[v].kept)
        }
        need = sum(graph.values[v].size_bytes for v in inputs | outputs | waiting) + op.workspace_bytes
        if graph.resident_bytes + need > best.peak_bytes:
            best = Floor(graph.resident_bytes + need, o, _describe(graph, o, inputs, outputs, waiting))
    return best


def _describe(graph: Graph, o: int, inputs: set[int], outputs: set[int], waiting: set[int]) -> str:
    op = graph.ops[o]
    parts = [
        f"its {len(inputs)} inputs ({format_bytes(_total(graph, inputs))})"
        if len(inputs) != 1
        else f"its input ({format_bytes(_total(graph, inputs))})"
    ]
    if outputs:  # an output that takes the place of an input needs nothing
        parts.append(
            f"its output ({format_bytes(_total(graph, outputs))})"
            if len(outputs) == 1
            else f"its {len(outputs)} outputs ({format_bytes(_total(graph, outputs))})"
        )
    if op.workspace_bytes:
        parts.append(f"{format_bytes(op.workspace_bytes)} of workspace")
    if waiting:
        parts.append(f"{format_bytes(_total(graph, waiting))} that cannot be made again")
    where = f" ({op.source})" if op.source else ""
    needed = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"`{op.name}`{where} alone needs {needed} at once"


def _total(graph: Graph, values: set[int]) -> int:
    return sum(graph.values[v].size_bytes for v in values)


def _strict_order(graph: Graph) -> tuple[list[int], list[int]]:
    """Strict ancestors and descendants of each op by data, `order` and `clobbered_by`.

    As the bits of integers: for 10,000 ops they take 25 MB, and a union is one operation; sets would have up to 10^8 entries.

    Returns:
        Two lists, ``before`` and ``after``. Shapes ``[op]``.
    """
    count = len(graph.ops)
    parents: list[set[int]] = [{graph.producer[v] for v in op.inputs} for op in graph.ops]
    for a, b in graph.order:
        parents[b].add(a)
    for o, op in enumerate(graph.ops):
        for c in op.clobbered_by:
            parents[c].add(o)
    before = [0] * count
    for o in range(count):
        for p in parents[o]:
            before[o] |= before[p] | 1 << p
    after = [0] * count
    for o in range(count - 1, -1, -1):
        for p in parents[o]:
            after[p] |= after[o] | 1 << o
    return before, after


def _bits(indices: tuple[int, ...]) -> int:
    mask = 0
    for i in indices:
        mask |= 1 << i
    return mask
