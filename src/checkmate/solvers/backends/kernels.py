"""Compiled functions of the solvers, kept on disk by numba, so that only the first process compiles them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from numba import njit

_OPTIONS: Final = {"error_model": "numpy", "nogil": True, "_nrt": False}
_log = logging.getLogger("checkmate.solvers")
_told: list[str] = []
"""The reason that this process has warned of, if any."""


def kernel(function: Callable[..., Any]) -> Any:
    """Compile a function when it is first called, or load it from disk. A disk that cannot be used is no reason to fail.

    It runs without the interpreter's lock, so that an `Alarm` can end it, and it may not allocate: arrays are made by the caller.
    So numba counts no references. It would count them, in atomic operations, for every array of every tuple that a kernel
    passes on or reads from: seven eighths of the time of a search.
    """
    try:
        compiled = njit(cache=True, **_OPTIONS)(function)
    except RuntimeError as error:  # numba found no folder that it can write
        _warn(str(error))
        return njit(**_OPTIONS)(function)
    files = getattr(compiled, "_cache", None)  # none with NUMBA_DISABLE_JIT
    if files is not None:
        files.load_overload, files.save_overload = _without_errors(files.load_overload), _without_errors(files.save_overload)
    return compiled


def fault() -> str | None:
    """The reason that compiled functions cannot be kept on disk, as far as this process knows; None without one."""
    return _told[0] if _told else None


def _without_errors(access: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads or writes files of compiled functions; it returns None, as for no file, where that fails."""

    def accessed(*values: Any) -> Any:
        try:
            return access(*values)
        except Exception as error:  # noqa: BLE001 - a damaged file raises whatever its bytes mean to pickle
            _warn(f"{type(error).__name__}: {error}")
            return None

    return accessed


def _warn(reason: str) -> None:
    """Tell the first reason; others come of the same folder."""
    if not _told:
        _told.append(reason)
        _log.warning(
            "compiled functions of the solvers cannot be kept on disk (%s): every process compiles them again, which takes half "
            "a minute; set NUMBA_CACHE_DIR to a folder that can be written",
            reason,
        )
