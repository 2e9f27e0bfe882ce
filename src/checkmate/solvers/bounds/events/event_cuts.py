"""Event cuts: a lower bound on the cost of every plan, whatever its order.

An *event* is the first computation of an op. Before the event of op t all strict ancestors of t have
been computed at least once and no strict descendant has, in every plan of any order; of every other
op, X[e, o] = 1 if it has. Take events whose ops form a chain of the DAG. With S[e, k] = value k
is live at event e, y[e, f, o] = op o is computed again between events e and f, and
dX[e, f, o] = X[f, o] - X[e, o] = op o is first computed between them, every plan satisfies

    bytes of t_e's own needs + sum of size_k S[e, k] + states <= budget,            (memory)
    S[e, k] <= X[e, producer of k],                                                 (live after made)
    X[e, o] <= X[f, o],      X[e, o] <= X[e, p] for a parent p of o,                (order)
    S[f, k]      <= S[e, k] + y[e, f, producer of k] + dX[e, f, producer of k],     (supply)
    y[e, f, o]   <= the same for every input k of o,
    dX[e, f, o]  <= the same for every input k of o,

with X = 1 at the end of the step, and states = the replay states of random ops that have surely run
and run again later. The least cost of y, plus the cost of computing each op once, bounds every plan,
with or without a given order, and with any number of recomputations.
Every row is proven in ``docs/explanation/event_cuts.md``.

How this differs from the literature: the formulation of Jain et al. (2020), section 4, has a stage for every op
and variables for every pair of ops, fixes the order of first computations and is exact in that class. Moccasin
(Bartan et al. 2023) has retention intervals on the same stages. Here memory is limited at a few chosen
moments only, so the program grows with events times ops. These moments are defined by ancestors, not by
positions; therefore the bound holds for any order. We know of no earlier use.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np

from checkmate.solvers.backends.program import Floats, Ints, Program, ProgramBuilder
from checkmate.solvers.bounds.events.cut_model import CutModel, Mask

BUDGET_SLACK: Final = 2e-6
"""Share by which a program widens a budget: twice the engine's feasibility tolerance, 1e-6 in HiGHS. An engine may return a point
that breaks a row by the tolerance, and may cut off points that barely keep a row. Its bound holds for the exact problem only if
the rows are wider than the tolerance. Rows are scaled to a budget of 1, so that the share is comparable with it."""


class NoColumn(IntEnum):
    """Entries of a table of column indices that stand for no column. `ProgramBuilder` takes their terms as 0."""

    UNMODELLED = -1  # the variable is fixed or left out of the relaxation; its value depends on the case
    ALWAYS_LIVE = -2  # S is 1 in every plan; its bytes are counted as a constant


@dataclass(frozen=True, slots=True, eq=False)
class CutProgram:
    """The program of some events: it minimises the cost of recomputation, as a share of computing every op once."""

    cuts: tuple[int, ...]  # op of each event, in the order of the chain
    program: Program
    live: Ints  # column of S, or a `NoColumn`, shape [event, value]
    impossible: bool  # an event alone exceeds the budget, in exact bytes
    fetched: Ints  # column of z (`copy_cuts`), or a `NoColumn`, shape [value]
    memory_rows: tuple[tuple[int, int], ...]  # events and rows that limit their memory, in bytes or whole units (`memory_units`)
    implied: Mask  # rows of longer segments, which other rows imply in integers

    def memory_prices(self, row_prices: Floats) -> Floats:
        """Gain of the relaxation for each share of the budget taken from an event, from the prices of all rows."""
        prices = np.zeros(len(self.cuts))
        for e, row in self.memory_rows:
            prices[e] -= row_prices[row]
        return prices

    def without_slack(self, prices: Floats | None) -> Program:
        """The program for integers: without implied rows of price 0, which its relaxation does not need.

        Its optimum is the same, in integers and relaxed. Most rows go, and the engine's presolve removes the columns
        that no remaining row needs: eight events of ResNet-50 at f = 0.1 are solved in 8 s; the whole program takes more than
        100 s.
        """
        if prices is None:
            return self.program
        return self.program.with_rows(~self.implied | (np.abs(prices) > 1e-12))


def memory_units(sizes: Ints, room: int) -> list[int]:
    """Sizes for which rounding down to multiples shrinks the room by more than the values.

    Rows in whole units are the cuts of Chvátal (1973) and Gomory (1958): the left side of a row that holds in integers is rounded
    down, then its limit. Only the most frequent sizes are tried; a gain of a ten thousandth of the room is not worth a row.
    """
    if room <= 0:
        return []
    distinct, counts = np.unique(sizes[sizes > 0], return_counts=True)
    units = distinct[np.argsort(-counts, kind="stable")[:16]]
    gains = room % units / room
    losses = (sizes[:, None] % units).sum(axis=0) / max(1, int(sizes.sum()))
    return units[(gains >= 1e-4) & (gains > losses)].tolist()


class _Term(NamedTuple):
    """A variable in each row of a group: a column, or a constant instead of a column."""

    columns: Ints
    constants: Floats


def build_cuts(model: CutModel, cuts: Sequence[int], *, floating: bool = True, all_segments: bool = False) -> CutProgram:
    """The program of a chain of events; ``all_segments`` adds columns of y for all pairs of events, not only up to the end."""
    return CutBuilder(model, tuple(cuts), floating, all_segments=all_segments).build()


class CutBuilder:
    """Columns and rows of one program, one method for each group of rows of the proof.

    ``add_copies`` adds columns and rows of copies to a host once the columns of S and y exist.
    """

    def __init__(
        self,
        model: CutModel,
        cuts: tuple[int, ...],
        floating: bool,
        *,
        all_segments: bool = False,
        add_copies: Callable[[CutBuilder], None] | None = None,
    ) -> None:
        self.model = model
        self.cuts = cuts
        self.floating = floating
        self.all_segments = all_segments
        self.add_copies = add_copies
        self.budget = model.problem.budget_bytes - model.problem.graph.resident_bytes
        self.builder = ProgramBuilder()
        self.live = np.full((len(cuts), len(model.size)), NoColumn.UNMODELLED, dtype=np.int64)
        self.fetched = np.full(len(model.size), NoColumn.UNMODELLED, dtype=np.int64)
        # For each event, and the end, and each op: whether it has surely been computed; whether it is on neither side without a
        # variable; otherwise the column of X; and whether it is worth modelling as computed again.
        self.sure: list[Mask] = []
        self.unmodelled: list[Mask] = []
        self.computed: list[Ints] = []
        self.recomputable: list[Mask] = []
        self.recomputed: dict[tuple[int, int], Ints] = {}  # (event, later event or end) -> columns of y, shape [op + 1]
        self.impossible = False
        self.implied: list[slice] = []
        self.memory_rows: list[tuple[int, int]] = []

    def build(self) -> CutProgram:
        """The program."""
        for e in range(len(self.cuts)):
            self._add_event(e)
        self.sure.append(np.ones(self.model.end + 1, dtype=np.bool_))
        self.unmodelled.append(np.zeros(self.model.end + 1, dtype=np.bool_))
        self.computed.append(np.full(self.model.end + 1, NoColumn.UNMODELLED, dtype=np.int64))
        self._add_segments()
        if self.add_copies is not None:
            self.add_copies(self)
        for e in range(len(self.cuts)):
            self._limit_memory(e)
            self._order_floating(e)
        for e, f in self.recomputed:
            with self._implied(f > e + 1):
                self._link(e, f)
        implied = np.zeros(self.builder.rows, dtype=np.bool_)
        for rows in self.implied:
            implied[rows] = True
        program, rows = self.builder.build(), tuple(self.memory_rows)
        return CutProgram(self.cuts, program, self.live, self.impossible, self.fetched, rows, implied)

    @contextmanager
    def _implied(self, are: bool = True) -> Generator[None]:
        """Marks the rows added in the block as implied by others in integers, if ``are``."""
        begin = self.builder.rows
        yield
        if are:
            self.implied.append(slice(begin, self.builder.rows))

    def _add_event(self, e: int) -> None:
        """Columns of X and S: ops that may have been computed, and values that may or must be live, at event e."""
        m, t = self.model, self.cuts[e]
        above, below = m.sides(t)
        beside = ~above & ~below
        beside[t] = False
        floating = beside & self.floating
        reached = above.copy()
        reached[t] = True
        # Once an op that overwrites o's inputs has surely run, o cannot run again. A floating overwriter may not have run yet:
        # assuming that it has would forbid recomputations that some plan makes, and the bound would be wrong.
        again = m.again_after(reached)
        # S describes the beginning of the event, before t has read: t is not among ``above``. y describes the time after t
        # has run. Columns that nothing can need would stay at 0 and are left out.
        useful_values, _ = self._useful(above, again)
        _, useful_ops = self._useful(reached, again)
        # Live in every plan: the inputs of t; and an instance that cannot be made again and has a reader whose first
        # computation is still to come: a dropout mask between its forward and its backward op, for example.
        forced = np.zeros(len(m.size), dtype=np.bool_)
        forced[m.inputs[t]] = True
        read_later = np.zeros(len(m.size), dtype=np.bool_)
        read_later[m.edge_value[below[m.edge_op]]] = True
        if self.add_copies is None:
            forced |= read_later & ~again[m.producer]
        forced &= above[m.producer]
        free = np.flatnonzero(useful_values & (above | floating)[m.producer] & ~forced)
        self.live[e, forced] = NoColumn.ALWAYS_LIVE
        self.live[e, free] = self.builder.add_columns(np.zeros(len(free)))
        column = np.full(m.end + 1, NoColumn.UNMODELLED, dtype=np.int64)
        column[floating] = self.builder.add_columns(np.zeros(int(floating.sum())))
        self.sure.append(above)
        self.unmodelled.append(beside & (not self.floating))
        self.computed.append(column)
        self.recomputable.append(useful_ops & again & (reached | floating))

    def _useful(self, done: Mask, again: Mask) -> tuple[Mask, Mask]:
        """Values that can still be read, and ops with an output that can still be read.

        An op reads if it may still be computed for the first time, or if it may be computed again and its own outputs can
        be read. One pass from END back suffices, since readers have higher indices than producers.
        """
        m = self.model
        values = np.zeros(len(m.size), dtype=np.bool_)
        ops = np.zeros(m.end + 1, dtype=np.bool_)
        for o in range(m.end, -1, -1):
            ops[o] = any(values[v] for v in m.outputs[o])
            if not done[o] or (again[o] and ops[o]):
                values[m.inputs[o]] = True
        return values, ops

    def _add_segments(self) -> None:
        """Columns of y between neighbouring events, which have the cost, and of longer segments.

        A column of a longer segment is the *or* of shorter ones and adds nothing in integers. In the relaxation it ties an op
        that is computed again in fractions over several segments to its inputs over all of them. Measured with HiGHS: without the
        columns from each event to the end, two events on a GPT-2 graph ran into the time limit, with them they took 1.1 s;
        MobileNet took 5.4 s without and 14.7 s with them.
        """
        m, last = self.model, len(self.cuts)
        for e in range(last):
            self.recomputed[e, e + 1] = self._again_columns(e, m.cost / m.total)
        begins = last if self.all_segments else 0
        for e in range(begins):
            for f in range(e + 2, last):
                with self._implied():
                    self._add_union(e, f - 1, f)
        for e in range(last - 2, -1, -1):
            # The rows of memory count replay states by these columns.
            with self._implied(not m.replay.any()):
                self._add_union(e, e + 1, last)
        for e in range(min(begins, last - 2)):
            ops = np.flatnonzero(self.recomputable[e])
            with self._implied():
                self.builder.add_rows([(self.recomputed[e, last][ops], 1.0), (self.recomputed[e, last - 1][ops], -1.0)], low=0.0)

    def _again_columns(self, e: int, cost: Floats) -> Ints:
        """Columns of y for a segment that begins with event e. Shape ``[op + 1]``."""
        ops = np.flatnonzero(self.recomputable[e])
        column = np.full(self.model.end + 1, NoColumn.UNMODELLED, dtype=np.int64)
        column[ops] = self.builder.add_columns(cost[ops])
        return column

    def _add_union(self, e: int, middle: int, f: int) -> None:
        """Columns of y from event e to event f, or the end, as the *or* of the columns up to and from a third event."""
        self.recomputed[e, f] = self._again_columns(e, np.zeros(self.model.end + 1))
        ops = np.flatnonzero(self.recomputable[e])
        whole, first, rest = (self.recomputed[pair][ops] for pair in ((e, f), (e, middle), (middle, f)))
        self.builder.add_rows([(first, 1.0), (rest, 1.0), (whole, -1.0)], low=0.0)
        self.builder.add_rows([(whole, 1.0), (first, -1.0)], low=0.0)
        # An op that was recomputable after the first event may be overwritten or useless after the third: it has no column there.
        both = rest >= 0
        self.builder.add_rows([(whole[both], 1.0), (rest[both], -1.0)], low=0.0)

    def _limit_memory(self, e: int) -> None:
        """Memory row of an event. Its constants are first compared in exact bytes, which alone may prove that no plan exists."""
        m, t = self.model, self.cuts[e]
        always = self.live[e] == NoColumn.ALWAYS_LIVE
        own = m.workspace[t] + int(m.size[m.outputs[t]].sum()) + int(m.size[always].sum())
        if own > self.budget:
            self.impossible = True
            return
        values = np.flatnonzero(self.live[e] >= 0)
        # An op that has surely run and runs again later has its replay state held in between.
        again = self.recomputed[e, len(self.cuts)]
        ops = np.flatnonzero(self.sure[e] & (again >= 0) & (m.replay > 0))
        columns = np.concatenate([self.live[e, values], again[ops]])
        sizes = np.concatenate([m.size[values], m.replay[ops]])
        room = (self.budget * (1 + BUDGET_SLACK) - own) / max(1, self.budget)
        self.memory_rows.append((e, self.builder.rows))
        self.builder.add_row(columns, sizes / max(1, self.budget), high=room)
        for unit in memory_units(sizes, self.budget - own):
            fits, whole = (self.budget - own) // unit, sizes // unit
            self.memory_rows.append((e, self.builder.rows))
            scale = max(1, fits)
            self.builder.add_row(columns[whole > 0], whole[whole > 0] / scale, high=fits / scale + BUDGET_SLACK)

    def _order_floating(self, e: int) -> None:
        """Order rows: a floating op comes after its parents and stays computed; its values are live only if it is computed."""
        m, column = self.model, self.computed[e]
        values = np.flatnonzero(self.live[e] >= 0)
        values = values[column[m.producer[values]] >= 0]
        self.builder.add_rows([(column[m.producer[values]], 1.0), (self.live[e, values], -1.0)], low=0.0)
        parents, ops = column[m.parent_edges].T
        float_both = (parents >= 0) & (ops >= 0)
        self.builder.add_rows([(parents[float_both], 1.0), (ops[float_both], -1.0)], low=0.0)
        both = np.flatnonzero((column >= 0) & (self.computed[e + 1] >= 0))
        self.builder.add_rows([(self.computed[e + 1][both], 1.0), (column[both], -1.0)], low=0.0)

    def _link(self, e: int, f: int) -> None:
        """Supply rows between events e and f (or the end): the three reasons for which a value is needed."""
        m, redo = self.model, self.recomputed[e, f]
        begun = self.computed[e]
        # Needed because it is live at f. The end has no S: there END, one of the ops first computed, reads the kept values.
        if f < len(self.cuts):
            values = np.flatnonzero(self.live[f] != NoColumn.UNMODELLED)
            always = np.where(self.live[f, values] == NoColumn.ALWAYS_LIVE, 1.0, 0.0)
            self._supply(e, f, values, (1.0, _Term(self.live[f, values], always)))
        # Needed because a reader is computed again. An op first computed between neighbouring events is not
        # computed again there (see the proof). If that is unknown, both are one need, below.
        fixed = (begun < 0) & (self.computed[f] < 0)
        either = ~fixed & (f == e + 1)
        edges = np.flatnonzero((redo >= 0)[m.edge_op] & ~either[m.edge_op])
        self._supply(e, f, m.edge_value[edges], (1.0, self._y(e, f, m.edge_op[edges])))
        # Needed because a reader is first computed: one row for a value if that is sure for any reader, as all these rows are
        # the same; else one row for each reader.
        first = fixed & self.sure[f] & ~self.sure[e] & ~self.unmodelled[e] & ~self.unmodelled[f]
        sure = np.unique(m.edge_value[first[m.edge_op]])
        self._supply(e, f, sure, (1.0, _Term(np.full(len(sure), NoColumn.UNMODELLED), np.ones(len(sure)))))
        moving = np.flatnonzero(~fixed[m.edge_op])
        ops = m.edge_op[moving]
        again = [(1.0, self._y(e, f, ops))] if f == e + 1 else []
        self._supply(e, f, m.edge_value[moving], (1.0, self._x(f, ops)), (-1.0, self._x(e, ops)), *again)
        floating = np.flatnonzero(either & (redo >= 0) & (begun >= 0))
        self.builder.add_rows([(begun[floating], 1.0), (redo[floating], -1.0)], low=0.0)

    def _x(self, e: int, ops: Ints) -> _Term:
        columns = self.computed[e][ops]
        return _Term(columns, np.where(columns >= 0, 0.0, self.sure[e][ops]))

    def _y(self, e: int, f: int, ops: Ints) -> _Term:
        return _Term(self.recomputed[e, f][ops], np.zeros(len(ops)))

    def _supply(self, e: int, f: int, values: Ints, *need: tuple[float, _Term]) -> None:
        """Rows: need <= S[e, k] + y[e, f, p] + X[f, p] - X[e, p] for each of some values k with producers p.

        The need is a sum of variables, each with its factor. Rows that always hold are left out. Rows of unmodelled producers are
        left out too, as if their values were available: dropping rows relaxes.
        """
        producer = self.model.producer[values]
        begun, ended = self._x(e, producer), self._x(f, producer)
        made = ended.constants - begun.constants
        given = (made >= 1.0) & (begun.columns < 0) & (ended.columns < 0)
        given |= self.live[e, values] == NoColumn.ALWAYS_LIVE
        given |= self.unmodelled[e][producer] | self.unmodelled[f][producer]
        use = np.flatnonzero(~given)
        v = values[use]
        supply = [(self.live[e, v], 1.0), (self.recomputed[e, f][producer[use]], 1.0), (self.fetched[v], 1.0)]
        supply += [(ended.columns[use], 1.0), (begun.columns[use], -1.0)]
        needed = sum((factor * term.constants for factor, term in need), np.zeros(len(values)))
        self.builder.add_rows(supply + [(term.columns[use], -factor) for factor, term in need], low=(needed - made)[use])
