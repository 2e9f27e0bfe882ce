"""Graphs, plans, results and curves as JSON files, versioned and written atomically.

Plans with copies to the host, results and curves with these plans, and graphs with values that are on the host before the step
have version 2. All others are written as version 1, which earlier releases read.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from checkmate.core.errors import CheckmateError, FileFormatError, shortened
from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.core.result import Curve, Result
from checkmate.core.units import MOST_BYTES

Content = Graph | Plan | Result | Curve
_FORMATS: dict[str, type[Content]] = {
    "checkmate.graph/1": Graph,
    "checkmate.plan/1": Plan,
    "checkmate.result/1": Result,
    "checkmate.curve/1": Curve,
    "checkmate.plan/2": Plan,
    "checkmate.result/2": Result,
    "checkmate.curve/2": Curve,
    "checkmate.graph/2": Graph,
}
_VERBS = {Graph: "capture", Plan: "plan", Result: "plan --result", Curve: "pareto"}
_ONLY_WITH_COPIES = ("Offload", "Fetch", "Discard", "HostMemory")
"""Definitions that the schemas of version 1 do not have."""
_ENCODER = msgspec.json.Encoder()
_C = TypeVar("_C", Graph, Plan, Result, Curve)


class _Header(msgspec.Struct):
    format: str


def read(path: str | os.PathLike[str]) -> Content:
    """The graph, plan, result or curve in a file.

    Raises:
        FileFormatError: The file is truncated, has another format, or has a version that this release does not read.
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
        value = msgspec.convert(body, type=content)
        if _has_copies(value) > header.format.endswith("/2"):
            raise FileFormatError(f"a file of format {header.format!r} has no copies to the host", hint="change its format to /2")
        _check_figures(value)
        return value
    except (msgspec.ValidationError, CheckmateError, ValueError, OverflowError, RecursionError) as error:
        raise FileFormatError(f"{os.fspath(path)}: {error}") from None


def read_as(path: str | os.PathLike[str], kind: type[_C]) -> _C:
    """As `read`, for a caller that needs one kind of file."""
    content = read(path)
    if not isinstance(content, kind):
        raise FileFormatError(
            f"{os.fspath(path)}: holds a {type(content).__name__.lower()}, not a {kind.__name__.lower()}",
            hint=f"write one with `checkmate {_VERBS[kind]}`",
        )
    return content


def write(value: Content, path: str | os.PathLike[str]) -> None:
    """Write a graph, plan, result or curve; a regular file is written whole or not at all.

    Raises:
        TypeError: The value is of another type.
        OSError: The file cannot be written.
    """
    write_bytes(Path(path), encode(value))


def encode(value: Content) -> bytes:
    """The bytes of a file that holds a graph, plan, result or curve."""
    name = next((f for f, kind in _FORMATS.items() if isinstance(value, kind)), None)
    if name is None:
        raise TypeError(f"a {type(value).__name__} is no graph, plan, result or curve")
    if _has_copies(value):
        name = name.replace("/1", "/2")
    body = msgspec.structs.asdict(value)
    for new in ("host", "measured"):  # earlier releases write files without these names
        if new in body and body[new] is None:
            del body[new]
    return _ENCODER.encode({"format": name, **body}) + b"\n"


def _has_copies(value: Content) -> bool:
    if isinstance(value, Graph):
        return any(v.on_host for v in value.values)
    plans = [value] if isinstance(value, Plan) else [value.plan] if isinstance(value, Result) else []
    if isinstance(value, Curve):
        plans = [point.plan for point in value.points]
    return any(plan.host is not None for plan in plans)


def _check_figures(value: Content) -> None:
    """Refuse invalid amounts in results and curves; `Graph` checks its own amounts."""
    points = value.points if isinstance(value, Curve) else [value] if isinstance(value, Result) else []
    figures = [(name, getattr(point, name)) for point in points for name in ("budget_bytes", "peak_bytes", "cost")]
    if isinstance(value, Curve):
        figures.append(("floor_bytes", value.floor_bytes))
    for name, figure in figures:
        if not 0 <= figure <= MOST_BYTES:
            raise FileFormatError(f"{name} {shortened(str(figure))} is not between 0 and {MOST_BYTES}")


def write_bytes(path: Path, data: bytes) -> None:
    """Follow links and write bytes: atomically to a regular file, directly to a pipe or a device."""
    descriptor = _descriptor(path)
    if descriptor is not None:
        with os.fdopen(os.dup(descriptor), "wb") as stream:
            stream.write(data)
        return
    target = _followed(path)
    if is_special(target):
        with target.open("wb") as stream:
            stream.write(data)
    else:
        write_atomically(target, data)


def check_writable(path: Path, size_bytes: int = 0) -> None:
    """Check that `write_bytes` can write that many bytes, without changing anything."""
    descriptor = _descriptor(path)
    if descriptor is not None:
        os.fstat(descriptor)
        return
    target = _followed(path)
    if target.exists() and not os.access(target, os.W_OK):
        raise _error(errno.EACCES, target)
    if is_special(target):
        return
    with tempfile.TemporaryFile(dir=target.parent) as stream:
        _reserve(stream.fileno(), size_bytes)


def write_atomically(target: Path, data: bytes) -> None:
    """Write bytes to a regular file that appears whole or not at all. An existing file keeps its permissions."""
    before = target.stat() if target.exists() else None
    if before is not None and not os.access(target, os.W_OK):  # a rename would replace a write-protected file
        raise _error(errno.EACCES, target)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name[:40]}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(temporary).chmod(0o666 & ~umask if before is None else stat.S_IMODE(before.st_mode))
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _descriptor(path: Path) -> int | None:
    """The open file of this process to which a path leads, as ``/dev/stdout`` does, or None.

    Opening the path again would truncate a file to which the shell redirects, and write at its beginning.
    """
    open_files = {os.path.realpath("/proc/self/fd"), "/dev/fd"}
    place = Path(os.path.abspath(path))  # noqa: PTH100 - resolves no links
    for _ in range(40):  # as many links as Linux follows
        if os.path.realpath(place.parent) in open_files and place.name.isdecimal():
            return int(place.name)
        if not place.is_symlink():
            return None
        place = place.parent / place.readlink()
    return None


def _followed(path: Path) -> Path:
    """The path to which links lead; its file need not exist."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise _error(errno.ELOOP, path)
    return target


def is_special(target: Path) -> bool:
    """Whether a path is a pipe, a device or a socket, on which a write can wait for a reader."""
    try:
        mode = target.stat().st_mode
    except FileNotFoundError:
        return False
    if stat.S_ISDIR(mode):
        raise _error(errno.EISDIR, target)
    return not stat.S_ISREG(mode)


def _reserve(descriptor: int, size_bytes: int) -> None:
    """Allocate bytes on the disk, if the file system can."""
    if size_bytes and hasattr(os, "posix_fallocate"):
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise


def _error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), os.fspath(path))


def schema(name: str) -> dict[str, Any]:
    """JSON Schema of a file format: ``"checkmate.graph/1"``, for example."""
    document = schema_of(name, _FORMATS[name])
    return document if name.endswith("/2") else _without_copies(document)


def _without_copies(document: dict[str, Any]) -> dict[str, Any]:
    """The schema of version 1, in which plans have neither copies nor a host, and graphs no values on the host."""
    definitions = {kind: d for kind, d in document["$defs"].items() if kind not in _ONLY_WITH_COPIES}
    if "Plan" in definitions:
        steps = definitions["Plan"]["properties"]["steps"]["items"]
        dropped = {f"#/$defs/{kind}" for kind in _ONLY_WITH_COPIES}
        steps["anyOf"] = [step for step in steps["anyOf"] if step["$ref"] not in dropped]
        mapping = steps["discriminator"]["mapping"]
        steps["discriminator"]["mapping"] = {tag: kind for tag, kind in mapping.items() if kind not in dropped}
        del definitions["Plan"]["properties"]["host"]
    if "Value" in definitions:
        del definitions["Value"]["properties"]["on_host"]
    return {**document, "$defs": definitions}


def schema_of(name: str, kind: type) -> dict[str, Any]:
    """JSON Schema of a file that holds a value of a kind and the name of its format."""
    document = msgspec.json.schema(kind)
    definition = document["$defs"][kind.__name__]
    definition["properties"] = {"format": {"const": name}, **definition["properties"]}
    definition["required"] = ["format", *definition["required"]]
    return {"$id": name, "title": name, **document}


def formats() -> tuple[str, ...]:
    """Formats that this release reads and writes."""
    return tuple(_FORMATS)
