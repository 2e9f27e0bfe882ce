"""Measured op costs in a SQLite file of the user's cache folder, shared by all of the user's processes."""

from __future__ import annotations

import os
import sqlite3
import sys
from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple

_SCHEMA = "CREATE TABLE IF NOT EXISTS measures (key TEXT PRIMARY KEY, cost_ns INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL)"
_BATCH: Final = 500
"""Keys in one statement. SQLite's limit on its variables was 999 before version 3.32."""
_WAIT_S: Final = 60
"""Seconds that a process waits for another one's write: writes take milliseconds, unless a network file system is slow."""


class OpCost(NamedTuple):
    """Measured cost of one computation of an op.

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
        """Measures of those keys that are in the store.

        Args:
            keys: Signatures of ops, as `add` was given them.
        """
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
        """Store measures whose keys are new; others stay as they are.

        Args:
            measures: Signature of an op -> its measure.
        """
        with closing(self._connect()) as connection, connection:
            connection.executemany("INSERT OR IGNORE INTO measures VALUES (?, ?, ?)", [(k, *m) for k, m in measures.items()])

    def _connect(self) -> sqlite3.Connection:
        return connected(self.path, _SCHEMA)


def connected(path: Path, schema: str) -> sqlite3.Connection:
    """A connection to a file that all processes of a user share, with concurrent readers and one writer at a time.

    Args:
        path: The file; it and its folder are made if they do not exist.
        schema: SQL statements that make its tables if they do not exist.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(path, timeout=_WAIT_S)
    connection.execute(f"PRAGMA busy_timeout = {1000 * _WAIT_S}")
    # Readers do not wait for a writer, and a process that dies while it writes leaves the file consistent.
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(schema)
    return connection


def cache_folder() -> Path:
    """The user's cache folder of Checkmate: ``CHECKMATE_CACHE`` if set, else a folder in the platform's cache directory."""
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
    """A cost rounded to some significant digits, one or more. More would be noise, and would change plans from run to run.

    Args:
        cost: The cost.
        digits: Significant digits to keep.

    Examples:
        >>> quantise(123456.7), quantise(9.4), quantise(0.2)
        (123000, 9, 1)
    """
    return max(1, int(float(f"{cost:.{digits}g}")))
