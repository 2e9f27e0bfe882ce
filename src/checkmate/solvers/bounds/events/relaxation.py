"""Relaxations of event cuts, with rows of longer segments added where a solution violates them.

The rows of longer segments are most of a program, and a few percent of them matter to its relaxation. So it is solved
without them, and those that its solution violates are added, as in the cutting-plane method of Dantzig, Fulkerson and Johnson (1954).

A column of a longer segment costs nothing, and the rows say how small and how large it may be. So the solution
of the rows so far is completed by raising such columns to what their rows ask, one after another, until nothing changes. Where that
breaks a row, the row is added with those that raised its columns: all of what contradicts the solution in one round, where the row
alone would be met by a column that nothing holds in place. If nothing is broken, the completed solution is one of the whole program.

Ten events of a captured ResNet-50 have 91,000 rows. With all of them the relaxation takes 32 s; in thirteen rounds it takes 6, with
16,000 rows, and in four of them, 2 s, it proves all but a hundredth. Dual values of some rows, with 0 for the others, are
dual values of the whole program, so that each round's bound holds whether or not there is time for another.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace

import numpy as np

from checkmate.solvers.backends.program import Floats, Ints, Solved
from checkmate.solvers.bounds.events.event_cuts import CutProgram


@dataclass(frozen=True, slots=True, kw_only=True)
class RelaxationParameters:
    """Parameters of `relax`.

    How much each matters: ``docs/benchmarks/solver_parameters.md``.

    Attributes:
        least_rows: Rows of longer segments up to which a program is solved with all of them at once, which takes less time.
        least_gain: Share of the distance from the bound to what is enough that a round has to gain.
        patience: Rounds in a row without that gain after which to stop.
        tolerance: By how much a row is broken that counts as broken. The engine's is 1e-7.
    """

    least_rows: int = 10_000
    least_gain: float = 0.002
    patience: int = 2
    tolerance: float = 1e-6


PARAMETERS = RelaxationParameters()
_RISE = 1e-9
"""Least rise of a column; with less a chain of rows could go on for long by rounding errors."""


def relax(cut: CutProgram, *, time_s: float, enough: float = math.inf) -> Solved:
    """Solve the relaxation of a program of events.

    Args:
        cut: The program.
        time_s: Seconds it may take.
        enough: Bound beyond which more is of no use.

    Returns:
        The best bound of all rounds and the row prices of the last one that was solved to its end, without a solution. Finished if no
        more rows are needed, or the last two rounds gained too little.
    """
    from checkmate.solvers.backends.highs import solve_linear

    program = cut.program
    if int(cut.implied.sum()) <= PARAMETERS.least_rows:
        return replace(solve_linear(program, time_s=time_s), solution=None, objective=math.inf)
    until = time.monotonic() + time_s
    segments = LongSegments(cut)
    rows = ~cut.implied
    best = Solved(-math.inf, None, math.inf, False)
    without_gain = 0
    while True:
        solved = solve_linear(program.with_rows(rows), time_s=until - time.monotonic())
        bound = max(best.bound, solved.bound)
        if solved.solution is None or solved.row_prices is None:
            return replace(best, bound=bound, finished=solved.finished)
        far = enough - best.bound if math.isfinite(enough) else 0.0
        without_gain = without_gain + 1 if bound <= best.bound + PARAMETERS.least_gain * far else 0
        prices = np.zeros(len(rows))
        prices[rows] = solved.row_prices
        added = segments.contradiction(solved.solution)
        added = added[~rows[added]]
        finished = not len(added) or without_gain >= PARAMETERS.patience or bound >= enough
        best = Solved(bound, None, math.inf, finished, row_prices=prices)
        if finished:
            return best
        rows[added] = True


class LongSegments:
    """The rows of a program that are about longer segments, and the columns that only they have.

    Args:
        cut: The program.
    """

    def __init__(self, cut: CutProgram) -> None:
        matrix = cut.program.matrix
        self._free = np.ones(matrix.shape[1], dtype=np.bool_)
        self._free[matrix[~cut.implied].indices] = False
        self._rows = np.flatnonzero(cut.implied)
        self._matrix = matrix[self._rows]
        self._low = cut.program.row_low[self._rows]
        row = np.repeat(np.arange(len(self._rows)), np.diff(self._matrix.indptr))
        column, positive = self._matrix.indices, self._matrix.data > 0
        # A row raises a column if that is the only one that can meet it. All its coefficients are 1 or -1.
        raising = positive & self._free[column]
        raising &= (np.bincount(row[raising], minlength=len(self._rows)) == 1)[row]
        by_column = np.argsort(column[raising], kind="stable")
        self._raising: Ints = row[raising][by_column]
        self._raised: Ints = column[raising][by_column].astype(np.int64)
        self._first = np.flatnonzero(np.diff(self._raised, prepend=-1))
        self._steps = self._matrix[self._raising]
        needs = self._matrix.copy()
        needs.data = (~positive & self._free[column]).astype(np.float64)
        needs.eliminate_zeros()
        self._needs = needs

    def contradiction(self, solution: Floats) -> Ints:
        """Rows that, together, no completion of a solution keeps.

        Args:
            solution: A point that keeps the other rows, and perhaps some of these. Shape ``[column]``.

        Returns:
            Rows of the program; none if the solution can be completed.
        """
        x, reason = self._completed(solution)
        broken = self._low - self._matrix @ x > PARAMETERS.tolerance
        front = np.flatnonzero(broken)
        seen = np.zeros(len(x), dtype=np.bool_)
        while len(front):
            columns = np.unique(self._needs[front].indices)
            columns = columns[~seen[columns] & (reason[columns] >= 0)]
            seen[columns] = True
            front = reason[columns]
            front = np.unique(front[~broken[front]])
            broken[front] = True
        return self._rows[broken]

    def _completed(self, solution: Floats) -> tuple[Floats, Ints]:
        """The solution with columns raised as far as their rows ask, and the row that raised each, -1 for none. Shapes ``[column]``."""
        x = solution.copy()
        reason = np.full(len(x), -1, dtype=np.int64)
        if not len(self._raised):
            return x, reason
        low, columns = self._low[self._raising], self._raised[self._first]
        count = np.diff(np.append(self._first, len(self._raised)))
        while True:
            asked = low - self._steps @ x + x[self._raised]
            most = np.maximum.reduceat(asked, self._first)
            rises = np.minimum(most, 1.0) > x[columns] + _RISE
            if not rises.any():
                return x, reason
            by = np.flatnonzero((asked >= np.repeat(most, count)) & np.repeat(rises, count))
            reason[self._raised[by]] = self._raising[by]
            x[columns[rises]] = np.minimum(most[rises], 1.0)
