"""A linear program with optional integer columns, built row by row as sparse arrays."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """Minimise ``cost @ x`` with ``row_low <= matrix @ x <= row_high`` and ``low <= x <= high``.

    Limits of rows may be infinite.
    """

    cost: Floats
    low: Floats
    high: Floats
    integral: npt.NDArray[np.bool_]
    matrix: sparse.csr_matrix
    row_low: Floats
    row_high: Floats

    def with_rows(self, which: npt.NDArray[np.bool_]) -> Program:
        """The program with some of its rows."""
        return replace(self, matrix=self.matrix[which], row_low=self.row_low[which], row_high=self.row_high[which])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """An engine's answer on a program."""

    bound: float = -np.inf  # proven for the optimum; infinite if there is proven to be none
    solution: Floats | None = None
    finished: bool = False  # no limit was hit
    row_prices: Floats | None = None  # of a relaxation: gain of the optimum for one unit of each row's limit


class ProgramBuilder:
    """Columns and rows so far. A negative column index in a row stands for a zero."""

    def __init__(self) -> None:
        none, no_bools = np.zeros(0), np.zeros(0, dtype=np.bool_)
        no_indices = np.zeros(0, dtype=np.int64)
        self.columns = self.rows = 0
        self._columns: list[tuple[Floats, Floats, npt.NDArray[np.bool_]]] = [
            (none, none, no_bools)
        ]  # cost, upper limit, integral
        self._entries: list[tuple[Floats, Ints, Ints]] = [(none, no_indices, no_indices)]  # coefficient, row, column
        self._limits: list[tuple[Floats, Floats]] = [(none, none)]

    def add_columns(self, cost: npt.ArrayLike, *, high: float = 1.0, integral: bool = True) -> Ints:
        """New columns from 0 to ``high``; returns their indices."""
        costs = np.asarray(cost, dtype=np.float64)
        count = len(costs)
        self._columns.append((costs, np.full(count, high), np.full(count, integral)))
        self.columns += count
        return np.arange(self.columns - count, self.columns, dtype=np.int64)

    def add_rows(self, terms: list[tuple[Ints, float]], low: npt.ArrayLike = -np.inf, high: npt.ArrayLike = np.inf) -> None:
        """One row for each position of the terms: the sum of coefficients times columns."""
        count = len(terms[0][0])
        index = np.arange(self.rows, self.rows + count, dtype=np.int64)
        for columns, coefficient in terms:
            self._add_entries(np.full(count, coefficient), index, columns)
        self._add_limits(count, low, high)

    def add_row(self, columns: Ints, entries: Floats, low: float = -np.inf, high: float = np.inf) -> None:
        """One row."""
        self._add_entries(entries, np.full(len(columns), self.rows, dtype=np.int64), columns)
        self._add_limits(1, low, high)

    def _add_entries(self, entries: Floats, rows: Ints, columns: Ints) -> None:
        used = columns >= 0
        self._entries.append((entries[used], rows[used], columns[used]))

    def _add_limits(self, count: int, low: npt.ArrayLike, high: npt.ArrayLike) -> None:
        self._limits.append((np.full(count, low, dtype=np.float64), np.full(count, high, dtype=np.float64)))
        self.rows += count

    def build(self) -> Program:
        """The program."""
        cost, high, integral = (np.concatenate(parts) for parts in zip(*self._columns, strict=True))
        entries, rows, columns = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        row_low, row_high = (np.concatenate(parts) for parts in zip(*self._limits, strict=True))
        matrix = sparse.csr_matrix((entries, (rows, columns)), shape=(self.rows, self.columns))
        return Program(
            cost=cost,
            low=np.zeros(self.columns),
            high=high,
            integral=integral.astype(np.bool_),
            matrix=matrix,
            row_low=row_low,
            row_high=row_high,
        )


def dual_bound(program: Program, duals: Floats) -> float:
    """Lower bound on the optimum from any row duals, by the Lagrangian; duals of the wrong sign count as 0.

    For columns in [low, high], min of c x subject to rows is at least the value of the Lagrangian at any y of the right sign
    (weak duality), optimal or not. Therefore an engine's tolerances or an early stop can only loosen the bound, not make it
    wrong.
    """
    y = np.where(np.isinf(program.row_high), np.maximum(duals, 0), duals)
    y = np.where(np.isinf(program.row_low), np.minimum(y, 0), y)
    reduced = program.cost - program.matrix.T @ y
    low = np.where(np.isinf(program.row_low), 0, program.row_low)
    high = np.where(np.isinf(program.row_high), 0, program.row_high)
    rows = np.maximum(y, 0) @ low + np.minimum(y, 0) @ high
    columns = np.maximum(reduced, 0) @ program.low + np.minimum(reduced, 0) @ program.high
    return float(rows + columns)


def proves_infeasible(program: Program, ray: Floats) -> bool:
    """Whether a dual ray is a Farkas certificate: its Lagrangian without costs is clearly positive.

    The ray is scaled to a largest entry of 1, which makes the threshold comparable. Engines differ in the sign of the ray.
    """
    costless = replace(program, cost=np.zeros_like(program.cost))
    scale = float(np.abs(ray).max(initial=0.0))
    # Rounding errors of the sums are many orders of magnitude below the threshold.
    return scale > 0 and max(dual_bound(costless, ray / scale), dual_bound(costless, -ray / scale)) > 1e-7
