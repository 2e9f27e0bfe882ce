"""An independent check of a plan: no code shared with `simulate`, `Plan.from_order` or a solver.

This check derives memory from lifetimes: for every storage, the steps from its allocation until the
last value that shares it is freed. `simulate` keeps a running balance instead; the two must agree.

The time of a plan with copies is a longest path over computations and copies; each node waits for its predecessors.
`simulate` advances clocks instead.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise
from typing import Literal, NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Fetch, Free, HostMemory, Offload, Plan, Step
from checkmate.core.units import format_bytes

Rule = Literal[
    "graph", "index", "read", "free", "once", "missing", "kept", "order", "clobber", "budget", "phase", "reorder",
    "offload", "fetch", "discard", "host", "cost", "size",
]  # fmt: skip


class Violation(NamedTuple):
    """One broken rule.

    Attributes:
        rule: Which rule.
        step: The step that breaks it, or the plan's length for a rule about the end.
        message: The fault in words.
    """

    rule: Rule
    step: int
    message: str


def validate(
    graph: Graph,
    plan: Plan,
    budget_bytes: int | None = None,
    *,
    recompute: Literal["all", "forward"] = "all",
    reorder: bool = True,
    host: HostMemory | None = None,
    cost: int | None = None,
) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan; empty for a valid plan.

    Args:
        graph: The graph.
        plan: The plan.
        budget_bytes: The most bytes that the plan may hold at any step, resident bytes included.
        recompute: ``"forward"`` if only forward ops, and `Graph.view_ops`, may be computed again.
        reorder: False if first computations must follow the graph's own order, `Graph.view_ops` apart.
        host: The memory that copies may fill, and the bus that they are timed on; by default the plan's.
        cost: The claimed cost of the plan: with copies, the nanoseconds after which the step ends.

    Returns:
        The violations, in the order of their steps.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> validate(chain, Plan((Compute(0), Free(0), Compute(1))))[0].message
        "op 1 ('1') reads value 0 ('0'), which is not live"
        >>> validate(chain, Plan.from_order(chain, [0, 1]), budget_bytes=5)[0].rule
        'budget'
    """
    digest = plan.graph_digest.partition("+")[0]
    if digest and not graph.has_digest(digest):
        return (Violation("graph", 0, "the plan was made for another graph"),)
    if excess := plan.excess(graph):
        return (Violation("size", 0, excess),)
    found: list[Violation] = []
    table = _Table(graph, found)
    for step_index, step in enumerate(plan.steps):
        table.take(step_index, step)
    end = len(plan.steps)
    table.finish(end)
    _check_counts(graph, table.runs, end, found, recompute)
    _check_sequence(graph, table.runs, found, reorder)
    if budget_bytes is not None:
        found += _check_budget(graph, plan, table, budget_bytes)
    bus = host or plan.host
    if bus is not None:
        found += _check_host(graph, table, bus.bytes, end)
    if cost is not None and not found:
        found = _check_cost(graph, plan, table, bus, cost)
    return tuple(sorted(found, key=lambda violation: violation.step))


class _Table:
    """The instance that every value names, and the lifetime of every storage."""

    def __init__(self, graph: Graph, found: list[Violation]) -> None:
        self.graph = graph
        self.found = found
        self.names: dict[int, list[int]] = {}  # storage number -> [owner, first step, last step]
        self.current: dict[int, int] = {}  # value -> storage number
        self.sharers: list[int] = []  # storage number -> live values that name it
        self.runs: dict[int, list[int]] = {}  # op -> steps that compute it
        self.owner = _owners(graph)
        self.views: dict[int, list[tuple[int, int]]] = {}  # op -> its views, each with the value whose storage it shares
        # Value -> steps of the copies to and from the host copy that it has.
        self.copied: dict[int, list[int]] = {v: [] for v, value in enumerate(graph.values) if value.on_host}
        self.begun = False  # whether a value of the host was fetched or freed: no other can have been there from the beginning
        self.on_host: list[tuple[int, int, int]] = []  # value, first step, step that discards it
        self.moves: dict[int, list[int]] = {}  # storage number -> steps of its copies
        self.fetched: dict[int, int] = {}  # storage number -> step of the copy into it
        self.waits: dict[int, list[int]] = {}  # step -> steps of copies that it waits for; a computation waits after it has run
        self.reads: dict[int, list[int]] = {}  # step that computes -> steps of the copies into its inputs

    def take(self, at: int, step: Step) -> None:
        """Follow a step."""
        if isinstance(step, Compute):
            self.compute(at, step.op)
        elif isinstance(step, Free):
            self.free(at, step.value)
        elif not 0 <= step.value < len(self.graph.values):
            self.found.append(Violation("index", at, f"there is no value {step.value}"))
        elif isinstance(step, Offload):
            self.offload(at, step.value)
        elif isinstance(step, Fetch):
            self.fetch(at, step.value)
        else:
            self.discard(at, step.value)

    def compute(self, step: int, o: int) -> None:
        if not 0 <= o < len(self.graph.ops):
            self.found.append(Violation("index", step, f"there is no op {o}"))
            return
        op = self.graph.ops[o]
        for v in op.inputs:
            if v not in self.current:
                name = self.graph.values[v].name
                self.found.append(Violation("read", step, f"op {o} ({op.name!r}) reads value {v} ({name!r}), which is not live"))
            elif self.current[v] in self.fetched:
                self.reads.setdefault(step, []).append(self.fetched[self.current[v]])
        if self.begun and any(self.graph.values[v].on_host for v in op.outputs):
            text = f"op {o} ({op.name!r}) is for a value that is there when the step begins, and it is computed later"
            self.found.append(Violation("order", step, text))
        self.runs.setdefault(o, []).append(step)
        for v in op.outputs:
            if self.graph.values[v].base is None:
                self.names[len(self.names)] = [v, step, -1]
                self.sharers.append(0)
                self._point(v, len(self.names) - 1, step)
        if o not in self.views:
            self.views[o] = list(_shared(self.graph, o, self.owner))
        for v, source in self.views[o]:
            shared = self.current.get(source)
            if shared is not None:
                self._point(v, shared, step)

    def free(self, step: int, v: int) -> None:
        if v not in self.current:
            self.found.append(Violation("free", step, f"value {v} is freed and is not live"))
            return
        # A storage that a free releases last counts one step before the free.
        self._leave(self.current.pop(v), step - 1, step)
        self.begun |= self.graph.values[v].on_host

    def offload(self, step: int, v: int) -> None:
        if v not in self.current or v in self.copied or self.graph.values[v].base is not None:
            why = "is not live" if v not in self.current else "has a copy there" if v in self.copied else "is a view"
            self.found.append(Violation("offload", step, f"value {v} is copied to the host and {why}"))
            return
        self.copied[v] = [step]
        self.moves.setdefault(self.current[v], []).append(step)

    def fetch(self, step: int, v: int) -> None:
        if v in self.current or v not in self.copied:
            why = "has no copy there" if v not in self.copied else "is live"
            self.found.append(Violation("fetch", step, f"value {v} is fetched from the host and {why}"))
            return
        storage = len(self.names)
        self.names[storage] = [v, step, -1]
        self.sharers.append(1)
        self.current[v] = storage
        self.copied[v].append(step)
        self.moves[storage] = [step]
        self.fetched[storage] = step
        self.begun = True

    def discard(self, step: int, v: int) -> None:
        if v not in self.copied or self.graph.values[v].on_host:
            why = "there is none" if v not in self.copied else "was there before the step"
            self.found.append(Violation("discard", step, f"the copy of value {v} is discarded and {why}"))
            return
        copies = self.copied.pop(v)
        self.on_host.append((v, copies[0], step))
        self.waits.setdefault(step, []).extend(copies)

    def finish(self, end: int) -> None:
        for v, value in enumerate(self.graph.values):
            if value.kept and v not in self.current and (not value.on_host or self.graph.producer[v] in self.runs):
                self.found.append(Violation("kept", end, f"value {v} ({value.name!r}) must be live at the end and is not"))
        for life in self.names.values():
            if life[2] < 0:
                life[2] = end
        on_host = [(v, 0 if self.graph.values[v].on_host else copies[0]) for v, copies in self.copied.items() if copies]
        self.on_host += [(v, first, end) for v, first in on_host]

    def _point(self, v: int, storage: int, step: int) -> None:
        """Let a value name another storage; its former storage counts to the end of this step."""
        self.sharers[storage] += 1
        if v in self.current:
            self._leave(self.current[v], step, step)
        self.current[v] = storage

    def _leave(self, storage: int, last: int, step: int) -> None:
        self.sharers[storage] -= 1
        if not self.sharers[storage]:
            self.names[storage][2] = last
            if storage in self.moves:
                self.waits.setdefault(step, []).extend(self.moves[storage])


def _owners(graph: Graph) -> list[int]:
    """Value that owns the storage of each value: starts from the owners, then views, then views of views."""
    owner = list(range(len(graph.values)))
    views_of: dict[int, list[int]] = {}
    level: list[int] = []
    for v, value in enumerate(graph.values):
        if value.base is None:
            level.append(v)
        else:
            views_of.setdefault(value.base, []).append(v)
    for v in level:
        for view in views_of.get(v, ()):
            owner[view] = owner[v]
            level.append(view)
    return owner


def _shared(graph: Graph, o: int, owner: list[int]) -> Iterator[tuple[int, int]]:
    """Views that an op makes, a base before its views, each with the value whose storage it shares.

    This value is the view's base if the op reads or makes the base, else another view of the same storage that the op reads.
    """
    op = graph.ops[o]
    waiting: dict[int, list[int]] = {}  # view that the op makes -> views of it that the op makes
    ready: list[tuple[int, int]] = []
    made, read = set(op.outputs), set(op.inputs)
    another: dict[int, int] = {}
    for u in op.inputs:
        another.setdefault(owner[u], u)
    for v in op.outputs:
        base = graph.values[v].base
        if base is None:
            continue
        if base in made and graph.values[base].base is not None:
            waiting.setdefault(base, []).append(v)
        else:
            ready.append((v, base if base in made or base in read else another[owner[v]]))
    for v, source in ready:
        yield v, source
        ready += [(view, v) for view in waiting.get(v, ())]


def _check_counts(graph: Graph, runs: dict[int, list[int]], end: int, found: list[Violation], recompute: str) -> None:
    for o, op in enumerate(graph.ops):
        steps = runs.get(o, [])
        if not steps and not any(graph.values[v].on_host for v in op.outputs):
            found.append(Violation("missing", end, f"op {o} ({op.name!r}) is never computed"))
        elif len(steps) > 1 and not op.recomputable:
            found.append(Violation("once", steps[1], f"op {o} ({op.name!r}) may run only once"))
        elif len(steps) > 1 and recompute == "forward" and op.phase != "forward" and o not in graph.view_ops:
            found.append(Violation("phase", steps[1], f"op {o} ({op.name!r}) is not a forward op and is computed again"))
        for c in op.clobbered_by:
            done = runs.get(c, [end])[0]
            after = bisect_right(steps, done)
            if after < len(steps):
                found.append(
                    Violation("clobber", steps[after], f"op {o} ({op.name!r}) is computed after op {c} overwrote what it reads")
                )


def _check_sequence(graph: Graph, runs: dict[int, list[int]], found: list[Violation], reorder: bool) -> None:
    pairs = list(graph.order)
    if not reorder:
        own = [o for o in range(len(graph.ops)) if o not in graph.view_ops]
        pairs += pairwise(own)
    for position, (a, b) in enumerate(pairs):
        if a in runs and b in runs and runs[b][0] < runs[a][0]:
            rule: Rule = "order" if position < len(graph.order) else "reorder"
            found.append(Violation(rule, runs[b][0], f"op {b} is first computed before op {a}"))


def _check_budget(graph: Graph, plan: Plan, table: _Table, budget_bytes: int) -> list[Violation]:
    steps = len(plan.steps)
    change = [0] * (steps + 2)
    for owner, born, died in table.names.values():
        change[born] += graph.values[owner].size_bytes
        change[died + 1] -= graph.values[owner].size_bytes
    for o, run in table.runs.items():
        if len(run) > 1:
            change[run[0]] += graph.ops[o].replay_bytes
            change[run[-1] + 1] -= graph.ops[o].replay_bytes
    held, worst, at = graph.resident_bytes, budget_bytes, -1
    for index, step in enumerate(plan.steps):
        held += change[index]
        workspace = graph.ops[step.op].workspace_bytes if isinstance(step, Compute) and 0 <= step.op < len(graph.ops) else 0
        if held + workspace > worst:
            worst, at = held + workspace, index
    if at < 0:
        return []
    text = f"{format_bytes(worst)} are held, {worst - budget_bytes} bytes over the budget of {format_bytes(budget_bytes)}"
    return [Violation("budget", at, text)]


def _check_host(graph: Graph, table: _Table, limit_bytes: int, steps: int) -> list[Violation]:
    change = [0] * (steps + 2)
    for v, first, last in table.on_host:
        change[first] += graph.values[v].size_bytes
        change[last] -= graph.values[v].size_bytes
    held = 0
    for step in range(steps):
        held += change[step]
        if held > limit_bytes:
            text = (
                f"copies take {format_bytes(held)} of the host, {held - limit_bytes} bytes over its {format_bytes(limit_bytes)}"
            )
            return [Violation("host", step, text)]
    return []


def _check_cost(graph: Graph, plan: Plan, table: _Table, bus: HostMemory | None, cost: int) -> list[Violation]:
    """Check that the longest path through the computations and copies equals the claimed cost."""
    done: dict[int, int] = {}  # step that issues a copy -> time at which the copy is done
    engines: dict[type, list[int]] = {Offload: [], Fetch: []}  # direction -> steps of its copies so far
    made: dict[int, int] = {}  # value -> step that copied it to the host
    stream = 0  # end of the longest path to the newest node of the compute stream
    for index, step in enumerate(plan.steps):
        if isinstance(step, Compute):
            stream = max([stream, *(done[copy] for copy in table.reads.get(index, ()))]) + graph.ops[step.op].cost
        elif isinstance(step, (Offload, Fetch)):
            assert bus is not None
            rate = bus.out_bytes_per_s if isinstance(step, Offload) else bus.in_bytes_per_s
            if not rate:
                return [
                    Violation("offload", index, f"value {step.value} is copied to the host, and the rate of copies to it is 0")
                ]
            after = engines[type(step)][-1:] + ([made[step.value]] if isinstance(step, Fetch) and step.value in made else [])
            length = (graph.values[step.value].size_bytes * 1_000_000_000 + rate - 1) // rate
            done[index] = max([stream, *(done[copy] for copy in after)]) + length
            engines[type(step)].append(index)
            if isinstance(step, Offload):
                made[step.value] = index
        stream = max([stream, *(done[copy] for copy in table.waits.get(index, ()))])
    longest = max([stream, *done.values()])
    return (
        [] if longest == cost else [Violation("cost", len(plan.steps), f"the plan takes {longest} {graph.cost_unit}, not {cost}")]
    )
