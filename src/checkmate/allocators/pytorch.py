"""PyTorch's CUDA caching allocator."""

from __future__ import annotations

from dataclasses import dataclass

from checkmate.allocators.heap import Chunk, Heap

_MIB = 2**20


_LEAST = 512  # every size is a multiple of it


_SMALL = 1 * _MIB  # up to here requests share segments of `_SMALL_SEGMENT`


_SMALL_SEGMENT = 2 * _MIB


_LARGE = 10 * _MIB  # up to here they share segments of `_LARGE_SEGMENT`; beyond, each has its own


_LARGE_SEGMENT = 20 * _MIB


_ROUND = 2 * _MIB  # to which segments of their own are rounded up


@dataclass(slots=True)
class CachingAllocator(Heap):
    """PyTorch's caching allocator: small and large requests apart, and segments that are kept.

    Examples:
        >>> allocator = CachingAllocator()
        >>> block = allocator.allocate(1000)
        >>> allocator.in_use, allocator.held
        (1024, 2097152)
    """

    def allocate(self, size_bytes: int) -> Chunk:
        """Hand out the smallest free block that is large enough, or one of a new segment; its rest is split off."""
        size = max(_LEAST, -(-size_bytes // _LEAST) * _LEAST)
        small = size <= _SMALL
        block = self._smallest(size, small) or self._extend(_segment_bytes(size), small)
        rest = block.size - size
        if rest >= _LEAST if small else rest > _SMALL:
            self._cut(block, size)
        return self._hand_out(block)


def _segment_bytes(size: int) -> int:
    if size <= _SMALL:
        return _SMALL_SEGMENT
    return _LARGE_SEGMENT if size < _LARGE else -(-size // _ROUND) * _ROUND
