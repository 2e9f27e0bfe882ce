"""The parts of `torch.cuda.memory._snapshot` that are read, and a reader that checks them.

A pickle can run any program when it is loaded, by the names in it. The reader looks up no name.
"""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from checkmate.core.errors import FileFormatError, OptionError, shortened
from checkmate.core.units import format_bytes

Bytes = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A size or an address."""


class Frame(msgspec.Struct, frozen=True):
    """One entry of a stack."""

    name: str
    filename: str  # "" if it is not known, "??" in C++
    line: int


class Block(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a segment."""

    size: Bytes  # as the allocator rounds it
    state: str  # "active_allocated", "active_awaiting_free" or "inactive"
    address: Bytes
    frames: Any = ()  # stack of the allocation, innermost frame first; see `frames_of`


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """Memory that the allocator got from the device in one piece; the sum of all segments is the reserved memory."""

    device: int = 0
    address: Bytes
    total_size: Bytes
    is_expandable: bool = False
    segment_type: str = "large"  # or "small"
    pool: tuple[int, int] = msgspec.field(name="segment_pool_id", default=(0, 0))  # of a `torch.cuda.MemPool`
    blocks: list[Block]  # in the order of their addresses

    @property
    def in_use(self) -> list[tuple[int, int]]:
        """Offset and bytes of each block in use."""
        return [(block.address - self.address, block.size) for block in self.blocks if block.state != "inactive"]


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """One action of the allocator."""

    action: str  # alloc, free_requested, free_completed, oom, snapshot, or segment_ and alloc, free, map or unmap
    addr: Bytes = 0
    size: Bytes = 0
    device_free: Bytes | None = None  # only for "oom"
    frames: Any = None  # as in a block; None if stacks were not recorded


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state of the allocators of all devices, and their earlier events."""

    segments: list[Segment]
    device_traces: list[list[Event]] = []  # the latest events of each device


def read_snapshot(path: str | os.PathLike[str], limit_bytes: int = 2 << 30) -> Snapshot:
    """Read a file of `torch.cuda.memory._dump_snapshot`; its size is limited, since it takes about ten times as much memory."""
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
        return snapshot_of(plain_data(data))
    except FileFormatError as error:
        raise FileFormatError(f"{name}: {error.message}", hint=error.hint) from None


def snapshot_of(content: Any) -> Snapshot:
    """Check the content of a file."""
    if not isinstance(content, dict) or "segments" not in content:
        raise _refusal("not a memory snapshot: it has no list of segments")
    try:
        return msgspec.convert(content, type=Snapshot)
    except (msgspec.ValidationError, OverflowError, RecursionError) as error:
        raise _refusal(f"not a memory snapshot: {error}") from None


def frames_of(frames: Any) -> tuple[Frame, ...]:
    """Check and convert the stack of a block or an event; a file shares one stack between many of them."""
    if not isinstance(frames, (list, tuple)):
        raise FileFormatError(f"not a memory snapshot: a stack is a {type(frames).__name__}")
    return tuple(map(_frame, frames))


def _frame(frame: Any) -> Frame:
    if isinstance(frame, dict):
        name, filename, line = frame.get("name"), frame.get("filename"), frame.get("line")
        if isinstance(name, str) and isinstance(filename, str) and isinstance(line, int) and abs(line) < 1 << 31:
            return Frame(shortened(name), shortened(filename, 1024), line)  # paths of build systems are longer than names
    raise FileFormatError("not a memory snapshot: an entry of a stack without name, filename and line")


class _Plain(pickle._Unpickler):  # pyright: ignore[reportPrivateUsage]
    """The unpickler in Python: unlike that in C it reserves no memory for a memo index or a length that a file only claims."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}, which could run code")


def plain_data(data: bytes) -> Any:
    r"""Read a pickle that consists of lists, dictionaries, tuples, text, numbers, booleans and None.

    Without a name a pickle can neither import nor call anything.

    Examples:
        >>> plain_data(pickle.dumps({"sizes": [1, 2], "pool": (0, 1)}))
        {'sizes': [1, 2], 'pool': (0, 1)}
        >>> plain_data(b"\x80\x02cposix\nsystem\n.")
        Traceback (most recent call last):
            ...
        checkmate.core.errors.FileFormatError: the pickle is not read: it names posix.system, which could run code
        <BLANKLINE>
        hint: give a file written by `torch.cuda.memory._dump_snapshot`
    """
    try:
        return _Plain(io.BytesIO(data)).load()
    except Exception as error:  # noqa: BLE001  (a damaged pickle raises nearly any error)
        raise _refusal(f"the pickle is not read: {error or type(error).__name__}") from None


def _refusal(message: str) -> FileFormatError:
    return FileFormatError(message, hint="give a file written by `torch.cuda.memory._dump_snapshot`")
