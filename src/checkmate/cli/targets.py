"""Load the model, loss and batch that a command line names; errors in them count as bad input."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import inspect
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from checkmate.core.errors import CheckmateError, MissingExtraError, OptionError

_RETURNED = "(model, loss, example) or (model, loss, optimizer, example)"
SHAPE = f"give FILE.py:FUNCTION or MODULE:FUNCTION, where FUNCTION() returns {_RETURNED}"


class Built(NamedTuple):
    """A training step of PyTorch as a function returned it."""

    model: Any
    loss: Any
    example: Any
    optimizer: Any = None


def needs(module: str, extra: str) -> None:
    """Check that a module of an extra is installed."""
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(
            f"this command needs {module}, which is not installed", hint=f'pip install "checkmate-remat[{extra}]"'
        )


def resolve(target: str, batch: int | None) -> Callable[[], object]:
    """The function that a command line names, with its batch size if one is given."""
    where, colon, name = target.rpartition(":")
    if not colon or not where or not name.isidentifier():
        raise OptionError(f"cannot read {target!r}", hint=SHAPE)
    function = getattr(_from_file(Path(where)) if where.endswith(".py") else _from_name(where), name, None)
    if not callable(function):
        raise OptionError(f"{where} has no function {name!r}", hint=SHAPE)
    if batch is None:
        return function
    try:
        inspect.signature(function).bind(batch)
    except TypeError:
        raise OptionError(
            f"--batch {batch} is given to {name}(), which takes no batch size",
            hint=f"write `def {name}(batch):`, or leave out --batch",
        ) from None
    return partial(function, batch)


def source(target: str) -> Path | None:
    """The file of the function that a command line names, after loading it; None if the function has no file."""
    where = target.rpartition(":")[0]
    if where.endswith(".py"):
        return Path(where)
    file = getattr(sys.modules.get(where), "__file__", None)
    return None if file is None else Path(file)


def returned(what: str, function: Callable[[], Any]) -> Any:
    """Call the code of a target like a program without arguments; its prints go to stderr, as stdout is for the verb's data.

    If the code raises, the error has the file and line of the user's code.
    """
    file = what.rpartition(":")[0] or what
    argv, sys.argv = sys.argv, [file]
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except SystemExit as stop:
        raise OptionError(
            f"{what} ended the program with exit code {stop.code!r}",
            hint='put what parses arguments or trains under `if __name__ == "__main__":`, so that the file can be imported',
        ) from stop
    except Exception as error:
        raise OptionError(
            f"{what} raised {type(error).__name__}{_place(error, file)}: {' '.join(str(error).split())}", hint=_cure(error, file)
        ) from error
    finally:
        sys.argv = argv


def _place(error: Exception, file: str) -> str:
    """The line of the user's code that failed: the innermost line in the user's file, or the line that cannot be parsed."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if f.filename != __file__ and not f.filename.startswith("<frozen")
    ]
    users = [f for f in frames if Path(f.filename).name == Path(file).name] or frames
    return f" at {users[-1].filename}:{users[-1].lineno}" if users else ""


def _cure(error: Exception, file: str) -> str:
    """The action to take for an error of the user's code, as an imperative."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return SHAPE if f"{file}.".startswith(f"{error.name}.") else f"pip install {error.name.partition('.')[0]}"
    if isinstance(error, (RuntimeError, AssertionError)) and re.search(r"cuda|nvidia", str(error), re.IGNORECASE):
        return (
            'build the model and the batch on the CPU, or in `with torch.device("meta"):`; --device names a GPU that is not here'
        )
    return f"correct the function: it has to run without Checkmate, and to return {_RETURNED}"


def is_jax_step(found: object) -> bool:
    """Whether a function returned a step of JAX: (step, arguments), a function and the tuple of its arguments."""
    return isinstance(found, tuple) and len(found) == 2 and callable(found[0]) and isinstance(found[1], tuple)


def checked(target: str, found: object) -> Built:
    """The model, loss, example and optimizer that a function returned."""
    import torch

    def described(built: object) -> str:
        return f"a tuple of {len(built)}" if isinstance(built, tuple) else f"{type(built).__name__}"

    if not isinstance(found, tuple) or len(found) not in (3, 4):
        raise OptionError(f"{target} returned {described(found)}, not {_RETURNED}", hint=SHAPE)
    model, loss, *optimizer, example = found
    if not isinstance(model, torch.nn.Module):
        raise OptionError(f"{target} returned {described(model)} for the model, not a torch.nn.Module", hint=SHAPE)
    if optimizer and not isinstance(optimizer[0], torch.optim.Optimizer):
        raise OptionError(
            f"{target} returned {described(optimizer[0])} for the optimizer, not a torch.optim.Optimizer",
            hint=f"return {_RETURNED}",
        )
    return Built(model, loss, example, *optimizer)


def without_memory(target: str, function: Callable[[], object]) -> Built:
    """The step that a function returns, with fake tensors (shapes without memory) if the function works with them."""
    from checkmate.torch._compat.dispatch import FakeTensorMode

    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            return checked(target, returned(target, function))
    except (CheckmateError, RuntimeError):  # the function needs values, for example of data that it reads
        return checked(target, returned(target, function))


def causal_model(config: str, batch: int, length: int | None) -> Built:
    """A language model of Hugging Face on the meta device, with a batch of tokens; it returns its loss.

    The configuration is a file, its folder, or a name on the hub. The default length of the sequences is the model's number of
    positions.
    """
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("--config needs transformers, which is not installed", hint="pip install transformers")
    if config.endswith(".json") and not Path(config).is_file():
        raise OptionError(f"--config {config}: no such file", hint="give a config.json of Hugging Face, or the folder of one")
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        settings = AutoConfig.from_pretrained(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise OptionError(
            f"--config {config} cannot be read: {' '.join(str(error).split())}",
            hint="give a config.json with a model_type, or the folder of one; a name on the hub needs a connection",
        ) from error
    positions = getattr(settings, "max_position_embeddings", None)
    if length is not None and (length < 2 or (positions is not None and length > positions)):
        raise OptionError(
            f"--seq {length} is not from 2 to the {positions} positions of the model", hint=f"give at most --seq {positions}"
        )
    if batch < 1:
        raise OptionError(f"--batch {batch} is not a number of sequences", hint="give --batch 1 or more")
    settings.use_cache = False  # training keeps no keys and values of earlier calls
    with torch.device("meta"):
        try:
            model = AutoModelForCausalLM.from_config(settings)
        except ValueError as error:
            raise OptionError(
                f"--config {config}: {type(settings).__name__} is no configuration of a causal language model",
                hint="write build() for other models, and give FILE.py:build",
            ) from error
        tokens = torch.zeros(batch, length or positions or 2048, dtype=torch.long)
    return Built(model.train(), None, {"input_ids": tokens, "labels": tokens})


@contextmanager
def tracing(target: str) -> Iterator[None]:
    """Turn an error of tracing into bad input, with the message of the error."""
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
    if type(error).__module__.startswith(("torch.", "jax.")):
        return True
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    return not isinstance(error, CheckmateError) and "/jax/_src/" in last


def _from_file(path: Path) -> Any:
    if not path.is_file():
        raise OptionError(f"{path}: no such file", hint=SHAPE)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    sys.path.insert(0, str(path.resolve().parent))
    try:
        returned(str(path), partial(spec.loader.exec_module, module))
    finally:
        sys.path.pop(0)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, str(Path.cwd()))
    try:
        return returned(name, lambda: importlib.import_module(name))
    finally:
        sys.path.pop(0)
