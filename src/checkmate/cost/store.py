"""Measured op costs in a SQLite file of the user's cache folder, shared by all of the user's processes."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

_SCHEMA = "CREATE TABLE IF NOT EXISTS measures (key TEXT PRIMARY KEY, cost_ns INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL)"
_BATCH = 500  # SQLite's limit on variables of one statement was 999 before 3.32


class OpCost(NamedTuple):
    """What one computation of an op was measured to take.

    Attributes:
        cost_ns: Nanoseconds.
        workspace_bytes: Bytes that live only while it runs.
    """

    cost_ns: int
    workspace_bytes: int


class CostStore:
    """Measures by key; the first one written stays, so that all processes plan with the same costs.

    Args:
        path: The file; ``op_costs.sqlite`` in the user's cache folder by default.

    Examples:
        >>> import tempfile
        >>> store = CostStore(Path(tempfile.mkdtemp()) / "costs.sqlite")
        >>> store.add({"mm": OpCost(1200, 0)})
        >>> store.add({"mm": OpCost(9999, 0)})
        >>> store.get(["mm", "add"])
        {'mm': OpCost(cost_ns=1200, workspace_bytes=0)}
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = Path(path) if path is not None else cache_folder() / "op_costs.sqlite"

    def get(self, keys: Iterable[str]) -> dict[str, OpCost]:
        """Measures of those keys that are known."""
        wanted = list(dict.fromkeys(keys))
        found: dict[str, OpCost] = {}
        with closing(self._connect()) as connection:
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                rows = connection.execute(f"SELECT key, cost_ns, workspace_bytes FROM measures WHERE key IN ({marks})", batch)
                found.update((key, OpCost(cost, workspace)) for key, cost, workspace in rows)
        return found

    def add(self, measures: Mapping[str, OpCost]) -> None:
        """Keep measures whose keys are new."""
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR IGNORE INTO measures VALUES (?, ?, ?)", [(k, *m) for k, m in measures.items()])

    def _connect(self) -> sqlite3.Connection:
        return connected(self.path, _SCHEMA)


def connected(path: Path, schema: str) -> sqlite3.Connection:
    """A connection to a file that every process of a user shares: readers and one writer at a time, the others wait a minute.

    Args:
        path: The file; it and its folder are made if they are not there.
        schema: Statements that make its tables where they are not there yet.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=60.0)
    connection.execute("PRAGMA busy_timeout = 60000")
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(schema)
    return connection


def cache_folder() -> Path:
    """The user's cache folder of Checkmate: ``CHECKMATE_CACHE``, or what the platform has for it."""
    if chosen := os.environ.get("CHECKMATE_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base) / "checkmate" if base else Path.home() / "AppData" / "Local" / "checkmate"
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "checkmate"
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "checkmate" if base else Path.home() / ".cache" / "checkmate"


def quantise(cost: float, digits: int = 3) -> int:
    """A cost to so many significant digits: more would be noise, and would change plans from run to run.

    Examples:
        >>> quantise(123456.7), quantise(9.4), quantise(0.2)
        (123000, 9, 1)
    """
    return max(1, int(float(f"{cost:.{digits}g}")))
