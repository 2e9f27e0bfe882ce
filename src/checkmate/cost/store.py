"""Measured op costs in a SQLite file of the user's cache folder, shared by all processes, and the processor's name."""

from __future__ import annotations

import json
import os
import platform
import sqlite3
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Final, NamedTuple

from checkmate.core.errors import shortened
from checkmate.cost.database import Database, cache_folder

_SCHEMA = "CREATE TABLE IF NOT EXISTS measures (key TEXT PRIMARY KEY, cost_ns INTEGER NOT NULL, workspace_bytes INTEGER NOT NULL)"

MOST_BYTES: Final = 2**47
"""Bytes that a process can address: no op takes more."""


class OpCost(NamedTuple):
    """Measured cost of one computation of an op."""

    cost_ns: int
    workspace_bytes: int  # bytes that live only while it runs


class CostStore:
    """Measurements by key. The first one written stays: all processes plan with the same costs.

    A warning tells of a file that cannot be used; nothing is then read from it or kept. A warning also tells of an impossible
    number, for example a negative or infinite cost; that op is measured again. By default the file is ``op_costs.sqlite`` in the
    user's cache folder.

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
        """Measurements of those keys that are in the store."""
        query = "SELECT key, cost_ns, workspace_bytes FROM measures WHERE key IN (SELECT value FROM json_each(?))"
        wanted = json.dumps(list(dict.fromkeys(keys)))

        def read(connection: sqlite3.Connection) -> dict[str, OpCost]:
            return {key: OpCost(cost, workspace) for key, cost, workspace in connection.execute(query, (wanted,))}

        found = self.database.run(read, {})
        a_day_ns = 86_400 * 10**9
        for key, cost in list(found.items()):
            limits = (("a cost of {} ns", a_day_ns), ("a workspace of {} bytes", MOST_BYTES))
            for number, (name, most) in zip(cost, limits, strict=True):
                if not (isinstance(number, int) and 0 <= number <= most):  # pyright: ignore[reportUnnecessaryIsInstance]
                    self.database.disbelieve(name.format(shortened(repr(number))))
                    found.pop(key, None)
        return found

    def add(self, measures: Mapping[str, OpCost]) -> None:
        """Store measurements with new keys; existing ones stay as they are."""
        rows = [(key, *measure) for key, measure in measures.items()]
        self.database.run(
            lambda connection: connection.executemany("INSERT OR IGNORE INTO measures VALUES (?, ?, ?)", rows), None
        )


def quantise(cost: float) -> int:
    """A cost rounded to three significant digits, at least 1: more digits are noise and would change plans from run to run.

    Examples:
        >>> quantise(123456.7), quantise(9.4), quantise(0.2)
        (123000, 9, 1)
    """
    return max(1, int(float(f"{cost:.3g}")))


@cache
def processor() -> str:
    """Name of the processor: kernels are chosen by its instructions and cache sizes."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def library_variables(*prefixes: str) -> dict[str, str]:
    """Environment variables by which kernel libraries choose kernels, and variables that begin with a framework's prefix.

    Examples:
        >>> os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ONEDNN_VERBOSE"] = "AVX2", "1"
        >>> known = library_variables()
        >>> known["ONEDNN_MAX_CPU_ISA"], "ONEDNN_VERBOSE" in known
        ('AVX2', False)
        >>> del os.environ["ONEDNN_MAX_CPU_ISA"], os.environ["ONEDNN_VERBOSE"]
    """
    libraries = ("ONEDNN_", "DNNL_", "MKL_", "CUDNN_", "CUBLAS", "TORCH_CUDNN_", "NVIDIA_TF32_", "ATEN_", *prefixes)
    # Variables named VERBOSE or LOG change only a library's messages.
    known = (name for name in os.environ if name.startswith(libraries) and "VERBOSE" not in name and "LOG" not in name)
    return {name: os.environ[name] for name in sorted(known)}
