"""What PyTorch's CUDA allocator keeps of the device for a plan: *reserved* memory, beyond what is allocated."""

from __future__ import annotations

import bisect
from collections.abc import Iterable
from dataclasses import dataclass, field

from checkmate.core.graph import Graph
from checkmate.core.plan import Plan
from checkmate.studies.requests import requests

_MIB = 2**20
_LEAST = 512  # every size is a multiple of it
_SMALL = 1 * _MIB  # up to here requests share segments of `_SMALL_SEGMENT`
_SMALL_SEGMENT = 2 * _MIB
_LARGE = 10 * _MIB  # up to here they share segments of `_LARGE_SEGMENT`; beyond, each has its own
_LARGE_SEGMENT = 20 * _MIB
_ROUND = 2 * _MIB  # to which segments of their own are rounded up
_STEPS = 3  # a plan settles into a layout in its second run


def reserved_bytes(graph: Graph, plan: Plan, resident: Iterable[int] = ()) -> int:
    """Bytes that the allocator takes of the device while a plan runs again and again.

    Its policy is that of PyTorch's native caching allocator with default settings, which never gives a segment back while the
    device has room; where it has none, it first gives back what is free. Source: c10/cuda/CUDACachingAllocator.cpp and
    c10/core/AllocatorConfig.h, PyTorch 2.13.

    Args:
        graph: The graph.
        plan: The plan.
        resident: Sizes in bytes of what is resident, in the order in which it was allocated; what they lack of the
            graph's resident bytes counts as one more.

    Returns:
        Bytes of all segments: at least the allocated peak.

    Raises:
        PlanError: The plan cannot be run.

    Examples:
        >>> graph = Graph.from_dag(cost=[1, 2], size_bytes=[3 << 20, 30 << 20], edges=[(0, 1)], kept=[1])
        >>> reserved_bytes(graph, Plan.from_order(graph, [0, 1])) >> 20
        50
    """
    allocator = CachingAllocator()
    sizes = list(resident)
    for size in (*sizes, graph.resident_bytes - sum(sizes)):
        if size > 0:
            allocator.allocate(size)
    asked = requests(graph, plan)
    for _ in range(_STEPS):
        held: dict[int, Block] = {}
        for request in asked:
            if request.size_bytes:
                held[request.block] = allocator.allocate(request.size_bytes)
            else:
                allocator.release(held.pop(request.block))
        for block in held.values():  # gradients and outputs, gone before the next step
            allocator.release(block)
    return allocator.reserved_bytes


@dataclass(slots=True, eq=False)
class Block:
    """A part of a segment.

    Attributes:
        size: Its bytes.
        address: Where it begins.
        small: Whether its segment is one for small requests.
        before: The block that ends where it begins, in the same segment.
        after: The block that begins where it ends.
        used: Whether it is handed out.
    """

    size: int
    address: int
    small: bool
    before: Block | None = None
    after: Block | None = None
    used: bool = False


@dataclass(slots=True)
class CachingAllocator:
    """PyTorch's caching allocator, by sizes alone: best fit, blocks split and joined, segments kept.

    Attributes:
        reserved_bytes: Bytes of all segments.
        allocated_bytes: Bytes of the blocks that are handed out.
        peak_bytes: The most there ever were.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.allocated_bytes, allocator.reserved_bytes
        (1024, 2097152)
    """

    reserved_bytes: int = 0
    allocated_bytes: int = 0
    peak_bytes: int = 0
    _free: dict[bool, list[tuple[int, int, Block]]] = field(default_factory=lambda: {True: [], False: []})

    def allocate(self, size_bytes: int) -> Block:
        """Hand out the smallest free block that is large enough, or one of a new segment; its rest is split off."""
        size = max(_LEAST, -(-size_bytes // _LEAST) * _LEAST)
        small = size <= _SMALL
        pool = self._free[small]
        at = bisect.bisect_left(pool, (size, 0))
        block = pool.pop(at)[2] if at < len(pool) else self._segment(size, small)
        rest = block.size - size
        if rest >= _LEAST if small else rest > _SMALL:
            split = Block(rest, block.address + size, small, block, block.after)
            if block.after is not None:
                block.after.before = split
            block.size, block.after = size, split
            self._put(split)
        block.used = True
        self.allocated_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        return block

    def release(self, block: Block) -> None:
        """Take a block back and join it with free neighbours."""
        block.used = False
        self.allocated_bytes -= block.size
        if block.after is not None and not block.after.used:
            self._take(block.after)
            self._join(block, block.after)
        if block.before is not None and not block.before.used:
            before = block.before
            self._take(before)
            self._join(before, block)
            block = before
        self._put(block)

    def _segment(self, size: int, small: bool) -> Block:
        if small:
            length = _SMALL_SEGMENT
        elif size < _LARGE:
            length = _LARGE_SEGMENT
        else:
            length = -(-size // _ROUND) * _ROUND
        block = Block(length, self.reserved_bytes, small)
        self.reserved_bytes += length
        return block

    def _join(self, first: Block, second: Block) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first

    def _put(self, block: Block) -> None:
        bisect.insort(self._free[block.small], (block.size, block.address, block))

    def _take(self, block: Block) -> None:
        pool = self._free[block.small]
        pool.pop(bisect.bisect_left(pool, (block.size, block.address)))
