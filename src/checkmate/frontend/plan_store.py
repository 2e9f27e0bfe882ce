"""Measured peaks of compiled plans, in a SQLite file of the user's cache folder.

The peak of a compiled plan is known only when it has run. Measured plans are therefore kept with their peaks, and so is which of
them was the answer to which budget: a smaller budget is never answered with a larger peak.
"""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from checkmate.cost.store import cache_folder, connected

_SCHEMA = """
CREATE TABLE IF NOT EXISTS plans (key TEXT, plan TEXT, peak_bytes INTEGER NOT NULL, PRIMARY KEY (key, plan));
CREATE TABLE IF NOT EXISTS answers (key TEXT, budget_bytes INTEGER, peak_bytes INTEGER NOT NULL, PRIMARY KEY (key, budget_bytes));
"""


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was compiled and measured.

    Attributes:
        order: Its computations.
        peak_bytes: What the step took above what is resident.
    """

    order: tuple[int, ...]
    peak_bytes: int


class PlanStore:
    """Measured plans of one graph, compiled one way.

    Args:
        key: The graph and all that decides what a compiler makes of its plans.
        path: The file; ``measured_plans.sqlite`` in the user's cache folder by default.

    Examples:
        >>> import tempfile
        >>> plans = PlanStore("graph", Path(tempfile.mkdtemp()) / "plans.sqlite")
        >>> plans.add(MeasuredPlan((0, 1, 2), 900))
        >>> plans.record_answer(1000, 900)
        >>> plans.monotone_bounds(800), plans.monotone_bounds(1200)
        ((0, 800), (900, 1200))
    """

    def __init__(self, key: str, path: str | os.PathLike[str] | None = None) -> None:
        self.key = key
        self.path = Path(path) if path is not None else cache_folder() / "measured_plans.sqlite"

    def all(self) -> list[MeasuredPlan]:
        """Every plan, the smallest peak first."""
        with closing(self._connect()) as connection:
            query = "SELECT plan, peak_bytes FROM plans WHERE key = ? ORDER BY peak_bytes, plan"
            return [MeasuredPlan(tuple(json.loads(plan)), peak) for plan, peak in connection.execute(query, (self.key,))]

    def add(self, plan: MeasuredPlan) -> None:
        """Keep a plan; what was measured last counts."""
        row = (self.key, _text(plan.order), plan.peak_bytes)
        with closing(self._connect()) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO plans VALUES (?, ?, ?)", row)

    def record_answer(self, budget_bytes: int, peak_bytes: int) -> None:
        """Record the measured peak of the plan that a budget was answered with."""
        with closing(self._connect()) as connection, connection:
            connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (self.key, budget_bytes, peak_bytes))

    def monotone_bounds(self, budget_bytes: int) -> tuple[int, int]:
        """Least and most bytes that the plan for a budget may need, so that no smaller budget ever gets a larger peak."""
        with closing(self._connect()) as connection:
            query = "SELECT budget_bytes, peak_bytes FROM answers WHERE key = ? AND budget_bytes != ?"
            rows = list(connection.execute(query, (self.key, budget_bytes)))
        least = max((peak for budget, peak in rows if budget < budget_bytes), default=0)
        return least, min([budget_bytes, *(peak for budget, peak in rows if budget > budget_bytes)])

    def _connect(self) -> sqlite3.Connection:
        return connected(self.path, _SCHEMA)


def _text(order: Sequence[int]) -> str:
    return json.dumps(list(order), separators=(",", ":"))
