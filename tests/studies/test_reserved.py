"""What PyTorch's caching allocator takes of a device, by its published rules."""

from __future__ import annotations

import random
from copy import deepcopy

import pytest

from checkmate import Graph, Plan, simulate, solve
from checkmate.allocators import CachingAllocator, Chunk, packed
from checkmate.core.budget import keep_all_bytes
from checkmate.core.problem import Problem
from checkmate.studies.reserved import allocator_peaks, requests, smallest_arena

KIB, MIB = 2**10, 2**20


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([1], [2 * MIB]),  # small requests share 2 MiB
        ([MIB, MIB], [2 * MIB]),
        ([MIB, MIB, 1], [2 * MIB, 2 * MIB]),
        ([MIB + 1], [20 * MIB]),  # from 1 to 10 MiB they share 20 MiB
        ([9 * MIB, 9 * MIB], [20 * MIB]),
        ([9 * MIB, 9 * MIB, 9 * MIB], [20 * MIB, 20 * MIB]),
        ([10 * MIB], [10 * MIB]),  # beyond, each has its own, rounded to 2 MiB
        ([11 * MIB, 33 * MIB], [12 * MIB, 34 * MIB]),
    ],
)
def test_segments(sizes: list[int], segments: list[int]) -> None:
    """The sizes of segments for requests that come one after the other."""
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    assert allocator.held == sum(segments)


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_is_left() -> None:
    """What is left of a block with less is lost until it is given back."""
    allocator = CachingAllocator()
    block = allocator.allocate(40 * MIB)
    allocator.release(block)
    assert allocator.allocate(39 * MIB).size == 40 * MIB
    second = allocator.allocate(40 * MIB)
    allocator.release(second)
    assert allocator.allocate(30 * MIB).size == 30 * MIB
    assert allocator.allocate(10 * MIB).size == 10 * MIB
    assert allocator.held == 80 * MIB


@pytest.mark.parametrize("seed", range(5))
def test_blocks_never_overlap_and_nothing_is_lost(seed: int) -> None:
    """Random requests: blocks in use are apart, sums are right, and when all is given back every segment is whole."""
    chance = random.Random(seed)
    allocator = CachingAllocator()
    held: list[Chunk] = []
    for _ in range(2000):
        if held and chance.random() < 0.48:
            allocator.release(held.pop(chance.randrange(len(held))))
        else:
            size = int(2 ** chance.uniform(3, 25))
            held.append(allocator.allocate(size))
            assert held[-1].size >= size
        assert allocator.in_use == sum(b.size for b in held)
        ends = 0
        for block in sorted(held, key=lambda b: b.address):
            assert block.address >= ends
            ends = block.address + block.size
    for block in held:
        allocator.release(block)
    free = [block for pool in allocator._free.values() for block in pool]
    assert sum(b.size for b in free) == allocator.held
    assert not {b.address for b in free} & {b.address + b.size for b in free}


def chain(layers: int, unit: int) -> Graph:
    """Forward and backward of a chain, values of 1 to 5 units."""
    sizes = [unit * (1 + 7 * i % 5) for i in range(layers)]
    edges = [(i, i + 1) for i in range(2 * layers - 1)] + [(layers - 1 - i, layers + i) for i in range(1, layers)]
    return Graph.from_dag(cost=[1] * 2 * layers, size_bytes=[*sizes, *reversed(sizes)], edges=edges, kept=(2 * layers - 1,))


@pytest.mark.parametrize("unit", [100 * KIB, 3 * MIB, 17 * MIB])
def test_allocated_is_what_the_plan_takes_and_reserved_is_no_less(unit: int) -> None:
    """Requests in order add up to the plan's peak; a plan for less memory reserves no more."""
    graph = chain(12, unit)
    reserved = []
    for share in (1.0, 0.6):
        result = solve(Problem(graph, int(share * keep_all_bytes(graph))))
        assert result.plan is not None
        held: dict[int, int] = {}
        peak = 0
        for request in requests(graph, result.plan):
            if request.size_bytes:
                held[request.block] = request.size_bytes
            else:
                del held[request.block]
            peak = max(peak, sum(held.values()))
        assert peak == simulate(graph, result.plan).peak_bytes
        reserved.append(allocator_peaks(graph, result.plan).reserved_bytes)
        assert reserved[-1] >= peak
    assert reserved[1] <= reserved[0]


def test_what_is_resident_has_segments_too() -> None:
    """Given one by one it takes what its sizes take; what is not given is one block more."""
    graph = Graph.from_dag(cost=[1], size_bytes=[512], edges=[], kept=[0], resident_bytes=45 * MIB)
    plan = Plan.from_order(graph, [0])
    assert allocator_peaks(graph, plan).reserved_bytes == 46 * MIB + 2 * MIB
    assert allocator_peaks(graph, plan, [9 * MIB] * 5).reserved_bytes == 60 * MIB + 2 * MIB
    assert allocator_peaks(graph, plan, [9 * MIB] * 4).reserved_bytes == 60 * MIB + 2 * MIB
    assert allocator_peaks(graph, plan, [9 * MIB] * 4 + [9 * MIB // 2] * 2).reserved_bytes == 60 * MIB + 2 * MIB


@pytest.mark.parametrize(("kinds", "most"), [(3, 1.1), (6, 1.1), (24, 1.25)])
def test_an_arena_reserves_no_more_and_is_close_to_the_allocated_peak(kinds: int, most: float) -> None:
    """All large requests are known in advance. Layers of a model repeat some sizes; with a size for each layer more is lost."""
    chance = random.Random(kinds)
    layers = 24
    sizes = [int(2 ** chance.uniform(21, 26)) for _ in range(kinds)] * (layers // kinds)
    edges = [(i, i + 1) for i in range(2 * layers - 1)] + [(layers - 1 - i, layers + i) for i in range(1, layers)]
    graph = Graph.from_dag(cost=[1] * 2 * layers, size_bytes=[*sizes, *reversed(sizes)], edges=edges, resident_bytes=100 * MIB)
    result = solve(Problem(graph, int(0.6 * keep_all_bytes(graph))))
    alone, arena = allocator_peaks(graph, result.plan), smallest_arena(graph, result.plan)
    assert arena.reserved_bytes <= alone.reserved_bytes
    again = allocator_peaks(graph, result.plan, arena_bytes=arena.size_bytes)
    assert again.reserved_bytes == arena.reserved_bytes
    assert result.peak_bytes <= again.allocated_bytes <= arena.reserved_bytes <= most * result.peak_bytes


def test_a_block_is_counted_with_what_is_not_split_off() -> None:
    """Up to 1 MiB of a large segment stays with its block, and counts as allocated."""
    graph = Graph.from_dag(cost=[1, 1], size_bytes=[23 * MIB // 2, 35 * MIB // 2], edges=[(0, 1)], kept=[1])
    plan = Plan.from_order(graph, [0, 1])
    assert simulate(graph, plan).peak_bytes == 29 * MIB
    assert allocator_peaks(graph, plan).allocated_bytes == 30 * MIB


@pytest.mark.parametrize("seed", range(3))
def test_blocks_of_known_lifetimes_are_packed(seed: int) -> None:
    """No two overlap in time and place; what is made last and freed first loses no byte, and other lifetimes few."""
    chance = random.Random(seed)
    spans = [sorted(chance.sample(range(200), 2)) for _ in range(60)]
    nested = [(k, 200 - k) for k in range(60)]
    for lives, most in ((spans, 1.1), (nested, 1.0)):
        blocks = [(made, freed, chance.randrange(1, 100)) for made, freed in lives]
        offsets, size = packed(blocks)
        for k, (made, freed, taken) in enumerate(blocks):
            assert 0 <= offsets[k] <= size - taken
            for j, (other, gone, length) in enumerate(blocks[:k]):
                apart = gone <= made or freed <= other
                assert apart or offsets[j] + length <= offsets[k] or offsets[k] + taken <= offsets[j]
        peak = max(sum(taken for made, freed, taken in blocks if made <= t < freed) for t in range(200))
        assert peak <= size <= most * peak


def test_expandable_segments_grow_by_pages_at_their_end() -> None:
    """A hole that fits comes before the end, however small the end is; no block keeps a rest; an arena would change nothing."""
    allocator = CachingAllocator(expandable=True)
    first, second = allocator.allocate(15 * MIB), allocator.allocate(11 * MIB)
    assert (first.size, second.size, allocator.held) == (15 * MIB, 11 * MIB, 40 * MIB)
    allocator.release(first)
    assert allocator.allocate(14 * MIB) == first._replace(size=14 * MIB)
    third = allocator.allocate(20 * MIB)
    assert (third.address, allocator.held) == (second.address + second.size, 60 * MIB)
    assert allocator.allocate(1).size == 512
    assert allocator.held == 62 * MIB
    graph = chain(6, 3 * MIB)
    plan = Plan.from_order(graph, range(len(graph.ops)))
    alone = allocator_peaks(graph, plan, CachingAllocator(expandable=True)).reserved_bytes
    assert alone % (20 * MIB) == 0
    assert smallest_arena(graph, plan, CachingAllocator(expandable=True)) == (0, alone)


def test_a_segment_is_held_as_it_is() -> None:
    """Blocks in use, and free parts that the next requests take; without a block it goes back to the device."""
    allocator = CachingAllocator()
    (block,) = allocator.hold(20 * MIB, [(6 * MIB, 2 * MIB)], small=False)
    copy = deepcopy(allocator)
    assert (allocator.in_use, allocator.held) == (2 * MIB, 20 * MIB)
    assert allocator.allocate(12 * MIB).address == block.address + block.size
    allocator.allocate(6 * MIB)
    assert allocator.held == 20 * MIB
    copy.empty_cache()
    assert copy.held == 20 * MIB
    copy.release(block)
    copy.empty_cache()
    assert (copy.held, allocator.held) == (0, 20 * MIB)
    assert copy.allocate(1).size == 512
