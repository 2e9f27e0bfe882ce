"""Best fit with coalescing, by sizes alone: what the allocators of PyTorch and TensorFlow have in common."""

from __future__ import annotations

import bisect
from collections.abc import Hashable
from dataclasses import dataclass, field


@dataclass(slots=True, eq=False)
class Chunk:
    """A part of a region.

    Attributes:
        size: Its bytes.
        address: Where it begins.
        pool: Which chunks it is among when it is free.
        before: The chunk that ends where it begins, in the same region.
        after: The chunk that begins where it ends.
        used: Whether it is handed out.
    """

    size: int
    address: int
    pool: Hashable = None
    before: Chunk | None = None
    after: Chunk | None = None
    used: bool = False


@dataclass(slots=True)
class Heap:
    """Regions that are cut into chunks, and joined again. What is asked for, and cut, is a subclass's to decide.

    Attributes:
        held: Bytes of all regions.
        in_use: Bytes of the chunks that are handed out.
        peak: The most there ever were.
    """

    held: int = 0
    in_use: int = 0
    peak: int = 0
    # By size, then address.
    _free: dict[Hashable, list[tuple[int, int, Chunk]]] = field(default_factory=dict[Hashable, list[tuple[int, int, Chunk]]])

    def release(self, chunk: Chunk) -> None:
        """Take a chunk back and join it with free neighbours."""
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
        """The smallest free chunk of a pool that is no smaller, taken out of it."""
        free = self._free.setdefault(pool, [])
        at = bisect.bisect_left(free, (size, 0))
        return free.pop(at)[2] if at < len(free) else None

    def _extend(self, size: int, pool: Hashable = None) -> Chunk:
        """A new region as one chunk."""
        chunk = Chunk(size, self.held, pool)
        self.held += size
        return chunk

    def _cut(self, chunk: Chunk, size: int) -> None:
        """Leave so many bytes of a chunk and put the rest back."""
        rest = Chunk(chunk.size - size, chunk.address + size, chunk.pool, chunk, chunk.after)
        if chunk.after is not None:
            chunk.after.before = rest
        chunk.size, chunk.after = size, rest
        self._insert(rest)

    def _hand_out(self, chunk: Chunk) -> Chunk:
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
