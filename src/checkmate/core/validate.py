"""An independent check of a plan: no code shared with `simulate`, `Plan.from_order` or a solver.

Memory is derived here from lifetimes: for every storage made, the steps from its birth to the death
of the last value that shares it. `simulate` keeps a running balance instead; the two must agree.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Literal, NamedTuple

from checkmate.core.graph import Graph
from checkmate.core.plan import Compute, Free, Plan
from checkmate.core.units import format_bytes

Rule = Literal["graph", "index", "read", "free", "once", "missing", "kept", "order", "clobber", "budget", "phase", "reorder"]


class Violation(NamedTuple):
    """One broken rule.

    Attributes:
        rule: Which rule.
        step: The step that breaks it, or the plan's length for a rule about the end.
        message: What is wrong, in words.
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
) -> tuple[Violation, ...]:
    """Everything that is wrong with a plan; empty for a plan that holds.

    Args:
        graph: The graph.
        plan: The plan.
        budget_bytes: The most bytes it may hold at any step, resident bytes included.
        recompute: ``"forward"`` if only forward ops, and `Graph.view_ops`, may be computed again.
        reorder: False if first computations must follow the graph's own order, `Graph.view_ops` apart.

    Returns:
        The violations, in the order of their steps.

    Examples:
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)], kept=[1])
        >>> validate(chain, Plan((Compute(0), Free(0), Compute(1))))[0].message
        "op 1 ('1') reads value 0 ('0'), which is not live"
        >>> validate(chain, Plan.from_order(chain, [0, 1]), budget_bytes=5)[0].rule
        'budget'
    """
    if plan.graph_digest not in ("", graph.digest):
        return (Violation("graph", 0, "the plan was made for another graph"),)
    found: list[Violation] = []
    table = _Table(graph, found)
    for step_index, step in enumerate(plan.steps):
        if isinstance(step, Free):
            table.free(step_index, step.value)
        else:
            table.compute(step_index, step.op)
    end = len(plan.steps)
    table.finish(end)
    _check_counts(graph, table.runs, end, found, recompute)
    _check_sequence(graph, table.runs, found, reorder)
    if budget_bytes is not None:
        found += _check_budget(graph, plan, table, budget_bytes)
    return tuple(sorted(found, key=lambda violation: violation.step))


class _Table:
    """Which instance every value names, and the lifetime of every storage."""

    def __init__(self, graph: Graph, found: list[Violation]) -> None:
        self.graph = graph
        self.found = found
        self.names: dict[int, list[int]] = {}  # storage number -> [owner, first step, last step]
        self.current: dict[int, int] = {}  # value -> storage number
        self.sharers: list[int] = []  # storage number -> live values that name it
        self.runs: dict[int, list[int]] = {}  # op -> steps that compute it

    def compute(self, step: int, o: int) -> None:
        if not 0 <= o < len(self.graph.ops):
            self.found.append(Violation("index", step, f"there is no op {o}"))
            return
        op = self.graph.ops[o]
        for v in op.inputs:
            if v not in self.current:
                name = self.graph.values[v].name
                self.found.append(Violation("read", step, f"op {o} ({op.name!r}) reads value {v} ({name!r}), which is not live"))
        self.runs.setdefault(o, []).append(step)
        before = {v: self.current[v] for v in (*op.inputs, *op.outputs) if v in self.current}
        for v in op.outputs:
            if self.graph.values[v].base is None:
                self.names[len(self.names)] = [v, step, -1]
                self.sharers.append(0)
                self._point(v, len(self.names) - 1, step)
        for v in op.outputs:
            if self.graph.values[v].base is not None:
                shared = self._shared(o, v, before)
                if shared is not None:
                    self._point(v, shared, step)

    def free(self, step: int, v: int) -> None:
        if v not in self.current:
            self.found.append(Violation("free", step, f"value {v} is freed and is not live"))
            return
        # A storage that dies by a free is gone at the free itself: it last counted one step before.
        self._leave(self.current.pop(v), step - 1)

    def finish(self, end: int) -> None:
        for v, value in enumerate(self.graph.values):
            if value.kept and v not in self.current:
                self.found.append(Violation("kept", end, f"value {v} ({value.name!r}) must be live at the end and is not"))
        for life in self.names.values():
            if life[2] < 0:
                life[2] = end

    def _shared(self, o: int, v: int, before: dict[int, int]) -> int | None:
        """Storage that a new view shares: its base's, or that of another view of it that the op reads."""
        op, owner = self.graph.ops[o], self._owner(v)
        base = self.graph.values[v].base
        if base in op.outputs:
            return self.current.get(base)
        if base in op.inputs:
            return before.get(base)
        for u in op.inputs:
            if self._owner(u) == owner:
                return before.get(u)
        return None

    def _owner(self, v: int) -> int:
        base = self.graph.values[v].base
        return v if base is None else self._owner(base)

    def _point(self, v: int, storage: int, step: int) -> None:
        """Let a value name another storage; the one it named counts to the end of this step."""
        self.sharers[storage] += 1
        if v in self.current:
            self._leave(self.current[v], step)
        self.current[v] = storage

    def _leave(self, storage: int, last: int) -> None:
        self.sharers[storage] -= 1
        if not self.sharers[storage]:
            self.names[storage][2] = last


def _check_counts(graph: Graph, runs: dict[int, list[int]], end: int, found: list[Violation], recompute: str) -> None:
    for o, op in enumerate(graph.ops):
        steps = runs.get(o, [])
        if not steps:
            found.append(Violation("missing", end, f"op {o} ({op.name!r}) is never computed"))
        elif len(steps) > 1 and not op.recomputable:
            found.append(Violation("once", steps[1], f"op {o} ({op.name!r}) may run only once"))
        elif len(steps) > 1 and recompute == "forward" and op.phase != "forward" and o not in graph.view_ops:
            found.append(Violation("phase", steps[1], f"op {o} ({op.name!r}) is not a forward op and is computed again"))
        for c in op.clobbered_by:
            done = runs.get(c, [end])[0]
            late = next((s for s in steps if s > done), None)
            if late is not None:
                found.append(Violation("clobber", late, f"op {o} ({op.name!r}) is computed after op {c} overwrote what it reads"))


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
