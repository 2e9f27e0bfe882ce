"""Relaxations of event cuts; the rows of longer segments are added when a solution violates them.

Most rows of a program belong to longer segments, and few of them matter to its relaxation. The relaxation is solved without
them, and rows that its solution violates are added, as in the cutting-plane method of Dantzig, Fulkerson and Johnson (1954).

A column of a longer segment costs nothing, and its rows limit it from below and above. Therefore a solution of the rows so far
is completed: these columns are raised to the limits of their rows, one after another, until nothing changes. If that breaks a
row, the row is added together with the rows that raised its columns. Added alone, an unconstrained column would satisfy it, and
a chain of ops would take a round for each op. If no row breaks, the completed solution solves the whole program.

Ten events of a captured ResNet-50 have 91,000 rows. With all of them the relaxation takes 32 s. Thirteen rounds take 7 s, and
the first five, in 2.2 s, prove 0.2344 of 0.2365. Dual values of some rows, with 0 for all others, are dual values of the whole
program: the bound of each round holds whether or not there is time for the next.
"""

# scipy.sparse ships no types.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np

from checkmate.solvers.backends.program import Floats, Ints, Solved
from checkmate.solvers.bounds.events.event_cuts import CutProgram


def relax(cut: CutProgram, *, time_s: float, enough: float = math.inf, at_once: int = 10_000) -> Solved:
    """Solve the relaxation of a program of events, up to a bound beyond which more is of no use.

    The answer has no solution. It has the best bound of all rounds, and the row prices of the last round solved to its end.
    It is finished if no more rows are needed or the last rounds gained too little. A program with few implied rows is solved
    with all of them at once, which takes less time.
    """
    from checkmate.solvers.backends.highs import solve_linear

    if int(cut.implied.sum()) <= at_once:
        solved = solve_linear(cut.program, time_s=time_s)
        return Solved(bound=solved.bound, finished=solved.finished, row_prices=solved.row_prices)
    until = time.monotonic() + time_s
    segments = LongSegments(cut)
    rows = ~cut.implied
    best = Solved()
    without_gain = 0
    while True:
        solved = solve_linear(cut.program.with_rows(rows), time_s=until - time.monotonic())
        bound = max(best.bound, solved.bound)
        if solved.solution is None or solved.row_prices is None:
            return Solved(bound=bound, finished=solved.finished, row_prices=best.row_prices)
        # Stop after two rounds in a row that gain less than this share of the distance to `enough`.
        little = math.isfinite(enough) and bound <= best.bound + 0.002 * (enough - best.bound)
        without_gain = without_gain + 1 if little else 0
        added = segments.contradiction(solved.solution)
        added = added[~rows[added]]
        finished = not len(added) or without_gain >= 2 or bound >= enough
        prices = np.zeros(len(rows))
        prices[rows] = solved.row_prices
        best = Solved(bound=bound, finished=finished, row_prices=prices)
        if finished:
            return best
        rows[added] = True


class LongSegments:
    """The implied rows of a program, and the columns that no other row has.

    Each of these rows is a clause: its coefficients are 1 or -1, its lower limit is 1 less the number of -1 coefficients, and
    it has no upper limit. Therefore no row asks for a column beyond 1.
    """

    def __init__(self, cut: CutProgram) -> None:
        matrix: Any = cut.program.matrix
        free = np.ones(matrix.shape[1], dtype=np.bool_)
        free[matrix[~cut.implied].indices] = False
        self._rows: Ints = np.flatnonzero(cut.implied)
        self._matrix = matrix[self._rows]
        self._low: Floats = cut.program.row_low[self._rows]
        self._lowest, self._highest = cut.program.low, cut.program.high
        row = np.repeat(np.arange(len(self._rows)), np.diff(self._matrix.indptr))
        column, positive = self._matrix.indices, self._matrix.data > 0
        # A row raises a column if no other column can satisfy the row. By column: the largest demand is a segment's maximum.
        raising = positive & free[column]
        raising &= (np.bincount(row[raising], minlength=len(self._rows)) == 1)[row]
        by_column = np.argsort(column[raising], kind="stable")
        self._raising: Ints = row[raising][by_column]
        self._raised: Ints = column[raising][by_column].astype(np.int64)
        self._first: Ints = np.flatnonzero(np.diff(self._raised, prepend=-1))
        self._count: Ints = np.diff(np.append(self._first, len(self._raised)))
        self._raising_rows = self._matrix[self._raising]
        # Which free columns a row needs low.
        self._needs = self._matrix.copy()
        self._needs.data = (~positive & free[column]).astype(np.float64)
        self._needs.eliminate_zeros()

    def contradiction(self, solution: Floats) -> Ints:
        """Rows that the completed solution breaks, and the rows that raised their columns; none if it keeps all rows.

        The solution itself keeps the other rows of the program, and breaks at least one of the returned rows.
        """
        x, reason = self._completed(solution)
        chosen = self._low - self._matrix @ x > 1e-6  # the engine's tolerance is 1e-7
        new = np.flatnonzero(chosen)
        seen = np.zeros(len(x), dtype=np.bool_)
        while len(new):
            columns = np.unique(self._needs[new].indices)
            columns = columns[~seen[columns] & (reason[columns] >= 0)]
            seen[columns] = True
            new = np.unique(reason[columns])
            new = new[~chosen[new]]
            chosen[new] = True
        return self._rows[chosen]

    def _completed(self, solution: Floats) -> tuple[Floats, Ints]:
        """The solution with free columns raised as their rows ask, and the last row that raised each column, or -1.

        An engine's solution exceeds the limits of its columns by up to its tolerance. It is clipped to them: then a clause asks
        for no more than the least of its negative columns, and columns that raise each other in a circle stop rising. If a third
        column were -1e-7, they would rise to 1 in ten million steps.
        """
        x = np.clip(solution, self._lowest, self._highest)
        reason = np.full(len(x), -1, dtype=np.int64)
        low, columns = self._low[self._raising], self._raised[self._first]
        for _ in columns:  # each pass settles at least one column
            asked = low - self._raising_rows @ x + x[self._raised]
            most = np.maximum.reduceat(asked, self._first)
            rises = most > x[columns] + 1e-9  # smaller ones are rounding errors, which could raise each other for long
            if not rises.any():
                break
            asks_most = np.flatnonzero((asked >= np.repeat(most, self._count)) & np.repeat(rises, self._count))
            reason[self._raised[asks_most]] = self._raising[asks_most]
            x[columns[rises]] = most[rises]
        return x, reason
