"""Memory histories that a GPU recorded, replayed through the model of the allocator."""

from __future__ import annotations

import random
from typing import Any

import pytest

from benchmarks.gpu.history import replayed_history
from checkmate import Plan
from checkmate.allocators import CachingAllocator, Chunk
from checkmate.oom import read_snapshot
from checkmate.oom.snapshot import snapshot_of
from checkmate.studies.reserved import requests
from tests.oom.recording import MIB, failed_run
from tests.studies.test_reserved import chain

BASE = 1 << 40


class Recorder:
    """The model of the allocator, with events and segments in the format of `torch.cuda.memory._snapshot`."""

    def __init__(self, expandable: bool = False) -> None:
        self.allocator, self.events = CachingAllocator(expandable), list[dict[str, Any]]()
        self.segments, self.blocks = dict[int, int](), dict[int, Chunk]()

    def note(self, action: str, address: int, size: int) -> None:
        self.events.append({"action": action, "addr": BASE + address, "size": size})

    def allocate(self, size: int) -> int:
        before = dict(self.allocator._next)
        block = self.allocator.allocate(size)
        for pool, first in before.items():
            if (grown := self.allocator._next[pool] - first - (not self.allocator.expandable)) > 0:
                self.segments[first] = grown
                self.note("segment_map" if self.allocator.expandable else "segment_alloc", first, grown)
        self.note("alloc", block.address, size)
        self.blocks[block.address] = block
        return block.address

    def free(self, address: int) -> None:
        block = self.blocks.pop(address)
        self.note("free_requested", address, block.size)
        self.note("free_completed", address, block.size)
        self.allocator.release(block)

    def empty_cache(self) -> None:
        self.allocator.empty_cache()
        for address in [a for a in self.segments if a not in self.allocator._regions]:
            self.note("segment_free", address, self.segments.pop(address))

    def raw(self, last: int | None = None) -> dict[str, Any]:
        """The state now, with the last so many events."""
        events = self.events if last is None else self.events[len(self.events) - last :]
        return {"segments": [self.segment(*each) for each in self.segments.items()], "device_traces": [events]}

    def snapshot(self, last: int | None = None) -> Any:
        return snapshot_of(self.raw(last))

    def segment(self, address: int, size: int) -> dict[str, Any]:
        inside = [b for a, b in sorted(self.blocks.items()) if address <= a < address + size]
        blocks = [{"address": BASE + b.address, "size": b.size, "state": "active_allocated"} for b in inside]
        expandable = self.allocator.expandable
        return {"address": BASE + address, "total_size": size, "is_expandable": expandable, "blocks": blocks}


@pytest.mark.parametrize("expandable", [False, True])
def test_the_model_reserves_what_was_recorded_of_a_plan(expandable: bool) -> None:
    """From the first event or from later ones, in whose beginning blocks are in use: at no event do the two differ."""
    graph = chain(12, 3 * MIB)
    recorder = Recorder(expandable)
    for _ in range(2):
        held: dict[int, int] = {}
        for request in requests(graph, Plan.from_order(graph, range(len(graph.ops)))):
            if request.size_bytes:
                held[request.block] = recorder.allocate(request.size_bytes)
            else:
                recorder.free(held.pop(request.block))
        for address in held.values():
            recorder.free(address)
    for last in (None, len(recorder.events) * 2 // 3, 40):
        found = replayed_history(recorder.snapshot(last))
        assert found == (recorder.allocator.held, recorder.allocator.held, None)


def test_segments_that_were_returned_are_returned_in_the_model() -> None:
    """As by `torch.cuda.empty_cache`: what is reserved afterwards is compared, not the sum of both."""
    chance, recorder = random.Random(0), Recorder()
    for _ in range(3):
        held = [recorder.allocate(int(2 ** chance.uniform(9, 25))) for _ in range(40)]
        chance.shuffle(held)
        for address in held[4:]:
            recorder.free(address)
        recorder.empty_cache()
    found = replayed_history(recorder.snapshot())
    assert found.recorded_bytes == found.modelled_bytes > recorder.allocator.held
    assert found.differs_at is None


def test_an_allocator_with_other_rules_is_told_from_the_model(tmp_path: Any) -> None:
    """This one never makes a segment below 20 MiB; the first request of 10 MiB or more shows it. Read from a file."""
    recording = failed_run()
    found = replayed_history(read_snapshot(recording.dump(tmp_path / "history.pickle")))
    assert (found.recorded_bytes, found.modelled_bytes) == (80 * MIB, 76 * MIB)
    assert found.differs_at is not None
    assert recording.events[found.differs_at]["size"] == 16 * MIB
