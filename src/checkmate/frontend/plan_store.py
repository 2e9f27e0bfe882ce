"""Measured peaks of compiled plans, in a SQLite file in the user's cache folder.

The peak of a compiled plan is known only after it has run. Measured plans are therefore stored with their peaks. The answer to
each budget is stored too: no smaller budget is later answered with a larger peak (`PlanStore.monotone_bounds`). `Misfits` stores
the steps that do not fit as Inductor compiles them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sqlite3
from collections.abc import Iterable
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import msgspec

import checkmate
from checkmate.core.errors import shortened
from checkmate.cost.database import Database, cache_folder
from checkmate.cost.store import MOST_BYTES
from checkmate.frontend.step_memory import StepMemory

_SCHEMA = """
CREATE TABLE IF NOT EXISTS steps (
    key TEXT, plan TEXT, peak_bytes INTEGER NOT NULL, memory TEXT NOT NULL, PRIMARY KEY (key, plan)
);
CREATE TABLE IF NOT EXISTS answers (key TEXT, budget_bytes INTEGER, peak_bytes INTEGER NOT NULL, PRIMARY KEY (key, budget_bytes));
CREATE TABLE IF NOT EXISTS compilers (key TEXT PRIMARY KEY, compiler TEXT NOT NULL, reason TEXT NOT NULL);
"""


def _database(path: str | os.PathLike[str] | None, without: str) -> Database:
    return Database(lambda: cache_folder() / "measured_plans.sqlite" if path is None else Path(path), _SCHEMA, without)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that was compiled, and the measured memory of the step."""

    order: tuple[int, ...]  # ops in the order of their computations
    memory: StepMemory


class PlanStore:
    """Measured plans of one graph, compiled one way: the key covers everything that the measured peaks depend on."""

    def __init__(self, key: str, path: str | os.PathLike[str] | None = None) -> None:
        self.key = key
        self.database = _database(path, "compiled plans are measured again in every process")

    def all(self) -> list[MeasuredPlan]:
        """Every plan, the smallest peak first."""
        query = "SELECT plan, memory FROM steps WHERE key = ? ORDER BY peak_bytes, plan"

        def read(connection: sqlite3.Connection) -> list[MeasuredPlan]:
            rows = connection.execute(query, (self.key,))
            return [MeasuredPlan(tuple(json.loads(plan)), msgspec.json.decode(memory, type=StepMemory)) for plan, memory in rows]

        found = self.database.run(read, [])
        wrong = [plan for plan in found if not (_are_counts(plan.order) and _are_counts(astuple(plan.memory)))]
        if wrong:
            self.database.disbelieve(f"a plan of {shortened(repr(wrong[0]))}")
        return [plan for plan in found if plan not in wrong] if wrong else found

    def add(self, plan: MeasuredPlan) -> None:
        """Store a plan; an earlier measurement of the same plan is replaced."""
        order = json.dumps(list(plan.order), separators=(",", ":"))
        row = (self.key, order, plan.memory.peak_bytes, msgspec.json.encode(plan.memory).decode())
        self._rows("INSERT OR REPLACE INTO steps VALUES (?, ?, ?, ?)", row)

    def record_answer(self, budget_bytes: int, peak_bytes: int) -> None:
        """Store the measured peak of the plan that was chosen for a budget above the resident bytes."""
        self._rows("INSERT OR REPLACE INTO answers VALUES (?, ?, ?)", (self.key, budget_bytes, peak_bytes))

    def monotone_bounds(self, budget_bytes: int) -> tuple[int, int]:
        """Bounds on the measured peak for a budget above the resident bytes that keep peaks monotone in the budget.

        They are the largest peak that answered a smaller budget, and the smallest peak that answered a larger one, at most the
        budget.
        """
        query = "SELECT budget_bytes, peak_bytes FROM answers WHERE key = ? AND budget_bytes != ?"
        rows = self._rows(query, (self.key, budget_bytes))
        wrong = [row for row in rows if not _are_counts(row)]
        if wrong:
            self.database.disbelieve(f"a budget and a peak of {shortened(repr(wrong[0]))}")
            rows = [row for row in rows if _are_counts(row)]
        least = max((peak for budget, peak in rows if budget < budget_bytes), default=0)
        return least, min([budget_bytes, *(peak for budget, peak in rows if budget > budget_bytes)])

    def _rows(self, statement: str, values: tuple[str | int, ...]) -> list[Any]:
        """Rows of a statement; none if the file cannot be used."""
        return self.database.run(lambda connection: list(connection.execute(statement, values)), [])


class Misfits:
    """Steps that keep the budget in no compilation, in the same file."""

    def __init__(self, path: Path | None = None) -> None:
        self.database = _database(path, "a step is compiled in every process to find out that it does not fit")

    def get(self, key: str) -> int | None:
        """Bytes of the smallest compilation of a step; None if it fits, or is not known."""

        def read(connection: sqlite3.Connection) -> tuple[str] | None:
            return connection.execute("SELECT reason FROM compilers WHERE key = ?", (key,)).fetchone()

        known = self.database.run(read, None)
        return int(known[0]) if known is not None and known[0].isdecimal() else None

    def add(self, key: str, least_bytes: int) -> None:
        """Store the bytes of the smallest compilation of a step; an entry that another process stored before stays."""
        row = (key, str(least_bytes))  # the same columns as in stores of earlier versions
        self.database.run(lambda db: db.execute("INSERT OR IGNORE INTO compilers VALUES (?, 'eager', ?)", row), None)


def _are_counts(numbers: Iterable[object]) -> bool:
    """Whether all are integers that can be a size or an index."""
    return all(isinstance(number, int) and 0 <= number <= MOST_BYTES for number in numbers)


@functools.cache
def sources_digest() -> str:
    """Hash of this package's sources, for keys: other sources may compile the same plan to code with another peak."""
    digest = hashlib.sha256()
    for path in sorted(Path(checkmate.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
