"""Reading and writing the files of verbs; an error counts as bad input."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from checkmate.cli import terminal
from checkmate.core import files
from checkmate.core.errors import FileFormatError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve, Result

_ContentT = TypeVar("_ContentT", Graph, Plan, Result, Curve)


def load(path: Path, kind: type[_ContentT]) -> _ContentT:
    """Read a graph, plan, result or curve from a file."""
    with _as_bad_input(path, f"give a {kind.__name__.lower()} file"):
        return files.read_as(path, kind)


def load_planned(path: Path) -> tuple[Plan, Result | None]:
    """Read the plan from a plan or result file, and the result from a result file."""
    hint = "give a plan file written by `checkmate plan`"
    with _as_bad_input(path, hint):
        content = files.read(path)
    if isinstance(content, Result):
        return content.plan, content
    if not isinstance(content, Plan):
        raise FileFormatError(f"{path}: the file has no plan", hint=hint)
    return content, None


@contextlib.contextmanager
def _as_bad_input(path: Path, hint: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint=hint) from error


class Outputs:
    """Files that a verb writes. They are checked before the work. Content that cannot be written afterwards is saved elsewhere.

    No output replaces a file that the verb reads; None stands for a file that is not given.
    """

    def __init__(self, *inputs: Path | None) -> None:
        self._inputs = [path for path in inputs if path is not None]

    def check(self, *paths: Path | None) -> None:
        """Check that files can be written; None stands for a file that is not wanted."""
        wanted = [path for path in paths if path is not None]
        size_bytes = 2**16  # least size of an output, in addition to the sizes of the inputs
        for path in self._inputs:
            with contextlib.suppress(OSError):  # the later read raises the error
                size_bytes += path.stat().st_size
        for k, path in enumerate(wanted):
            self._check_is_no_input(path)
            if any(_are_same(path, other) for other in wanted[:k]):
                raise OptionError(f"{path} is given for two outputs", hint="give each output a path")
            try:
                files.check_writable(path, size_bytes)
            except OSError as error:
                message = f"cannot write {path}: {error.strerror or error}"
                raise OptionError(message, hint="choose another path with --out") from error

    def save(self, *contents: tuple[Graph | Plan | Result | Curve | bytes, Path | None]) -> None:
        """Write values or bytes to files that are wanted; a regular file is written whole or not at all.

        The error for a file that cannot be written names the place at which its content was saved instead.
        """
        failures: list[str] = []
        for content, path in contents:
            if path is None:
                continue
            data = content if isinstance(content, bytes) else files.encode(content)
            try:
                self._check_is_no_input(path)
                with contextlib.nullcontext() if files.is_special(path) else terminal.signals_ignored():
                    files.write_bytes(path, data)
                continue
            except OptionError as error:
                fault = error.message
            except KeyboardInterrupt:  # a pipe without a reader
                fault = f"writing {path} was interrupted"
            except OSError as error:
                fault = f"cannot write {path}: {error.strerror or error}"
            failures.append(f"{fault}; {_saved_elsewhere(data, path.name)}")
        if failures:
            raise OptionError("; ".join(failures), hint="move what was saved, or choose another path with --out")

    def _check_is_no_input(self, path: Path) -> None:
        for other in self._inputs:
            if _are_same(path, other):
                raise OptionError(f"output {path} is the input {other}", hint="choose another path with --out")


def _are_same(a: Path, b: Path) -> bool:
    """Whether two paths lead, or would lead, to one regular file."""
    try:
        return a.samefile(b) and a.is_file()
    except OSError:
        return os.path.realpath(a) == os.path.realpath(b)


def _saved_elsewhere(data: bytes, name: str) -> str:
    """Save bytes in a new folder for temporary files, and describe the place."""
    try:
        saved = Path(tempfile.mkdtemp(prefix="checkmate-")) / name
        files.write_bytes(saved, data)
    except OSError:
        return "it could not be saved elsewhere either"
    return f"it was saved as {saved} instead"


def beside(path: Path, ending: str) -> Path:
    """Path in the current folder with the name of a file and another ending.

    Examples:
        >>> beside(Path("models/gpt2.graph.json"), "-8GiB.plan.json").name
        'gpt2-8GiB.plan.json'
    """
    return Path(path.name.removesuffix(".json").removesuffix(".graph") + ending)
