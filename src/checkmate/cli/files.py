"""Files that a verb reads and writes; trouble with them is bad input."""

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
    """The graph, plan, result or curve in a file.

    Raises:
        OptionError: The file cannot be opened.
        FileFormatError: It holds something else, or cannot be read.
    """
    try:
        return files.read_as(path, kind)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint=f"give a {kind.__name__.lower()} file") from error


def load_plan(path: Path) -> Plan:
    """The plan in a plan or result file.

    Raises:
        OptionError: The file cannot be opened.
        FileFormatError: It holds no plan, or cannot be read.
    """
    return load_planned(path)[0]


def load_planned(path: Path) -> tuple[Plan, Result | None]:
    """The plan in a plan or result file, and the result where it is one.

    Raises:
        OptionError: The file cannot be opened.
        FileFormatError: It holds no plan, or cannot be read.
    """
    try:
        content = files.read(path)
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}", hint="give a plan file, as `checkmate plan` writes it") from error
    plan = content.plan if isinstance(content, Result) else content
    if not isinstance(plan, Plan):
        raise FileFormatError(f"{path}: holds no plan", hint="give a plan file, as `checkmate plan` writes it")
    return plan, content if isinstance(content, Result) else None


def save(value: Graph | Plan | Result | Curve, path: Path) -> None:
    """Write a file whole, or say why not.

    Raises:
        OptionError: The file cannot be written.
    """
    with writing(path):
        files.write(value, path)


def save_bytes(data: bytes, path: Path) -> None:
    """Write bytes whole, or say why not.

    Raises:
        OptionError: The file cannot be written.
    """
    with writing(path):
        files.write_atomically(path, data)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn trouble with writing a file into bad input.

    Raises:
        OptionError: The file cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise OptionError(f"cannot write {path}: {error.strerror or error}", hint="choose another place with --out") from error


def beside(path: Path, ending: str) -> Path:
    """A file's name in the current folder with another ending.

    Examples:
        >>> beside(Path("models/gpt2.graph.json"), "-8GiB.plan.json").name
        'gpt2-8GiB.plan.json'
    """
    return Path(path.name.removesuffix(".json").removesuffix(".graph") + ending)
