"""SQLite files in the user's cache folder. One warning names a faulty file, and the work goes on without it."""

from __future__ import annotations

import logging
import os
import sqlite3
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

from checkmate.core.errors import OptionError

_log = logging.getLogger("checkmate.cost")

T = TypeVar("T")

_LOCKS: Final = (
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_LOCKED,
    sqlite3.SQLITE_PROTOCOL,  # locking the write-ahead log fails on some network file systems
    sqlite3.SQLITE_IOERR_LOCK,
    sqlite3.SQLITE_IOERR_RDLOCK,
    sqlite3.SQLITE_IOERR_SHMLOCK,
    sqlite3.SQLITE_IOERR_CHECKRESERVEDLOCK,
)
"""SQLite's codes of a lock that was not obtained."""

_CURES: Final = {
    **dict.fromkeys(_LOCKS, "end the process that keeps it locked"),
    sqlite3.SQLITE_FULL: "free space on its disk",
    sqlite3.SQLITE_IOERR: "free space on its disk",
    sqlite3.SQLITE_READONLY: "make it writable",
    sqlite3.SQLITE_CANTOPEN: "make it writable",
}
"""Cures of faults by SQLite's error code; for any other fault the user removes the file."""

_FAULTS: Final = (sqlite3.Error, OSError, ValueError, TypeError, OverflowError, RecursionError)
"""Errors of a damaged file, whose numbers or JSON can be anything."""

_warned: set[str] = set()
"""Places about which this process has warned."""
_locked: set[Path] = set()
"""Files for which this process has waited in vain; it does not wait again."""


class Fault(NamedTuple):
    """A reason that a process cannot use a file."""

    place: str  # the file or folder with the fault; empty if no folder is known
    reason: str  # in words
    cure: str  # an imperative
    used: str = "used"  # cannot be "used", or cannot be "written"


class Database:
    """A SQLite file that all processes of a user share, with concurrent readers and one writer at a time.

    Any fault of the file (no home folder, a folder or file that cannot be written, a full disk, a lock that is not released, a
    damaged file or one of another program) raises no exception: one warning gives its path and the cure. A read-only file is
    read. The file and its folder are created when they are first needed; ``schema`` creates its tables if they do not exist.
    ``without`` describes, for the warning, the consequence in a process that cannot use the file.
    """

    wait_s = 10.0  # for another process's write, which takes milliseconds, unless a network file system is slow

    def __init__(self, locate: Callable[[], Path], schema: str, without: str) -> None:
        self._locate, self._schema, self._without = locate, schema, without

    def run(self, work: Callable[[sqlite3.Connection], T], otherwise: T) -> T:
        """Read or write in one transaction; the alternative is returned if the file cannot be used."""
        try:
            path = self._locate()
        except OptionError as error:
            self._warn("", f"{error.message}: {self._without}; {error.hint}")
            return otherwise
        if path in _locked:
            return otherwise
        try:
            with closing(self._connect(path)) as connection, connection:
                return work(connection)
        except _FAULTS as error:
            if _code(error) in _LOCKS:
                _locked.add(path)
            place, reason, cure, used = _fault(path, error)
            text = f"{place} cannot be {used} ({reason}): {self._without}; {cure}, or set CHECKMATE_CACHE to another folder"
            self._warn(place, text)
            return otherwise

    def disbelieve(self, what: str) -> None:
        """Warn once that the file has an impossible number, which is not used."""
        path = str(self._locate())
        text = f"{path} has {what}, which cannot be right and is not used: {self._without}; remove the file"
        self._warn(path, f"{text}, or set CHECKMATE_CACHE to another folder")

    def fault(self) -> Fault | None:
        """Read every page of the file and return its fault; None if the file can be read and written."""
        try:
            path = self._locate()
        except OptionError as error:
            return Fault("", error.message, error.hint)
        try:
            with closing(self._connect(path)) as connection:
                (verdict,) = connection.execute("PRAGMA quick_check(1)").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict)
                with closing(sqlite3.connect(":memory:")) as intended:
                    intended.executescript(self._schema)
                    if not _columns(intended) <= _columns(connection):
                        raise sqlite3.DatabaseError("its tables have other columns")
                connection.execute("BEGIN IMMEDIATE")  # a read-only file is refused here
                connection.rollback()
        except _FAULTS as error:
            return _fault(path, error)
        return None

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
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
            if tables and not any(f" {name} (" in self._schema for name in tables):
                raise sqlite3.DatabaseError("it is the database of another program")
            # Readers do not wait for a writer, and a process that dies while it writes leaves the file consistent.
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute("PRAGMA synchronous = NORMAL")  # a crash of the system may lose the last rows
            connection.executescript(self._schema)
        except BaseException:
            connection.close()
            raise
        return connection

    def _warn(self, place: str, text: str) -> None:
        if place not in _warned:
            _warned.add(place)
            _log.warning("%s", text)


def _fault(path: Path, error: Exception) -> Fault:
    code, folder = _code(error), path.parent
    if isinstance(error, OSError) or (code in _CURES and not os.access(folder, os.W_OK | os.X_OK)):
        place, cure = f"the cache folder {folder}", "make it a folder that can be written"
    else:
        place, cure = str(path), _CURES.get(code, "remove the file")
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return Fault(place, reason, cure, "written" if code in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_FULL) else "used")


def _code(error: Exception) -> int:
    """SQLite's error code: of a lock the full code, since its details matter; otherwise the low byte, the kind of error."""
    code = getattr(error, "sqlite_errorcode", 0)
    return code if code in _LOCKS else code & 0xFF


def _columns(connection: sqlite3.Connection) -> set[tuple[str, str]]:
    """Table and name of every column of a database."""
    query = "SELECT t.name, c.name FROM sqlite_master AS t, pragma_table_info(t.name) AS c WHERE t.type = 'table'"
    return set(connection.execute(query))


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
