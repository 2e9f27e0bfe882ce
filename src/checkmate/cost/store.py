"""Values that all processes of a user share, among them measured costs of ops, in one SQLite file of the cache folder.

One warning names a faulty file, and the work goes on without it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sqlite3
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, Generic, NamedTuple, TypeVar

import msgspec

from checkmate.core.errors import OptionError

_log = logging.getLogger("checkmate.cost")

T = TypeVar("T")
R = TypeVar("R")

_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS entries (
    kind TEXT, key TEXT, value BLOB NOT NULL, checksum TEXT NOT NULL, PRIMARY KEY (kind, key)
)
"""

_FAULTS: Final = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError)
"""Errors of a file that cannot be used, or of a value that it cannot hold."""

_END_IT: Final = "end the process that keeps it locked"

_warned: set[str] = set()
"""Places about which this process has warned."""
_locked: set[Path] = set()
"""Files for which this process has waited in vain; it does not wait again."""


@dataclass(eq=False)
class Fault(Exception):
    """A reason that a process cannot use a file."""

    place: str  # the file or folder with the fault; empty if no folder is known
    reason: str  # in words
    cure: str  # an imperative

    def __str__(self) -> str:
        return f"{self.place} cannot be used ({self.reason})" if self.place else self.reason


class Store(Generic[T]):
    """Values of one kind by key, with concurrent readers and one writer at a time.

    Any fault of the file (no home folder, a folder or file that cannot be written, a full disk, a lock that is not released, a
    damaged file or one of another program) raises no exception: one warning gives its path and the cure. A read-only file is
    read. A damaged entry is not used. The file and its folder are created when they are first needed; by default the file is
    ``store.sqlite`` in the user's cache folder. ``without`` describes, for the warning, the consequence in a process that cannot
    use the file.
    """

    wait_s = 10.0  # for another process's write, which takes milliseconds, unless a network file system is slow

    def __init__(self, kind: str, of: type[T], without: str, path: str | os.PathLike[str] | None = None) -> None:
        self._kind, self._of, self._without, self._path = kind, of, without, path

    def get(self, keys: Iterable[str] | None = None) -> dict[str, T]:
        """The values of those keys that are in the store, or of all keys."""
        query = "SELECT key, value, checksum FROM entries WHERE kind = ?"
        query += "" if keys is None else " AND key IN (SELECT value FROM json_each(?))"
        wanted = self._kind, *([] if keys is None else [json.dumps(list(dict.fromkeys(keys)))])
        rows = self._run(lambda connection: connection.execute(query, wanted).fetchall(), [])
        found = {row[0]: self._decoded(*row) for row in rows}
        return {key: value for key, value in found.items() if value is not None}

    def add(self, values: Mapping[str, T], *, replace: bool = False) -> None:
        """Store values with new keys. Existing ones stay as they are unless they are replaced."""
        statement = f"INSERT OR {'REPLACE' if replace else 'IGNORE'} INTO entries VALUES (?, ?, ?, ?)"
        self._run(lambda connection: connection.executemany(statement, [self._row(*item) for item in values.items()]), None)

    def change(self, key: str, initial: T, change: Callable[[T], T]) -> None:
        """Replace a value, or the initial one, by one computed from it; no other process writes in between."""

        def write(connection: sqlite3.Connection) -> None:
            connection.execute("BEGIN IMMEDIATE")
            query = "SELECT key, value, checksum FROM entries WHERE kind = ? AND key = ?"
            row = connection.execute(query, (self._kind, key)).fetchone()
            known = None if row is None else self._decoded(*row)
            value = change(initial if known is None else known)
            connection.execute("INSERT OR REPLACE INTO entries VALUES (?, ?, ?, ?)", self._row(key, value))

        self._run(write, None)

    def fault(self) -> Fault | None:
        """Read every page of the file and return its fault; None if the file can be read and written."""

        def read(connection: sqlite3.Connection) -> None:
            (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
            if verdict != "ok":
                raise sqlite3.DatabaseError(verdict)
            connection.execute("SELECT kind, key, value, checksum FROM entries LIMIT 1")
            connection.execute("BEGIN IMMEDIATE")  # a read-only file is refused here

        try:
            self._connected(read)
        except Fault as fault:
            return fault
        return None

    def _row(self, key: str, value: T) -> tuple[str, str, bytes, str]:
        body = msgspec.msgpack.encode(value)
        return self._kind, key, body, self._checksum(key, body)

    def _decoded(self, key: str, body: bytes, checksum: str) -> T | None:
        """The value of an entry; None, with a warning, if the entry is damaged."""
        try:
            if checksum == self._checksum(key, body):
                return msgspec.msgpack.decode(body, type=self._of)
        except (msgspec.DecodeError, TypeError, RecursionError):
            pass
        path = str(self._located())
        self._warn(path, f"{path} has a damaged entry, which is not used: {self._without}; remove the file")
        return None

    def _checksum(self, key: str, body: bytes) -> str:
        return hashlib.sha256(f"{self._kind} {key} ".encode() + body).hexdigest()

    def _run(self, work: Callable[[sqlite3.Connection], R], otherwise: R) -> R:
        """Read or write in one transaction; the alternative is returned if the file cannot be used."""
        try:
            return self._connected(work)
        except Fault as fault:
            self._warn(fault.place, f"{fault}: {self._without}; {fault.cure}")
            return otherwise

    def _connected(self, work: Callable[[sqlite3.Connection], R]) -> R:
        """Read or write in one transaction, or raise `Fault`."""
        try:
            path = self._located()
        except OptionError as error:
            raise Fault("", error.message, error.hint) from error
        if path in _locked:
            raise Fault(str(path), "database is locked", _END_IT)
        try:
            with closing(self._connect(path)) as connection, connection:
                return work(connection)
        except _FAULTS as error:
            if _is_lock(error):
                _locked.add(path)
            raise _fault(path, error) from error

    def _located(self) -> Path:
        return cache_folder() / "store.sqlite" if self._path is None else Path(self._path)

    def _connect(self, path: Path) -> sqlite3.Connection:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return self._opened(path)
        except (sqlite3.OperationalError, OSError):
            if not path.is_file() or (os.access(path.parent, os.W_OK) and os.access(path, os.W_OK)):
                raise
            # Without `immutable`, SQLite creates a write-ahead log next to the database.
            return sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)

    def _opened(self, path: Path) -> sqlite3.Connection:
        connection = sqlite3.connect(path, timeout=self.wait_s)
        try:
            tables = [name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
            if tables and "entries" not in tables:
                raise sqlite3.DatabaseError("it is the database of another program")
            # Readers do not wait for a writer, and a process that dies while it writes leaves the file consistent.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the system may lose the last rows
            connection.executescript(_SCHEMA)
        except BaseException:
            connection.close()
            raise
        return connection

    def _warn(self, place: str, text: str) -> None:
        if place not in _warned:
            _warned.add(place)
            _log.warning("%s%s", text, ", or set CHECKMATE_CACHE to another folder" if place else "")


def _fault(path: Path, error: Exception) -> Fault:
    if isinstance(error, OSError) or (_is_of(error, "CANTOPEN", "READONLY") and not os.access(path.parent, os.W_OK | os.X_OK)):
        place, cure = f"the cache folder {path.parent}", "make it a folder that can be written"
    elif _is_lock(error):
        place, cure = str(path), _END_IT
    elif _is_of(error, "FULL", "IOERR", "READONLY", "CANTOPEN"):
        place, cure = str(path), "make it writable, with free space on its disk"
    else:
        place, cure = str(path), "remove the file"
    return Fault(place, error.strerror if isinstance(error, OSError) and error.strerror else str(error), cure)


def _is_lock(error: Any) -> bool:
    """Whether a lock was not obtained, also by a network file system that gives none for the write-ahead log."""
    return _is_of(error, "BUSY", "LOCKED", "PROTOCOL") or "LOCK" in getattr(error, "sqlite_errorname", "")


def _is_of(error: Any, *kinds: str) -> bool:
    """Whether SQLite's name of an error, like ``SQLITE_IOERR_READ``, is of one of some kinds, like ``IOERR``."""
    return getattr(error, "sqlite_errorname", "").startswith(tuple(f"SQLITE_{kind}" for kind in kinds))


def cache_folder() -> Path:
    """The user's cache folder of Checkmate: ``CHECKMATE_CACHE`` if set, else a folder in the platform's cache directory.

    Raises:
        OptionError: The environment names no folder, and the user has no home folder.
    """
    if chosen := os.environ.get("CHECKMATE_CACHE"):
        return Path(chosen)
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA")
        return Path(base) / "checkmate" if base else _home() / "AppData" / "Local" / "checkmate"
    if sys.platform == "darwin":
        return _home() / "Library" / "Caches" / "checkmate"
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) / "checkmate" if base else _home() / ".cache" / "checkmate"


def _home() -> Path:
    try:
        return Path.home()
    except RuntimeError as error:
        raise OptionError(
            "there is no cache folder, because the user has no home folder", hint="set CHECKMATE_CACHE to a folder"
        ) from error


OpT = TypeVar("OpT")


class OpCost(NamedTuple):
    """Measured cost of one computation of an op."""

    cost_ns: int
    workspace_bytes: int  # bytes that live only while it runs


class CostStore(Store[OpCost]):
    """Measurements by key. The first one written stays: all processes plan with the same costs.

    Examples:
        >>> import tempfile
        >>> store = CostStore(Path(tempfile.mkdtemp()) / "costs.sqlite")
        >>> store.add({"mm": OpCost(1200, 0)})
        >>> store.add({"mm": OpCost(9999, 0)})
        >>> store.get(["mm", "add"])
        {'mm': OpCost(cost_ns=1200, workspace_bytes=0)}
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        super().__init__("cost", OpCost, "costs of ops are measured again in every process", path)


class MeasuredCosts(Generic[OpT]):
    """Costs of the ops of a framework: from the store, else measured, or estimated if an op cannot run alone.

    A signature is a text with everything on which the cost of an op depends; None for an op that cannot run in isolation.
    ``measure`` gets all missing ops at once by signature, and the other requested ops with their known costs. It leaves out ops
    that could not be measured.

    Examples:
        >>> import tempfile
        >>> store = CostStore(tempfile.mkdtemp() + "/costs.sqlite")
        >>> measured = []
        >>> def measure(ops, known):
        ...     measured.extend(ops)
        ...     return {key: OpCost(1000, 8) for key in ops}
        >>> costs = MeasuredCosts(signature=str, measure=measure, estimate=lambda op: OpCost(1, 0), store=store)
        >>> [cost.cost_ns for cost in costs(["mm", "add", "mm"])], measured
        ([1000, 1000, 1000], ['mm', 'add'])
    """

    def __init__(
        self,
        *,
        signature: Callable[[OpT], str | None],
        measure: Callable[[Mapping[str, OpT], Mapping[str, tuple[OpT, OpCost]]], Mapping[str, OpCost]],
        estimate: Callable[[OpT], OpCost],
        store: CostStore | None = None,
    ) -> None:
        self.store = CostStore() if store is None else store
        self.known: dict[str, OpCost] = {}
        self._signature, self._measure, self._estimate = signature, measure, estimate

    def __call__(self, ops: Sequence[OpT]) -> list[OpCost]:
        """Cost of each op, in order; ops of the same signature share one measurement."""
        keys = [self._signature(op) for op in ops]
        distinct = {k: op for k, op in zip(keys, ops, strict=True) if k is not None}
        missing = [k for k in distinct if k not in self.known]
        if missing:
            self.known.update(self.store.get(missing))
            missing = [k for k in missing if k not in self.known]
        if missing:
            began = time.perf_counter()
            known = {k: (op, self.known[k]) for k, op in distinct.items() if k in self.known}
            measured = self._measure({k: distinct[k] for k in missing}, known)
            self.store.add(measured)
            self.known.update(measured)
            # Another process may have measured the same op meanwhile. The first entry of the store counts: all processes then
            # plan with the same costs.
            self.known.update(self.store.get(missing))
            _log.info("measured %d ops in %.1f s", len(missing), time.perf_counter() - began)
        # An op that could not be measured now, for want of memory for example, may be measured another time.
        estimated = {k: self._estimate(op) for k, op in distinct.items() if k not in self.known}
        found = self.known | estimated
        return [found[k] if k is not None else self._estimate(op) for k, op in zip(keys, ops, strict=True)]


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
