"""Plans that solvers found, in a SQLite file in the user's cache folder, so that a second process need not search again.

A row is a claim, as a solver's answer is one: its plan is checked and simulated for the graph at hand before it is used, and a
row that is damaged, or that does not hold, is as good as none. What cannot be computed from a plan is the bound on the cost of
all others; it is stored with the plan, and a checksum covers both.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from checkmate import __version__
from checkmate.core.errors import CheckmateError
from checkmate.core.evaluate import evaluate
from checkmate.core.plan import Plan
from checkmate.core.problem import Problem
from checkmate.core.result import Limits, Reason, Result, Termination
from checkmate.cost.database import Database, cache_folder

_log = logging.getLogger("checkmate.frontend")

PLANNED_BEFORE: Final = "planned before"
"""Detail of the termination of a result that comes from the store."""

_FORMAT: Final = 1
_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS solved (key TEXT PRIMARY KEY, row BLOB NOT NULL, checksum TEXT NOT NULL)"
_LEAST_S: Final = 0.02
"""Seconds of a solve whose plan is worth storing: one that searched, for which a new process takes a second to load kernels."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    """One solved problem.

    Attributes:
        order: Ops in the order of their computations.
        bound: Proven lower bound on the cost of every plan.
        termination: How the solve ended.
        time_s: Time limit of the solve, infinite for none.
        gap: Gap at which the solve was to stop.
    """

    order: tuple[int, ...]
    bound: float
    termination: Termination
    time_s: float
    gap: float

    def answers(self, limits: Limits, found_gap: float) -> bool:
        """Whether a solve with these limits would have ended no later: proven, within the gap asked for, or as much time."""
        asked_s = math.inf if limits.time_s is None else limits.time_s
        done = self.termination.reason is Reason.OPTIMAL or found_gap <= limits.gap
        return done or (self.time_s >= asked_s and self.gap <= limits.gap)


class SolvedPlans:
    """Plans that were found before, by problem and solver.

    Whatever is wrong with the file is told in a warning, and no reason to fail: the problem is then solved again.

    Args:
        path: The file; ``solved_plans.sqlite`` in the user's cache folder by default.

    Examples:
        >>> import tempfile
        >>> from checkmate import Graph, Problem
        >>> chain = Graph.from_dag(cost=[1, 1], size_bytes=[4, 2], edges=[(0, 1)])
        >>> plans = SolvedPlans(Path(tempfile.mkdtemp()) / "plans.sqlite")
        >>> plans.get(Problem(chain, 6), "Auto()", Limits()) is None
        True
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        def locate() -> Path:
            return Path(path) if path is not None else cache_folder() / "solved_plans.sqlite"

        self._locate = locate
        self.database = Database(locate, _SCHEMA, "plans are searched again in every process")

    @classmethod
    def of_user(cls) -> SolvedPlans | None:
        """The store in the user's cache folder; None if the environment has ``CHECKMATE_PLAN_CACHE=0``."""
        return None if os.environ.get("CHECKMATE_PLAN_CACHE") == "0" else cls()

    def get(self, problem: Problem, solver: str, limits: Limits) -> tuple[Result, bool] | None:
        """The stored plan of a problem, checked and simulated again.

        Args:
            problem: The problem.
            solver: The solver with its options, as text.
            limits: The limits that a solve would have now.

        Returns:
            The result, and whether it answers a solve with these limits. If not, it is a plan to start from: it was found in less
            time than is given now. None if there is no plan, or none that holds.
        """
        began = time.perf_counter()
        row = self._read(_key(problem, solver))
        if row is None:
            return None
        graph = problem.graph
        try:
            result = evaluate(graph, Plan.from_order(graph, row.order))
        except (CheckmateError, IndexError, OverflowError) as error:
            _log.warning("a stored plan of %s does not hold for its graph and is not used: %s", self._locate(), error)
            return None
        bound = max(result.bound, row.bound)
        if result.peak_bytes > problem.budget_bytes or bound > result.cost:
            _log.warning("a stored plan of %s does not keep its budget or costs less than its bound: not used", self._locate())
            return None
        gap = (result.cost - bound) / result.cost if result.cost else 0.0
        result = msgspec.structs.replace(
            result,
            budget_bytes=problem.budget_bytes,
            bound=bound,
            gap=gap,
            termination=msgspec.structs.replace(row.termination, detail=PLANNED_BEFORE),
            solver=solver,
            elapsed_s=time.perf_counter() - began,
        )
        return result, row.answers(limits, gap)

    def add(self, problem: Problem, limits: Limits, result: Result) -> None:
        """Store the result of a solve, unless it took next to no time, or ended at a target.

        Args:
            problem: The problem.
            limits: The limits of the solve.
            result: Its result.
        """
        if result.elapsed_s < _LEAST_S or result.termination.limit == "target":
            return
        most_s = math.inf if limits.time_s is None else limits.time_s
        body = msgspec.msgpack.encode(_Row(result.plan.order, result.bound, result.termination, most_s, limits.gap))
        key = _key(problem, result.solver)

        def write(connection: sqlite3.Connection) -> None:
            if _is_readable(connection, self._locate()):
                connection.execute("INSERT OR REPLACE INTO solved VALUES (?, ?, ?)", (key, body, _checksum(key, body)))

        self.database.run(write, None)

    def _read(self, key: str) -> _Row | None:
        def read(connection: sqlite3.Connection) -> tuple[bytes, str] | None:
            if not _is_readable(connection, self._locate()):
                return None
            return connection.execute("SELECT row, checksum FROM solved WHERE key = ?", (key,)).fetchone()

        found = self.database.run(read, None)
        if found is None:
            return None
        body, checksum = found
        try:
            if checksum != _checksum(key, body):
                raise msgspec.ValidationError("its checksum is wrong")
            return msgspec.msgpack.decode(body, type=_Row)
        except (msgspec.DecodeError, TypeError) as error:
            _log.warning("a row of %s is damaged and is not used: %s", self._locate(), error)
            return None


def _is_readable(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether a file has the format of this version; a new one is given it."""
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        connection.execute(f"PRAGMA user_version = {_FORMAT}")
    elif version != _FORMAT:
        _log.warning("%s has format %d, and this version of Checkmate reads %d: the file is not used", path, version, _FORMAT)
        return False
    return True


def _key(problem: Problem, solver: str) -> str:
    """Hash of all that decides on what a solver finds.

    The digest of a graph leaves out costs, phases and resident bytes. The latter count as what they leave of the budget: the
    process allocates other tensors too, and the same step has a few bytes more or less that are resident in the next process.
    """
    graph = problem.graph
    facts: Sequence[object] = (
        __version__,
        solver,
        graph.digest,
        [(op.cost, op.phase) for op in graph.ops],
        problem.budget_bytes - problem.graph.resident_bytes,
        problem.recompute,
        problem.reorder,
    )
    return hashlib.sha256(msgspec.json.encode(facts)).hexdigest()


def _checksum(key: str, body: bytes) -> str:
    return hashlib.sha256(key.encode() + body).hexdigest()
