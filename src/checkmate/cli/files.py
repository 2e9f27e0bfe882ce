"""Reading and writing the files of verbs; an error counts as bad input."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from checkmate.core import files
from checkmate.core.curve import Curve
from checkmate.core.errors import FileFormatError, OptionError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result

_C = TypeVar("_C", Graph, Plan, Result, Curve)


def load(path: Path, kind: type[_C]) -> _C:
    """Read a graph, plan, result or curve from a file.

    Raises:
        OptionError: The file cannot be opened.
        FileFormatError: The file has another format or is damaged.
    """
    try:
        return files.read_as(path, kind)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint=f"give a {kind.__name__.lower()} file") from error


def load_plan(path: Path) -> Plan:
    """Read the plan from a plan or result file.

    Raises:
        OptionError: The file cannot be opened.
        FileFormatError: The file has no plan or is damaged.
    """
    return load_planned(path)[0]


def load_planned(path: Path) -> tuple[Plan, Result | None]:
    """Read the plan from a plan or result file, and the result from a result file.

    Raises:
        OptionError: The file cannot be opened.
        FileFormatError: The file has no plan or is damaged.
    """
    try:
        content = files.read(path)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint="give a plan file written by `checkmate plan`") from error
    plan = content.plan if isinstance(content, Result) else content
    if not isinstance(plan, Plan):
        raise FileFormatError(f"{path}: the file has no plan", hint="give a plan file written by `checkmate plan`")
    return plan, content if isinstance(content, Result) else None


def save(value: Graph | Plan | Result | Curve, path: Path) -> None:
    """Write a value to a file atomically.

    Raises:
        OptionError: The file cannot be written.
    """
    with writing(path):
        files.write(value, path)


def save_bytes(data: bytes, path: Path) -> None:
    """Write bytes to a file atomically.

    Raises:
        OptionError: The file cannot be written.
    """
    with writing(path):
        files.write_atomically(path, data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn errors of writing a file into bad input.

    Raises:
        OptionError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}", hint="choose another path with --out") from error


def beside(path: Path, ending: str) -> Path:
    """Path in the current folder with the name of a file and another ending.

    Examples:
        >>> beside(Path("models/gpt2.graph.json"), "-8GiB.plan.json").name
        'gpt2-8GiB.plan.json'
    """
    return Path(path.name.removesuffix(".json").removesuffix(".graph") + ending)
