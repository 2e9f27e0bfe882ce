"""Graphs, plans, results and curves as JSON files, versioned and written atomically."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from checkmate.core.curve import Curve
from checkmate.core.errors import CheckmateError, FileFormatError
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Result

Content = Graph | Plan | Result | Curve
_FORMATS: dict[str, type[Content]] = {
    "checkmate.graph/1": Graph,
    "checkmate.plan/1": Plan,
    "checkmate.result/1": Result,
    "checkmate.curve/1": Curve,
}
_ENCODER = msgspec.json.Encoder()
_C = TypeVar("_C", Graph, Plan, Result, Curve)


class _Header(msgspec.Struct):
    format: str


def read(path: str | os.PathLike[str]) -> Content:
    """The graph, plan, result or curve in a file.

    Raises:
        FileFormatError: The file is truncated or foreign, or of a version not read here.
        OSError: The file cannot be opened.
    """
    data = Path(path).read_bytes()
    try:
        header = msgspec.json.decode(data, type=_Header)
        body = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise FileFormatError(
            f"{os.fspath(path)}: not a Checkmate file, or cut short: {error}",
            hint="write it again with `checkmate.write` or `checkmate capture`",
        ) from None
    content = _FORMATS.get(header.format)
    if content is None:
        raise FileFormatError(
            f"{os.fspath(path)}: format {header.format!r} is not read here; this release reads {', '.join(_FORMATS)}",
            hint="upgrade checkmate-remat if the file is newer",
        )
    del body["format"]
    try:
        return msgspec.convert(body, type=content)
    except (msgspec.ValidationError, CheckmateError, ValueError, OverflowError, RecursionError) as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None


def read_as(path: str | os.PathLike[str], kind: type[_C]) -> _C:
    """As `read`, for a caller that needs one kind of file.

    Raises:
        FileFormatError: The file holds something else, or cannot be read.
    """
    content = read(path)
    if not isinstance(content, kind):
        raise FileFormatError(f"{os.fspath(path)}: holds a {type(content).__name__.lower()}, not a {kind.__name__.lower()}")
    return content


def write(value: Content, path: str | os.PathLike[str]) -> None:
    """Write a graph, plan, result or curve; the file is there whole or not at all.

    Raises:
        TypeError: The value is none of the four.
        OSError: The file cannot be written.
    """
    name = next((f for f, kind in _FORMATS.items() if isinstance(value, kind)), None)
    if name is None:
        raise TypeError(f"a {type(value).__name__} is no graph, plan, result or curve")
    target = Path(path)
    data = _ENCODER.encode({"format": name, **msgspec.structs.asdict(value)}) + b"\n"
    write_atomically(target, data)


def write_atomically(target: Path, data: bytes) -> None:
    """Write bytes to a file that appears whole or not at all."""
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def schema(name: str) -> dict[str, Any]:
    """JSON Schema of a file format, such as ``"checkmate.graph/1"``.

    Raises:
        KeyError: There is no such format.
    """
    return schema_of(name, _FORMATS[name])


def schema_of(name: str, kind: type) -> dict[str, Any]:
    """JSON Schema of a file that holds a value of a kind and the name of its format."""
    document = msgspec.json.schema(kind)
    definition = document["$defs"][kind.__name__]
    definition["properties"] = {"format": {"const": name}, **definition["properties"]}
    definition["required"] = ["format", *definition.get("required", [])]
    return {"$id": name, "title": name, **document}


def formats() -> tuple[str, ...]:
    """Formats read and written here."""
    return tuple(_FORMATS)
