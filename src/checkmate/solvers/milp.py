"""The integer program of Jain et al. (2020), generalised to values, views and workspace, on HiGHS.

In the paper an op has one output, and R, S, FREE and U are matrices of stage and op (equations 1 to 9). FREE, the reader after
which a stage frees a value, needs linearised products of R; U sums the bytes. Here S is of stage and value, and L below replaces
FREE and U: a value is held at a place of a stage if it is read later in the stage or carried to the next. L is the least that
satisfies this, with one column for each reader, and the bytes follow by differences from place to place.
The plans are the same, and the relaxation is tighter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from checkmate.core.problem import Problem
from checkmate.core.result import Reason, Termination
from checkmate.solvers.reductions.fold_views import FoldViews, may_run_again, reads_with_storage
from checkmate.solvers.session import Session
from checkmate.solvers.tunables import TUNABLES

if TYPE_CHECKING:
    from checkmate.solvers.backends.program import Floats, Program


@dataclass(frozen=True, slots=True)
class Milp:
    """Frontier-advancing stages as a mixed-integer program: exact in its class.

    Stage t ends with the first computation of op t in the graph's order. Before that it may compute any earlier
    ops again, each once, in ascending order. That is the class of Jain et al. (2020), eq. 9. A bound on it is not a bound on
    plans of other orders, so it is reported by name, and ``Result.bound`` comes from event cuts. A view that a rule ties to
    its place is assumed to need its storage's owner too, which can only exclude plans. Liveness is modelled by the last
    reader in a stage instead of by FREE, which is tighter. The engine starts from a plan of the local search: that took
    MobileNet (185 ops) from 8.3 to 1.0 s.

    Attributes:
        max_ops: Larger graphs (views not counted) are refused: the program grows with the square of the ops.
    """

    max_ops: int = 400

    def run(self, problem: Problem, session: Session) -> Termination:
        """Build the program, start it from a quick plan and let the engine run to the limits.

        Raises:
            SolverError: The engine's answer is no solution.
        """
        from checkmate.solvers.backends.highs import solve_integer
        from checkmate.solvers.bounds.events.refine import prove_single_events

        fold = FoldViews.of(problem.graph)
        folded = fold.apply(problem)
        if len(folded.graph.ops) > self.max_ops:
            detail = f"{len(folded.graph.ops)} ops, and the stage program stops at {self.max_ops}"
            return Termination(Reason.NOT_FOUND, detail=detail)
        stages = StageProgram(folded)
        program = stages.build()
        until = session.elapsed_s() + 5.0  # enough to close the gap at many moderate budgets
        prove_single_events(problem, session, lambda: session.elapsed_s() > until)
        quick = _given_order_plan(folded, session)
        if quick is not None:
            session.offer(fold.invert(quick))

        def take(solution: Floats) -> None:
            session.offer(fold.invert(stages.order(solution)))

        scale = max(1, folded.graph.cost)
        gap = session.limits.gap * (session.cost or problem.graph.cost) / scale
        solved = solve_integer(
            program,
            time_s=session.left_s(),
            # Engines have tolerances of ten times the least gap.
            absolute_gap=max(1e-7, gap),
            threads=session.limits.threads,
            start=None if quick is None else stages.solution(quick),
            on_solution=take,
        )
        if solved.solution is not None:
            take(solved.solution)
        if math.isinf(solved.bound) and solved.bound > 0:
            return Termination(Reason.NOT_FOUND, detail="proven: no plan in stages of the graph's own order keeps the budget")
        if math.isfinite(solved.bound) and all(value.base is None for value in folded.graph.values):
            # The program's objective includes first computations, unlike that of event cuts.
            bound = solved.bound * scale + fold.cost_offset
            session.remark(f"given-order bound, stages of the graph's own order only: {bound:.0f}")
        limit = "" if solved.finished else "time"
        return Termination(Reason.FEASIBLE if session.plan else Reason.NOT_FOUND, limit)


def _given_order_plan(problem: Problem, session: Session) -> list[int] | None:
    """A quick plan whose first computations are in the graph's own order, to start the engine from; None if none is found."""
    from checkmate.solvers.evict.search import Search

    given = Problem(problem.graph, problem.budget_bytes, problem.recompute, reorder=False)
    search = Search(given, frozenset(), session.limits.seed, time_up=session.time_up)
    if not search.first(out_of_time=lambda: session.left_s() <= 0):
        return None
    search.improve(400, TUNABLES.temperature, lambda: session.left_s() <= 0)  # a fraction of a second
    return search.order()


class StageProgram:
    """Columns of the program, and the way from orders to solutions and back.

    R[t, o]: op o is computed in stage t. After the stages of all ops, a last stage computes kept values again.
    S[t, v]: value v is held when stage t begins.
    L[t, i, v]: value v is held while op i runs in stage t. It can change only at the readers of v, and has columns only
    there.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.graph = graph = problem.graph
        self.ops = len(graph.ops)
        self.budget = problem.budget_bytes - graph.resident_bytes
        self.inputs = [reads_with_storage(graph, op.inputs) for op in graph.ops]
        self.readers: list[list[int]] = [[] for _ in graph.values]
        for o, inputs in enumerate(self.inputs):
            for v in inputs:
                self.readers[v].append(o)
        self.again = [may_run_again(problem, o) for o in range(self.ops)]
        self.last = [min(op.clobbered_by, default=self.ops) for op in graph.ops]
        self.stages = self.ops + 1
        self.R = np.full((self.stages, self.ops), -1, dtype=np.int64)
        self.S = np.full((self.stages + 1, len(graph.values)), -1, dtype=np.int64)

    def build(self) -> Program:
        """The program; minimises cost as a share of computing each op once."""
        from checkmate.solvers.backends.program import ProgramBuilder

        self.builder = ProgramBuilder()
        self._add_columns()
        self._add_dependences()
        for t in range(self.stages):
            self._add_memory(t)
        return self.builder.build()

    def _add_columns(self) -> None:
        graph, scale = self.graph, max(1, self.graph.cost)
        for t in range(self.stages):
            # Frontier-advancing stages (Jain et al. 2020): stage t computes op t for the first time and no op after it. This
            # halves the columns and leaves one way to divide a plan into stages.
            allowed = [o for o in range(t) if self.again[o] and t <= self.last[o]]
            if t < self.ops:
                allowed.append(t)
            self.R[t, allowed] = self.builder.add_columns([graph.ops[o].cost / scale for o in allowed])
            # A column fixed to 1 keeps the rows of all stages alike; presolve removes it.
            if t < self.ops:
                self._fix(self.R[t, t : t + 1])
        for t in range(1, self.stages + 1):
            # Only values that exist by then and can still be read: the others would be 0 in every cheapest plan.
            held = [v for v in range(len(graph.values)) if graph.producer[v] < t and self._useful(v, t)]
            self.S[t, held] = self.builder.add_columns(np.zeros(len(held)))
        kept = np.array([v for v, value in enumerate(graph.values) if value.kept], dtype=np.int64)
        self._fix(self.S[self.stages, kept])

    def _useful(self, v: int, t: int) -> bool:
        """Whether a value can still be read from stage t on."""
        return self.graph.values[v].kept or any(r >= t or self.again[r] for r in self.readers[v])

    def _fix(self, columns: np.ndarray) -> None:
        self.builder.add_rows([(columns, 1.0)], low=1.0, high=1.0)

    def _add_dependences(self) -> None:
        """Rows: inputs of an op are held or computed in the stage, and so are values held in the next stage."""
        producer = np.array(self.graph.producer, dtype=np.int64)
        for t in range(self.stages):
            pairs = [(v, o) for o in range(self._width(t)) if self.R[t, o] >= 0 for v in self.inputs[o]]
            values, ops = np.array(pairs, dtype=np.int64).reshape(-1, 2).T
            self.builder.add_rows([(self.S[t, values], 1.0), (self.R[t, producer[values]], 1.0), (self.R[t, ops], -1.0)], low=0.0)
            carried = np.flatnonzero(self.S[t + 1] >= 0)
            made = self.R[t, producer[carried]]
            self.builder.add_rows([(self.S[t, carried], 1.0), (made, 1.0), (self.S[t + 1, carried], -1.0)], low=0.0)

    def _add_memory(self, t: int) -> None:
        """Rows: bytes at each place of a stage, as a share of the budget, by differences from the place before.

        As sums over all values, each row would have an entry for each value.
        """
        graph, b = self.graph, max(1, self.budget)
        width = self._width(t)
        terms: list[dict[int, float]] = [{} for _ in range(width)]  # change of the held bytes when op i begins

        def add(i: int, column: int, size: float) -> None:
            if column >= 0 and i < width:
                terms[i][column] = terms[i].get(column, 0.0) + size / b

        # From the beginning of the stage to the place of its producer, a value is live if it was held. There the new instance
        # replaces it. After each reader it stays only if a later reader runs or the next stage begins with it.
        for v, value in enumerate(graph.values):
            p = graph.producer[v]
            if p >= width or not value.size_bytes:
                continue
            size = float(value.size_bytes)
            readers = [r for r in self.readers[v] if p < r < width and self.R[t, r] >= 0]
            add(0, int(self.S[t, v]), size)
            held = self._held(t, v, readers)
            add(p, int(self.S[t, v]), -size)
            # From its producer's place on, the value is held if it is read later in the stage or carried on.
            making = self._at_least([int(self.R[t, p]), held[0]])
            add(p, making, size)
            add(p + 1, making, -size)
            add(p + 1, held[0], size)
            for position, r in enumerate(readers):
                add(r + 1, held[position], -size)
                add(r + 1, held[position + 1], size)
        self._add_replays(t, add)
        # One continuous column for the bytes held at each place; its row has only the changes at the place.
        level = self.builder.add_columns(np.zeros(width), integral=False)
        for i in range(width):
            columns = np.array([*terms[i], level[i], *([level[i - 1]] if i else [])], dtype=np.int64)
            entries = np.array([*terms[i].values(), -1.0, *([1.0] if i else [])])
            self.builder.add_row(columns, entries, low=0.0, high=0.0)
            # An op that does not run in this stage has no workspace there.
            workspace = graph.ops[i].workspace_bytes / b
            run = int(self.R[t, i])
            self.builder.add_row(
                np.array([level[i], run], dtype=np.int64), np.array([1.0, workspace]), high=1.0 if self.budget > 0 else 0.0
            )

    def _width(self, t: int) -> int:
        """Number of ops for which a stage has a place."""
        return min(t + 1, self.ops)

    def _held(self, t: int, v: int, readers: list[int]) -> list[int]:
        """Columns: held until reader k or later, for each k; the last: held in the next stage. Each is no less than the next."""
        tail = int(self.S[t + 1, v])
        columns = [tail]
        for r in reversed(readers):
            columns.append(self._at_least([int(self.R[t, r]), columns[-1]]))
        return columns[::-1]

    def _at_least(self, columns: list[int]) -> int:
        """A column no less than each of ``columns``: their *or*, as bytes push it down. A single column itself; -1 for none."""
        used = sorted({c for c in columns if c >= 0})
        if len(used) <= 1:
            return used[0] if used else -1
        column = self.builder.add_columns([0.0], integral=False)
        for c in used:
            self.builder.add_rows([(column, 1.0), (np.array([c], dtype=np.int64), -1.0)], low=0.0)
        return int(column[0])

    def _add_replays(self, t: int, add: Callable[[int, int, float], None]) -> None:
        """A random op's state is held from its first computation to its last, if there are several."""
        for o, op in enumerate(self.graph.ops):
            if not op.replay_bytes or not self.again[o] or o > t:
                continue
            later = [int(self.R[s, o]) for s in range(t + 1, self.stages) if self.R[s, o] >= 0]
            after = self._at_least(later)
            if o == t:
                add(t, after, float(op.replay_bytes))
                continue
            now = self._at_least([int(self.R[t, o]), after])
            add(0, now, float(op.replay_bytes))
            add(o + 1, now, -float(op.replay_bytes))
            add(o + 1, after, float(op.replay_bytes))

    def order(self, solution: Floats) -> list[int]:
        """Ops in the order in which an integer solution computes them."""
        return np.nonzero((self.R >= 0) & (solution[self.R] > 0.5))[1].tolist()

    def solution(self, order: list[int]) -> Floats | None:
        """Values of R for an order, NaN elsewhere; None if the order is not in stage form."""
        start = np.full(self.builder.columns, np.nan)
        start[self.R[self.R >= 0]] = 0.0
        # In stage form ops ascend within a stage, and a stage ends with the first computation of its op.
        t, previous = 0, -1
        for o in order:
            if o <= previous or self.R[t, o] < 0:
                return None
            start[self.R[t, o]] = 1.0
            t, previous = (t + 1, -1) if o == t else (t, o)
        return start

    def held(self, solution: Floats) -> Floats:
        """Share of each value that a relaxed solution holds when a stage begins. Shape ``[stage + 1, value]``."""
        return np.where(self.S >= 0, solution[self.S], 0.0)

    def rounded(self, held: npt.NDArray[np.bool_]) -> list[int]:
        """Order with the fewest computations for a choice of held values (Jain et al. 2020, algorithm 2, second phase).

        Given S, whether a value is held when a stage begins, R is the least that keeps the dependences. It has each stage's op
        and the producers of values newly held at its end, then, from the last op back, producers of inputs that are not held.
        Values that may not be computed again, and storages of views that are tied to a place, are always held.
        """
        graph = self.graph
        held = held.copy()
        shared = {graph.root[v] for v, value in enumerate(graph.values) if value.base is not None}
        for v, value in enumerate(graph.values):
            p = graph.producer[v]
            held[: p + 1, v] = False
            if not self.again[p] or self.last[p] < self.ops or value.base is not None or v in shared:
                held[p + 1 :, v] = True
            held[self.stages, v] |= value.kept
        # From the last op of the stage to the first: an input has a smaller index than its reader; one pass collects all.
        order: list[int] = []
        for t in range(self.stages):
            wanted = {graph.producer[v] for v in np.flatnonzero(held[t + 1] & ~held[t])} | ({t} & set(range(self.ops)))
            for o in range(self._width(t) - 1, -1, -1):
                if o in wanted:
                    wanted.update(graph.producer[v] for v in self.inputs[o] if not held[t, v])
            order += sorted(wanted)
        return order
