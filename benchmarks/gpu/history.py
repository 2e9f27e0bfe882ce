"""A recorded memory history, replayed through the model of the allocator: is the model wrong, or are the requests of a plan?

python benchmarks/gpu/history.py benchmarks/gpu/results/mixtral.peaks.history.pickle
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from checkmate.allocators import CachingAllocator, Chunk
from checkmate.oom.replay import moment_of
from checkmate.oom.snapshot import Event, Snapshot, read_snapshot


class ReplayedHistory(NamedTuple):
    """Largest sums of all segments during a recording.

    Attributes:
        recorded_bytes: As recorded.
        modelled_bytes: By the model, for the recorded requests.
        differs_at: The first event after which the two differ, by its index in the recording; None if they never do.
    """

    recorded_bytes: int
    modelled_bytes: int
    differs_at: int | None


def replayed_history(snapshot: Snapshot, device: int | None = None) -> ReplayedHistory:
    """Make the recorded requests of a device, on one stream and outside of memory pools, of the model of the allocator.

    The model begins with the segments and blocks that are recorded for the beginning. It returns its cached segments when the
    allocator returned any, for which a recording does not tell the reason; expandable segments stay as they are.
    """
    device = moment_of(snapshot, device).device
    trace = snapshot.device_traces[device] if device < len(snapshot.device_traces) else []
    first = [[]] * device + [[Event(action="oom"), *(event for event in trace if event.action != "oom")]]
    start = moment_of(msgspec.structs.replace(snapshot, device_traces=first), device)  # the moment of an error before all events
    model, blocks = CachingAllocator(start.expandable), dict[int, Chunk]()
    for address, size in start.segments:
        inside = sorted((b.address, b.size_bytes) for b in start.held if address <= b.address < address + size)
        chunks = model.hold(size, [(at - address, taken) for at, taken in inside], small=size == 2 << 20)
        blocks.update(zip((at for at, _ in inside), chunks, strict=True))
    recorded, sums, differs_at = model.held, [(model.held, model.held)], None
    signs = {"segment_alloc": 1, "segment_map": 1, "segment_free": -1, "segment_unmap": -1}
    for k, event in enumerate(trace):
        recorded += event.size * signs.get(event.action, 0)
        if event.action == "segment_free":
            model.empty_cache()
        elif event.action == "free_completed" and event.addr in blocks:
            model.release(blocks.pop(event.addr))
        elif event.action == "alloc":
            blocks[event.addr] = model.allocate(event.size)
            sums.append((recorded, model.held))
            differs_at = k if differs_at is None and recorded != model.held else differs_at
    return ReplayedHistory(max(sums)[0], max(held for _, held in sums), differs_at)


def main(names: Sequence[str]) -> None:
    """Print what was recorded in files, and what the model has in its place."""
    for name in names:
        print(name, *(f"{key} {value}" for key, value in replayed_history(read_snapshot(name))._asdict().items()))


if __name__ == "__main__":
    main(sys.argv[1:])
