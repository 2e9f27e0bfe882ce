"""The blocks and segments of an allocator at one moment of its recording."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from checkmate.core.errors import OptionError
from checkmate.oom.snapshot import Event, Snapshot

_GONE = ("free_completed", "free")  # PyTorch before 2.0 has one event for both halves of a free


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockInUse:
    """A block that was in use.

    Attributes:
        address: The address.
        size_bytes: Bytes.
        frames: Stack of its allocation as in the file; None if it was allocated before the recording began.
        awaits_stream: Whether it was freed, but another stream might still have read it.
    """

    address: int
    size_bytes: int
    frames: Any
    awaits_stream: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of the allocator of one device.

    Attributes:
        device: Index of the device.
        name: The moment in words.
        error: The event of the out-of-memory error; None if the recording has none.
        held: Blocks in use.
        segments: Address and bytes of each segment.
    """

    device: int
    name: str
    error: Event | None
    held: tuple[BlockInUse, ...]
    segments: tuple[tuple[int, int], ...]

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use."""
        return sum(block.size_bytes for block in self.held)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments; those in use where the snapshot has no segments for them, as that of a plan."""
        return max(self.allocated_bytes, sum(size for _, size in self.segments))

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest free range of one segment."""
        blocks = sorted((block.address, block.size_bytes) for block in self.held)
        largest, k = 0, 0
        for start, size in sorted(self.segments):
            free_from, end = start, start + size
            while k < len(blocks) and blocks[k][0] < end:
                address, taken = blocks[k]
                largest = max(largest, address - free_from)
                free_from = max(free_from, address + taken)
                k += 1
            largest = max(largest, end - free_from)
        return largest


def moment_of(snapshot: Snapshot, device: int | None = None) -> Moment:
    """The moment of the last out-of-memory error; without one, of the largest use in the recording.

    The state is reconstructed backwards from that of the snapshot, as PyTorch's viewer does it.

    Args:
        snapshot: The snapshot.
        device: Index of the device; by default that of an error, else that with the most reserved memory.

    Raises:
        OptionError: The snapshot has nothing of that device.
    """
    at = _device(snapshot, device)
    trace = snapshot.device_traces[at] if at < len(snapshot.device_traces) else []
    state = _State(snapshot, at)
    errors = [k for k, event in enumerate(trace) if event.action == "oom"]
    if errors:
        until, name, error = errors[-1], "at the out-of-memory error", trace[errors[-1]]
    elif trace:
        until, name, error = _peak(trace, state.allocated_bytes), "at the largest use in the recording", None
    else:
        until, name, error = 0, "when the snapshot was taken (no events were recorded)", None
    for event in reversed(trace[until:]):
        state.undo(event)
    segments = tuple(sorted((*state.segments.items(), *_mapped(state.expandable, trace[until:]))))
    return Moment(device=at, name=name, error=error, held=state.held(trace[:until]), segments=segments)


def _device(snapshot: Snapshot, device: int | None) -> int:
    reserved: dict[int, int] = {}
    for segment in snapshot.segments:
        reserved[segment.device] = reserved.get(segment.device, 0) + segment.total_size
    traced = [k for k, trace in enumerate(snapshot.device_traces) if trace]
    if device is not None:
        if device not in reserved and device not in traced:
            raise OptionError(
                f"the snapshot has nothing of device {device}",
                hint=f"give one of {', '.join(map(str, sorted({*reserved, *traced})))}" if reserved or traced else "",
            )
        return device
    failed = [k for k in traced if any(event.action == "oom" for event in snapshot.device_traces[k])]
    return max(failed or reserved or traced or [0], key=lambda k: (reserved.get(k, 0), -k))


def _peak(trace: list[Event], left_bytes: int) -> int:
    """Number of events until the first moment at which most bytes are in use, found backwards from what is left."""
    now = most = left_bytes
    found = len(trace)
    for k in range(len(trace) - 1, -1, -1):
        if trace[k].action == "alloc":
            now -= trace[k].size
        elif trace[k].action in _GONE:
            now += trace[k].size
        if now >= most:
            most, found = now, k
    return found


def _mapped(segments: list[tuple[int, int]], events: list[Event]) -> list[tuple[int, int]]:
    """Address and bytes of each expandable segment before the events, from those after them; neighbours are joined.

    Between two neighbouring ends of all ranges, the first event there tells what was before: mapped memory if it unmaps.
    """
    maps = [(e.addr, e.addr + e.size, e.action) for e in events if e.action in ("segment_map", "segment_unmap")]
    ranges = [(start, start + size) for start, size in segments]
    ends = sorted({end for start, stop, *_ in (*ranges, *maps) for end in (start, stop)})
    at = {end: k for k, end in enumerate(ends)}
    change = [0] * (len(ends) + 1)
    for start, stop in ranges:
        change[at[start]] += 1
        change[at[stop]] -= 1
    mapped = [covers > 0 for covers in accumulate(change)]
    unknown = list(range(len(ends) + 1))  # of each range, itself or one nearer to the next of which no event has told

    def next_unknown(k: int) -> int:
        while unknown[k] != k:
            unknown[k] = unknown[unknown[k]]
            k = unknown[k]
        return k

    for start, stop, action in maps:
        k = next_unknown(at[start])
        while k < at[stop]:
            mapped[k], unknown[k] = action == "segment_unmap", k + 1
            k = next_unknown(k)
    found: list[tuple[int, int]] = []
    for (k, start), stop in zip(enumerate(ends), ends[1:], strict=False):
        if mapped[k] and found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], stop - found[-1][0])
        elif mapped[k]:
            found.append((start, stop - start))
    return found


class _State:
    """Blocks in use and segments, as of the snapshot, from which events are undone; expandable segments stay as they are."""

    def __init__(self, snapshot: Snapshot, device: int) -> None:
        self.segments: dict[int, int] = {}
        self.expandable: list[tuple[int, int]] = []
        self.blocks: dict[int, tuple[int, Any]] = {}
        for segment in snapshot.segments:
            if segment.device != device:
                continue
            if segment.is_expandable:
                self.expandable.append((segment.address, segment.total_size))
            else:
                self.segments[segment.address] = segment.total_size
            address = segment.address
            for block in segment.blocks:
                address = block.address if block.address >= 0 else address
                if block.state != "inactive":
                    self.blocks[address] = (block.size, block.frames or None)
                address += block.size

    @property
    def allocated_bytes(self) -> int:
        return sum(size for size, _ in self.blocks.values())

    def undo(self, event: Event) -> None:
        if event.action == "alloc":
            self.blocks.pop(event.addr, None)
        elif event.action in _GONE:
            self.blocks[event.addr] = (event.size, None)
        elif event.action == "segment_free":
            self.segments[event.addr] = event.size
        elif event.action == "segment_alloc":
            self.segments.pop(event.addr, None)

    def held(self, before: list[Event]) -> tuple[BlockInUse, ...]:
        """Blocks with the stacks of their allocations, which are among the events before the moment."""
        allocated: dict[int, Any] = {}
        awaits: set[int] = set()
        for event in before:
            if event.action == "alloc":
                allocated[event.addr] = event.frames
                awaits.discard(event.addr)
            elif event.action == "free_requested":
                awaits.add(event.addr)
            elif event.action in _GONE:
                allocated.pop(event.addr, None)
        return tuple(
            BlockInUse(address=address, size_bytes=size, frames=allocated.get(address, frames), awaits_stream=address in awaits)
            for address, (size, frames) in self.blocks.items()
        )
