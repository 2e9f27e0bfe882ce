"""A model of PyTorch's caching allocator: best-fit allocation with coalescing, simulated on sizes.

The allocator (c10/cuda/CUDACachingAllocator.cpp) cuts regions of device memory into chunks, hands out the smallest free chunk
that is large enough and joins free neighbours.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Chunk(NamedTuple):
    """A part of a region."""

    size: int
    address: int  # of its first byte, counted over the regions of its pool in order of creation, with one byte between regions
    pool: bool  # True for small requests, which have their own free list


@dataclass(slots=True)
class CachingAllocator:
    """PyTorch's caching allocator: separate pools for small and large requests, on one stream.

    The numbers are those of c10/core/AllocatorConfig.h, PyTorch 2.11 and 2.13, with their names. With ``expandable`` segments
    each pool is one region that grows at its end, page by page.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.in_use, allocator.held
        (1024, 2097152)
    """

    expandable: bool = False
    held: int = 0  # bytes of all regions, free chunks included
    in_use: int = 0  # bytes of the allocated chunks
    peak: int = 0  # of the bytes in use
    # Free chunks by size, then address: the first that fits is the smallest.
    _free: dict[bool, list[Chunk]] = field(default_factory=dict[bool, list[Chunk]])
    _starts: dict[int, Chunk] = field(default_factory=dict[int, Chunk])  # free chunks by their first byte
    _ends: dict[int, Chunk] = field(default_factory=dict[int, Chunk])  # free chunks by the byte after their last
    _regions: dict[int, int] = field(default_factory=dict[int, int])  # bytes of each by its address
    _next: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 1 << 60})  # address of the next region of a pool

    def allocate(self, size_bytes: int) -> Chunk:
        """Allocate the smallest free block that is large enough, or one in a new segment.

        The rest of the block is split off if it is at least 512 bytes in a small or expandable segment, or more than 1 MiB in a
        large one (should_split): smaller rests stay with it as internal fragmentation.
        """
        mib, size = 2**20, _rounded(size_bytes or 1)
        small = size <= mib  # kSmallSize
        if small:
            segment = 2 * mib  # kSmallBuffer
        elif self.expandable or size < 10 * mib:  # kMinLargeAlloc
            segment = 20 * mib  # kLargeBuffer, which several requests share; the page of an expandable segment
        else:
            segment = -(-size // (2 * mib)) * 2 * mib  # kRoundLarge
        block = self._smallest(size, small) or self._extend(size, segment, small)
        rest = block.size - size
        split = rest > 0 if small or self.expandable else rest > mib  # blocks are multiples of the least one
        return self._hand_out(block, size if split else block.size)

    def hold(self, size_bytes: int, blocks: Iterable[tuple[int, int]], *, small: bool) -> list[Chunk]:
        """Add a segment as it is, with blocks in use: the offset and the bytes of each, in the order of their offsets."""
        address, end, found = self._region(size_bytes, small), 0, list[Chunk]()
        for offset, requested in (*blocks, (size_bytes, 0)):
            if offset > end:
                self._insert(Chunk(offset - end, address + end, small))
            found.append(Chunk(_rounded(requested), address + offset, small))
            self.in_use, end = self.in_use + found[-1].size, offset + found[-1].size
        self.peak = max(self.peak, self.in_use)
        return found[:-1]

    def empty_cache(self) -> None:
        """Return to the device every segment without a block in use; expandable segments stay as they are."""
        for chunk in [c for chunks in self._free.values() for c in chunks if self._regions.get(c.address) == c.size]:
            self.held -= self._regions.pop(self._remove(chunk).address)

    def release(self, chunk: Chunk) -> None:
        """Free a chunk and join it with its free neighbours."""
        self.in_use -= chunk.size
        for other in (self._starts.get(chunk.address + chunk.size), self._ends.get(chunk.address)):
            if other is not None:
                self._remove(other)
                chunk = Chunk(chunk.size + other.size, min(chunk.address, other.address), chunk.pool)
        self._insert(chunk)

    def _smallest(self, size: int, pool: bool) -> Chunk | None:
        """Remove the smallest free chunk of at least a size from a pool; None if there is none."""
        free = self._free.setdefault(pool, [])
        at = bisect_left(free, (size, 0))
        if self.expandable and at + 1 < len(free) and free[at] is self._ends.get(self._next[pool]):
            at += 1  # the last chunk of an expandable region counts as large as it can grow (get_free_block)
        return self._remove(free[at]) if at < len(free) else None

    def _extend(self, size: int, segment: int, pool: bool) -> Chunk:
        """Make a region of one chunk, or let the last chunk of an expandable region grow by whole segments."""
        last = self._ends.get(self._next[pool]) if self.expandable else None
        begun = 0 if last is None else self._remove(last).size
        grown = -(-(size - begun) // segment) * segment
        return Chunk(begun + grown, self._region(grown, pool) - begun, pool)

    def _region(self, size: int, pool: bool) -> int:
        """Address of a new region."""
        address = self._next[pool]
        self._next[pool] += size + (not self.expandable)  # other regions do not join
        self.held += size
        if not self.expandable:
            self._regions[address] = size
        return address

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


def _rounded(size_bytes: int) -> int:
    return -(-size_bytes // 512) * 512  # kMinBlockSize


def packed(blocks: Sequence[tuple[int, int, int]]) -> tuple[list[int], int]:
    """Offsets of blocks in one piece of memory, and its bytes: no two overlap that are in use at the same time.

    The largest block comes first, and each gets the first place that is free for all of its time. A block is the moment in which
    it is made, the moment in which it is freed, and its bytes.

    Examples:
        >>> packed([(0, 2, 8), (1, 4, 4), (2, 4, 6)])
        ([0, 8, 0], 12)
    """
    offsets, placed, most = [0] * len(blocks), list[int](), 0
    for k in sorted(range(len(blocks)), key=lambda k: -blocks[k][2]):
        made, freed, size = blocks[k]
        for j in sorted((j for j in placed if blocks[j][0] < freed and made < blocks[j][1]), key=offsets.__getitem__):
            if offsets[k] + size <= offsets[j]:
                break
            offsets[k] = max(offsets[k], offsets[j] + blocks[j][2])
        placed.append(k)
        most = max(most, offsets[k] + size)
    return offsets, most
