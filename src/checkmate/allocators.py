"""Models of the allocators of PyTorch and TensorFlow: best-fit allocation with coalescing, simulated on sizes.

PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp) and TensorFlow's BFC allocator (bfc_allocator.cc) both cut
regions of device memory into chunks, hand out the smallest free chunk that is large enough and join free neighbours. They
differ in rounding, in the size of regions and in when a chunk is split.
"""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a region, with its neighbours there."""

    size: int
    address: int  # of its first byte, counted over all regions in the order in which they were made
    pool: Hashable = None  # key of its free list
    before: Chunk | None = None
    after: Chunk | None = None
    used: bool = False


@dataclass(slots=True)
class Heap:
    """Regions of memory, cut into chunks. Subclasses define rounding, splitting and the size of regions."""

    held: int = 0  # bytes of all regions, free chunks included
    in_use: int = 0  # bytes of the allocated chunks
    peak: int = 0  # of the bytes in use
    # Sorted by size, then address: the first that fits is the smallest, and ties break as in both allocators.
    _free: dict[Hashable, list[tuple[int, int, Chunk]]] = field(default_factory=dict[Hashable, list[tuple[int, int, Chunk]]])

    def release(self, chunk: Chunk) -> None:
        """Free a chunk and join it with its free neighbours; it may be part of another one afterwards."""
        chunk.used = False
        self.in_use -= chunk.size
        if chunk.after is not None and not chunk.after.used:
            self._remove(chunk.after)
            self._join(chunk, chunk.after)
        if chunk.before is not None and not chunk.before.used:
            before = chunk.before
            self._remove(before)
            self._join(before, chunk)
            chunk = before
        self._insert(chunk)

    def _smallest(self, size: int, pool: Hashable = None) -> Chunk | None:
        """Remove the smallest free chunk of at least a size from a pool; None if there is none."""
        free = self._free.setdefault(pool, [])
        at = bisect.bisect_left(free, (size, 0))
        return free.pop(at)[2] if at < len(free) else None

    def _extend(self, size: int, pool: Hashable = None) -> Chunk:
        """Make a region of one chunk."""
        chunk = Chunk(size, self.held, pool)
        self.held += size
        return chunk

    def _hand_out(self, chunk: Chunk, size: int) -> Chunk:
        """Mark a chunk as allocated; all beyond a size is split off and free."""
        if size < chunk.size:
            rest = Chunk(chunk.size - size, chunk.address + size, chunk.pool, chunk, chunk.after)
            if chunk.after is not None:
                chunk.after.before = rest
            chunk.size, chunk.after = size, rest
            self._insert(rest)
        chunk.used = True
        self.in_use += chunk.size
        self.peak = max(self.peak, self.in_use)
        return chunk

    def _join(self, first: Chunk, second: Chunk) -> None:
        first.size += second.size
        first.after = second.after
        if second.after is not None:
            second.after.before = first

    def _insert(self, chunk: Chunk) -> None:
        bisect.insort(self._free.setdefault(chunk.pool, []), (chunk.size, chunk.address, chunk))

    def _remove(self, chunk: Chunk) -> None:
        free = self._free[chunk.pool]
        free.pop(bisect.bisect_left(free, (chunk.size, chunk.address)))


@dataclass(slots=True)
class CachingAllocator(Heap):
    """PyTorch's caching allocator: separate pools for small and large requests, and no segment is released.

    The numbers are those of c10/core/AllocatorConfig.h, PyTorch 2.13, with their names.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.in_use, allocator.held
        (1024, 2097152)
    """

    def allocate(self, size_bytes: int) -> Chunk:
        """Allocate the smallest free block that is large enough, or one in a new segment.

        The rest of the block is split off if it is at least 512 bytes in a small segment, or more than 1 MiB in a large one
        (should_split): smaller rests stay with it as internal fragmentation.
        """
        mib, min_block = 2**20, 512  # kMinBlockSize
        size = max(min_block, -(-size_bytes // min_block) * min_block)
        small = size <= mib  # kSmallSize
        if small:
            segment = 2 * mib  # kSmallBuffer
        elif size < 10 * mib:  # kMinLargeAlloc
            segment = 20 * mib  # kLargeBuffer, which several requests share
        else:
            segment = -(-size // (2 * mib)) * 2 * mib  # kRoundLarge
        block = self._smallest(size, small) or self._extend(segment, small)
        rest = block.size - size
        split = rest >= min_block if small else rest > mib
        return self._hand_out(block, size if split else block.size)


@dataclass(slots=True)
class Bfc(Heap):
    """TensorFlow's best-fit allocator with coalescing, in the mode in which its memory grows on demand.

    The numbers are those of xla/tsl/framework/bfc_allocator.h and .cc, TensorFlow 2.21.

    Examples:
        >>> heap = Bfc()
        >>> chunk = heap.allocate(3_000_000)
        >>> heap.in_use
        4194304
    """

    _region: int = 2 * 2**20  # the first one under `allow_growth`; every further one is twice as large

    def allocate(self, size_bytes: int) -> Chunk:
        """Allocate the smallest free chunk that is large enough, or one in a new region.

        The chunk is split if it is at least twice as large as the request, or if 128 MiB or more would stay unused
        (BFCAllocator::FindChunkPtr): smaller rests stay with it as internal fragmentation.
        """
        size = max(256, -(-size_bytes // 256) * 256)  # kMinAllocationSize
        chunk = self._smallest(size) or self._grow(size)
        split = chunk.size >= 2 * size or chunk.size - size >= 128 * 2**20  # max_internal_fragmentation_bytes
        return self._hand_out(chunk, size if split else chunk.size)

    def _grow(self, size: int) -> Chunk:
        """Make a region of one chunk (BFCAllocator::Extend)."""
        doubled = False
        while size > self._region:
            self._region *= 2
            doubled = True
        chunk = self._extend(self._region)
        if not doubled:
            self._region *= 2
        return chunk
