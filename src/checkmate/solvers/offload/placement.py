"""Times of a reference, a sequence of computations without copies, and the places of copies in it.

A computation that is added later only delays the steps after it: the time between the step that issues a copy and the step that
waits for it can only grow. Copies that are hidden in the reference therefore stay hidden.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.plan import HostMemory


class Gap(NamedTuple):
    """The longest time between two uses of a value."""

    value: int
    made_ns: int  # end of the value's first computation; copies can begin then
    left_ns: int  # end of the last use before the gap
    needed_ns: int  # begin of the first use after the gap
    stage: int  # stage that needs the value again


class Placed(NamedTuple):
    """A value that is away for some stages."""

    value: int
    gone_at: int  # first stage before which its copy to the host is done and it can be freed
    fetch_at: int  # stage before which its copy back is issued


@dataclass(frozen=True, slots=True)
class Reference:
    """A sequence of computations with its times."""

    sequence: tuple[int, ...]
    targets: tuple[int, ...]  # ops in the order of their first computations, one for each stage; not those of values on the host
    begins: tuple[int, ...]  # time at which each stage begins, and the end; shape [stage + 1]
    gaps: dict[int, Gap]  # longest gap of each value that can be copied

    @classmethod
    def of(cls, graph: Graph, sequence: Sequence[int]) -> Reference:
        """The reference of a sequence of a graph whose views are folded."""
        now = 0
        done: set[int] = set()
        targets: list[int] = []
        begins = [0]  # a stage ends with the first computation of its target
        made: dict[int, int] = {}
        last: dict[int, int] = {}  # value -> end of its last use
        best: dict[int, Gap] = {}
        # A view that folding left is tied to its place and keeps its base's storage.
        viewed = {graph.root[v] for v, value in enumerate(graph.values) if value.base is not None}
        copyable = (value.base is None and value.size_bytes and not value.on_host for value in graph.values)
        free = {v for v, may in enumerate(copyable) if may and v not in viewed}

        def use(v: int, begin: int, end: int) -> None:
            if v not in free:
                return
            if v in last:
                gap = Gap(v, made[v], last[v], begin, len(targets))
                if v not in best or gap.needed_ns - gap.left_ns > best[v].needed_ns - best[v].left_ns:
                    best[v] = gap
            made.setdefault(v, end)
            last[v] = end

        for o in sequence:
            op = graph.ops[o]
            end = now + op.cost
            for v in dict.fromkeys(op.inputs):
                use(v, now, end)
            for v in op.outputs:
                use(v, now, end)
            now = end
            if o not in done and not any(graph.values[v].on_host for v in op.outputs):
                done.add(o)
                targets.append(o)
                begins.append(now)
        for v, value in enumerate(graph.values):
            if value.kept:
                use(v, now, now)
        return cls(tuple(sequence), tuple(targets), tuple(begins), best)


def place(reference: Reference, chosen: Iterable[int], host: HostMemory, size: Sequence[int], speed: float) -> list[Placed]:
    """Places of the copies of some values: copies to the host as early, copies back as late as the bus allows.

    Copies to the host are made in the order in which the values are computed, copies back in the order in which they are needed.
    Values that would be away for no stage are left out. At a `speed` above 1 fewer bytes are held, and steps wait for copies.
    """
    gaps = [reference.gaps[v] for v in chosen if v in reference.gaps]
    begins = reference.begins
    gone: dict[int, int] = {}
    engine = 0
    for gap in sorted(gaps, key=lambda gap: (gap.made_ns, gap.value)):
        engine = max(engine, gap.made_ns) + int(host.out_ns(size[gap.value]) / speed)
        gone[gap.value] = bisect_left(begins, max(engine, gap.left_ns))
    placed: list[Placed] = []
    latest = begins[-1]
    for gap in sorted(gaps, key=lambda gap: (-gap.needed_ns, -gap.stage, gap.value)):
        begin = min(latest, gap.needed_ns) - int(host.in_ns(size[gap.value]) / speed)
        fetch_at = min(gap.stage, bisect_right(begins, begin) - 1)
        if gone[gap.value] < fetch_at:
            placed.append(Placed(gap.value, gone[gap.value], fetch_at))
            latest = begin
    return placed[::-1]
