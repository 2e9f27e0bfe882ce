"""Load the model, loss and batch that a command line names; errors in them count as bad input."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkmate.core.errors import CheckmateError, OptionError

SHAPE = "give FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns (model, loss, example)"

_TRACERS = ("torch.", "jax.")
"""Packages whose errors are errors of the traced program."""


def resolve(target: str) -> Callable[..., object]:
    """The function that a command line names.

    Raises:
        OptionError: The text has another form, or the function does not exist.
    """
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise OptionError(f"cannot read {target!r}", hint=SHAPE)
    return _function(where, name)


def source(target: str) -> Path | None:
    """The file of the function that a command line names, once it is loaded; None for one that has no file."""
    where = target.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    file = getattr(sys.modules.get(where), "__file__", None)
    return None if file is None else Path(file)


def built(target: str, function: Callable[[], object]) -> tuple[Any, Any, Any]:
    """Call the function for its model, loss and example.

    Raises:
        OptionError: The function raises, or returns something else.
    """
    return checked(target, returned(target, function))


def returned(what: str, function: Callable[[], Any]) -> Any:
    """Call the user's code.

    Args:
        what: The target, file or module, for the error.
        function: The code.

    Raises:
        OptionError: It raises; the message has the file and line.
    """
    try:
        return function()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = "" if frame.filename == __file__ else f" at {frame.filename}:{frame.lineno}"
        raise OptionError(f"{what} raised {type(error).__name__}{place}: {' '.join(str(error).split())}", hint=SHAPE) from error


def is_jax_step(found: object) -> bool:
    """Whether a function returned (step, arguments), a function and the tuple of its arguments, as steps of JAX are given."""
    return isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple)


def checked(target: str, found: object) -> tuple[Any, Any, Any]:
    """The model, loss and example that a function returned.

    Raises:
        OptionError: It is something else.
    """
    import torch

    if not isinstance(found, tuple) or len(found) != 3:
        raise OptionError(f"{target} returned {_describe(found)}, not (model, loss, example)", hint=SHAPE)
    if not isinstance(found[0], torch.nn.Module):
        raise OptionError(f"{target} returned {_describe(found[0])} for the model, not a torch.nn.Module", hint=SHAPE)
    return found


def without_memory(target: str, function: Callable[[], object]) -> tuple[Any, Any, Any]:
    """As `built`, with fake tensors (shapes without memory) if the function works with them.

    Raises:
        OptionError: The function raises, or returns something else.
    """
    from checkmate.torch._compat.dispatch import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return built(target, function)
    except (CheckmateError, RuntimeError):  # the function needs values, such as those of data that it reads
        return built(target, function)


@contextmanager
def tracing(target: str) -> Iterator[None]:
    """Turn an error of tracing into bad input, with the message of the error.

    Raises:
        OptionError: The trace failed.
    """
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]
    talking = [logger for logger in loggers if not logger.disabled]
    for logger in talking:
        logger.disabled = True  # torch also logs the traceback of the exception
    try:
        yield
    except Exception as error:
        if not _is_of_tracer(error):
            raise
        text = " ".join(re.split(r"Hint:|from user code", str(error))[0].split())
        raise OptionError(
            f"{target}: the step cannot be traced: {text}", hint="make loss(model(x), y) run without Checkmate first"
        ) from error
    finally:
        for logger in talking:
            logger.disabled = False


def _is_of_tracer(error: Exception) -> bool:
    """Whether a framework raised an error; JAX raises TypeError and ValueError from its own frames."""
    if type(error).__module__.startswith(_TRACERS):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return not isinstance(error, CheckmateError) and any(f"/{name[:-1]}/_src/" in last for name in _TRACERS)


def _function(where: str, name: str) -> Callable[..., object]:
    module = _from_file(Path(where)) if where.endswith(".py") else _from_name(where)
    function = getattr(module, name, None)
    if not callable(function):
        raise OptionError(f"{where} has no function {name!r}", hint=SHAPE)
    return function


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise OptionError(f"{path}: no such file", hint=SHAPE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        returned(str(path), lambda: loader.exec_module(module))
    finally:
        sys.path.pop(0)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return returned(name, lambda: importlib.import_module(name))
    finally:
        sys.path.pop(0)


def _describe(built: object) -> str:
    return f"a tuple of {len(built)}" if isinstance(built, tuple) else f"{type(built).__name__}"
