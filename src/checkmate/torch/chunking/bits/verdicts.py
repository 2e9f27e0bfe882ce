"""Verdicts on programs, whether their pieces give the bits of the whole ops, in a SQLite file of the user's cache folder.

A verdict holds where the same kernels run: what chooses them (`kernel_settings`) is in its key, and the program itself by a hash
of its content.
"""

from __future__ import annotations

import sqlite3
from typing import Final

import torch

from checkmate.core.errors import shortened
from checkmate.cost.database import Database, cache_folder
from checkmate.torch.graph.kernel_settings import kernel_settings

_FORMAT: Final = 2
"""To be raised when a comparison becomes stricter: verdicts of before do not count then."""

_SCHEMA: Final = "CREATE TABLE IF NOT EXISTS verdicts (key TEXT PRIMARY KEY, same INTEGER NOT NULL)"

VERDICTS = Database(
    lambda: cache_folder() / "chunked_bits.sqlite", _SCHEMA, "bits of ops in pieces are compared again in every process"
)


def known_verdict(key: str) -> bool | None:
    """The verdict on a program that was reached before, in this process or another one.

    Args:
        key: Of `verdict_key`.
    """

    def read(connection: sqlite3.Connection) -> object:
        row = connection.execute("SELECT same FROM verdicts WHERE key = ?", (key,)).fetchone()
        return None if row is None else row[0]

    found = VERDICTS.run(read, None)
    if found not in (None, 0, 1):
        VERDICTS.disbelieve(f"a verdict of {shortened(repr(found))}")
        return None
    return None if found is None else bool(found)


def keep_verdict(key: str, same: bool) -> None:
    """Store a verdict.

    Args:
        key: Of `verdict_key`.
        same: Whether the bits are the same.
    """
    VERDICTS.run(lambda connection: connection.execute("INSERT OR REPLACE INTO verdicts VALUES (?, ?)", (key, int(same))), None)


def verdict_key(program: str, device: torch.device) -> str:
    """All on which a verdict depends, as a text.

    Args:
        program: Key of the program.
        device: Where it runs.
    """
    return f"{_FORMAT} {program} {kernel_settings(device)}"
