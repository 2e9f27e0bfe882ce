"""The format of `torch.cuda.memory._snapshot`: what the reader checks, and what `checkmate.report` writes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import msgspec

from checkmate.core.errors import FileFormatError, OptionError, shortened
from checkmate.core.units import format_bytes
from checkmate.oom import plain_pickle

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A size or an address."""

_MOST_LETTERS = 1024
"""Letters of a path that are kept: those of a build system are longer than other names."""

LIMIT_BYTES = 2 << 30
"""Largest file that is read by default. In memory it takes about ten times as much."""


class Frame(msgspec.Struct, frozen=True):
    """One entry of a stack.

    Attributes:
        name: The function.
        filename: Its file; ``""`` if it is not known, ``"??"`` in C++.
        line: The line.
    """

    name: str
    filename: str
    line: int


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a segment.

    Attributes:
        size: Bytes, as the allocator rounds them.
        requested_size: Bytes that were asked for.
        state: ``"active_allocated"``, ``"active_awaiting_free"`` or ``"inactive"``.
        address: The address; -1 in files of PyTorch before 2.1.
        frames: Stack of the allocation, innermost frame first; see `frames_of`.
    """

    size: Bytes
    requested_size: int = 0
    state: str
    address: int = -1
    frames: Any = ()


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the allocator got from the device in one piece; the sum of all segments is the reserved memory.

    Attributes:
        device: Index of the device.
        address: The address.
        total_size: Bytes.
        allocated_size: Bytes in use.
        active_size: Bytes in use, or that another stream may still read.
        requested_size: Bytes of the blocks in use that were asked for.
        stream: The stream it belongs to.
        segment_type: ``"small"`` or ``"large"``.
        is_expandable: Whether it can grow.
        segment_pool_id: The pool it belongs to.
        frames: Stack of its allocation.
        blocks: Its parts, in the order of their addresses.
    """

    device: int = 0
    address: Bytes
    total_size: Bytes
    allocated_size: Bytes = 0
    active_size: Bytes = 0
    requested_size: int = 0
    stream: int = 0
    segment_type: str = "large"
    is_expandable: bool = False
    segment_pool_id: tuple[int, int] = (0, 0)
    frames: Any = ()
    blocks: list[Block]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One action of the allocator.

    Attributes:
        action: ``"alloc"``, ``"free_requested"``, ``"free_completed"``, ``"segment_alloc"``, ``"segment_free"``,
            ``"segment_map"``, ``"segment_unmap"``, ``"oom"`` or ``"snapshot"``.
        addr: The address; 0 for ``"oom"``.
        size: Bytes; for ``"oom"`` those that were asked for.
        stream: The stream.
        time_us: Time in microseconds.
        device_free: Free bytes of the device, only for ``"oom"``.
        frames: Stack of the action, innermost frame first; see `frames_of`. None if stacks were not recorded.
    """

    action: str
    addr: Bytes = 0
    size: Bytes = 0
    stream: int = 0
    time_us: int = 0
    device_free: Bytes | None = None
    frames: Any = None


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the allocators of all devices, and what they did before.

    Attributes:
        segments: The segments of all devices.
        device_traces: The latest events of each device; empty lists if they were not recorded.
        allocator_settings: Settings of the allocator.
        external_annotations: Annotations of a profiler.
    """

    segments: list[Segment]
    device_traces: list[list[Event]] = []
    allocator_settings: dict[str, Any] = {}
    external_annotations: list[Any] = []


def read_snapshot(path: str | os.PathLike[str], limit_bytes: int = LIMIT_BYTES) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot` without running any code of the pickle.

    Args:
        path: The file.
        limit_bytes: Size above which the file is refused.

    Raises:
        FileFormatError: The file is not a memory snapshot, or has more than plain data.
        OptionError: The file cannot be opened, or is larger than the limit.
    """
    name = os.fspath(path)
    try:
        with Path(path).open("rb") as file:
            data = file.read(limit_bytes + 1)
    except OSError as error:
        raise OptionError(f"{name}: {error.strerror or error}", hint="give a file of torch.cuda.memory._dump_snapshot") from None
    if len(data) > limit_bytes:
        raise OptionError(
            f"{name}: larger than {format_bytes(limit_bytes)}",
            hint="record fewer events, such as _record_memory_history(max_entries=100_000), or raise the limit",
        )
    try:
        return snapshot_of(plain_pickle.loads(data), len(data))
    except FileFormatError as error:
        raise FileFormatError(f"{name}: {error.message}", hint=error.hint) from None


def snapshot_of(content: Any, file_bytes: int) -> Snapshot:
    """Check the content of a file.

    Args:
        content: What `plain_pickle.loads` returned.
        file_bytes: Size of the file, which limits the number of segments, blocks and events.

    Raises:
        FileFormatError: It is not a memory snapshot.
    """
    hint = "give a file written by `torch.cuda.memory._dump_snapshot`"
    if not isinstance(content, dict) or "segments" not in content:
        raise FileFormatError("not a memory snapshot: it has no list of segments", hint=hint)
    room = file_bytes // 2  # every entry, and every key of one, takes two bytes of a file or more
    for entry in _entries(content):
        room -= 1 + (len(entry) if isinstance(entry, dict) else 0)
        if room < 0:
            raise FileFormatError("not a memory snapshot: the same list is in it many times", hint=hint)
    try:
        return msgspec.convert(content, type=Snapshot)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise FileFormatError(f"not a memory snapshot: {error}", hint=hint) from None


def frames_of(frames: Any) -> tuple[Frame, ...]:
    """Check and convert the stack of a block or an event, which files share between many of these.

    Raises:
        FileFormatError: It is not a stack.
    """
    if not isinstance(frames, (list, tuple)):
        raise FileFormatError(f"not a memory snapshot: a stack is a {type(frames).__name__}")
    return tuple(map(_frame, frames))


def _frame(frame: Any) -> Frame:
    if isinstance(frame, dict):
        name, filename, line = frame.get("name"), frame.get("filename"), frame.get("line")
        if isinstance(name, str) and isinstance(filename, str) and isinstance(line, int) and abs(line) < 1 << 31:
            return Frame(shortened(name), shortened(filename, _MOST_LETTERS), line)
    raise FileFormatError("not a memory snapshot: an entry of a stack without name, filename and line")


def _entries(content: dict[str, Any]) -> Iterator[Any]:
    """Segments, blocks and events, each as often as it occurs."""
    segments, traces = content["segments"], content.get("device_traces")
    for segment in segments if isinstance(segments, list) else ():
        yield segment
        blocks = segment.get("blocks") if isinstance(segment, dict) else None
        yield from blocks if isinstance(blocks, list) else ()
    for trace in traces if isinstance(traces, list) else ():
        yield trace
        yield from trace if isinstance(trace, list) else ()
