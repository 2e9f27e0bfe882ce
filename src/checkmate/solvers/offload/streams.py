"""Values on the host before the step: which are on the device when it begins, and when the others are fetched.

The search over evictions knows no copies. It plans a graph in which the op of such a value may run again, at a price for the time
of its copy (`Streams.problem`). Values on the host and activations then compete for the same bytes. Each computation becomes a
`Fetch`, except for the first of a value that is there from the beginning. `prefetch` then issues each fetch as early as the
budget allows; the bytes that a search leaves free for this are the ring of buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random

from msgspec import structs

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, HostMemory, Plan, Step, with_frees
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, MinBudget
from checkmate.core.simulate import simulate
from checkmate.solvers.bounds.floor import floor
from checkmate.solvers.evict.smallest import smallest_peak
from checkmate.solvers.reductions.unread import needed_steps


@dataclass(frozen=True)
class Streams:
    """A way to search for plans of a folded problem whose graph has values on the host.

    Attributes:
        folded: The problem without its host.
        host: The host.
        share: Share of the bytes left by kept values that values on the device take when the step begins.
        price: Cost of a copy in the search, as a share of its time: low if the bus idles, high if the step waits for it.
        ring: Share of the budget above resident bytes that the search leaves free for copies under way.
        last: Whether values that are read last, not first, are on the device when the step begins.
    """

    folded: Problem
    host: HostMemory
    share: float = 0.0
    price: float = 0.1
    ring: float = 0.0
    last: bool = False

    @cached_property
    def ops(self) -> dict[int, int]:
        """Value of each op of a value on the host, in the order of their first readers."""
        graph = self.folded.graph
        found = [v for v, value in enumerate(graph.values) if value.on_host]
        found.sort(key=lambda v: (min(graph.readers[v], default=len(graph.ops)), v))
        return {graph.producer[v]: v for v in found}

    @cached_property
    def stay(self) -> list[int]:
        """Ops of the values that are never fetched, since the host does not hold all."""
        return self._first(sum(self._size(o) for o in self._read) - self.host.bytes, up_to=False)

    @cached_property
    def fetched_bytes(self) -> int:
        """The most bytes on the host of values that a plan may fetch."""
        return sum(self._size(o) for o in self._read if o not in self.stay)

    @cached_property
    def there(self) -> list[int]:
        """Ops of the values on the device when the step begins: those read first, which are also read last in a training step."""
        graph = self.folded.graph
        kept = sum(v.size_bytes for v in graph.values if v.kept and not v.on_host)
        room = self.share * (self._budget_bytes - graph.resident_bytes - kept)
        return sorted({*self.stay, *self._first(room, up_to=True)})

    def _first(self, most_bytes: float, *, up_to: bool) -> list[int]:
        chosen: list[int] = []
        for o in self._read:
            if most_bytes > 0 and (not up_to or self._size(o) <= most_bytes):
                chosen.append(o)
                most_bytes -= self._size(o)
        return chosen

    @property
    def _read(self) -> list[int]:
        """Ops of the values that another op reads: the others need not be on the device at all."""
        return [o for o, v in self.ops.items() if self.folded.graph.readers[v]][:: -1 if self.last else 1]

    def _size(self, o: int) -> int:
        return self.folded.graph.values[self.ops[o]].size_bytes

    @property
    def on_demand(self) -> frozenset[int]:
        """Ops without a stage in the search: what they make is fetched for its reader."""
        return frozenset(self.ops).difference(self.there)

    @cached_property
    def problem(self) -> Problem:
        """The problem of the search; the folded one if nothing is on the host."""
        graph, there = self.folded.graph, set(self.there)
        if not self.ops:
            return self.folded
        ops, values = list(graph.ops), list(graph.values)
        for o, v in self.ops.items():
            cost = round(self.price * self.host.in_ns(values[v].size_bytes))
            ops[o] = structs.replace(ops[o], cost=cost, recomputable=o not in self.stay, phase="forward")
            values[v] = structs.replace(values[v], on_host=False, kept=o in there)
        order = tuple(pair for pair in graph.order if there.issuperset(self.ops.keys() & set(pair)))
        changed = structs.replace(graph, ops=tuple(ops), values=tuple(values), order=order)
        return Problem(changed, self._budget_bytes, self.folded.recompute, self.folded.reorder)

    @property
    def _budget_bytes(self) -> int:
        room = self.folded.budget_bytes - self.folded.graph.resident_bytes
        return self.folded.budget_bytes - int(self.ring * max(0, room))

    def near(self, random: Random) -> Streams:
        """Streams that differ a little."""
        draw = random.uniform
        ring = min(0.5, self.ring * 2 ** draw(-1, 1) + draw(0, 0.003))
        return replace(
            self, share=min(1.0, max(0.0, self.share + draw(-0.1, 0.1))), price=self.price * 2 ** draw(-1, 1), ring=ring
        )

    def fetched(self, steps: Iterable[Step]) -> list[Step]:
        """Steps of the search's graph as those of the folded graph."""
        seen: set[int] = set()
        found: list[Step] = []
        for step in steps:
            if isinstance(step, Compute) and step.op in self.ops:
                again = step.op in seen or step.op in self.on_demand
                seen.add(step.op)
                found.append(Fetch(self.ops[step.op]) if again else step)
            else:
                found.append(step)
        # Views that no op reads have to be made, too.
        return [*found, *(Fetch(self.ops[o]) for o in sorted(self.on_demand - seen))]


def smallest_with_fetches(
    problem: Problem, limits: Limits | None = None, *, near: int = 0, keep_interrupted: bool = False
) -> MinBudget:
    """As `smallest_peak`, where values on the host need not be there when the step begins."""
    assert problem.host is not None
    streams = Streams(problem.without_host(), problem.host)
    found = smallest_peak(streams.problem, limits, near=near, keep_interrupted=keep_interrupted)
    needed = needed_steps(streams.problem, [Compute(o) for o in found.plan.order])
    plan = with_frees(problem.graph, streams.fetched(needed), problem.host)
    lowest = floor(problem.graph, copies=True)
    return structs.replace(
        found,
        plan=plan,
        peak_bytes=simulate(problem.graph, plan).peak_bytes,
        floor_bytes=lowest.peak_bytes,
        why=lowest.why,
        binding_op="" if lowest.op is None else problem.graph.ops[lowest.op].name,
    )


def prefetch(graph: Graph, plan: Plan, budget_bytes: int) -> Plan:
    """The plan with each fetch of a value that was on the host before the step as early as the budget allows.

    For these frees, and fetches in this order, no earlier places exist: each fetch goes back until its bytes do not fit, or to
    the fetch before it, which came as early as it could.
    """
    held = simulate(graph, plan).bytes
    moved: dict[int, list[Fetch]] = {}
    gone: dict[int, int] = {}  # value -> step after the last that names it: its former instance is needed until then
    steps: list[Step] = []
    earliest = 0
    for p, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            for v in (*graph.ops[step.op].outputs, *graph.ops[step.op].inputs):
                gone[v] = p + 1
            if any(graph.values[v].on_host for v in graph.ops[step.op].outputs):
                earliest = p + 1
        elif isinstance(step, Fetch) and graph.values[step.value].on_host:
            size = graph.values[step.value].size_bytes
            first, q = max(earliest, gone.get(step.value, 0)), p
            while q > first and held[q - 1] + size <= budget_bytes:
                q -= 1
            # Bytes are those after a step, and other fetches may have come to this place.
            before = (held[q - 1] if q else graph.resident_bytes) + sum(
                graph.values[s.value].size_bytes for s in moved.get(q, ())
            )
            q += q < p and before + size > budget_bytes
            held[q:p] += size
            moved.setdefault(q, []).append(step)
            earliest = q
        else:
            gone[step.value] = p + 1
    for p, step in enumerate(plan.steps):
        steps += moved.get(p, ())
        if not (isinstance(step, Fetch) and graph.values[step.value].on_host):
            steps.append(step)
    return Plan(tuple(steps), plan.graph_digest, plan.host)
