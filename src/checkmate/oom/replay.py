"""The blocks and segments of an allocator at one moment of its recording."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import sub
from typing import Any, NamedTuple

import numpy as np

from checkmate.core.errors import OptionError
from checkmate.oom.snapshot import Event, Snapshot


class BlockInUse(NamedTuple):
    """A block that was in use."""

    address: int
    size_bytes: int
    frames: Any  # stack of its allocation as in the file; None if it was allocated before the recording began


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """The state of the allocator of one device."""

    device: int
    name: str
    error: Event | None
    held: tuple[BlockInUse, ...]
    segments: tuple[tuple[int, int], ...]  # address and bytes of each
    expandable: bool  # whether any segment can grow

    @property
    def allocated_bytes(self) -> int:
        """Bytes in use."""
        return sum(block.size_bytes for block in self.held)

    @property
    def reserved_bytes(self) -> int:
        """Bytes of all segments; at least those in use, as a recording can begin after a segment."""
        return max(self.allocated_bytes, sum(size for _, size in self.segments))

    @property
    def largest_free_bytes(self) -> int:
        """Bytes of the largest free range of one segment."""
        blocks = sorted((block.address, block.address + block.size_bytes) for block in self.held)
        largest = 0
        for start, size in self.segments:
            inside = blocks[bisect_left(blocks, (start,)) : bisect_left(blocks, (start + size,))]
            edges = [start, *(edge for block in inside for edge in block), start + size]
            largest = max(largest, *(stop - begin for begin, stop in zip(edges[::2], edges[1::2], strict=True)))
        return largest


def moment_of(snapshot: Snapshot, device: int | None = None) -> Moment:
    """The moment of the last out-of-memory error; without one, of the largest use in the recording.

    The state is reconstructed backwards from the snapshot, as in PyTorch's viewer. The default is the device of an error, else
    the device with the most reserved memory.
    """
    at = _device(snapshot, device)
    trace = snapshot.device_traces[at] if at < len(snapshot.device_traces) else []
    of_device = [segment for segment in snapshot.segments if segment.device == at]
    in_use = (block for segment in of_device for block in segment.blocks if block.state != "inactive")
    blocks = {block.address: (block.size, block.frames or None) for block in in_use}
    segments = {segment.address: segment.total_size for segment in of_device if not segment.is_expandable}
    errors = [k for k, event in enumerate(trace) if event.action == "oom"]
    if errors:
        until, name = errors[-1], "at the out-of-memory error"
    elif trace:
        until, name = _peak(trace, sum(size for size, _ in blocks.values())), "at the largest use in the recording"
    else:
        until, name = 0, "when the snapshot was taken (no events were recorded)"
    for event in reversed(trace[until:]):
        if event.action == "alloc":
            blocks.pop(event.addr, None)
        elif event.action == "free_completed":
            blocks[event.addr] = (event.size, None)
        elif event.action == "segment_free":
            segments[event.addr] = event.size
        elif event.action == "segment_alloc":
            segments.pop(event.addr, None)
    expandable = [(segment.address, segment.total_size) for segment in of_device if segment.is_expandable]
    return Moment(
        device=at,
        name=name,
        error=trace[until] if errors else None,
        held=_with_stacks(blocks, trace[:until]),
        segments=tuple(sorted((*segments.items(), *_mapped(expandable, trace[until:])))),
        expandable=any(segment.is_expandable for segment in snapshot.segments),
    )


def _device(snapshot: Snapshot, device: int | None) -> int:
    reserved = Counter[int]()
    for segment in snapshot.segments:
        reserved[segment.device] += segment.total_size
    traced = [k for k, trace in enumerate(snapshot.device_traces) if trace]
    if device is not None:
        if device not in reserved and device not in traced:
            raise OptionError(
                f"the snapshot has nothing of device {device}",
                hint=f"give one of {', '.join(map(str, sorted({*reserved, *traced})))}" if reserved or traced else "",
            )
        return device
    failed = [k for k in traced if any(event.action == "oom" for event in snapshot.device_traces[k])]
    return max(failed or reserved or traced or [0], key=lambda k: (reserved[k], -k))


def _peak(trace: list[Event], left_bytes: int) -> int:
    """Number of events until the first moment of largest use, found backwards from ``left_bytes``, the use at the end."""
    signs = {"alloc": 1, "free_completed": -1}
    changes = (event.size * signs.get(event.action, 0) for event in reversed(trace))
    held = list(accumulate(changes, sub, initial=left_bytes))[::-1]
    return held.index(max(held))


def _mapped(segments: list[tuple[int, int]], events: list[Event]) -> list[tuple[int, int]]:
    """Address and bytes of each expandable segment before the events, from the segments after them; neighbours are joined."""
    maps = [event for event in events if event.action in ("segment_map", "segment_unmap")]
    ranges = [*segments, *((event.addr, event.size) for event in maps)]
    ends = sorted({end for start, size in ranges for end in (start, start + size)})
    at = {end: k for k, end in enumerate(ends)}
    mapped = np.zeros(len(ends), dtype=bool)  # from each end to the next
    for start, size in segments:
        mapped[at[start] : at[start + size]] = True
    for event in reversed(maps):
        mapped[at[event.addr] : at[event.addr + event.size]] = event.action == "segment_unmap"
    found: list[tuple[int, int]] = []
    for is_mapped, (start, stop) in zip(mapped, pairwise(ends), strict=False):
        if is_mapped and found and sum(found[-1]) == start:
            found[-1] = (found[-1][0], stop - found[-1][0])
        elif is_mapped:
            found.append((start, stop - start))
    return found


def _with_stacks(blocks: dict[int, tuple[int, Any]], before: list[Event]) -> tuple[BlockInUse, ...]:
    """Blocks with the stacks of their allocations, found among the events before the moment."""
    allocated: dict[int, Any] = {}
    for event in before:
        if event.action == "alloc":
            allocated[event.addr] = event.frames
        elif event.action == "free_completed":
            allocated.pop(event.addr, None)
    return tuple(BlockInUse(address, size, allocated.get(address, frames)) for address, (size, frames) in blocks.items())
