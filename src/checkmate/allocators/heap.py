"""Best-fit allocation with coalescing, simulated on sizes: the part that PyTorch's and TensorFlow's allocators share.

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
    """A part of a region.

    Attributes:
        size: Its bytes.
        address: Its first byte, counted over all regions in the order in which they were made.
        pool: Key of the free list it belongs to.
        before: The chunk that ends where it begins, in the same region, or None.
        after: The chunk that begins where it ends, in the same region, or None.
        used: Whether it is allocated.
    """

    size: int
    address: int
    pool: Hashable = None
    before: Chunk | None = None
    after: Chunk | None = None
    used: bool = False


@dataclass(slots=True)
class Heap:
    """Regions of memory, cut into chunks. Subclasses define rounding, splitting and the size of regions.

    Attributes:
        held: Bytes of all regions, free chunks included.
        in_use: Bytes of the allocated chunks.
        peak: Peak of ``in_use``.
    """

    held: int = 0
    in_use: int = 0
    peak: int = 0
    # Sorted by size, then address: the first that fits is the smallest, and ties break as in both allocators.
    _free: dict[Hashable, list[tuple[int, int, Chunk]]] = field(default_factory=dict[Hashable, list[tuple[int, int, Chunk]]])

    def release(self, chunk: Chunk) -> None:
        """Free a chunk and join it with its free neighbours.

        Args:
            chunk: An allocated chunk of this heap. It may be part of another one afterwards.
        """
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
        """Remove the smallest free chunk of at least so many bytes from a pool; None if there is none."""
        free = self._free.setdefault(pool, [])
        at = bisect.bisect_left(free, (size, 0))
        return free.pop(at)[2] if at < len(free) else None

    def _extend(self, size: int, pool: Hashable = None) -> Chunk:
        """Make a region of one chunk."""
        chunk = Chunk(size, self.held, pool)
        self.held += size
        return chunk

    def _cut(self, chunk: Chunk, size: int) -> None:
        """Shorten a chunk to so many bytes and free the rest."""
        rest = Chunk(chunk.size - size, chunk.address + size, chunk.pool, chunk, chunk.after)
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.size, chunk.after = size, rest
        self._insert(rest)

    def _hand_out(self, chunk: Chunk) -> Chunk:
        """Mark a chunk as allocated."""
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
