"""Measured op costs in a SQLite file of the user's cache folder, shared by all of the user's processes."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from checkmate.core.errors import shortened
from checkmate.cost.database import Database, cache_folder

_SCHEMA = "CREATE TABLE IF NOT EXISTS measures (key TEXT PRIMARY KEY, cost_ns INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL)"
_BATCH: Final = 500
"""Keys in one statement. SQLite's limit on its variables was 999 before version 3.32."""


MOST_BYTES: Final = 2**47
"""Bytes that a process can address: no op takes more."""
_MOST: Final = (86_400 * 10**9, MOST_BYTES)
"""Most nanoseconds of an op, those of a day, and most bytes."""


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

    A file that cannot be used is told in a warning; nothing is then found in it or kept. So is one with a number that cannot be
    right, such as a negative or an infinite cost; that op is measured again.

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
        def locate() -> Path:
            return Path(path) if path is not None else cache_folder() / "op_costs.sqlite"

        self.database = Database(locate, _SCHEMA, "costs of ops are measured again in every process")

    def get(self, keys: Iterable[str]) -> dict[str, OpCost]:
        """Measures of those keys that are in the store.

        Args:
            keys: Signatures of ops, as `add` was given them.
        """
        wanted = list(dict.fromkeys(keys))

        def read(connection: sqlite3.Connection) -> dict[str, OpCost]:
            found: dict[str, OpCost] = {}
            for start in range(0, len(wanted), _BATCH):
                batch = wanted[start : start + _BATCH]
                marks = ",".join("?" * len(batch))
                rows = connection.execute(f"SELECT key, cost_ns, workspace_bytes FROM measures WHERE key IN ({marks})", batch)
                found.update((key, OpCost(cost, workspace)) for key, cost, workspace in rows)
            return found

        found = self.database.run(read, {})
        for key, cost in list(found.items()):
            for number, name, most in zip(cost, ("a cost of {} ns", "a workspace of {} bytes"), _MOST, strict=True):
                if not (isinstance(number, int) and 0 <= number <= most):  # pyright: ignore[reportUnnecessaryIsInstance]
                    self.database.disbelieve(name.format(shortened(repr(number))))
                    found.pop(key, None)
        return found

    def add(self, measures: Mapping[str, OpCost]) -> None:
        """Store measures whose keys are new; others stay as they are.

        Args:
            measures: Signature of an op -> its measure.
        """
        rows = [(key, *measure) for key, measure in measures.items()]
        self.database.run(
            lambda connection: connection.executemany("INSERT OR IGNORE INTO measures VALUES (?, ?, ?)", rows), None
        )


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
