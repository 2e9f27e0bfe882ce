"""A linear program with optional integer columns, built row by row as sparse arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt
from scipy import sparse

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
_Scalar = TypeVar("_Scalar", bound=np.generic)


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
    row_prices: Floats | None = None  # of a relaxation: what the optimum gains for one unit of each row's limit


@dataclass(slots=True)
class ProgramBuilder:
    """Columns and rows so far. A negative column index in a row stands for a zero."""

    _cost: list[Floats] = field(default_factory=list[Floats])
    _high: list[Floats] = field(default_factory=list[Floats])
    _integral: list[npt.NDArray[np.bool_]] = field(default_factory=list[npt.NDArray[np.bool_]])
    _rows: list[Ints] = field(default_factory=list[Ints])
    _columns: list[Ints] = field(default_factory=list[Ints])
    _entries: list[Floats] = field(default_factory=list[Floats])
    _row_low: list[Floats] = field(default_factory=list[Floats])
    _row_high: list[Floats] = field(default_factory=list[Floats])
    columns: int = 0
    rows: int = 0

    def add_columns(self, cost: npt.ArrayLike, *, high: float = 1.0, integral: bool = True) -> Ints:
        """New columns from 0 to ``high``; returns their indices."""
        costs = np.asarray(cost, dtype=np.float64)
        count = len(costs)
        self._cost.append(costs)
        self._high.append(np.full(count, high))
        self._integral.append(np.full(count, integral))
        self.columns += count
        return np.arange(self.columns - count, self.columns, dtype=np.int64)

    def add_rows(self, terms: list[tuple[Ints, float]], low: npt.ArrayLike = -np.inf, high: npt.ArrayLike = np.inf) -> None:
        """One row for each position of the terms: the sum of coefficient times column."""
        count = len(terms[0][0])
        index = np.arange(self.rows, self.rows + count, dtype=np.int64)
        for columns, coefficient in terms:
            used = columns >= 0
            self._rows.append(index[used])
            self._columns.append(columns[used])
            self._entries.append(np.full(int(used.sum()), coefficient))
        self._row_low.append(np.broadcast_to(np.asarray(low, dtype=np.float64), (count,)))
        self._row_high.append(np.broadcast_to(np.asarray(high, dtype=np.float64), (count,)))
        self.rows += count

    def add_row(self, columns: Ints, entries: Floats, low: float = -np.inf, high: float = np.inf) -> None:
        """One row."""
        used = columns >= 0
        self._rows.append(np.full(int(used.sum()), self.rows, dtype=np.int64))
        self._columns.append(columns[used])
        self._entries.append(entries[used])
        self._row_low.append(np.array([low]))
        self._row_high.append(np.array([high]))
        self.rows += 1

    def build(self) -> Program:
        """The program."""
        matrix = sparse.csr_matrix(
            (_joined(self._entries), (_joined(self._rows), _joined(self._columns))), shape=(self.rows, self.columns)
        )
        return Program(
            cost=_joined(self._cost),
            low=np.zeros(self.columns),
            high=_joined(self._high),
            integral=_joined(self._integral).astype(np.bool_),
            matrix=matrix,
            row_low=_joined(self._row_low),
            row_high=_joined(self._row_high),
        )


def _joined(parts: Sequence[npt.NDArray[_Scalar]]) -> npt.NDArray[_Scalar]:
    return np.concatenate([np.zeros(0, dtype=parts[0].dtype if parts else np.float64), *parts])


def dual_bound(program: Program, duals: Floats) -> float:
    """Lower bound on the optimum from any row duals, by the Lagrangian; those of the wrong sign count as 0.

    For columns in [low, high], min of c x subject to rows is at least the value of the Lagrangian at any y of the right sign
    (weak duality). It needs no optimality, so an engine's tolerances or an early stop cannot make the bound wrong,
    only loose.
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

    The ray is scaled to a largest entry of 1, so that the threshold means the same for all; engines differ in its sign.
    """
    costless = replace(program, cost=np.zeros_like(program.cost))
    scale = float(np.abs(ray).max(initial=0.0))
    # Rounding errors of the sums are many orders of magnitude below the threshold.
    return scale > 0 and max(dual_bound(costless, ray / scale), dual_bound(costless, -ray / scale)) > 1e-7
