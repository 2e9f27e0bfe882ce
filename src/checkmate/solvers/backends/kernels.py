"""Compiled functions of the solvers. numba keeps them on disk, and only the first process compiles them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Final

from numba import njit

from checkmate.solvers.clocks import preparing

_OPTIONS: Final = {"error_model": "numpy", "nogil": True, "_nrt": False, "no_cfunc_wrapper": True}
_log = logging.getLogger("checkmate.solvers")
_told: list[str] = []
"""The reason about which this process has warned, if any."""


def kernel(function: Callable[..., Any], *, from_python: bool = True) -> Any:
    """Compile a function when it is first called, or load it from disk. An unusable disk is not an error.

    The function runs without the interpreter's lock, which lets an `Alarm` end it. It may not allocate: the caller makes arrays.
    Therefore numba counts no references. It would count them, in atomic operations, for every array of every tuple that a
    kernel passes on or reads from: seven eighths of the time of a search.
    """
    options = {**_OPTIONS, "no_cpython_wrapper": not from_python, "forceinline": not from_python}
    try:
        compiled = njit(cache=True, **options)(function)
    except RuntimeError as error:  # numba found no folder that it can write
        _warn(str(error))
        compiled = njit(**options)(function)
    files = getattr(compiled, "_cache", None)  # none with NUMBA_DISABLE_JIT
    compiled.compile = _uncounted(compiled.compile)
    if files is not None:
        files.load_overload = _mending(files, files.load_overload)
        files.save_overload = _mending(files, files.save_overload)
    return compiled


def inner_kernel(function: Callable[..., Any]) -> Any:
    """A `kernel` that only kernels call: it has no wrapper for Python, which takes numba as long to compile as the function."""
    return kernel(function, from_python=False)


def fault() -> str | None:
    """The reason known to this process that compiled functions cannot be kept on disk, or None."""
    return _told[0] if _told else None


def _uncounted(compile_: Callable[..., Any]) -> Callable[..., Any]:
    """A function that compiles or loads another; its time counts towards no time limit."""

    def compiled(signature: Any) -> Any:
        with preparing():
            return compile_(signature)

    return compiled


def _mending(files: Any, access: Callable[..., Any]) -> Callable[..., Any]:
    """A function that reads or writes files of compiled functions and rewrites a damaged index.

    An index is also damaged if it names a type that this version of the package lacks. The function returns None, as for a
    missing file, if rewriting does not help.
    """

    def accessed(*values: Any) -> Any:
        try:
            try:
                return access(*values)
            except Exception:  # noqa: BLE001 - a damaged file raises whatever its bytes mean to pickle
                files.flush()  # an empty index
                return access(*values)
        except Exception as error:  # noqa: BLE001
            _warn(f"{type(error).__name__}: {error}")
            return None

    return accessed


def _warn(reason: str) -> None:
    """Warn of the first reason; the others come from the same folder."""
    if not _told:
        _told.append(reason)
        _log.warning(
            "compiled functions of the solvers cannot be kept on disk (%s): every process compiles them again, which takes "
            "some seconds; set NUMBA_CACHE_DIR to a folder that can be written",
            reason,
        )
