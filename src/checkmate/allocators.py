"""Models of the allocators of PyTorch and TensorFlow: best-fit allocation with coalescing, simulated on sizes.

PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp) and TensorFlow's BFC allocator (bfc_allocator.cc) both cut
regions of device memory into chunks, hand out the smallest free chunk that is large enough and join free neighbours. They
differ in rounding, in the size of regions and in when a chunk is split.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of a region."""

    size: int
    address: int  # of its first byte, counted over all regions in order of creation, with one byte between regions
    pool: Hashable = None  # key of its free list


@dataclass(slots=True)
class Heap:
    """Regions of memory, cut into chunks. Subclasses define rounding, splitting and the size of regions."""

    held: int = 0  # bytes of all regions, free chunks included
    in_use: int = 0  # bytes of the allocated chunks
    peak: int = 0  # of the bytes in use
    # Free chunks by size, then address: the first that fits is the smallest. Both allocators break ties this way.
    _free: dict[Hashable, list[Chunk]] = field(default_factory=dict[Hashable, list[Chunk]])
    _starts: dict[int, Chunk] = field(default_factory=dict[int, Chunk])  # free chunks by their first byte
    _ends: dict[int, Chunk] = field(default_factory=dict[int, Chunk])  # free chunks by the byte after their last
    _next: int = 0  # address of the next region

    def release(self, chunk: Chunk) -> None:
        """Free a chunk and join it with its free neighbours."""
        self.in_use -= chunk.size
        for other in (self._starts.get(chunk.address + chunk.size), self._ends.get(chunk.address)):
            if other is not None:
                self._remove(other)
                chunk = Chunk(chunk.size + other.size, min(chunk.address, other.address), chunk.pool)
        self._insert(chunk)

    def _smallest(self, size: int, pool: Hashable = None) -> Chunk | None:
        """Remove the smallest free chunk of at least a size from a pool; None if there is none."""
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, 0))
        return self._remove(free[at]) if at < len(free) else None

    def _extend(self, size: int, pool: Hashable = None) -> Chunk:
        """Make a region of one chunk."""
        chunk = Chunk(size, self._next, pool)
        self._next += size + 1  # regions do not join
        self.held += size
        return chunk

    def _hand_out(self, chunk: Chunk, size: int) -> Chunk:
        """Mark the first bytes of a chunk as allocated, and free the others."""
        if size < chunk.size:
            self._insert(Chunk(chunk.size - size, chunk.address + size, chunk.pool))
        self.in_use += size
        self.peak = max(self.peak, self.in_use)
        return Chunk(size, chunk.address, chunk.pool)

    def _insert(self, chunk: Chunk) -> None:
        insort(self._free.setdefault(chunk.pool, []), chunk)
        self._starts[chunk.address] = self._ends[chunk.address + chunk.size] = chunk

    def _remove(self, chunk: Chunk) -> Chunk:
        free = self._free[chunk.pool]
        free.pop(bisect_left(free, chunk))
        del self._starts[chunk.address], self._ends[chunk.address + chunk.size]
        return chunk


@dataclass(slots=True)
class CachingAllocator(Heap):
    """PyTorch's caching allocator: separate pools for small and large requests; segments are never released.

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
