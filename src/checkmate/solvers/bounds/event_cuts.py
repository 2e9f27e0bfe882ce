"""Event cuts: a lower bound on the cost of every plan, whatever its order.

An *event* is the first computation of an op. Before the event of op t all strict ancestors of t have
been computed at least once and no strict descendant has, in every plan of any order; of every other
op, X[e, o] says whether it has. Take events whose ops form a chain of the DAG. With S[e, k] = value k
is live at event e, y[e, f, o] = op o is computed again between events e and f, and
dX[e, f, o] = X[f, o] - X[e, o] = op o is first computed between them, every plan satisfies

    bytes of t_e's own needs + sum of size_k S[e, k] <= budget,
    S[e, k] <= X[e, producer of k],      X[e, o] <= X[f, o],      X[e, o] <= X[e, p] for a parent p of o,
    S[f, k]      <= S[e, k] + y[e, f, producer of k] + dX[e, f, producer of k],
    y[e, f, o]   <= the same for every input k of o,
    dX[e, f, o]  <= the same for every input k of o,

with X = 1 at the end of the step. The least cost of y, added to the cost of computing each op once, is
a bound on all of them: a relaxation of every plan, given order or not, with any number of
recomputations. The proof is in ``docs/explanation/event_cuts.md``. Found here, not in the literature
that we know.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.solvers.backends.program import Ints, Program, ProgramBuilder

Mask = npt.NDArray[np.bool_]
_LIVE = -2
"""In place of a column: the value is live at the event in every plan."""
_NONE = -1

SLACK = 2e-6
"""Share by which the budget is widened, so that an engine's feasibility tolerance of 1e-6 stays inside."""


@dataclass(frozen=True, slots=True, eq=False)
class CutProgram:
    """The program of some cuts.

    Attributes:
        cuts: Op of each event, in the order of the chain.
        program: Minimises the cost of recomputation, as a share of computing every op once.
        live: Column of S, or -2 where it is 1 and -1 where it is not modelled. Shape ``[event, value]``.
        impossible: Whether an event alone exceeds the budget, in exact bytes.
    """

    cuts: tuple[int, ...]
    program: Program
    live: Ints
    impossible: bool


class CutModel:
    """What the programs of one problem share. Views must be folded; one that is left counts for nothing.

    Args:
        problem: The problem.
        targets: None for any order; else first computations of these ops follow this order, and the
            bound holds for that narrower class only.
    """

    def __init__(self, problem: Problem, targets: tuple[int, ...] | None = None) -> None:
        self.problem = problem
        self.targets = targets
        self._sides: dict[int, tuple[Mask, Mask]] = {}
        graph = self.problem.graph
        self.end = len(graph.ops)
        count = self.end + 1
        inputs = [*(list(dict.fromkeys(op.inputs)) for op in graph.ops), [v for v, x in enumerate(graph.values) if x.kept]]
        self.inputs = inputs
        self.outputs = [*(list(op.outputs) for op in graph.ops), []]
        self.producer = np.array(graph.producer, dtype=np.int64)
        self.size = np.array([v.size_bytes for v in graph.values], dtype=np.int64)
        self.cost = np.array([*(op.cost for op in graph.ops), 0], dtype=np.float64)
        self.workspace = [*(op.workspace_bytes for op in graph.ops), 0]
        forward_only = self.problem.recompute == "forward"
        self.again = np.array(
            [*(op.recomputable and (op.phase == "forward" or not forward_only) for op in graph.ops), False], dtype=np.bool_
        )
        self.clobbers = [*(op.clobbered_by for op in graph.ops), ()]
        self.edge_value = np.array([v for part in inputs for v in part], dtype=np.int64)
        self.edge_op = np.array([o for o, part in enumerate(inputs) for _ in part], dtype=np.int64)
        before: list[set[int]] = [{graph.producer[v] for v in part} for part in inputs]
        for a, b in graph.order:
            before[b].add(a)
        for o, clobbers in enumerate(self.clobbers):
            for c in clobbers:
                before[c].add(o)
        before[self.end] = set(range(self.end))
        self.parents: list[list[int]] = [sorted(p) for p in before]
        self.children: list[list[int]] = [[] for _ in range(count)]
        for o, above in enumerate(self.parents):
            for p in above:
                self.children[p].append(o)
        self.position = {} if self.targets is None else {o: t for t, o in enumerate(self.targets)}

    def sides(self, op: int) -> tuple[Mask, Mask]:
        """Ops surely computed before the event of an op, and ops surely not."""
        if op not in self._sides:
            if self.targets is None or op not in self.position:
                self._sides[op] = self._reach([op], self.parents), self._reach([op], self.children)
            else:
                t = self.position[op]
                earlier, later = list(self.targets[:t]), [*self.targets[t + 1 :], self.end]
                above, below = self._reach([*earlier, op], self.parents), self._reach(later, self.children)
                above[earlier] = True
                above[op] = False
                below[later] = True
                self._sides[op] = above, below
        return self._sides[op]

    def readers_of(self, value: int) -> tuple[int, ...]:
        """Ops that read a value, END left out."""
        return self.problem.graph.readers[value]

    def comparable(self, a: int, b: int) -> bool:
        """Whether one of two ops surely comes before the other."""
        above, below = self.sides(a)
        return a == b or bool(above[b] or below[b])

    def any_order(self, cuts: Sequence[int]) -> bool:
        """Whether what these events prove holds for any order: the DAG itself says what comes before and after each."""
        if self.targets is None:
            return True
        for cut in cuts:
            known = self._reach([cut], self.parents) | self._reach([cut], self.children)
            known[cut] = True
            if not known.all():
                return False
        return True

    def build(self, cuts: Sequence[int], *, floating: bool = True) -> CutProgram:
        """The program of a chain of events, given from first to last.

        Args:
            cuts: The events.
            floating: Whether ops beside the chain are modelled. Without them the bound is weaker and
                the program smaller: what they make counts as there for nothing, and they ask for nothing.
        """
        return _Builder(self, tuple(cuts), floating).build()

    def _reach(self, roots: list[int], adjacent: list[list[int]]) -> Mask:
        seen = np.zeros(self.end + 1, dtype=np.bool_)
        stack = list(roots)
        while stack:
            for o in adjacent[stack.pop()]:
                if not seen[o]:
                    seen[o] = True
                    stack.append(o)
        return seen


class _Builder:
    def __init__(self, model: CutModel, cuts: tuple[int, ...], floating: bool) -> None:
        self.model = model
        self.floating = floating
        self.cuts = cuts
        self.budget = model.problem.budget_bytes - model.problem.graph.resident_bytes
        self.builder = ProgramBuilder()
        self.live = np.full((len(cuts), len(model.size)), _NONE, dtype=np.int64)
        self.done: list[Mask] = []  # ops surely computed before each event; the end has them all
        self.ignored: list[Mask] = []  # ops that float at each event and are not modelled; none at the end
        self.first: list[Ints] = []  # column of X for each op at each event, -1 where it is known; -1 at the end
        self.again: list[Mask] = []  # ops worth modelling as computed again after each event
        self.redo: dict[tuple[int, int], Ints] = {}  # (event, event) -> column of y for each op, or -1
        self.impossible = False

    def build(self) -> CutProgram:
        for e in range(len(self.cuts)):
            self._add_event(e)
        self.done.append(np.ones(self.model.end + 1, dtype=np.bool_))
        self.ignored.append(np.zeros(self.model.end + 1, dtype=np.bool_))
        self.first.append(np.full(self.model.end + 1, _NONE, dtype=np.int64))
        self._add_segments()
        for e in range(len(self.cuts)):
            self._limit_memory(e)
            self._order_floating(e)
        for e, f in self.redo:
            self._link(e, f)
        return CutProgram(self.cuts, self.builder.build(), self.live, self.impossible)

    def _add_event(self, e: int) -> None:
        """Columns of X and S: what may have been computed and what may or must be live at event e."""
        m, t = self.model, self.cuts[e]
        above, below = m.sides(t)
        beside = ~above & ~below
        beside[t] = False
        floating = beside & self.floating
        reached = above.copy()
        reached[t] = True
        again = m.again.copy()
        for o in np.flatnonzero(again).tolist():
            if m.clobbers[o] and any(reached[c] for c in m.clobbers[o]):
                again[o] = False
        useful_values, _ = self._useful(above, again)
        _, useful_ops = self._useful(reached, again)
        forced = np.zeros(len(m.size), dtype=np.bool_)
        forced[m.inputs[t]] = True
        later = below[m.edge_op]
        read_later = np.zeros(len(m.size), dtype=np.bool_)
        read_later[m.edge_value[later]] = True
        forced |= read_later & ~again[m.producer]
        forced &= above[m.producer]
        free = np.flatnonzero(useful_values & (above | floating)[m.producer] & ~forced)
        self.live[e, forced] = _LIVE
        self.live[e, free] = self.builder.add_columns(np.zeros(len(free)))
        column = np.full(m.end + 1, _NONE, dtype=np.int64)
        column[floating] = self.builder.add_columns(np.zeros(int(floating.sum())))
        self.done.append(above)
        self.ignored.append(beside & (not self.floating))
        self.first.append(column)
        self.again.append(useful_ops & again & (reached | floating))

    def _useful(self, done: Mask, again: Mask) -> tuple[Mask, Mask]:
        """Values that an op not surely done may read, at once or through ops computed again."""
        m = self.model
        values = np.zeros(len(m.size), dtype=np.bool_)
        ops = np.zeros(m.end + 1, dtype=np.bool_)
        for o in range(m.end, -1, -1):
            ops[o] = any(values[v] for v in m.outputs[o])
            if not done[o] or (again[o] and ops[o]):
                values[m.inputs[o]] = True
        return values, ops

    def _add_segments(self) -> None:
        """Columns of y between neighbouring events, which carry the cost, and from each event to the end."""
        m, last = self.model, len(self.cuts)
        total = max(1.0, float(m.cost.sum()))
        for e in range(last):
            ops = np.flatnonzero(self.again[e])
            column = np.full(m.end + 1, _NONE, dtype=np.int64)
            column[ops] = self.builder.add_columns(m.cost[ops] / total)
            self.redo[e, e + 1] = column
        for e in range(last - 2, -1, -1):
            ops = np.flatnonzero(self.again[e])
            column = np.full(m.end + 1, _NONE, dtype=np.int64)
            column[ops] = self.builder.add_columns(np.zeros(len(ops)))
            self.redo[e, last] = column
            first, rest = self.redo[e, e + 1][ops], self.redo[e + 1, last][ops]
            whole = column[ops]
            # Again between e and the end: in the first segment or in the rest.
            self.builder.add_rows([(first, 1.0), (rest, 1.0), (whole, -1.0)], low=0.0)
            self.builder.add_rows([(whole, 1.0), (first, -1.0)], low=0.0)
            both = rest >= 0
            if both.any():
                self.builder.add_rows([(whole[both], 1.0), (rest[both], -1.0)], low=0.0)

    def _limit_memory(self, e: int) -> None:
        m, t = self.model, self.cuts[e]
        own = m.workspace[t] + int(m.size[m.outputs[t]].sum()) + int(m.size[self.live[e] == _LIVE].sum())
        if own > self.budget:
            self.impossible = True
            return
        columns = np.flatnonzero(self.live[e] >= 0)
        room = (self.budget * (1 + SLACK) - own) / max(1, self.budget)
        self.builder.add_row(self.live[e, columns], m.size[columns] / max(1, self.budget), high=room)

    def _order_floating(self, e: int) -> None:
        """An op that floats at an event comes after its parents, and does not go back at the next event."""
        m, column = self.model, self.first[e]
        values = np.flatnonzero(self.live[e] >= 0)
        values = values[column[m.producer[values]] >= 0]
        if len(values):
            self.builder.add_rows([(column[m.producer[values]], 1.0), (self.live[e, values], -1.0)], low=0.0)
        pairs = [(p, o) for o in np.flatnonzero(column >= 0).tolist() for p in m.parents[o] if column[p] >= 0]
        if pairs:
            parents, ops = (np.array(part, dtype=np.int64) for part in zip(*pairs, strict=True))
            self.builder.add_rows([(column[parents], 1.0), (column[ops], -1.0)], low=0.0)
        both = np.flatnonzero((column >= 0) & (self.first[e + 1] >= 0))
        if len(both):
            self.builder.add_rows([(self.first[e + 1][both], 1.0), (column[both], -1.0)], low=0.0)

    def _link(self, e: int, f: int) -> None:
        """Rows that tie S, y and X between events e and f (or the end)."""
        m = self.model
        redo = self.redo[e, f]
        begun, before, after = self.first[e], self.done[e], self.done[f]
        known = after.astype(np.float64) - before  # dX where neither X is a column
        if f < len(self.cuts):
            values = np.flatnonzero(self.live[f] != _NONE)
            self._supply(e, f, values, self.live[f, values], np.where(self.live[f, values] == _LIVE, 1.0, 0.0))
        edges = np.flatnonzero(redo[m.edge_op] >= 0)
        self._supply(e, f, m.edge_value[edges], redo[m.edge_op[edges]], np.zeros(len(edges)))
        known[self.ignored[e] | self.ignored[f]] = 0.0
        fixed = (begun < 0) & (self.first[f] < 0)
        sure = np.unique(m.edge_value[fixed[m.edge_op] & (known[m.edge_op] > 0.5)])
        self._supply(e, f, sure, np.full(len(sure), _NONE), np.ones(len(sure)))
        moving = np.flatnonzero(~fixed[m.edge_op])
        ops = m.edge_op[moving]
        self._supply(
            e, f, m.edge_value[moving], self.first[f][ops], np.where(self.first[f][ops] >= 0, 0.0, after[ops]),
            begun[ops], np.where(begun[ops] >= 0, 0.0, before[ops]),
        )  # fmt: skip

    def _supply(
        self, e: int, f: int, values: Ints, asked: Ints, constant: npt.NDArray[np.float64],
        less: Ints | None = None, less_constant: npt.NDArray[np.float64] | None = None,
    ) -> None:  # fmt: skip
        """Rows: what is asked of a value between two events is live, made again or made for the first time.

        Args:
            e: The first event.
            f: The second event, or the end.
            values: Values asked for.
            asked: Column that asks, or negative for the constant alone.
            constant: What is asked beside the column.
            less: Column taken off what is asked, or negative.
            less_constant: Constant taken off.
        """
        m, live, redo = self.model, self.live[e], self.redo[e, f]
        producer = m.producer[values]
        begun, ended = self.first[e][producer], self.first[f][producer]
        made = np.where(ended >= 0, 0.0, self.done[f][producer]) - np.where(begun >= 0, 0.0, self.done[e][producer])
        given = (live[values] == _LIVE) | ((made >= 1.0) & (begun < 0) & (ended < 0))
        given |= self.ignored[e][producer] | self.ignored[f][producer]
        less = np.full(len(values), _NONE) if less is None else less
        low = constant - made - (0.0 if less_constant is None else less_constant)
        use = np.flatnonzero(~given)
        if not len(use):
            return
        v = values[use]
        self.builder.add_rows(
            [
                (np.maximum(live[v], _NONE), 1.0),
                (redo[producer[use]], 1.0),
                (ended[use], 1.0),
                (begun[use], -1.0),
                (np.where(asked[use] >= 0, asked[use], _NONE), -1.0),
                (less[use], 1.0),
            ],
            low=low[use],
        )
