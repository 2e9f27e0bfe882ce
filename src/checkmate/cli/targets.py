"""Load the model, loss and batch that a command line names; errors in them count as bad input."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import io
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from checkmate.core.errors import CheckmateError, OptionError

_RETURNED = "(model, loss, example) or (model, loss, optimizer, example)"
SHAPE = f"give FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns {_RETURNED}"

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
    if where.endswith(":"):
        raise OptionError(f"{target!r} has two colons", hint=f"write one: {where.rstrip(':')}:{name}")
    return _function(where, name)


def with_batch(function: Callable[..., object], batch: int | None) -> Callable[[], object]:
    """The function of a target with its batch size given; as it is without one.

    Raises:
        OptionError: The function takes none.
    """
    if batch is None:
        return function
    try:
        inspect.signature(function).bind(batch)
    except TypeError:
        name = function.__name__
        raise OptionError(
            f"--batch {batch} is given to {name}(), which takes no batch size",
            hint=f"write `def {name}(batch):`, or leave out --batch",
        ) from None
    return partial(function, batch)


def source(target: str) -> Path | None:
    """The file of the function that a command line names, once it is loaded; None for one that has no file."""
    where = target.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    file = getattr(sys.modules.get(where), "__file__", None)
    return None if file is None else Path(file)


class Built(NamedTuple):
    """A training step of PyTorch as a function returned it.

    Attributes:
        model: The model.
        loss: The loss.
        example: A batch.
        optimizer: The optimizer, or None.
    """

    model: Any
    loss: Any
    example: Any
    optimizer: Any = None


def built(target: str, function: Callable[[], object]) -> Built:
    """Call the function for its model, loss and example.

    Raises:
        OptionError: The function raises, or returns something else.
    """
    return checked(target, returned(target, function))


def returned(what: str, function: Callable[[], Any]) -> Any:
    """Call the user's code, as a program without arguments whose prints go to stderr: stdout is for the verb's data.

    Args:
        what: The target, file or module, for the error.
        function: The code.

    Raises:
        OptionError: It raises; the message has the file and line of the user's code.
    """
    file = what.rpartition(":")[0] or what
    argv, sys.argv = sys.argv, [file]
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.redirect_stderr(_Copied(sys.stderr, said)):
            return function()
    except SystemExit as stop:
        why = (said.getvalue().strip().splitlines() or [""])[-1]
        raise OptionError(
            f"{what} ended the program with exit code {stop.code!r}{f': {why}' if why else ''}",
            hint='put what parses arguments or trains under `if __name__ == "__main__":`, so that the file can be imported',
        ) from stop
    except Exception as error:
        raise OptionError(
            f"{what} raised {type(error).__name__}{_place(error, file)}: {' '.join(str(error).split())}", hint=_cure(error, file)
        ) from error
    finally:
        sys.argv = argv


class _Copied(io.TextIOBase):
    """A stream whose text is written to another one too."""

    def __init__(self, stream: TextIO, copy: TextIO) -> None:
        self._stream, self._copy = stream, copy

    def write(self, text: str, /) -> int:
        """Write text to both."""
        self._copy.write(text)
        return self._stream.write(text)

    def flush(self) -> None:
        """Write what is buffered."""
        self._stream.flush()


def _place(error: Exception, file: str) -> str:
    """The line of the user's code that failed: the innermost one in the user's file, or the one that cannot be parsed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and not f.filename.startswith("<frozen")
    ]
    users = [f for f in frames if Path(f.filename).name == Path(file).name] or frames
    return f" at {users[-1].filename}:{users[-1].lineno}" if users else ""


def _cure(error: Exception, file: str) -> str:
    """An imperative for an error of the user's code."""
    if isinstance(error, ModuleNotFoundError) and error.name and f"{file}.".startswith(f"{error.name}."):
        return SHAPE if not Path(f"{file}.py").is_file() else f"give the file with its ending: {file}.py:FUNCTION"
    if isinstance(error, ModuleNotFoundError) and error.name:
        return f"pip install {error.name.partition('.')[0]}"
    if isinstance(error, (RuntimeError, AssertionError)) and re.search(r"cuda|nvidia", str(error), re.IGNORECASE):
        return (
            'build the model and the batch on the CPU, or in `with torch.device("meta"):`; --device names a GPU that is not here'
        )
    if isinstance(error, SyntaxError):
        return f"correct the line; `python {file}` shows it"
    return f"correct the function: it has to run without Checkmate, and to return {_RETURNED}"


def is_jax_step(found: object) -> bool:
    """Whether a function returned (step, arguments), a function and the tuple of its arguments, as steps of JAX are given."""
    return isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple)


def checked(target: str, found: object) -> Built:
    """The model, loss, example and optimizer that a function returned.

    Raises:
        OptionError: It is something else.
    """
    import torch

    if not isinstance(found, tuple) or len(found) not in (3, 4):
        raise OptionError(f"{target} returned {_describe(found)}, not {_RETURNED}", hint=SHAPE)
    model, loss, *optimizer, example = found
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{target} returned {_describe(model)} for the model, not a torch.nn.Module", hint=SHAPE)
    if optimizer and not isinstance(optimizer[0], torch.optim.Optimizer):
        raise OptionError(
            f"{target} returned {_describe(optimizer[0])} for the optimizer, not a torch.optim.Optimizer",
            hint=f"return {_RETURNED}",
        )
    return Built(model, loss, example, *optimizer)


def optimizer_named(name: str, model: Any) -> Any:
    """An optimizer of a model's parameters.

    Raises:
        OptionError: No optimizer of that name is known.
    """
    from checkmate.torch.forecast.tracer import optimizer_class

    return optimizer_class(name)([p for p in model.parameters() if p.requires_grad])


def without_memory(target: str, function: Callable[[], object]) -> Built:
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
